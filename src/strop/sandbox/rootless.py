"""Rootless podman: its requirements of the host, and the namespaces that it works in.

podman creates a user namespace in which this user is root, over the user's ids in /etc/subuid and
/etc/subgid, and a mount namespace. A supervisor enters both, and can then mount an overlay and change to
another user. The programs of a container have one of these ids, which no other sandbox uses; the host's root
and this user are unmapped there. podman keeps a process that holds its user namespace after the last
container has ended; `podman system migrate` ends it.

Not covered: control groups, where none are delegated to this user (`Isolation` then records watched limits);
users of the image, which need 65,536 ids for each sandbox.
Tried with podman 4.3.1, runc 1.1.5 and 65,536 ids on Linux 6.18, control groups of version 1.
"""

from __future__ import annotations

import errno
import itertools
import os
import pwd
import shutil
import socket
from collections.abc import Collection, Mapping

from strop.errors import SandboxRefused
from strop.sandbox.idmap import claim_name
from strop.sandbox.linux import (
    CLONE_NEWNS,
    CLONE_NEWUSER,
    enter_namespaces,
    own_mounts,
    read_file,
    read_or_empty,
)
from strop.sandbox.spawning import run_program

_ANSWER_LIMIT_S = 60.0
_MAX_ERROR_CHARS = 600
_RANGES = ("/etc/subuid", "/etc/subgid")
_HELPERS = ("newuidmap", "newgidmap")
_REPORT = "echo $$; env; echo .; read -r _"


def require_ranges(program: str, environ: Mapping[str, str]) -> None:
    """Refuse a host whose podman gives this user no further ids, and name the missing part.

    Blocks for a tenth of a second. Raises: SandboxRefused with kind newuidmap, subuid or podman.
    """
    kind, why, next_step = "podman", "", "run podman unshare true, and mend the error that it reports"
    try:
        done = run_program(
            [program, "unshare", "cat", "/proc/self/uid_map"], environ, limit_s=_ANSWER_LIMIT_S
        )
    except OSError as error:
        why = str(error)
    else:
        why = done.stderr.decode(errors="replace").strip()[-_MAX_ERROR_CHARS:]
        if done.exit_code == 0 and count_ids(done.stdout.decode()) > 1:
            return
    names = names_of(os.geteuid())
    name = min(names, key=str.isdigit)
    helper = next((program for program in _HELPERS if shutil.which(program) is None), None)
    path = next((file for file in _RANGES if not ranges_of(read_or_empty(file), names)), None)
    if helper is not None:
        kind = "newuidmap"
        why, next_step = f"{helper} is not installed", "as root, install the package uidmap"
    elif path is not None:
        kind, why = "subuid", f"{path} gives user {name} no ids"
        ids = "100000-165535"
        next_step = (
            f"as root: usermod --add-subuids {ids} --add-subgids {ids} {name}; then as {name}: podman system"
            " migrate"
        )
    elif not why:
        why = "its user namespace has one id, though there are more"
        next_step = "podman system migrate"
    raise SandboxRefused(
        f"podman of user {name} cannot give programs a user of their own: {why}",
        allowed="root, or a user with newuidmap, newgidmap and ranges in /etc/subuid and /etc/subgid",
        next_step=next_step,
        kind=kind,
    )


def enter_podman(program: str, environ: Mapping[str, str]) -> dict[str, str]:
    """Become root of podman's user namespace, with a copy of its mounts; return podman's environment there.

    This process, which must have no threads, stays there. Raises: OSError.
    """
    in_r, in_w = os.pipe()
    out_r, out_w = os.pipe()
    actions = [(os.POSIX_SPAWN_DUP2, in_r, 0), (os.POSIX_SPAWN_DUP2, out_w, 1)]
    pid = os.posix_spawn(
        program, [program, "unshare", "sh", "-c", _REPORT], dict(environ), file_actions=actions
    )
    for descriptor in (in_r, out_w):
        os.close(descriptor)
    try:
        with open(out_r, encoding="utf-8", errors="replace") as answer:
            lines = list(itertools.takewhile(lambda line: line != ".\n", answer))
        if not lines:
            raise OSError(errno.EPERM, "podman unshare said nothing")
        # That process keeps the namespaces until its input ends.
        namespaces = [
            (os.open(f"/proc/{int(lines[0])}/ns/{name}", os.O_RDONLY | os.O_CLOEXEC), flag)
            for name, flag in (("user", CLONE_NEWUSER), ("mnt", CLONE_NEWNS))
        ]
    finally:
        os.close(in_w)
        os.waitpid(pid, 0)
    for descriptor, flag in namespaces:
        enter_namespaces(descriptor, flag)
        os.close(descriptor)
    own_mounts()
    return dict(line.rstrip("\n").split("=", 1) for line in lines[1:] if "=" in line)


def claim_id(number: int) -> tuple[int, int, socket.socket]:
    """Return an unused id of this user namespace, its id outside, and a socket that reserves it while open.

    The search starts at index `number`. Raises: OSError if all are taken.
    """
    users, groups = (parse_map(read_file(f"/proc/self/{kind}_map")) for kind in ("uid", "gid"))
    ids = sorted(users.keys() & groups.keys() - {0})
    for step in range(len(ids)):
        inside = ids[(number + step) % len(ids)]
        if (claim := claim_name(f"strop-sandbox-id-{users[inside]}")) is not None:
            return inside, users[inside], claim
    raise OSError(errno.EAGAIN, f"all {len(ids)} ids of this user are taken")


def parse_map(text: str) -> dict[int, int]:
    """Parse a uid_map or gid_map: from ids inside a user namespace to ids outside."""
    extents = [tuple(map(int, line.split())) for line in text.splitlines()]
    return {inside + step: outside + step for inside, outside, length in extents for step in range(length)}


def count_ids(text: str) -> int:
    """Return the number of ids in a range file or a map: the sum of its last column."""
    return sum(int(line.replace(":", " ").split()[-1]) for line in text.splitlines())


def ranges_of(text: str, names: Collection[str]) -> str:
    """Return the lines of a range file (/etc/subuid) that belong to a user with these names."""
    lines = [line for line in text.splitlines() if line.count(":") == 2]
    return "\n".join(line for line in lines if line.split(":")[0] in names)


def names_of(uid: int) -> set[str]:
    """Return the names of a user that a range file may contain."""
    try:
        return {pwd.getpwuid(uid).pw_name, str(uid)}
    except KeyError:
        return {str(uid)}
