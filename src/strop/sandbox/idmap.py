"""The users of a container's image, root included, as unprivileged users of the host.

A container gets a private range of the host's user ids. Its image belongs to the host's root; an id-mapped
mount presents it as the container root's, without changing any file. That needs Linux 5.19 for images on a
disk, and 6.3 for tmpfs.
"""

from __future__ import annotations

import errno
import os
import socket

from strop.sandbox.linux import CLONE_NEWUSER, mount_mapped, unshare, write_file

NUM_IDS = 1 << 16
"""Users of a container: 0 to 65535."""
# Behind the range of `sandbox_uid`; systemd's table of user ids leaves all up to 0x7fffffff unused.
_FIRST_ID = 0x70400000
_NUM_RANGES = (0x80000000 - _FIRST_ID) // NUM_IDS


def claim_ids(number: int) -> tuple[int, socket.socket]:
    """Return the first id of an unused range, and a socket that reserves the range while open.

    The search starts at range `number`. Raises: OSError if all are taken.
    """
    for step in range(_NUM_RANGES):
        index = (number + step) % _NUM_RANGES
        if (claim := claim_name(f"strop-sandbox-ids-{index}")) is not None:
            return _FIRST_ID + index * NUM_IDS, claim
    raise OSError(errno.EAGAIN, f"all {_NUM_RANGES} ranges of user ids are taken")


def claim_name(name: str) -> socket.socket | None:
    """Reserve a name on this host while the returned socket is open; None if it is taken.

    Raises: OSError.
    """
    # An abstract Unix socket ends with its process, so no file can be left behind.
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
    """Mount a directory of the host below `folder`, with its users mapped to those of a container.

    Returns the mounts in the format of an overlay's lower directories. An image of several layers is an
    overlay, which no kernel maps, so its layers are mapped. Raises: OSError if kernel or file system cannot.
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
    """Return the lower directories of a mounted overlay without an upper one; else the directory itself."""
    with open("/proc/self/mountinfo") as file:
        for line in file:
            place, _, mount = line.partition(" - ")
            kind, _, options = mount.rstrip("\n").split(" ", 2)
            if place.split(" ")[4] == source and kind == "overlay":
                values = dict(option.partition("=")[::2] for option in options.split(","))
                if "lowerdir" in values and "upperdir" not in values:
                    return values["lowerdir"].split(":")
    return [source]


def make_users(first_id: int) -> int:
    """Return a descriptor of a user namespace that maps `NUM_IDS` ids of the host. Raises: OSError."""
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
    """Return the uid_map, or gid_map, of a namespace with a range of the host's ids."""
    return f"0 {first_id} {NUM_IDS}\n"
