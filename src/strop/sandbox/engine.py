"""Is podman of this host fit for sandboxes? Asked once, before the first container.

Not covered: a disk that becomes full later, which podman then says.
"""

from __future__ import annotations

import os
import subprocess
from functools import cache
from pathlib import Path

from strop.errors import SandboxRefused
from strop.hardware.disks import describe_disk
from strop.sandbox.rootless import require_ranges

_ANSWER_LIMIT_S = 60.0


@cache
def require_engine(program: str) -> None:
    """Refuse a podman that does not answer, or that keeps its containers where overlays do not work.

    Blocks for a tenth of a second. Raises: SandboxRefused with kind podman or graph_root; for an ordinary
    user, newuidmap or subuid.
    """
    if os.geteuid() != 0:
        require_ranges(program, os.environ)
    words = [program, "info", "--format", "{{.Store.GraphRoot}}"]
    try:
        done = subprocess.run(
            words,
            capture_output=True,
            stdin=subprocess.DEVNULL,
            text=True,
            check=True,
            timeout=_ANSWER_LIMIT_S,
        )
    except (OSError, subprocess.SubprocessError) as error:
        said = getattr(error, "stderr", "") or str(error)
        raise SandboxRefused(
            f"podman does not tell where it keeps containers: {said.strip()}",
            allowed="a podman that works for this user",
            next_step="run podman info, and mend what it says",
            kind="podman",
        ) from error
    require_local(Path(done.stdout.strip()))


def require_local(graph_root: Path, *, mounts: str | None = None) -> None:
    """Refuse a place for containers that machines share. `mounts` is the text of /proc/self/mountinfo.

    Raises: SandboxRefused with kind graph_root.
    """
    disk = describe_disk(graph_root, mounts=mounts)
    if disk.is_network:
        raise SandboxRefused(
            f"podman keeps its containers on a disk that machines share: {disk}",
            allowed="a graph root on a local disk; overlays, and locks, do not work on others",
            next_step="set graphroot in storage.conf to a directory of a local disk",
            kind="graph_root",
        )
