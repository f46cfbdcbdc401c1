"""Leases: which run has which GPUs of this machine.

A run locks a file for each of its GPUs, named by UUID, and one of its own, named by the lease's id, which
all its processes carry in their environment. The kernel frees the locks when the process dies, so neither
clocks, nor process ids, nor heartbeats matter, and containers that share the folder see each other's leases.

Most processes of a dead run end by themselves: roles die with their parent (`process`), and agents end what
their roles have left. `clear_leftovers` ends the others: those with the id of a lease that nobody holds, and
their descendants. Nothing is ever ended by its name, its command line or the resources it uses.

Not covered: other users, whose locks are in a folder of their own, while their processes on a GPU are seen; a
process that cleared its environment and whose parents have ended.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from strop.errors import CheckRefused, StoreError
from strop.hardware.gpus import describe_process
from strop.hardware.process import list_running
from strop.io.atomic import explain_write_failure
from strop.io.lock import FileLock

if TYPE_CHECKING:
    from psutil import Process

LEASE_VARIABLE = "STROP_LEASE"
"""Holds the id of a run's lease in the environment of all its processes."""
USER_FOLDER = Path(f"/tmp/strop-{os.getuid()}")
FOLDER_VARIABLE = "STROP_RUNTIME_DIR"
"""Overrides the parent folder of leases, which is below /tmp."""
LOCK_NAME = "lock"
RUN_SUFFIX, GPU_SUFFIX = ".run", ".gpu"
_END_LIMIT_S = 5.0
_SETTLE_S = 0.1
_POLL_S = 0.01
_NUM_TRIES = 5


def leases_dir() -> Path:
    """Return the folder of this user's leases on this machine: below STROP_RUNTIME_DIR, else below /tmp.

    Not below XDG_RUNTIME_DIR, which a logout removes while a run goes on, and which steps of schedulers lack;
    and not below TMPDIR, which differs for each job and role.
    """
    return Path(os.environ.get(FOLDER_VARIABLE) or USER_FOLDER) / "leases"


@dataclass(frozen=True, slots=True)
class Lease:
    """The GPUs of a run, until the end of the `with` block of `take_lease` or of this process."""

    lease_id: str
    gpus: tuple[str, ...]

    @property
    def variables(self) -> Mapping[str, str]:
        """Variables for the environment of every process of the run."""
        return {LEASE_VARIABLE: self.lease_id}


@contextmanager
def take_lease(gpus: Sequence[str] = ()) -> Iterator[Lease]:
    """Hold GPUs or slices, given by UUID, inside the block. Running processes are left to their parent.

    Raises: CheckRefused naming the process that has one of them; StoreError if the folder of leases does not
        belong to this user alone, or cannot be written.
    """
    place = open_folder(leases_dir())
    lease_id = secrets.token_hex(6)
    with ExitStack() as undo:
        with FileLock(place / LOCK_NAME):
            for uuid in sorted(gpus):
                lock = FileLock(_gpu_path(uuid, place))
                if not lock.try_acquire():
                    raise CheckRefused(
                        f"{uuid} is held by {_describe_holder(lock)}",
                        allowed="GPUs that no living run holds",
                        next_step="wait for that run, end it, or ask for others",
                    )
                undo.callback(lock.release)
            own = undo.enter_context(FileLock(place / f"{lease_id}{RUN_SUFFIX}"))
        yield Lease(lease_id, tuple(gpus))
        # Otherwise the file stays, and the next `clear_leftovers` ends what has not ended by now.
        if not find_processes({lease_id}):
            own.path.unlink(missing_ok=True)


def find_holder(uuid: str) -> str | None:
    """Return a description of the process that has a GPU or slice; None if no run has it."""
    lock = FileLock(_gpu_path(uuid, leases_dir()))
    return _describe_holder(lock) if is_locked(lock) else None


def is_inherited() -> bool:
    """Whether this process belongs to a run with a living lease."""
    lease_id = os.environ.get(LEASE_VARIABLE)
    return bool(lease_id) and is_locked(FileLock(leases_dir() / f"{lease_id}{RUN_SUFFIX}"))


def is_locked(lock: FileLock) -> bool:
    """Whether a process has this lock."""
    if not lock.path.exists():
        return False
    is_free = lock.try_acquire()
    lock.release()
    return not is_free


def open_folder(folder: Path) -> Path:
    """Make the folder of leases, private to this user.

    Raises: StoreError if other users could write there: below /tmp, any user may have created it first.
    """
    try:
        folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder.mkdir(mode=0o700, exist_ok=True)
        facts = [path.lstat() for path in (folder.parent, folder)]
    except OSError as error:
        raise explain_write_failure(error, folder) from error
    above, own = facts
    is_shared = bool(above.st_mode & 0o022) or bool(own.st_mode & 0o077)
    if is_shared or any(fact.st_uid != os.getuid() for fact in facts):
        raise StoreError(
            f"{folder}, where leases are kept, can be written by others",
            allowed="a folder of this user's own, with mode 700",
            next_step=f"remove it, or set {FOLDER_VARIABLE} to a folder of your own",
        )
    return folder


def _gpu_path(uuid: str, folder: Path) -> Path:
    """Return the file of a GPU's lock. The old name of a slice has slashes."""
    return folder / f"{uuid.replace('/', '-')}{GPU_SUFFIX}"


def _describe_holder(lock: FileLock) -> str:
    holder = lock.holder()
    return "another process" if holder is None else f"{holder} ({describe_process(holder.pid)})"


def clear_leftovers() -> tuple[int, ...]:
    """End what this user's dead runs have left on this machine; return the processes that were ended.

    Living runs and other processes are not touched.
    Raises: StoreError if the folder of leases does not belong to this user alone.
    """
    place = leases_dir()
    if not place.is_dir():
        return ()
    open_folder(place)
    with FileLock(place / LOCK_NAME):
        locks = [FileLock(path) for path in sorted(place.glob(f"*{RUN_SUFFIX}"))]
        dead = [lock for lock in locks if _take_from_dead(lock)]
        # A living run may have been started from the shell of a dead one: it and its descendants are spared.
        holders = [lock.holder() for lock in locks if not lock.is_held]
        living = {holder.pid for holder in holders if holder is not None}
        ended, left = end_processes({lock.path.name.removesuffix(RUN_SUFFIX) for lock in dead}, living)
        for lock in dead:
            if not left:
                lock.path.unlink(missing_ok=True)
            lock.release()
    return ended


def _take_from_dead(lock: FileLock) -> bool:
    """Take the lock of a run unless that lives."""
    import psutil

    for _ in range(_NUM_TRIES):
        if lock.try_acquire():
            return True
        holder = lock.holder()
        if holder is None or psutil.pid_exists(holder.pid):
            return False
        # What the run was starting when it died has its lock until it becomes its program.
        time.sleep(_SETTLE_S)
    return False


def end_processes(
    lease_ids: Collection[str], living: Collection[int] = ()
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Kill what `find_processes` finds, and what that starts meanwhile; return ended and surviving ones."""
    import psutil

    deadline = time.monotonic() + _END_LIMIT_S
    found: set[Process] = set()
    # All are stopped before any is killed: a child that cleared its environment is found only as long as its
    # parent exists, and a stopped process starts no others. The last search begins some time after the last
    # new process, because a forked one shows its new environment only after exec.
    while (new := find_processes(lease_ids, living) - found) and time.monotonic() < deadline:
        for process in new:
            with suppress(psutil.Error):
                process.suspend()
        found |= new
        time.sleep(_SETTLE_S)
    for process in found:
        with suppress(psutil.Error):
            process.kill()
    while (left := list_running(found)) and time.monotonic() < deadline:
        time.sleep(_POLL_S)
    pids = {process.pid for process in left}
    return tuple(sorted({process.pid for process in found} - pids)), tuple(sorted(pids))


def find_processes(lease_ids: Collection[str], living: Collection[int] = ()) -> set[Process]:
    """Return this user's processes with the id of a lease, and their descendants.

    Without this process, `living` ones with their descendants, and the parents of all these.
    """
    import psutil

    listed = psutil.process_iter(["ppid", "status"]) if lease_ids else ()
    # A zombie has ended: its id is only kept for its parent.
    table = {process.pid: process for process in listed if process.info["status"] != psutil.STATUS_ZOMBIE}

    def add_children(pids: set[int]) -> set[int]:
        while more := {pid for pid, one in table.items() if one.info["ppid"] in pids} - pids:
            pids = pids | more
        return pids

    def is_marked(process: Process) -> bool:
        with suppress(psutil.Error, OSError):
            return process.environ().get(LEASE_VARIABLE) in lease_ids
        return False

    marked = {pid for pid, process in table.items() if is_marked(process)}
    spared = add_children(set(living))
    for pid in (os.getpid(), *living):
        while pid in table:
            spared.add(pid)
            pid = table[pid].info["ppid"]
    return {table[pid] for pid in add_children(marked) - spared}
