"""Find the processes and directories of dead runs by their leases, and end exactly these.

A process belongs to a run if its environment has the id of the lease, if the lease records its identity, or
if it descends from such a process. Directories have the id in a marker file. Nothing is ever ended by its
name, its command line or the resources it uses.

Covered: descendants in new sessions and groups, processes that start others while they are ended, reused
process ids. Not covered: a process that cleared its environment and whose parents have ended, unless the
lease records it.
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
    USER_FOLDER,
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
    """The leftovers of a dead run, and their fate."""

    lease: Lease
    ended: tuple[int, ...]
    """Processes that were ended."""
    removed: tuple[str, ...]
    """Directories that were removed."""
    surviving: tuple[int, ...] = ()
    """Processes that did not end; the lease is then kept."""

    def __str__(self) -> str:
        """Describe it in one line."""
        parts = [f"run {self.lease.run}, attempt {self.lease.attempt}, had ended without clearing up"]
        parts += [f"ended {_count(self.ended)}"] if self.ended else []
        parts += [f"removed {', '.join(self.removed)}"] if self.removed else []
        parts += [f"{_count(self.surviving)} did not end"] if self.surviving else []
        return "; ".join(parts)


def clear_leftovers(folder: Path | None = None) -> list[Cleared]:
    """Clean up after this user's dead runs on this machine. Living runs and other processes are not touched.

    Raises: StoreError if the folder of leases does not belong to this user alone.
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
            # A surviving process may still write there.
            removed = () if surviving else remove_directories(lease)
            if not surviving:
                forget_lease(lease, place)
            cleared.append(Cleared(lease=lease, ended=ended, removed=removed, surviving=surviving))
    return cleared


def find_processes(lease_id: str) -> list[int]:
    """Return this user's processes with the id of a lease."""
    return [pid for pid in _list_pids() if read_lease_id(pid) == lease_id]


def find_strays() -> dict[int, str]:
    """Return the processes whose environment has the id of a missing lease, with that id.

    For people to look at: their lease may be in a folder that this process cannot see.
    """
    lease_ids = {lease.lease_id for lease in find_leases()}
    by_pid = {pid: read_lease_id(pid) for pid in _list_pids()}
    return {pid: lease_id for pid, lease_id in by_pid.items() if lease_id and lease_id not in lease_ids}


def read_lease_id(pid: int) -> str | None:
    """Return the lease id in a process's environment; None if there is none, or it cannot be read."""
    try:
        # Empty for a zombie; not readable for another user's process.
        variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return None
    prefix = f"{LEASE_VARIABLE}=".encode()
    values = [entry.removeprefix(prefix) for entry in variables if entry.startswith(prefix)]
    return values[0].decode(errors="replace") if values else None


def end_processes(lease: Lease, *, living: Sequence[Lease] = ()) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Kill all processes of a lease, including those that they start meanwhile; return ended and surviving.

    `living`: leases of other runs. Their holders, with descendants and ancestors, are spared, even if their
    environment has this lease's id because they were started from this run's shell.
    """
    if not lease.holder.is_seen_here:
        return (), ()
    deadline = time.monotonic() + _END_LIMIT_S
    stopped = _stop_all(lease, living, deadline)
    ended = {pid for pid, start_ticks in stopped.items() if send_signal(pid, start_ticks, signal.SIGKILL)}
    while (left := _find_belonging(lease, living)) and time.monotonic() < deadline:
        ended |= {pid for pid, start_ticks in left.items() if send_signal(pid, start_ticks, signal.SIGKILL)}
        time.sleep(_POLL_S)
    return tuple(sorted(ended - set(left))), tuple(sorted(left))


def _stop_all(lease: Lease, living: Sequence[Lease], deadline: float) -> dict[int, int]:
    """Stop all processes of a lease before any is killed; return their ids and starts.

    A child that cleared its environment is found only as long as its parent exists, and a stopped process
    starts no others.
    """
    stopped: dict[int, int] = {}
    new_at = time.monotonic()
    while True:
        looked_at = time.monotonic()
        processes = _find_belonging(lease, living)
        new = {pid: start_ticks for pid, start_ticks in processes.items() if stopped.get(pid) != start_ticks}
        for pid, start_ticks in new.items():
            send_signal(pid, start_ticks, signal.SIGSTOP)
        stopped |= new
        if new:
            new_at = time.monotonic()
        # A forked process shows its new environment only after exec. So one search must begin this long after
        # the last new process; elapsed time alone is not enough on a busy machine.
        elif looked_at - new_at >= _SETTLE_S:
            return stopped
        if time.monotonic() >= deadline:
            return stopped
        time.sleep(_POLL_S)


def _find_belonging(lease: Lease, living: Sequence[Lease]) -> dict[int, int]:
    """Return the ids of all processes of a lease, with their starts."""
    table = {pid: stat for pid in _list_pids() if (stat := read_parent_and_start(pid)) is not None}
    recorded = {process.pid for process in lease.processes if process.is_alive()}
    marked = {pid for pid in table if pid in recorded or read_lease_id(pid) == lease.lease_id}
    holders = {other.holder.pid for other in living if other.is_alive}
    # This process, or a living run, may have been started by the dead run: their ancestors are spared too.
    spared = _add_children(holders, table)
    for pid in (os.getpid(), *holders):
        while pid in table:
            spared.add(pid)
            pid = table[pid][0]
    return {pid: table[pid][1] for pid in _add_children(marked, table) - spared if pid in table}


def _add_children(pids: set[int], table: Mapping[int, tuple[int, int]]) -> set[int]:
    """Return processes and their descendants."""
    family = set(pids)
    while more := {pid for pid, (parent, _) in table.items() if parent in family} - family:
        family |= more
    return family


def _list_pids() -> Iterator[int]:
    with suppress(OSError):
        yield from (int(name) for name in os.listdir("/proc") if name.isdigit())


def _count(pids: tuple[int, ...]) -> str:
    noun = "process" if len(pids) == 1 else "processes"
    return f"{noun} {', '.join(map(str, pids))}"


# Private directories of processes: sockets, logs, weights in memory. Beside each is a lock file that its
# owner holds; if the lock is free, both may be removed.

PREFIX = "ray-"
"""Prefix of directories of Ray nodes, whose paths must be short."""
MEMORY_PREFIX = "strop-"
"""Prefix of other directories in shared memory."""
SHARED_MEMORY = Path("/dev/shm")
_LOCK = ".lock"


@contextmanager
def own_dir(path: Path) -> Iterator[None]:
    """Make a directory, hold its lock, and remove both; first remove directories of dead owners beside it.

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
    """Remove and return this user's directories whose owner is gone."""
    removed = []
    lock_paths = [path for prefix in (PREFIX, MEMORY_PREFIX) for path in parent.glob(f"{prefix}*{_LOCK}")]
    for lock_path in sorted(lock_paths):
        with suppress(OSError, StoreError):
            lock, is_own = FileLock(lock_path), lock_path.lstat().st_uid == os.getuid()
            if is_own and lock.try_acquire():
                path = lock_path.with_name(lock_path.name.removesuffix(_LOCK))
                shutil.rmtree(path, ignore_errors=True)
                lock_path.unlink(missing_ok=True)
                lock.release()
                removed.append(path)
    return removed


def clear_directories() -> list[Path]:
    """Remove and return the directories of killed owners: weights in shared memory, and Ray's."""
    return [*remove_dead(SHARED_MEMORY), *remove_dead(USER_FOLDER)]
