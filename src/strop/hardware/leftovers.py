"""Finds what dead runs left on this machine by their leases, and ends exactly that.

A process belongs to a run if it carries the id of the lease in its environment, if the lease names it by
number and start, or if one of these started it. Directories carry the id in a marker file. Nothing is ever
ended by its name, its command line or what it uses; what carries no id of ours is not touched.

Covered: descendants in sessions and groups of their own, processes that start others while they are ended,
numbers that were used again. Not covered: a process that cleared its environment and whose parents have
ended, unless the lease names it.
"""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from strop.errors import StoreError
from strop.hardware.identity import read_parent_and_start, send_signal
from strop.hardware.leases import (
    LEASE_VARIABLE,
    LOCK_NAME,
    Lease,
    LeaseState,
    find_leases,
    forget_lease,
    leases_dir,
    open_folder,
    remove_directories,
    state_of,
)
from strop.io.atomic import explain_write_failure
from strop.io.lock import FileLock

_END_LIMIT_S = 5.0
_SETTLE_S = 0.1
_POLL_S = 0.01


@dataclass(frozen=True, kw_only=True, slots=True)
class Cleared:
    """What a dead run had left, and what was done about it."""

    lease: Lease
    ended: tuple[int, ...]
    """Processes that were ended."""
    removed: tuple[str, ...]
    """Directories."""
    surviving: tuple[int, ...] = ()
    """Processes that did not end; the lease is kept then."""

    def __str__(self) -> str:
        """Describe it in one line."""
        parts = [f"run {self.lease.run}, attempt {self.lease.attempt}, had ended without clearing up"]
        parts += [f"{name} {_count(found)}" for name, found in (("ended", self.ended),) if found]
        parts += [f"removed {', '.join(self.removed)}"] if self.removed else []
        parts += [f"{_count(self.surviving)} did not end"] if self.surviving else []
        return "; ".join(parts)


def clear_leftovers(folder: Path | None = None) -> list[Cleared]:
    """End what dead runs of this user left on this machine. Living runs and strangers are not touched.

    Raises: StoreError if the folder of leases is not this user's own.
    """
    place = folder or leases_dir()
    if not place.is_dir():
        return []
    open_folder(place)
    cleared = []
    with FileLock(place / LOCK_NAME):
        states = {lease: state_of(lease, place) for lease in find_leases(place)}
        living = [lease for lease, state in states.items() if state is LeaseState.ALIVE]
        for lease, state in states.items():
            if state is not LeaseState.DEAD:
                continue
            ended, surviving = end_processes(lease, living=living)
            # What still runs may still write there.
            removed = () if surviving else remove_directories(lease)
            if not surviving:
                forget_lease(lease, place)
            cleared.append(Cleared(lease=lease, ended=ended, removed=removed, surviving=surviving))
    return cleared


def find_processes(lease_id: str) -> list[int]:
    """Return the processes of this user that carry the id of a lease."""
    return [pid for pid in _list_pids() if read_lease_id(pid) == lease_id]


def find_strays() -> dict[int, str]:
    """Return processes that carry the id of a lease that is not there, with that id.

    For people to look at: their lease may be in a folder that this process cannot see.
    """
    known = {lease.lease_id for lease in find_leases()}
    found = {pid: read_lease_id(pid) for pid in _list_pids()}
    return {pid: lease_id for pid, lease_id in found.items() if lease_id and lease_id not in known}


def read_lease_id(pid: int) -> str | None:
    """Return the id of the lease that a process carries; None if there is none, or it cannot be read."""
    try:
        # Of a zombie it is empty; of another user's process it cannot be read.
        variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return None
    prefix = f"{LEASE_VARIABLE}=".encode()
    carried = [entry.removeprefix(prefix) for entry in variables if entry.startswith(prefix)]
    return carried[0].decode(errors="replace") if carried else None


def end_processes(lease: Lease, *, living: Sequence[Lease] = ()) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Kill all that belong to a lease, those that they start meanwhile too; return ended and surviving.

    `living` are leases of other runs: neither their holders nor what these started or were started by is
    touched, though it may carry the id of the run in whose shell it was started.
    """
    if not lease.holder.is_seen_here:
        return (), ()
    deadline = time.monotonic() + _END_LIMIT_S
    stopped = _stop_all(lease, living, deadline)
    ended = {pid for pid, start_ticks in stopped.items() if send_signal(pid, start_ticks, signal.SIGKILL)}
    while (found := _find_belonging(lease, living)) and time.monotonic() < deadline:
        ended |= {pid for pid, start_ticks in found.items() if send_signal(pid, start_ticks, signal.SIGKILL)}
        time.sleep(_POLL_S)
    return tuple(sorted(ended - set(found))), tuple(sorted(found))


def _stop_all(lease: Lease, living: Sequence[Lease], deadline: float) -> dict[int, int]:
    """Stop all that belong to a lease before any is killed; return them by number, with their starts.

    A child that cleared its environment is known by its parent, as long as that is there. And what is
    stopped starts nothing any more.
    """
    stopped: dict[int, int] = {}
    new_at = time.monotonic()
    while True:
        looked_at = time.monotonic()
        found = _find_belonging(lease, living)
        new = {pid: start_ticks for pid, start_ticks in found.items() if stopped.get(pid) != start_ticks}
        for pid, start_ticks in new.items():
            send_signal(pid, start_ticks, signal.SIGSTOP)
        stopped |= new
        if new:
            new_at = time.monotonic()
        # A process that has just been forked shows its environment once it has become its program. A look
        # that begins so late counts, and not the time alone: a busy machine may let it pass between two.
        elif looked_at - new_at >= _SETTLE_S:
            return stopped
        if time.monotonic() >= deadline:
            return stopped
        time.sleep(_POLL_S)


def _find_belonging(lease: Lease, living: Sequence[Lease]) -> dict[int, int]:
    """Return all processes of a lease, by number, with their starts."""
    table = {pid: found for pid in _list_pids() if (found := read_parent_and_start(pid)) is not None}
    named = {process.pid for process in lease.processes if process.is_alive()}
    carrying = {pid for pid in table if pid in named or read_lease_id(pid) == lease.lease_id}
    holders = {one.holder.pid for one in living if one.is_alive}
    # This process may have been started by what it clears up after, and so may a living run: their parents,
    # the parents of these and so on are spared too.
    spared = _add_children(holders, table)
    for pid in (os.getpid(), *holders):
        while pid in table:
            spared.add(pid)
            pid = table[pid][0]
    return {pid: table[pid][1] for pid in _add_children(carrying, table) - spared if pid in table}


def _add_children(pids: set[int], table: Mapping[int, tuple[int, int]]) -> set[int]:
    """Return processes, what they started, and so on."""
    found = set(pids)
    while more := {pid for pid, (parent, _) in table.items() if parent in found} - found:
        found |= more
    return found


def _list_pids() -> Iterator[int]:
    with suppress(OSError):
        yield from (int(name) for name in os.listdir("/proc") if name.isdigit())


def _count(pids: tuple[int, ...]) -> str:
    noun = "process" if len(pids) == 1 else "processes"
    return f"{noun} {', '.join(map(str, pids))}"


# Private directories of processes: sockets, logs, weights in memory. Beside each lies a lock that its owner
# holds; whoever finds the lock free may remove both.

PREFIX = "ray-"
"""Of directories of Ray nodes, whose paths must be short."""
MEMORY_PREFIX = "strop-"
"""Of directories in shared memory that belong to no Ray node."""
SHARED_MEMORY = Path("/dev/shm")
_LOCK = ".lock"


@contextmanager
def own_dir(path: Path) -> Iterator[None]:
    """Make the directory, hold its lock, and remove both; first remove what dead keepers left beside it.

    Raises: StoreError if it cannot be made.
    """
    remove_dead(path.parent)
    lock = FileLock(path.with_name(path.name + _LOCK))
    try:
        lock.acquire()
        path.mkdir(mode=0o700)
    except OSError as error:
        raise explain_write_failure(error, path) from error
    try:
        yield
    finally:
        shutil.rmtree(path, ignore_errors=True)
        lock.path.unlink(missing_ok=True)
        lock.release()


def remove_dead(parent: Path) -> list[Path]:
    """Remove directories of this user whose owner is gone; return them."""
    removed = []
    lock_paths = [path for prefix in (PREFIX, MEMORY_PREFIX) for path in parent.glob(f"{prefix}*{_LOCK}")]
    for lock_path in sorted(lock_paths):
        with suppress(OSError, StoreError):
            if lock_path.lstat().st_uid != os.getuid():
                continue
            lock = FileLock(lock_path)
            if lock.try_acquire():
                path = lock_path.with_name(lock_path.name.removesuffix(_LOCK))
                shutil.rmtree(path, ignore_errors=True)
                lock_path.unlink(missing_ok=True)
                lock.release()
                removed.append(path)
    return removed


def clear_shared_memory() -> list[Path]:
    """Remove what killed owners left in this machine's memory, weights for example; return it."""
    return remove_dead(SHARED_MEMORY)
