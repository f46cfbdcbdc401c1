"""Who uses which GPUs, ports and temporary directories of this machine, and what dead runs left of them.

A run takes a *lease*: a file of this user on this machine that says what it holds and which process
answers for it. A lease lives as long as that very process (`identity`). What a dead one left is known by its
lease alone: processes carry its id in their environment, directories in a marker file. Nothing is ever
ended by its name or its command line, and what carries no id of ours is not touched.

Covered: descendants in sessions of their own, numbers of processes that were used again, reboots, a kill at
any moment. Not covered: a process that cleared its environment; other machines, each of which has its own
leases; other users, whose leases nobody else can read.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import signal
import socket
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any

from strop.errors import CheckRefused, StoreError, explain_refusal
from strop.hardware.identity import ProcessIdentity, identify_self, read_boot_id
from strop.store.atomic import explain_write_failure, write_bytes_atomically
from strop.store.lock import FileLock

LEASE_VARIABLE = "STROP_LEASE"
"""In the environment of every process of a run: the id of its lease."""
MARKER_NAME = ".strop-lease"
"""In every temporary directory of a run: a file that holds the id of its lease."""
_LOCK_NAME = "lock"
_END_LIMIT_S = 5.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Lease:
    """What one attempt of a run holds on this machine."""

    lease_id: str
    run: str
    attempt: str
    holder: ProcessIdentity
    """The process that answers for it: with it the lease ends."""
    gpus: tuple[str, ...] = ()
    """UUIDs of GPUs or of slices."""
    ports: tuple[int, ...] = ()
    directories: tuple[str, ...] = ()
    """Absolute paths of temporary directories, each with the marker."""

    @property
    def is_alive(self) -> bool:
        """Whether the process that answers for it is there."""
        return self.holder.is_alive()

    def __str__(self) -> str:
        """Name it for a message."""
        return f"run {self.run}, attempt {self.attempt}, process {self.holder.pid}"


def leases_dir() -> Path:
    """Return where this user's leases of this machine are: below XDG_RUNTIME_DIR, else below /tmp.

    Steps of schedulers and containers often lack the first one.
    """
    shared = os.environ.get("XDG_RUNTIME_DIR")
    if shared and Path(shared).is_dir():
        return Path(shared) / "strop" / "leases"
    return Path(tempfile.gettempdir()) / f"strop-{os.getuid()}" / "leases"


class HeldLease:
    """A lease of this process; in `with`, given back at the end."""

    def __init__(self, lease: Lease, folder: Path) -> None:
        self.lease = lease
        self._folder = folder

    @property
    def variables(self) -> Mapping[str, str]:
        """What the environment of every process of the run needs."""
        return {LEASE_VARIABLE: self.lease.lease_id}

    def make_directory(self, parent: Path | None = None) -> Path:
        """Make a private temporary directory that goes with the lease; by default below TMPDIR.

        Raises: StoreError if it cannot be made.
        """
        try:
            path = Path(tempfile.mkdtemp(prefix=f"strop-{self.lease.lease_id}-", dir=parent)).absolute()
            (path / MARKER_NAME).write_text(self.lease.lease_id)
        except OSError as error:
            raise explain_write_failure(error, parent or Path(tempfile.gettempdir())) from error
        self.lease = replace(self.lease, directories=(*self.lease.directories, str(path)))
        _write(self.lease, self._folder)
        return path

    def release(self) -> None:
        """Remove the directories and the lease. What still runs is the business of who started it."""
        _remove_directories(self.lease)
        _path_of(self.lease, self._folder).unlink(missing_ok=True)

    def __enter__(self) -> HeldLease:
        """Hold it."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
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
    place = _open_folder(folder or leases_dir())
    lease = Lease(
        lease_id=secrets.token_hex(6),
        run=run,
        attempt=attempt,
        holder=identify_self(),
        gpus=tuple(gpus),
        ports=tuple(ports),
    )
    with FileLock(place / _LOCK_NAME):
        for other in find_leases(place):
            shared = [*sorted({*gpus} & {*other.gpus}), *map(str, sorted({*ports} & {*other.ports}))]
            if shared and other.is_alive:
                raise CheckRefused(
                    explain_refusal(
                        f"{', '.join(shared)} of {socket.gethostname()} is held by {other}",
                        allowed="GPUs and ports that no living run holds",
                        next_step="wait for that run, end it, or ask for others",
                    )
                )
        _write(lease, place)
    return HeldLease(lease, place)


def find_leases(folder: Path | None = None) -> list[Lease]:
    """Return this user's leases on this machine, of living and of dead runs."""
    place = folder or leases_dir()
    return [lease for path in sorted(place.glob("*.json")) if (lease := _read(path)) is not None]


@dataclass(frozen=True, kw_only=True, slots=True)
class Cleared:
    """What a dead run had left, and what became of it."""

    lease: Lease
    ended: tuple[int, ...]
    """Processes that were ended."""
    removed: tuple[str, ...]
    """Directories."""
    surviving: tuple[int, ...] = ()
    """Processes that did not end; the lease is kept then."""

    def __str__(self) -> str:
        """Say it in one line."""
        parts = [f"{len(self.ended)} processes ended", f"{len(self.removed)} folders removed"]
        if self.surviving:
            parts.append(f"{', '.join(map(str, self.surviving))} did not end")
        return f"{self.lease}: {', '.join(parts)}"


def clear_leftovers(folder: Path | None = None) -> list[Cleared]:
    """End what dead runs of this user left on this machine. Living runs and strangers are not touched.

    Raises: StoreError if the folder of leases is not this user's own.
    """
    place = folder or leases_dir()
    if not place.is_dir():
        return []
    _open_folder(place)
    cleared = []
    with FileLock(place / _LOCK_NAME):
        for lease in find_leases(place):
            if lease.is_alive:
                continue
            ended, surviving = end_processes(lease)
            removed = _remove_directories(lease)
            if not surviving:
                _path_of(lease, place).unlink(missing_ok=True)
            cleared.append(Cleared(lease=lease, ended=ended, removed=removed, surviving=surviving))
    return cleared


def find_processes(lease_id: str) -> list[int]:
    """Return the processes of this user that carry the id of a lease."""
    return [pid for pid in _list_pids() if _carries(pid, lease_id)]


def end_processes(lease: Lease) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Kill all that carry a lease's id, those that they start meanwhile too; return ended and surviving."""
    if lease.holder.boot_id != read_boot_id():
        return (), ()
    ended: set[int] = set()
    deadline = time.monotonic() + _END_LIMIT_S
    while (found := find_processes(lease.lease_id)) and time.monotonic() < deadline:
        for pid in found:
            if _kill(pid, lease.lease_id):
                ended.add(pid)
        time.sleep(0.01)
    return tuple(sorted(ended - set(found))), tuple(found)


def _kill(pid: int, lease_id: str) -> bool:
    """Kill a process if it carries the id. Held by a descriptor, it cannot become another in between."""
    try:
        descriptor = os.pidfd_open(pid)
    except OSError:
        return False
    try:
        if not _carries(pid, lease_id):
            return False
        signal.pidfd_send_signal(descriptor, signal.SIGKILL)
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return True


def _list_pids() -> Iterator[int]:
    with suppress(OSError):
        yield from (int(name) for name in os.listdir("/proc") if name.isdigit())


def _carries(pid: int, lease_id: str) -> bool:
    try:
        # Of a zombie it is empty; of another user's process it cannot be read.
        variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return False
    return f"{LEASE_VARIABLE}={lease_id}".encode() in variables


def _remove_directories(lease: Lease) -> tuple[str, ...]:
    """Remove the directories of a lease that carry its id; any other of that name is somebody else's."""
    removed = []
    for name in lease.directories:
        marker = Path(name) / MARKER_NAME
        with suppress(OSError):
            if not Path(name).is_symlink() and marker.read_text() == lease.lease_id:
                shutil.rmtree(name, ignore_errors=True)
                removed.append(name)
    return tuple(removed)


def _open_folder(folder: Path) -> Path:
    """Make the folder of leases, for this user alone.

    Raises: StoreError if somebody else could write there: below /tmp anybody may have made it first.
    """
    try:
        folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder.mkdir(mode=0o700, exist_ok=True)
        facts = [path.lstat() for path in (folder.parent, folder)]
    except OSError as error:
        raise explain_write_failure(error, folder) from error
    if any(fact.st_uid != os.getuid() for fact in facts) or facts[1].st_mode & 0o077:
        raise StoreError(
            explain_refusal(
                f"{folder}, where leases are kept, can be written by others",
                allowed="a folder of this user's own, with mode 700",
                next_step="remove it, or set XDG_RUNTIME_DIR to a folder of your own",
            )
        )
    return folder


def _path_of(lease: Lease, folder: Path) -> Path:
    return folder / f"{lease.lease_id}.json"


def _write(lease: Lease, folder: Path) -> None:
    write_bytes_atomically(_path_of(lease, folder), json.dumps(asdict(lease), indent=1).encode())


def _read(path: Path) -> Lease | None:
    """Return a lease; None where the file has gone, or is of another form: then nothing is done with it."""
    try:
        values: dict[str, Any] = json.loads(path.read_bytes())
        lists = {name: tuple(values[name]) for name in ("gpus", "ports", "directories")}
        return Lease(**{**values, **lists, "holder": ProcessIdentity(**values["holder"])})
    except (OSError, ValueError, TypeError, KeyError):
        return None
