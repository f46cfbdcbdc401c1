"""Which run uses which GPUs, ports and temporary directories of this machine.

A run takes a *lease*: a file of this user on this machine that says what it holds and which process
owns it. A lease is valid as long as that very process is alive (`identity`). There is no heartbeat and no
clock, so a stopped clock or a suspended machine ends nothing. `leftovers` clears up after dead runs.

Covered: numbers of processes that were used again, reboots, clocks that jump, a kill at any moment,
containers that share the folder of leases. Not covered: other machines, each of which has its own leases;
other users, whose leases cannot be read; a system that removes old files below /tmp, for runs that are
older than it allows.
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
"""In the environment of every process of a run: the id of its lease."""
FOLDER_VARIABLE = "STROP_RUNTIME_DIR"
"""Where leases are, if not below /tmp."""
MARKER_NAME = ".strop-lease"
"""In every temporary directory of a run: a file that holds the id of its lease."""
LOCK_NAME = "lock"


class LeaseState(StrEnum):
    """The state of a lease, as far as this process can tell."""

    ALIVE = "alive"
    DEAD = "dead"
    """Its holder has ended, or the machine has booted since."""
    ELSEWHERE = "elsewhere"
    """Of another machine, or of a container that seems to have ended. Nothing is done with it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Lease:
    """What one attempt of a run holds on this machine."""

    lease_id: str
    run: str
    attempt: str
    host: str
    holder: ProcessIdentity
    """The process that owns the lease: the lease ends with it."""
    taken_at: float
    """Unix seconds, for people to read; nothing is decided by it."""
    gpus: tuple[str, ...] = ()
    """UUIDs of GPUs or of slices."""
    ports: tuple[int, ...] = ()
    directories: tuple[str, ...] = ()
    """Absolute paths of temporary directories, each with the marker."""
    processes: tuple[ProcessIdentity, ...] = ()
    """Those that it started and named; all others are known by their environment."""

    @property
    def is_alive(self) -> bool:
        """Whether its holder can be seen and runs."""
        return self.holder.is_alive()

    def __str__(self) -> str:
        """Name it for a message."""
        return f"run {self.run}, attempt {self.attempt}, process {self.holder.pid}"


def leases_dir() -> Path:
    """Return where this user's leases of this machine are: below STROP_RUNTIME_DIR, else below /tmp.

    Not below XDG_RUNTIME_DIR, which a logout removes under a run that goes on, and which the steps of
    schedulers lack; and not below TMPDIR, which is another one for each job, and for each role.
    """
    named = os.environ.get(FOLDER_VARIABLE)
    return (Path(named) if named else Path(f"/tmp/strop-{os.getuid()}")) / "leases"


class HeldLease:
    """A lease of this process; in `with`, given back at the end."""

    def __init__(self, lease: Lease, folder: Path) -> None:
        self.lease = lease
        self.is_kept = False
        """Whether `release` leaves it behind: for what belongs to it and could not be ended."""
        self._folder = folder
        # Shows that the holder is alive to processes in other pid namespaces.
        self._lock = FileLock(lock_path_of(lease, folder))

    @property
    def variables(self) -> Mapping[str, str]:
        """What the environment of every process of the run needs."""
        return {LEASE_VARIABLE: self.lease.lease_id}

    def make_directory(self, parent: Path | None = None) -> Path:
        """Make a private temporary directory that goes with the lease; by default below TMPDIR.

        Raises: StoreError if it cannot be made.
        """
        place = (parent or Path(tempfile.gettempdir())).absolute()
        path = place / f"strop-{self.lease.lease_id}-{secrets.token_hex(4)}"
        # Noted first: a kill in between leaves a note without a directory, and no directory without a note.
        self._write(replace(self.lease, directories=(*self.lease.directories, str(path))))
        try:
            path.mkdir(mode=0o700)
            (path / MARKER_NAME).write_text(self.lease.lease_id)
        except OSError as error:
            raise explain_write_failure(error, path) from error
        return path

    def record_process(self, pid: int) -> None:
        """Note a child by its number and start, so that it is found even if it clears its environment."""
        found = identify(pid)
        if found is not None:
            self._write(replace(self.lease, processes=(*self.lease.processes, found)))

    def record_port(self, port: int) -> None:
        """Note a port that the run listens on."""
        self._write(replace(self.lease, ports=(*self.lease.ports, port)))

    def release(self) -> None:
        """Remove the directories and the lease. Processes that still run are left to their parent."""
        if not self.is_kept:
            remove_directories(self.lease)
            forget_lease(self.lease, self._folder)
        self._lock.release()

    def take(self) -> None:
        """Write the lease down. Raises: StoreError if that fails."""
        self._lock.acquire()
        self._write(self.lease)

    def _write(self, lease: Lease) -> None:
        path = path_of(lease, self._folder)
        write_bytes_atomically(path, json.dumps(asdict(lease), indent=1).encode())
        self.lease = lease

    def __enter__(self) -> HeldLease:
        """Hold it."""
        return self

    def __exit__(self, *_: object) -> None:
        """Give it back."""
        self.release()


def take_lease(
    run: str,
    attempt: str,
    *,
    gpus: Sequence[str] = (),
    ports: Sequence[int] = (),
    folder: Path | None = None,
) -> HeldLease:
    """Take what a run needs of this machine, if no other living run of this user has it.

    Raises: CheckRefused naming the run that has a GPU or port; StoreError if the folder of leases is not
        this user's own, or cannot be written.
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
    """Return this user's leases on this machine, of living and of dead runs."""
    place = folder or leases_dir()
    return [lease for path in sorted(place.glob("*.json")) if (lease := _read(path)) is not None]


def find_living(folder: Path | None = None) -> list[Lease]:
    """Return the leases that hold, those of containers that share the folder too."""
    return [lease for lease in find_leases(folder) if state_of(lease, folder) is LeaseState.ALIVE]


def find_inherited() -> Lease | None:
    """Return the living lease that this process was started under; None if there is none."""
    carried = os.environ.get(LEASE_VARIABLE)
    return next((lease for lease in find_living() if lease.lease_id == carried), None)


def state_of(lease: Lease, folder: Path | None = None) -> LeaseState:
    """Return the state of a lease, as far as this process can see."""
    if lease.holder.is_seen_here:
        return LeaseState.ALIVE if lease.is_alive else LeaseState.DEAD
    if not lease.holder.is_of_this_boot:
        return LeaseState.DEAD if lease.host == socket.gethostname() else LeaseState.ELSEWHERE
    # A process of another namespace: its number says nothing here, its lock does.
    path = lock_path_of(lease, folder or leases_dir())
    if not path.exists():
        return LeaseState.ELSEWHERE
    lock = FileLock(path)
    is_free = lock.try_acquire()
    lock.release()
    return LeaseState.ELSEWHERE if is_free else LeaseState.ALIVE


def remove_directories(lease: Lease) -> tuple[str, ...]:
    """Remove the directories of a lease that carry its id, and no other directory of that name.

    Returns those that were removed.
    """
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
    """Make the folder of leases, for this user alone.

    Raises: StoreError if other users could write there: below /tmp, any user may have made it first.
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
    """Return where a lease is written."""
    return folder / f"{lease.lease_id}.json"


def lock_path_of(lease: Lease, folder: Path) -> Path:
    """Return the file that its holder keeps locked."""
    return folder / f"{lease.lease_id}.lock"


def _read(path: Path) -> Lease | None:
    """Return a lease; None where the file has gone, or is of another form: then nothing is done with it."""
    try:
        values: dict[str, Any] = json.loads(path.read_bytes())
        lists = {name: tuple(values[name]) for name in ("gpus", "ports", "directories")}
        processes = tuple(ProcessIdentity(**process) for process in values["processes"])
        holder = ProcessIdentity(**values["holder"])
        return Lease(**{**values, **lists, "holder": holder, "processes": processes})
    except (OSError, ValueError, TypeError, KeyError):
        return None
