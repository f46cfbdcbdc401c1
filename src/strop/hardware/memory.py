"""Memory of this process and room on a disk, as the system counts them.

Needs Linux for the memory of a process; elsewhere only the peak since the start is known.
"""

from __future__ import annotations

import resource
import shutil
import sys
import tempfile
from pathlib import Path

from strop.errors import CheckRefused, explain_refusal
from strop.io.atomic import nearest_existing


def rss_bytes() -> int | None:
    """Return the resident memory of this process, or None where it cannot be read."""
    return _read_status("VmRSS")


def peak_rss_bytes() -> int:
    """Return the largest resident memory of this process since its start or `reset_peak_rss`."""
    peak = _read_status("VmHWM")
    if peak is not None:
        return peak
    # macOS counts in bytes, other systems in KiB.
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def reset_peak_rss() -> bool:
    """Start measuring the peak anew; False where the system cannot."""
    try:
        # 5 resets the high-water mark (proc(5)); it touches nothing else of the process.
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


def free_disk_bytes(path: Path) -> int:
    """Return what this user can still write under `path`, which need not exist yet."""
    return shutil.disk_usage(nearest_existing(path)).free


def require_writable(path: Path, purpose: str) -> None:
    """Refuse a place that cannot be written, before anything is done for it. Nothing is left there.

    `path` need not exist; then the directory counts in which it would be made.

    Raises: CheckRefused naming the place and what the system says.
    """
    existing = nearest_existing(path)
    try:
        # Asked by writing: root passes every permission, and no permission tells of a read-only disk.
        tempfile.TemporaryFile(dir=existing).close()
    except OSError as error:
        raise CheckRefused(
            explain_refusal(
                f"{purpose} cannot be written to {path} ({error.strerror}: {existing})",
                allowed="a directory that this user may write to, or one that can be made",
                next_step="mend its permissions, or choose another place for runs (output.root)",
            )
        ) from error


def require_free_disk(path: Path, needed_bytes: int, purpose: str) -> None:
    """Refuse to start what the disk cannot hold.

    Raises: CheckRefused with both numbers if less than `needed_bytes` is free under `path`.
    """
    free_bytes = free_disk_bytes(path)
    if free_bytes < needed_bytes:
        raise CheckRefused(
            explain_refusal(
                f"{purpose} needs {needed_bytes / 1e6:.1f} MB and {path} has {free_bytes / 1e6:.1f} MB free",
                allowed="a disk that holds all of it from the start",
                next_step="free space there, keep fewer checkpoints, or put runs on another disk",
            )
        )


def _read_status(name: str) -> int | None:
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return None
    # Lines read "VmHWM:    123456 kB".
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:")), None)
