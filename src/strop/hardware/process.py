"""Child processes that leave nothing behind.

A child gets its own process group, writes to its log from the first byte, and is killed by the kernel when
its parent dies, kill -9 included. Tried on Linux 5 and 6.

Covered: death of the parent at any moment; descendants in the child's process group, whenever the child ends
or is ended; reused process ids (a child is reaped only after its group). Not covered: descendants that start
a new session; descendants of the child after a kill -9 of the parent, if they outlive the child; systems
other than Linux, where the death of the parent goes unnoticed.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from strop.errors import CheckRefused, StoreError
from strop.io.atomic import explain_write_failure

if TYPE_CHECKING:
    from psutil import Process

_POLL_S = 0.01
TAIL_BYTES = 1 << 16
# Runs in the child before the program: ignore the signals that announce an end (Slurm sends them to every
# process of a step, and the default is to die; the parent handles them), set the parent-death signal, check
# that the parent has not died in between, exec the program. A stub, because code between fork and exec in a
# threaded process (preexec_fn) can deadlock. 1 is PR_SET_PDEATHSIG.
_STUB = """
import os, signal, sys
parent = int(sys.argv[1])
for number in (signal.SIGUSR1, signal.SIGUSR2):
    signal.signal(number, signal.SIG_IGN)
if sys.platform == "linux":
    import ctypes
    ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)
os.execv(sys.argv[2], sys.argv[3:])
"""


@dataclass(eq=False, kw_only=True)
class ChildProcess:
    """A child process. It is ended by `terminate` or with its parent."""

    pid: int
    """Process id, and id of its process group."""
    args: tuple[str, ...]
    log_path: Path
    _popen: subprocess.Popen[bytes]
    _lock: threading.Lock

    def poll(self) -> int | None:
        """Return the exit code, negative for a signal, or None while it runs.

        When the child has ended, the rest of its process group is killed.
        """
        with self._lock:
            # WNOWAIT keeps an ended child as a zombie until `wait` below, so its group id is not reused.
            options = os.WEXITED | os.WNOHANG | os.WNOWAIT
            if self._popen.returncode is None and os.waitid(os.P_PID, self.pid, options) is not None:
                _signal_group(self.pid, signal.SIGKILL)
                self._popen.wait()
            return self._popen.returncode

    def wait(self, wait_limit_s: float) -> int | None:
        """Return the exit code, or None if it still runs after `wait_limit_s`."""
        deadline = time.monotonic() + wait_limit_s
        while (exit_code := self.poll()) is None and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        return exit_code

    def tail(self, num_lines: int = 20) -> str:
        """Return the last lines of its log."""
        return tail(self.log_path, num_lines)


def spawn(
    args: Sequence[str],
    log_path: Path,
    env: Mapping[str, str] | None = None,
    *,
    cwd: Path | None = None,
    stdin: int = subprocess.DEVNULL,
) -> ChildProcess:
    """Start a program with its output appended to `log_path`. `env` None: this process's environment.

    May be called from any thread: the kernel ties the child to the thread that starts it, so one thread,
    which runs as long as this process, starts all children.

    Raises: CheckRefused if there is no such program; StoreError if the log cannot be opened.
    """
    program = shutil.which(args[0])
    if program is None:
        raise CheckRefused(
            f"program {args[0]!r} was not found",
            allowed="an executable file, or a name on PATH",
            next_step="install it or correct PATH",
        )
    try:
        log_path.parent.mkdir(parents=True, exist_ok=True)
        with log_path.open("ab") as log:
            popen = (
                _starter(os.getpid())
                .submit(
                    subprocess.Popen,
                    [sys.executable, "-I", "-S", "-c", _STUB, str(os.getpid()), program, *args],
                    stdin=stdin,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env=None if env is None else dict(env),
                    cwd=cwd,
                    start_new_session=True,
                )
                .result()
            )
    except OSError as error:
        raise explain_write_failure(error, log_path) from error
    return ChildProcess(
        pid=popen.pid, args=tuple(args), log_path=log_path, _popen=popen, _lock=threading.Lock()
    )


def terminate(child: ChildProcess, grace_s: float) -> int:
    """End a child and its process group: SIGTERM, after `grace_s` SIGKILL. Return its exit code.

    A child that has ended is not signalled, because its process id may have been reused.

    Raises: StoreError if the kernel does not end it, for example in a blocked write to a dead disk.
    """
    exit_code = child.poll()
    if exit_code is not None:
        return exit_code
    _signal_group(child.pid, signal.SIGTERM)
    exit_code = child.wait(grace_s)
    if exit_code is None:
        _signal_group(child.pid, signal.SIGKILL)
        exit_code = child.wait(10.0)
    if exit_code is None:
        raise StoreError(
            f"process {child.pid} ({child.args[0]}) survived SIGKILL for 10 s",
            allowed="a process that the kernel can end",
            next_step="check the disks it writes to; it ends when they answer",
        )
    return exit_code


def tail(path: Path, num_lines: int = 20) -> str:
    """Return the last lines of a text file, at most 64 KiB; empty if the file is missing."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - TAIL_BYTES))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError:
        return ""
    return "\n".join(lines[-num_lines:]) if num_lines > 0 else ""


@cache
def _starter(own_pid: int) -> ThreadPoolExecutor:
    # Keyed by process id, because a fork inherits the object but not its thread.
    return ThreadPoolExecutor(max_workers=1, thread_name_prefix="strop-spawn")


def _signal_group(pid: int, number: signal.Signals) -> None:
    try:
        os.killpg(pid, number)
    except (ProcessLookupError, PermissionError):
        # Gone already; macOS says "not permitted" for a group of zombies only.
        return


@dataclass(frozen=True, kw_only=True, slots=True)
class ProcessIdentity:
    """A process of one boot of this machine, safe against reuse of its id.

    psutil's start time is not used, because it is Unix time and changes when the clock is set. Linux only.
    """

    pid: int
    start_ticks: int
    """Clock ticks after the boot; field 22 of proc_pid_stat(5)."""
    boot_id: str

    def is_alive(self) -> bool:
        """Whether this process is visible and has not ended."""
        return identify(self.pid) == self

    def send(self, number: signal.Signals) -> bool:
        """Send this process a signal; return whether it still existed."""
        import psutil

        with suppress(psutil.Error):
            # Refuses to signal a process that has taken the id meanwhile.
            process = psutil.Process(self.pid)
            if self.is_alive():
                process.send_signal(number)
                return True
        return False


def identify(pid: int) -> ProcessIdentity | None:
    """Return the identity of a process; None if it has ended or is not visible."""
    try:
        # The program's name in field 2 may contain spaces and brackets, so count from its end.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return None
    # A zombie has ended: its id is only kept for its parent.
    is_ended = not fields or fields[0] in "ZX"
    return None if is_ended else ProcessIdentity(pid=pid, start_ticks=int(fields[19]), boot_id=boot_id)


_detached: list[subprocess.Popen[bytes]] = []
"""Kept, because a `Popen` complains when it is dropped while its process runs."""


def start_detached(
    args: Sequence[str], log_path: Path, env: Mapping[str, str], *, cwd: Path
) -> ProcessIdentity | None:
    """Start a program that outlives this process and its terminal; None if it has ended already.

    Its output is appended to `log_path`; `args[0]` is a path.
    Raises: CheckRefused if it cannot be started; StoreError if the log cannot be opened.
    """
    try:
        with log_path.open("ab") as log:
            child = subprocess.Popen(
                list(args),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=dict(env),
                cwd=cwd,
                start_new_session=True,
            )
    except OSError as error:
        if error.filename == str(log_path):
            raise explain_write_failure(error, log_path) from error
        raise CheckRefused(
            f"{args[0]} could not be started ({error})",
            allowed="a program of this machine, and room for one more process",
            next_step=f"read {log_path}",
        ) from error
    _detached.append(child)
    return identify(child.pid)


_PR_SET_CHILD_SUBREAPER = 36  # From <linux/prctl.h>.


def become_subreaper() -> None:
    """Become the parent of all orphaned descendants. Linux only; elsewhere it does nothing.

    Process 1 of a container must reap them itself.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def reap_orphans(own_pids: Collection[int]) -> int:
    """Reap adopted children that have ended; return their number.

    `own_pids`: children that other code of this process reaps.
    """
    num_reaped = 0
    # Not by psutil, which reads the whole process table.
    for path in Path("/proc/self/task").glob("*/children"):
        # A thread may have ended meanwhile.
        with suppress(OSError):
            for pid in {*map(int, path.read_text().split())}.difference(own_pids):
                # WNOHANG: 0 for a running child.
                with suppress(ChildProcessError):
                    num_reaped += os.waitpid(pid, os.WNOHANG)[0] == pid
    return num_reaped


def show_stacks_of_children(limit_s: float) -> list[int]:
    """Let all Python children write the stacks of their threads to standard error and end; return them.

    SIGABRT does that where PYTHONFAULTHANDLER is set, or `faulthandler.enable` was called. Stopped children
    are continued first. Waits until they have ended, at most `limit_s`.
    """
    import psutil

    children = list_running(psutil.Process().children())
    for number in (signal.SIGCONT, signal.SIGABRT):
        for child in children:
            with suppress(psutil.Error):
                child.send_signal(number)
    deadline = time.monotonic() + limit_s
    while list_running(children) and time.monotonic() < deadline:
        time.sleep(0.02)
    return [child.pid for child in children]


def end_descendants(limit_s: float) -> list[int]:
    """Kill all descendants of this process; return those that are left after `limit_s`.

    In a subreaper this includes orphans.
    """
    import psutil

    deadline = time.monotonic() + limit_s
    while (left := find_descendants(os.getpid())) and time.monotonic() < deadline:
        for process in left:
            with suppress(psutil.Error):
                process.kill()
        reap_orphans(())
        time.sleep(0.02)
    return [process.pid for process in left]


def find_descendants(pid: int) -> list[Process]:
    """Return all descendants of a process; none if it has ended."""
    import psutil

    with suppress(psutil.Error):
        return list(psutil.Process(pid).children(recursive=True))
    return []


def list_running(processes: Iterable[Process]) -> list[Process]:
    """Return those that have not ended; a zombie has."""
    import psutil

    def is_running(process: Process) -> bool:
        with suppress(psutil.Error):
            return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
        return False

    return [process for process in processes if is_running(process)]
