"""Child processes that leave nothing behind.

A child gets a process group of its own, writes to its log from the first byte, and is killed by the
kernel when the process that spawned it dies, kill -9 included. Tried on Linux 5 and 6.

Covered: death of the parent at any moment; descendants of the child that stay in its process group,
whenever the child ends or is ended; process ids that were reused (a child is reaped only after its group).
Not covered: descendants that make a session of their own; descendants of the child after a kill -9
of the parent, if they outlive the child; systems other than Linux, where the death of the parent
goes unnoticed.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from strop.errors import CheckRefused, StoreError, explain_refusal
from strop.io.atomic import explain_write_failure

_POLL_S = 0.01
TAIL_BYTES = 1 << 16
# Runs in the child before the program: leave announcements of an end to whoever started it (Slurm sends
# them to every process of a step, and the default is to die), ask for death with the parent, see that the
# parent has not died in between, become the program. A stub, because code between fork and exec in a threaded
# process (preexec_fn) can deadlock. 1 is PR_SET_PDEATHSIG.
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
    """A process that this process started. It is ended by `terminate` or with its parent."""

    pid: int
    """Also the id of its process group."""
    args: tuple[str, ...]
    log_path: Path
    _popen: subprocess.Popen[bytes]
    _lock: threading.Lock

    def poll(self) -> int | None:
        """Return the exit code, negative for a signal, or None while it runs.

        When the child has ended, what is left of its process group is killed.
        """
        with self._lock:
            if self._popen.returncode is None and _has_ended(self.pid):
                # The child is a zombie until `wait` below, so its group id cannot be reused yet.
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
    pass_fds: Sequence[int] = (),
) -> ChildProcess:
    """Start a program with its output appended to `log_path`. `env` None passes this environment on.

    `pass_fds` are descriptors that it inherits under their numbers, a held port for example.

    May be called from any thread: the kernel ties the child to the thread that starts it, so all
    children are started by one thread that lives as long as this process.

    Raises: CheckRefused if there is no such program; StoreError if the log cannot be opened.
    """
    program = shutil.which(args[0])
    if program is None:
        raise CheckRefused(
            explain_refusal(
                f"program {args[0]!r} was not found",
                allowed="an executable file, or a name on PATH",
                next_step="install it or correct PATH",
            )
        )
    stub = [sys.executable, "-I", "-S", "-c", _STUB, str(os.getpid()), program, *args]
    try:
        log_path.parent.mkdir(parents=True, exist_ok=True)
        with log_path.open("ab") as log:
            popen = (
                _starter(os.getpid())
                .submit(
                    subprocess.Popen,
                    stub,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env=None if env is None else dict(env),
                    cwd=cwd,
                    start_new_session=True,
                    pass_fds=pass_fds,
                )
                .result()
            )
    except OSError as error:
        raise explain_write_failure(error, log_path) from error
    return ChildProcess(
        pid=popen.pid, args=tuple(args), log_path=log_path, _popen=popen, _lock=threading.Lock()
    )


def terminate(child: ChildProcess, grace_s: float) -> int:
    """End a child and its process group: ask, wait `grace_s`, then kill. Return its exit code.

    A child that has ended already is left alone: its process id may belong to another by now.

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
            explain_refusal(
                f"process {child.pid} ({child.args[0]}) survived SIGKILL for 10 s",
                allowed="a process that the kernel can end",
                next_step="check the disks it writes to; it ends when they answer",
            )
        )
    return exit_code


def tail(path: Path, num_lines: int = 20) -> str:
    """Return the last lines of a text file, at most 64 KiB of it; empty if there is no such file."""
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
    # By process id: a forked copy of this process inherits the object but not its thread.
    return ThreadPoolExecutor(max_workers=1, thread_name_prefix="strop-spawn")


def _has_ended(pid: int) -> bool:
    """Whether a child is a zombie. WNOWAIT leaves it one."""
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def _signal_group(pid: int, number: signal.Signals) -> None:
    try:
        os.killpg(pid, number)
    except (ProcessLookupError, PermissionError):
        # Gone already; macOS says "not permitted" for a group of zombies only.
        return
