"""Limits for a whole tree of processes, where this process may make control groups.

A group is made below this process's own group, so the limits of a job or a container around strop hold as
well. Both versions need a group that this user may write to; with version 2 an ordinary user has one only in
a unit of systemd with Delegate=yes. There a group with processes cannot limit the groups below it, so the
processes of this group first move into a leaf beside them.

Covered: memory with its count of kills, number of processes, CPU time. Not covered: disk bandwidth.
Tried on a hybrid host (version 1 controllers, Linux 6.18), and with version 2 in Debian 12 (systemd 252,
Linux 6.1): a service of root, a session and a scope of an ordinary user.
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from strop.sandbox.agent import read_or_empty
from strop.sandbox.contract import Limits

_REMOVE_LIMIT_S = 2.0
_NAMES = ("memory", "pids", "cpu")
_LEAF = "strop-own"
"""Of version 2: the group of the processes that were beside the groups of sandboxes."""
_NUM_TRIES = 20
_PERIOD_US = 100_000


@dataclass(frozen=True, slots=True)
class Controller:
    """One resource that a hierarchy limits, and this process's own directory in it."""

    name: str
    version: int
    own_dir: Path


@dataclass(slots=True)
class Cgroup:
    """The groups of one sandbox; empty where none could be made."""

    dirs: dict[str, Path] = field(default_factory=dict)
    """By controller. Several controllers may share a directory."""
    version: int = 0

    def remove(self) -> None:
        """Remove the groups; their processes must have been killed."""
        for path in dict.fromkeys(self.dirs.values()):
            remove_group(path)
        self.dirs.clear()


def remove_group(path: Path) -> None:
    """Remove a group whose processes were killed; one that does not become empty stays."""
    deadline = time.monotonic() + _REMOVE_LIMIT_S
    while path.exists():
        try:
            path.rmdir()
        except OSError:
            # The last processes are dead but not yet out of the kernel's lists.
            if time.monotonic() > deadline:
                return
            time.sleep(0.005)


def remove_abandoned(controllers: list[Controller]) -> None:
    """Remove the groups of sandboxes whose clients are gone."""
    for controller in controllers:
        for path in controller.own_dir.glob("strop-box-*-*"):
            if not Path("/proc", path.name.split("-")[2]).exists():
                # A group that has processes stays.
                with suppress(OSError):
                    path.rmdir()


def make_cgroup(controllers: list[Controller], name: str, limits: Limits) -> Cgroup:
    """Make a group with limits on memory, processes and CPU time, as far as this process is permitted."""
    group = Cgroup()
    for controller in controllers:
        if controller.name == "cpu" and limits.cpus is None:
            continue
        path = controller.own_dir / name
        try:
            path.mkdir(exist_ok=True)
            _set_limit(path, controller, limits)
        except OSError:
            if path not in group.dirs.values():
                with suppress(OSError):
                    path.rmdir()
            continue
        group.dirs[controller.name] = path
        group.version = controller.version
    return group


def hand_down_controllers() -> None:
    """Let the groups below this process's own have controllers of version 2, as far as it is permitted."""
    for version, _, own_dir in _find_hierarchies(None, None):
        present = set(read_or_empty(own_dir / "cgroup.controllers").split())
        wanted = " ".join(f"+{name}" for name in _NAMES if name in present)
        for _ in range(_NUM_TRIES if version == 2 and wanted else 0):
            try:
                _write(own_dir / "cgroup.subtree_control", wanted)
                break
            except OSError as error:
                # EBUSY: the group itself has processes.
                if error.errno != errno.EBUSY or not _empty_group(own_dir):
                    break


def _empty_group(own_dir: Path) -> bool:
    """Move all processes of a group into a leaf below it; return False if this is not permitted."""
    try:
        (own_dir / _LEAF).mkdir(exist_ok=True)
        for pid in read_or_empty(own_dir / "cgroup.procs").split():
            with suppress(ProcessLookupError):
                _write(own_dir / _LEAF / "cgroup.procs", pid)
    except OSError:
        return False
    return True


def find_controllers(
    *, membership: str | None = None, mounts: str | None = None, is_for_children: bool = True
) -> list[Controller]:
    """Return a process's directories in the hierarchies of `_NAMES`; none if /proc does not list them.

    `membership`: the text of its /proc/PID/cgroup, by default this process's. `is_for_children`: only
    controllers that groups below its own may use.
    """
    listing = "cgroup.subtree_control" if is_for_children else "cgroup.controllers"
    controllers: dict[str, Controller] = {}
    for version, names, own_dir in _find_hierarchies(membership, mounts):
        for name in names if version == 1 else read_or_empty(own_dir / listing).split():
            if name in _NAMES:
                controllers.setdefault(name, Controller(name, version, own_dir))
    return list(controllers.values())


def _find_hierarchies(membership: str | None, mounts: str | None) -> Iterator[tuple[int, list[str], Path]]:
    """Yield version, controllers (of version 1) and the process's own directory of each mounted hierarchy."""
    # Empty on a kernel without control groups, or inside some containers.
    membership = read_or_empty("/proc/self/cgroup") if membership is None else membership
    mounts = read_or_empty("/proc/self/mountinfo") if mounts is None else mounts
    places = [_parse_mount(line) for line in mounts.splitlines() if " - cgroup" in line]
    for line in membership.splitlines():
        _, joined, inside = line.split(":", 2)
        names = joined.split(",") if joined else []
        for kind, root, where, options in places:
            if kind == ("cgroup" if names else "cgroup2") and set(names) <= set(options):
                own_dir = where / os.path.relpath(inside, root)
                yield 1 if names else 2, names, own_dir.parent if own_dir.name == _LEAF else own_dir


def _parse_mount(line: str) -> tuple[str, str, Path, list[str]]:
    before, _, after = line.partition(" - ")
    fields, (kind, _, options) = before.split(" "), after.split(" ", 2)
    return kind, fields[3], Path(fields[4]), options.split(",")


def _set_limit(path: Path, controller: Controller, limits: Limits) -> None:
    if controller.name == "pids":
        _write(path / "pids.max", str(limits.max_processes))
        return
    if controller.name == "cpu":
        quota = str(round((limits.cpus or 0.0) * _PERIOD_US))
        if controller.version == 1:
            _write(path / "cpu.cfs_period_us", str(_PERIOD_US))
            _write(path / "cpu.cfs_quota_us", quota)
        else:
            _write(path / "cpu.max", f"{quota} {_PERIOD_US}")
        return
    limit, swap = (
        ("memory.limit_in_bytes", "memory.memsw.limit_in_bytes")
        if controller.version == 1
        else ("memory.max", "memory.swap.max")
    )
    _write(path / limit, str(limits.group_bytes))
    if (path / swap).exists():
        _write(path / swap, str(limits.group_bytes) if controller.version == 1 else "0")


def _write(path: Path, text: str) -> None:
    with open(path, "wb", buffering=0) as file:
        file.write(text.encode())
