"""Where the first node of an attempt leaves what its other nodes need to join it.

Nodes that see one disk read the very file. Where they see none, the job's hosts repeat it on each of them
(`launch.sagemaker.control`), so whoever waits for it waits in the same way everywhere.
"""

from __future__ import annotations

from pathlib import Path

ROLES_FOLDER = "roles"
"""Of a run's directory: what its roles keep there."""


def meeting_path(work_dir: Path, attempt: str) -> Path:
    """Return the head's file of an attempt, in a folder of that attempt alone. `work_dir`: `<run>/roles`."""
    return work_dir / f"ray-{attempt}" / "head.json"
