"""The users of a container's image, root among them, as unprivileged users of the host.

A container gets a range of the host's user ids that no other has. Its image belongs to the host's root; an
id-mapped mount shows it as the container's root's, without a change of any file. That needs Linux 5.19 for
images on a disk, and 6.3 for what is in memory.
"""

from __future__ import annotations

import errno
import os
import socket

from strop.sandbox.linux import CLONE_NEWUSER, mount_mapped, unshare, write_file

NUM_IDS = 1 << 16
"""Users of a container: 0 to 65535."""
# Behind what single users are taken from (`sandbox_uid`); systemd's table leaves all up to 0x7fffffff unused.
_FIRST_ID = 0x70400000
_NUM_RANGES = (0x80000000 - _FIRST_ID) // NUM_IDS


def claim_ids(number: int) -> tuple[int, socket.socket]:
    """Return the first of a range of ids, and what keeps it from others until it is closed.

    `number`: where to begin to look. Raises: OSError if all are taken.
    """
    for step in range(_NUM_RANGES):
        index = (number + step) % _NUM_RANGES
        if (claim := claim_name(f"strop-sandbox-ids-{index}")) is not None:
            return _FIRST_ID + index * NUM_IDS, claim
    raise OSError(errno.EAGAIN, f"all {_NUM_RANGES} ranges of user ids are taken")


def claim_name(name: str) -> socket.socket | None:
    """Take a name on this host, and return what keeps it until it is closed; None if it is taken.

    Raises: OSError.
    """
    # A name in memory that ends with its process: no file could be left.
    claim = socket.socket(socket.AF_UNIX)
    try:
        claim.bind(f"\0{name}")
    except OSError as error:
        claim.close()
        if error.errno != errno.EADDRINUSE:
            raise
        return None
    return claim


def mount_for(source: str, folder: str, first_id: int) -> str:
    """Show a directory of the host, below `folder`, as users of a container see their own files.

    Returns it in the form of an overlay's lower directories. An image of several layers is an overlay, which
    no kernel maps; its layers can be. Raises: OSError, on a kernel or a file system that cannot.
    """
    namespace = make_users(first_id)
    mapped = []
    try:
        for number, layer in enumerate(_find_layers(source)):
            mapped.append(os.path.join(folder, str(number)))
            os.mkdir(mapped[-1])
            mount_mapped(layer, mapped[-1], namespace)
    finally:
        os.close(namespace)
    return ":".join(mapped)


def _find_layers(source: str) -> list[str]:
    """Return the directories of a mounted overlay that has lower ones alone; else the directory itself."""
    with open("/proc/self/mountinfo") as file:
        for line in file:
            place, _, mount = line.partition(" - ")
            kind, _, options = mount.rstrip("\n").split(" ", 2)
            if place.split(" ")[4] == source and kind == "overlay":
                named = dict(option.partition("=")[::2] for option in options.split(","))
                if "lowerdir" in named and "upperdir" not in named:
                    return named["lowerdir"].split(":")
    return [source]


def make_users(first_id: int) -> int:
    """Return a descriptor of a user namespace whose users are `NUM_IDS` of the host. Raises: OSError."""
    ready_r, ready_w = os.pipe()
    hold_r, hold_w = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.close(hold_w)
            unshare(CLONE_NEWUSER)
            os.write(ready_w, b".")
            os.read(hold_r, 1)
        finally:
            os._exit(0)
    os.close(ready_w)
    os.close(hold_r)
    try:
        if not os.read(ready_r, 1):
            raise OSError(errno.EPERM, "no user namespace may be made")
        for kind in ("uid_map", "gid_map"):
            write_file(f"/proc/{pid}/{kind}", users_map(first_id))
        return os.open(f"/proc/{pid}/ns/user", os.O_RDONLY | os.O_CLOEXEC)
    finally:
        os.close(hold_w)
        os.close(ready_r)
        os.waitpid(pid, 0)


def users_map(first_id: int) -> str:
    """Return the map of users, or of groups, of a namespace that has a range of the host's."""
    return f"0 {first_id} {NUM_IDS}\n"
