"""What a place is on: room, type, and whether it is reached over a network."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from strop.hardware.disks import describe_disk

MOUNTS = """\
27 1 254:0 / / rw,relatime - ext4 /dev/vda rw
30 27 0:40 / {root} rw,relatime shared:1 - {kind} server:/export rw,addr=10.0.0.1
31 27 0:41 / {root}/deep\\040folder rw - fuse.sshfs ada@host:/ rw
a line of another form
"""


@pytest.mark.parametrize(
    ("kind", "is_network"),
    [("nfs4", True), ("lustre", True), ("fuse.juicefs", True), ("xfs", False), ("fuse.ntfs", False)],
)
def test_the_innermost_mount_counts(tmp_path: Path, kind: str, is_network: bool) -> None:
    mounts = MOUNTS.format(root=tmp_path.resolve(), kind=kind)
    found = describe_disk(tmp_path / "runs" / "not-made-yet", mounts=mounts)
    assert (found.mount, found.kind, found.is_network) == (str(tmp_path.resolve()), kind, is_network)
    assert (tmp_path / "runs").exists() is False
    # A space in a mount point is written as an octal number.
    (tmp_path / "deep folder").mkdir()
    assert describe_disk(tmp_path / "deep folder" / "x", mounts=mounts).kind == "fuse.sshfs"
    # A name that only begins alike is another place.
    beside = tmp_path.with_name(f"{tmp_path.name}-beside")
    assert describe_disk(beside, mounts=mounts).mount == "/"


@pytest.mark.parametrize(
    ("place", "kind"), [(".", "ext4"), ("homework", "ext4"), ("home/me", "nfs4"), ("tmp/x", "xfs")]
)
def test_of_mounts_on_one_place_the_last_is_seen(tmp_path: Path, place: str, kind: str) -> None:
    root = tmp_path.resolve()
    for name in ("home", "homework", "tmp"):
        (root / name).mkdir()
    lines = (("", "ext4"), ("/home", "nfs4"), ("/tmp", "tmpfs"), ("/tmp", "xfs"))
    mounts = "".join(f"1 0 0:1 / {root}{where} rw - {what} device rw\n" for where, what in lines)
    assert describe_disk(root / place, mounts=mounts).kind == kind


def test_this_disk_is_described(tmp_path: Path) -> None:
    found = describe_disk(tmp_path)
    assert found.total_bytes == shutil.disk_usage(tmp_path).total
    assert tmp_path.resolve().is_relative_to(found.mount)
    assert str(found).startswith(f"{tmp_path}: ")
    assert found.kind in str(found)


def test_a_system_that_tells_no_mounts(tmp_path: Path) -> None:
    found = describe_disk(tmp_path, mounts="")
    assert (found.mount, found.kind, found.is_network) == ("", "", False)
    assert "(unknown file system, mounted at ?)" in str(found)
