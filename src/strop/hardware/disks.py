"""Free space and file system type of disks.

A network file system is reported and never refused, because most sites keep runs on one. There the clock is
the server's, locks may be missing and small writes are slow.
"""

from __future__ import annotations

import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

from strop.errors import CheckRefused
from strop.io.atomic import nearest_existing

NETWORK_KINDS = frozenset(
    (
        *("nfs", "nfs3", "nfs4", "cifs", "smb3", "smbfs", "9p", "afs", "virtiofs"),
        *("lustre", "gpfs", "beegfs", "ceph", "glusterfs", "wekafs", "panfs", "pvfs2", "orangefs"),
        *("sshfs", "s3fs", "juicefs", "goofys", "gcsfuse", "rclone"),
    )
)
"""File system types without the prefix of FUSE."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Disk:
    """The disk of a path."""

    path: str
    mount: str
    """Mount point; empty if unknown."""
    kind: str
    """File system type, for example ext4 or lustre; empty if unknown."""
    is_network: bool
    total_bytes: int
    free_bytes: int
    """Free space for this user."""

    def __str__(self) -> str:
        """Format it as one line."""
        kind = f"{self.kind or 'unknown file system'}{', over the network' if self.is_network else ''}"
        room = f"{self.free_bytes / 1e9:.1f} of {self.total_bytes / 1e9:.1f} GB free"
        return f"{self.path}: {room} ({kind}, mounted at {self.mount or '?'})"


def describe_disk(path: Path) -> Disk:
    """Describe the disk of a path, which need not exist yet."""
    import psutil

    existing = nearest_existing(path.resolve())
    usage = shutil.disk_usage(existing)
    try:
        mounts = [(part.mountpoint, part.fstype) for part in psutil.disk_partitions(all=True)]
    except (psutil.Error, OSError):
        mounts = []
    above = [entry for entry in enumerate(mounts) if existing.is_relative_to(entry[1][0])]
    # Of equal mount points the last one counts: it was mounted over the others.
    _, (mount, kind) = max(above, key=lambda entry: (len(entry[1][0]), entry[0]), default=(0, ("", "")))
    return Disk(
        path=str(path),
        mount=mount,
        kind=kind,
        is_network=kind.removeprefix("fuse.").removeprefix("fuseblk.") in NETWORK_KINDS,
        total_bytes=usage.total,
        free_bytes=usage.free,
    )


def free_disk_bytes(path: Path) -> int:
    """Return this user's free space under `path`, which need not exist yet."""
    return shutil.disk_usage(nearest_existing(path)).free


def require_writable(path: Path, purpose: str) -> None:
    """Refuse a path that cannot be written. Leaves nothing there.

    If `path` does not exist, its nearest existing parent is checked.

    Raises: CheckRefused naming the path and the system's error.
    """
    existing = nearest_existing(path)
    try:
        # Checked by writing: root passes every permission, and permissions do not show a read-only disk.
        tempfile.TemporaryFile(dir=existing).close()
    except OSError as error:
        raise CheckRefused(
            f"{purpose} cannot be written to {path} ({error.strerror}: {existing})",
            allowed="a directory that this user may write to, or one that can be made",
            next_step="mend its permissions, or choose another place for runs (output.root)",
        ) from error
