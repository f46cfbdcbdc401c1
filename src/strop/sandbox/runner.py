"""Starting a command, and the process above it, the runner.

The runner starts the program, adopts its orphans, ends it, and reports when all processes are gone.

No process of the command outlives it. The runner gets the program's exit code from the kernel, and reports it
over a socket that no program holds. As host root the runner has a user id that no program can signal; for an
ordinary user a program can kill its runner, which the supervisor notices.

It also watches the limits that the kernel does not enforce.
"""

from __future__ import annotations

import json
import math
import os
import select
import signal
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NoReturn

from strop.sandbox.family import (
    became_killable,
    find_copies,
    find_descendants,
    kill_biggest,
    memory_bytes,
    num_threads,
    process_states,
    segment_bytes,
    signal_descendants,
    signal_processes,
    start_times,
)
from strop.sandbox.linux import become_subreaper, hide_from_tracers
from strop.sandbox.place import Place
from strop.sandbox.program import Program, Request

ASK, KILL = b"T", b"K"
"""Orders to a runner: end the command by SIGTERM and later SIGKILL, or by SIGKILL at once."""
MARK, ASK_NEW, KILL_NEW = b"M", b"t", b"k"
"""Mark the running processes; send SIGTERM or SIGKILL to those started since."""
DONE = b"\n"
"""A runner's message that an order `MARK` or `KILL_NEW` is finished: no process to kill is left."""
_SIGNAL_BIT = 0x80
_MEASURE_LIMIT_S = 10.0
TERM_GRACE_S = 0.5
_WATCH_PERIOD_S = 0.05
_KILL_PERIOD_S = 0.005
_MAX_KILL_PERIOD_S = 0.1
_FORK_LIMIT_S = 2.0
"""Longest time from a fork to the exec of the copy."""
_MAX_WALKED_FILES = 100_000


def signal_order(number: int) -> bytes:
    """Return the order to send a signal to the program's process group."""
    return bytes([_SIGNAL_BIT | number])


@dataclass(kw_only=True, slots=True)
class Started:
    """The supervisor's descriptors of a command."""

    control: socket.socket
    stdin: int
    stdout: int
    stderr: int
    orders: socket.socket
    """Leads to the program's process until it has its request."""
    status: int
    """A shell reports the status of its commands here; -1 for other programs."""

    def order(self, request: Request) -> None:
        """Send a waiting process its request. If the process is gone, its runner reports why."""
        with suppress(OSError):
            self.orders.sendall(json.dumps(as_record(request)).encode())
        self.orders.close()

    def read_facts(self) -> dict[str, Any]:
        """Return the self-measurement of the waiting process.

        Raises: OSError if it ended before.
        """
        for source in (self.orders, self.control):
            source.settimeout(_MEASURE_LIMIT_S)
        # Written in one call, and short enough to arrive in one.
        if facts := self.orders.recv(1 << 16):
            return dict(json.loads(facts))
        report = self.control.recv(1 << 16)
        raise OSError(json.loads(report)["error"] if report else "it ended without a word")

    def close(self) -> None:
        """Drop a waiting command, which ends when `orders` closes."""
        self.orders.close()
        self.control.close()
        for descriptor in (self.stdin, self.stdout, self.stderr):
            os.close(descriptor)


def as_record(flat: Any) -> dict[str, Any]:
    """Return the fields of a dataclass with slots. Not `asdict`, which copies nested values."""
    return {name: getattr(flat, name) for name in flat.__slots__}


def start_command(
    place: Place,
    request: Request | None = None,
    *,
    main: Callable[[], None] | None = None,
    has_status: bool = False,
) -> Started:
    """Fork a command. Its runner reports over `control` when all its processes have ended.

    Without a request the process measures itself and waits for one, which may run `main`. `has_status`: the
    program is a shell that reports the status of its commands on `STATUS_FD`.

    Raises: OSError if the host gives no process.
    """
    control, runner_end = socket.socketpair()
    orders, order_end = socket.socketpair()
    stdin_r, stdin_w = os.pipe()
    stdout_r, stdout_w = os.pipe()
    stderr_r, stderr_w = os.pipe()
    status_r, status_w = os.pipe() if has_status else (-1, -1)
    streams = (stdin_r, stdout_w, stderr_w, *((status_w,) if has_status else ()))
    try:
        if os.fork() == 0:
            program = Program(place, request, main, (*streams, order_end.fileno()))
            _become_runner(program, runner_end)
    finally:
        runner_end.close()
        order_end.close()
        for descriptor in streams:
            os.close(descriptor)
    if request is not None:
        orders.close()
    return Started(
        control=control, stdin=stdin_w, stdout=stdout_r, stderr=stderr_r, orders=orders, status=status_r
    )


def _become_runner(program: Program, control: socket.socket) -> NoReturn:
    """Enter the place and run one command. Never returns into the supervisor's code."""
    try:
        signal.set_wakeup_fd(-1)
        os.setsid()
        hide_from_tracers()
        program.prepare(control)
        if program.place.has_own_pids and os.fork() != 0:
            os._exit(0)
        become_subreaper()
        _Runner(program, control).run()
    finally:
        os._exit(1)


class _Runner:
    def __init__(self, program: Program, control: socket.socket) -> None:
        self._program = program
        self._place = program.place
        self._control = control
        self._pid = os.getpid()
        self._status: int | None = None
        self._ended_at = 0.0
        self._cpu_s = 0.0
        self._num_oom_kills = 0
        self._breach = ""
        self._kill_at = math.inf
        """When SIGKILL begins."""
        self._kill_period_s = _KILL_PERIOD_S
        self._program_pid = 0
        self._marked: dict[int, str] = {}
        """Processes that `ASK_NEW` and `KILL_NEW` spare, with their start times."""
        self._num_clearings = 0
        """Running orders `KILL_NEW`."""
        self._signal = 0
        """The last requested signal."""
        self._copies: dict[int, str] = {}
        """Forks of the shell at the time of the signal. The shell's handler caught it in them, and an exec
        loses it."""
        self._forget_copies_at = math.inf

    def run(self) -> None:
        """Start the program, wait for it and all its descendants, report."""
        wake_r, wake_w = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(wake_w, warn_on_full_buffer=False)
        error_r, error_w = os.pipe2(os.O_CLOEXEC)
        self._program_pid = os.fork()
        if self._program_pid == 0:
            signal.set_wakeup_fd(-1)
            self._program.begin(error_w)
        os.close(error_w)
        self._program.close()
        # The program's exec closes the other end.
        with open(error_r, "rb") as errors:
            error = errors.read().decode(errors="replace")
        self._wait_for_all(wake_r)
        report = {
            "status": self._status,
            "error": error,
            "ended_at": self._ended_at,
            "cpu_s": self._cpu_s,
            "oom_kills": self._num_oom_kills,
            "breach": self._breach,
        }
        self._control.sendall(json.dumps(report).encode())
        os._exit(0)

    def _wait_for_all(self, wake_r: int) -> None:
        poll = select.poll()
        poll.register(self._control, select.POLLIN)
        poll.register(wake_r, select.POLLIN)
        next_watch_at = time.monotonic() + _WATCH_PERIOD_S
        while self._reap():
            now = time.monotonic()
            if now >= self._kill_at:
                signal_descendants(self._pid, signal.SIGKILL)
                # Frozen processes end when they are thawed, which may be hours later: back off.
                wait_s = self._kill_period_s
                self._kill_period_s = min(2 * wait_s, _MAX_KILL_PERIOD_S)
            elif self._num_clearings and self._signal_new(signal.SIGKILL):
                wait_s = _KILL_PERIOD_S
            else:
                if self._num_clearings:
                    self._control.sendall(DONE * self._num_clearings)
                    self._num_clearings = 0
                if now >= next_watch_at:
                    self._look()
                    next_watch_at = now + _WATCH_PERIOD_S
                wait_s = max(0.0, min(next_watch_at, self._kill_at) - time.monotonic())
                if self._copies:
                    self._signal_again()
                    wait_s = min(wait_s, _KILL_PERIOD_S)
            for descriptor, _ in poll.poll(wait_s * 1000):
                if descriptor == wake_r:
                    with suppress(BlockingIOError):
                        os.read(wake_r, 4096)
                else:
                    orders = self._control.recv(16)
                    # At the end of the stream the supervisor is gone.
                    self._obey(orders or KILL)
                    if not orders:
                        poll.unregister(self._control)

    def _obey(self, orders: bytes) -> None:
        for number in orders:
            order = bytes([number])
            if order == ASK:
                signal_descendants(self._pid, signal.SIGTERM)
                self._kill_at = min(self._kill_at, time.monotonic() + TERM_GRACE_S)
            elif order == KILL:
                self._kill_at = time.monotonic()
            elif order == MARK:
                self._marked = start_times(find_descendants(self._pid))
                self._control.sendall(DONE)
            elif order == ASK_NEW:
                self._signal_new(signal.SIGTERM)
            elif order == KILL_NEW:
                self._num_clearings += 1
            elif self._status is None:
                self._signal = number & ~_SIGNAL_BIT
                self._copies = find_copies(self._program_pid)
                self._forget_copies_at = time.monotonic() + _FORK_LIMIT_S
                with suppress(ProcessLookupError):
                    os.killpg(self._program_pid, self._signal)

    def _signal_again(self) -> None:
        """Send the last signal again to the forks that lost it by an exec."""
        lost = [pid for pid, line in self._copies.items() if became_killable(pid, line, self._signal)]
        signal_processes(lost, self._signal)
        is_over = time.monotonic() > self._forget_copies_at
        self._copies = {} if is_over else {pid: self._copies[pid] for pid in self._copies.keys() - lost}

    def _signal_new(self, number: signal.Signals) -> bool:
        """Send a signal to all processes started since the mark; return whether there was any."""
        present = start_times(self._marked)
        spared = {pid for pid, start in self._marked.items() if present.get(pid) == start}
        descendants = find_descendants(self._pid, spared - {self._program_pid})
        states = process_states([pid for pid in descendants if pid != self._program_pid])
        # Dead processes are left for their parent to reap.
        new = [pid for pid, state in states.items() if state not in "ZX"]
        signal_processes(new, number)
        return bool(new)

    def _reap(self) -> bool:
        """Reap dead children; return whether any process is left."""
        while True:
            try:
                pid, status, usage = os.wait4(-1, os.WNOHANG)
            except ChildProcessError:
                return False
            if pid == 0:
                return True
            # The program's usage includes all children that it waited for; other children here are orphans.
            self._cpu_s += usage.ru_utime + usage.ru_stime
            if pid == self._program_pid:
                self._status = status
                self._ended_at = time.monotonic()
                self._kill_at = self._ended_at

    def _look(self) -> None:
        """Check the limits that the kernel does not enforce."""
        watch = self._place.watch
        pids = find_descendants(self._pid)
        if watch.memory_bytes is not None:
            kept_bytes = segment_bytes(self._place.ipc_uid)
            if kept_bytes + memory_bytes(pids, watch.memory_bytes - kept_bytes) > watch.memory_bytes:
                kill_biggest(pids, self._pid)
                self._num_oom_kills += 1
        if watch.max_processes is not None and num_threads(pids) > watch.max_processes:
            self._end_for(f"more than {watch.max_processes} processes")
        if watch.max_scratch_files is not None and watch.scratch_bytes is None:
            counts = os.statvfs(self._place.scratch)
            if counts.f_files - counts.f_ffree > watch.max_scratch_files:
                self._end_for(f"more than {watch.max_scratch_files} files")
        elif watch.scratch_bytes is not None and watch.max_scratch_files is not None:
            num_bytes, num_files = measure_tree(self._place.scratch)
            if num_bytes > watch.scratch_bytes or num_files > watch.max_scratch_files:
                self._end_for(f"{num_bytes} bytes in {num_files} files")

    def _end_for(self, breach: str) -> None:
        self._breach = breach
        self._kill_at = time.monotonic()


def measure_tree(top: str) -> tuple[int, int]:
    """Return disk usage in bytes and number of files below a directory; links are not followed."""
    num_bytes = num_files = 0
    queue = [top]
    while queue and num_files < _MAX_WALKED_FILES:
        for entry in _list_entries(queue.pop()):
            num_files += 1
            if entry.is_dir(follow_symlinks=False):
                queue.append(entry.path)
            with suppress(OSError):
                num_bytes += entry.stat(follow_symlinks=False).st_blocks * 512
    return num_bytes, num_files


def _list_entries(path: str) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(path) as entries:
            return list(entries)
    except OSError:
        # Removed meanwhile, or made unreadable after its files had been counted.
        return []
