"""Leases: which run uses which GPUs, ports and temporary directories of this machine.

A *lease* is a file of this user on this machine that lists the resources of a run and the process that owns
it. It is valid as long as that process is alive (`identity`). There is no heartbeat and no clock, so a
stopped clock or a suspended machine ends no lease. `leftovers` cleans up after dead runs.

Covered: reused process ids, reboots, clocks that jump, a kill at any moment, containers that share the folder
of leases. Not covered: other machines, each of which has its own leases; other users, whose leases cannot be
read; a system that removes old files below /tmp, for runs older than that.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import socket
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

from strop.errors import CheckRefused, StoreError
from strop.hardware.identity import ProcessIdentity, identify, identify_self
from strop.io.atomic import explain_write_failure, write_bytes_atomically
from strop.io.lock import FileLock

LEASE_VARIABLE = "STROP_LEASE"
"""Holds the id of a run's lease in the environment of all its processes."""
USER_FOLDER = Path(f"/tmp/strop-{os.getuid()}")
FOLDER_VARIABLE = "STROP_RUNTIME_DIR"
"""Overrides the parent folder of leases, which is below /tmp."""
MARKER_NAME = ".strop-lease"
"""A file with the id of the lease, in every temporary directory of a run."""
LOCK_NAME = "lock"


class LeaseState(StrEnum):
    """The state of a lease, as far as this process can tell."""

    ALIVE = "alive"
    DEAD = "dead"
    """Its holder has ended, or the machine has booted since."""
    ELSEWHERE = "elsewhere"
    """It belongs to another machine, or to a container that seems to have ended; it is left alone."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Lease:
    """The resources of one attempt of a run on this machine."""

    lease_id: str
    run: str
    attempt: str
    host: str
    holder: ProcessIdentity
    """The process that owns the lease; the lease ends with it."""
    taken_at: float
    """Unix seconds, for people only."""
    gpus: tuple[str, ...] = ()
    """UUIDs of GPUs or of slices."""
    ports: tuple[int, ...] = ()
    directories: tuple[str, ...] = ()
    """Absolute paths of temporary directories, each with the marker."""
    processes: tuple[ProcessIdentity, ...] = ()
    """Recorded child processes; all others are found by their environment."""

    @property
    def is_alive(self) -> bool:
        """Whether its holder is visible and runs."""
        return self.holder.is_alive()

    def __str__(self) -> str:
        """Name it for a message."""
        return f"run {self.run}, attempt {self.attempt}, process {self.holder.pid}"


def leases_dir() -> Path:
    """Return the folder of this user's leases on this machine: below STROP_RUNTIME_DIR, else below /tmp.

    Not below XDG_RUNTIME_DIR, which a logout removes while a run goes on, and which steps of schedulers lack;
    and not below TMPDIR, which differs for each job and role.
    """
    return Path(os.environ.get(FOLDER_VARIABLE) or USER_FOLDER) / "leases"


class HeldLease:
    """A lease of this process; a `with` block releases it at the end."""

    def __init__(self, lease: Lease, folder: Path) -> None:
        self.lease = lease
        self.is_kept = False
        """Whether `release` keeps the file, because some processes of the lease could not be ended."""
        self._folder = folder
        # Held so that processes in other pid namespaces see that the holder is alive.
        self._lock = FileLock(lock_path_of(lease, folder))

    @property
    def variables(self) -> Mapping[str, str]:
        """Variables for the environment of every process of the run."""
        return {LEASE_VARIABLE: self.lease.lease_id}

    def make_directory(self, parent: Path | None = None) -> Path:
        """Make a private temporary directory that is removed with the lease; by default below TMPDIR.

        Raises: StoreError if it cannot be made.
        """
        place = (parent or Path(tempfile.gettempdir())).absolute()
        path = place / f"strop-{self.lease.lease_id}-{secrets.token_hex(4)}"
        # Recorded first: a kill in between leaves a record without a directory, never the reverse.
        self._write(replace(self.lease, directories=(*self.lease.directories, str(path))))
        try:
            path.mkdir(mode=0o700)
            (path / MARKER_NAME).write_text(self.lease.lease_id)
        except OSError as error:
            raise explain_write_failure(error, path) from error
        return path

    def record_process(self, pid: int) -> None:
        """Record a child by its identity, so that it is found even if it clears its environment."""
        child = identify(pid)
        if child is not None:
            self._write(replace(self.lease, processes=(*self.lease.processes, child)))

    def release(self) -> None:
        """Remove the directories and the lease. Running processes are left to their parent."""
        if not self.is_kept:
            remove_directories(self.lease)
            forget_lease(self.lease, self._folder)
        self._lock.release()

    def take(self) -> None:
        """Write the lease. Raises: StoreError if that fails."""
        self._lock.acquire()
        self._write(self.lease)

    def _write(self, lease: Lease) -> None:
        path = path_of(lease, self._folder)
        write_bytes_atomically(path, json.dumps(asdict(lease), indent=1).encode())
        self.lease = lease

    def __enter__(self) -> HeldLease:
        """Return the lease."""
        return self

    def __exit__(self, *_: object) -> None:
        """Release it."""
        self.release()


def take_lease(
    run: str,
    attempt: str,
    *,
    gpus: Sequence[str] = (),
    ports: Sequence[int] = (),
    folder: Path | None = None,
) -> HeldLease:
    """Take a lease, unless another living run of this user holds one of the GPUs or ports.

    Raises: CheckRefused naming the run that holds a GPU or port; StoreError if the folder of leases does not
        belong to this user alone, or cannot be written.
    """
    place = open_folder(folder or leases_dir())
    lease = Lease(
        lease_id=secrets.token_hex(6),
        run=run,
        attempt=attempt,
        host=socket.gethostname(),
        holder=identify_self(),
        taken_at=time.time(),
        gpus=tuple(gpus),
        ports=tuple(ports),
    )
    held = HeldLease(lease, place)
    with FileLock(place / LOCK_NAME):
        for other in find_leases(place):
            shared = [*sorted({*gpus} & {*other.gpus}), *map(str, sorted({*ports} & {*other.ports}))]
            if shared and state_of(other, place) is LeaseState.ALIVE:
                raise CheckRefused(
                    f"{', '.join(shared)} of {lease.host} is held by {other}",
                    allowed="GPUs and ports that no living run holds",
                    next_step="wait for that run, end it, or ask for others",
                )
        held.take()
    return held


def find_leases(folder: Path | None = None) -> list[Lease]:
    """Return this user's leases on this machine, of living and dead runs."""
    place = folder or leases_dir()
    return [lease for path in sorted(place.glob("*.json")) if (lease := _read(path)) is not None]


def find_living(folder: Path | None = None) -> list[Lease]:
    """Return the leases of living runs, including those in containers that share the folder."""
    return [lease for lease in find_leases(folder) if state_of(lease, folder) is LeaseState.ALIVE]


def find_inherited() -> Lease | None:
    """Return the living lease in this process's environment; None if there is none."""
    lease_id = os.environ.get(LEASE_VARIABLE)
    return next((lease for lease in find_living() if lease.lease_id == lease_id), None)


def state_of(lease: Lease, folder: Path | None = None) -> LeaseState:
    """Return the state of a lease, as far as this process can see."""
    if lease.holder.is_seen_here:
        return LeaseState.ALIVE if lease.is_alive else LeaseState.DEAD
    if not lease.holder.is_of_this_boot:
        return LeaseState.DEAD if lease.host == socket.gethostname() else LeaseState.ELSEWHERE
    # The holder is in another pid namespace: its number means nothing here, but its lock does.
    path = lock_path_of(lease, folder or leases_dir())
    if not path.exists():
        return LeaseState.ELSEWHERE
    lock = FileLock(path)
    is_free = lock.try_acquire()
    lock.release()
    return LeaseState.ELSEWHERE if is_free else LeaseState.ALIVE


def remove_directories(lease: Lease) -> tuple[str, ...]:
    """Remove and return the directories of a lease whose marker has its id."""
    removed = []
    for name in lease.directories:
        marker = Path(name) / MARKER_NAME
        with suppress(OSError):
            if not Path(name).is_symlink() and marker.read_text() == lease.lease_id:
                shutil.rmtree(name, ignore_errors=True)
                removed.append(name)
    return tuple(removed)


def forget_lease(lease: Lease, folder: Path) -> None:
    """Remove the files of a lease."""
    path_of(lease, folder).unlink(missing_ok=True)
    lock_path_of(lease, folder).unlink(missing_ok=True)


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


def path_of(lease: Lease, folder: Path) -> Path:
    """Return the file of a lease."""
    return folder / f"{lease.lease_id}.json"


def lock_path_of(lease: Lease, folder: Path) -> Path:
    """Return the file that its holder keeps locked."""
    return folder / f"{lease.lease_id}.lock"


def _read(path: Path) -> Lease | None:
    """Read a lease; None if the file is gone or has another format, which leaves it alone."""
    try:
        values: dict[str, Any] = json.loads(path.read_bytes())
        lists = {name: tuple(values[name]) for name in ("gpus", "ports", "directories")}
        processes = tuple(ProcessIdentity(**process) for process in values["processes"])
        holder = ProcessIdentity(**values["holder"])
        return Lease(**{**values, **lists, "holder": holder, "processes": processes})
    except (OSError, ValueError, TypeError, KeyError):
        return None
