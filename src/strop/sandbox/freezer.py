"""Freeze all programs of a sandbox, by the kernel where a control group can be made.

The group is made at the first pause and processes are moved into it then, so a sandbox that is never paused
pays nothing. Version 1 has a freezer controller; version 2 can freeze every group, also on hosts whose
version 2 has no controllers. Without groups every process is stopped by a signal, which its parent may
notice; the record of the pause says so.

Tried on a hybrid host (version 1 controllers, Linux 6.18), with both kinds of group and with signals.
"""

from __future__ import annotations

import errno
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from strop.sandbox.cgroup import Cgroup, find_freezers, remove_group
from strop.sandbox.contract import FrozenBy
from strop.sandbox.family import process_states, signal_processes, start_times
from strop.sandbox.linux import read_file, write_file

_FREEZE_LIMIT_S = 2.0
_LOOK_PERIOD_S = 0.001
_RETRY_S = 0.02
_STOPPED_STATES = "TtZX"
FREEZER_FILES = {1: ("freezer.state", "FROZEN", "THAWED"), 2: ("cgroup.freeze", "1", "0")}
"""By version: the file, and the words to freeze and to thaw."""


class Freezer:
    """Freeze and thaw the processes that `find_programs` lists."""

    def __init__(self, own: Cgroup, name: str, find_programs: Callable[[], list[int]]) -> None:
        self._own = own
        self._name = name
        self._find_programs = find_programs
        self._version = 0
        self._dir: Path | None = None
        self._is_made = False
        self._stopped: dict[int, str] = {}
        """Processes that were stopped by signal, with their start times."""

    def freeze(self) -> FrozenBy:
        """Return once no process runs. Raises: OSError if one cannot be stopped; then all continue."""
        try:
            if self._find_group():
                self._freeze_group()
                return FrozenBy.CGROUP
            self._stop_all()
            return FrozenBy.SIGNALS
        except OSError:
            self.thaw()
            raise

    def thaw(self) -> None:
        """Let the frozen processes run again."""
        if self._dir is not None:
            name, _, word = FREEZER_FILES[self._version]
            with suppress(FileNotFoundError):
                write_file(self._dir / name, word)
        present = start_times(self._stopped)
        stopped = [pid for pid, start in self._stopped.items() if present.get(pid) == start]
        signal_processes(stopped, signal.SIGCONT)
        self._stopped.clear()

    def close(self) -> None:
        """Remove the group, which must be empty."""
        if self._is_made and self._dir is not None:
            remove_group(self._dir)
        self._dir = None

    def _find_group(self) -> bool:
        """Find or make a group that can be frozen; return whether there is one."""
        if self._dir is not None:
            return True
        if self._own.version == 2 and self._own.dirs:
            # All programs are in this group already, and must not leave it.
            self._version, self._dir = 2, next(iter(self._own.dirs.values()))
            return True
        for version, own_dir in find_freezers():
            path = own_dir / self._name
            with suppress(OSError):
                path.mkdir(exist_ok=True)
                if (path / FREEZER_FILES[version][0]).exists():
                    self._version, self._dir, self._is_made = version, path, True
                    return True
                path.rmdir()
        return False

    def _freeze_group(self) -> None:
        assert self._dir is not None
        name, word, undo = FREEZER_FILES[self._version]
        write_file(self._dir / name, word)
        retry_at = time.monotonic() + _RETRY_S
        deadline = time.monotonic() + _FREEZE_LIMIT_S
        moved: set[int] = set()
        while True:
            # A process in the group is frozen and forks no more, so a pass without a new one has found all.
            new = [pid for pid in self._find_programs() if pid not in moved] if self._is_made else []
            for pid in new:
                with suppress(ProcessLookupError):
                    write_file(self._dir / "cgroup.procs", str(pid))
            moved.update(new)
            if not new and self._is_frozen():
                return
            if time.monotonic() > deadline:
                raise OSError(errno.EBUSY, f"something goes on after {_FREEZE_LIMIT_S:.0f} s")
            if not new:
                time.sleep(_LOOK_PERIOD_S)
            if self._version == 1 and time.monotonic() > retry_at:
                # A parent in vfork cannot freeze after its child has: thaw both and freeze again.
                write_file(self._dir / name, undo)
                time.sleep(_LOOK_PERIOD_S)
                write_file(self._dir / name, word)
                retry_at = time.monotonic() + _RETRY_S

    def _is_frozen(self) -> bool:
        assert self._dir is not None
        if self._version == 1:
            return read_file(self._dir / "freezer.state").strip() == "FROZEN"
        return "frozen 1" in read_file(self._dir / "cgroup.events").splitlines()

    def _stop_all(self) -> None:
        deadline = time.monotonic() + _FREEZE_LIMIT_S
        while True:
            states = process_states(self._find_programs())
            running = [pid for pid, state in states.items() if state not in _STOPPED_STATES]
            if not running:
                return
            if time.monotonic() > deadline:
                raise OSError(errno.EBUSY, f"{len(running)} processes go on after {_FREEZE_LIMIT_S:.0f} s")
            self._stopped |= {
                pid: start for pid, start in start_times(running).items() if pid not in self._stopped
            }
            signal_processes(running, signal.SIGSTOP)
            time.sleep(_LOOK_PERIOD_S)


def thaw_groups(name: str) -> list[Path]:
    """Thaw and return the groups of a killed supervisor, so that their processes can be killed."""
    thawed = []
    for version, own_dir in find_freezers():
        path = own_dir / name
        if path.exists():
            file, _, word = FREEZER_FILES[version]
            with suppress(OSError):
                write_file(path / file, word)
            thawed.append(path)
    return thawed
