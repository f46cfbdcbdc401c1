"""Find the leftovers of a stopped sandbox on the host."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from strop.sandbox.cgroup import find_controllers
from strop.sandbox.daemon import SCRATCH_BASES
from strop.sandbox.linux import read_file

_GRACE_S = 1.0
"""An entry that the kernel still lists this long after the end is a leak."""
_SOCKETS = ("tcp", "tcp6", "udp", "udp6", "raw", "raw6")
_USER_COLUMN = 7
_IPC = ("shm", "sem", "msg")


async def find_leftovers(
    supervisor_pid: int, maker_pid: int, uid: int | None, token: str, since: float
) -> list[str]:
    """Return processes, mounts, ports, control groups, directories and shared memory of a stopped sandbox.

    `maker_pid`: the process that made it, whose mounts are checked too. `uid`: the programs' user on the
    host, if it is private. `token`: a word of their command lines. `since`: the sandbox's start in seconds
    since the epoch, because the process id may have been used before.
    """
    deadline = time.monotonic() + _GRACE_S
    while True:
        left = [
            *_processes(supervisor_pid, uid, token),
            *_mounts(supervisor_pid, maker_pid),
            *(_sockets(uid) if uid is not None else ()),
            *(_shared_memory(uid) if uid is not None else ()),
            *(f"control group {group}" for group in _groups(supervisor_pid, since)),
            *(f"directory {path}" for path in _directories(supervisor_pid, maker_pid)),
            *(f"file {path}" for path in planted_files(token)),
        ]
        if not left or time.monotonic() > deadline:
            return left
        await asyncio.sleep(0.01)


def planted_files(token: str) -> list[Path]:
    """Return files with a word in their name, in the world-writable directories."""
    return [path for base in SCRATCH_BASES if os.path.isdir(base) for path in Path(base).glob(f"*{token}*")]


def _processes(supervisor_pid: int, uid: int | None, token: str) -> Iterator[str]:
    for name in filter(str.isdigit, os.listdir("/proc")):
        with suppress(OSError):
            words = Path("/proc", name, "cmdline").read_bytes()
            is_own = int(name) == supervisor_pid or os.stat(f"/proc/{name}").st_uid == uid
            if is_own or token.encode() in words:
                yield f"process {name}: {words.replace(bytes(1), b' ').decode(errors='replace')[:80]}"


def _mounts(supervisor_pid: int, maker_pid: int) -> Iterator[str]:
    """Yield mounts below the sandbox's directory, as seen by this process or by the one that made it."""
    places = set()
    for pid in ("self", maker_pid):
        with suppress(OSError):
            places |= {line.split()[4] for line in read_file(f"/proc/{pid}/mountinfo").splitlines()}
    for place in sorted(places):
        if "/strop-sandbox-" in place and str(supervisor_pid) in place.split("/"):
            yield f"mount {place}"


def _sockets(uid: int) -> Iterator[str]:
    for kind in _SOCKETS:
        with suppress(OSError):
            for line in read_file(f"/proc/net/{kind}").splitlines()[1:]:
                if line.split()[_USER_COLUMN] == str(uid):
                    yield f"socket {kind} {line.split()[1]}"


def _shared_memory(uid: int) -> Iterator[str]:
    for kind in _IPC:
        with suppress(OSError):
            header, *lines = read_file(f"/proc/sysvipc/{kind}").splitlines()
            column = header.split().index("uid")
            for line in lines:
                if line.split()[column] == str(uid):
                    yield f"{kind} {line.split()[1]}"


def _groups(supervisor_pid: int, since: float) -> list[Path]:
    places = {controller.own_dir / f"strop-{supervisor_pid}" for controller in find_controllers()}
    return sorted(path for path in places if path.exists() and path.stat().st_mtime >= since)


def _directories(supervisor_pid: int, maker_pid: int) -> list[Path]:
    directories: list[Path] = []
    # The process that made the sandbox may have mounted a file system there.
    for root in ("/", f"/proc/{maker_pid}/root"):
        for base in SCRATCH_BASES:
            with suppress(OSError):
                directories += Path(root, base.lstrip("/")).glob(f"strop-sandbox-*/{supervisor_pid}")
    return directories
