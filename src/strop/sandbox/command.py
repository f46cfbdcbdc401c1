"""One command in a place: the process above it, and the steps from a fork to the program.

The process above (the runner) adopts every orphan of the command and reports only when all are gone, so
nothing that the command starts outlives it. The program's exit code is what the kernel tells the runner;
the report goes over a socket that no program holds. As host root the runner keeps a user id that no
program can signal; for an ordinary user a program can kill its runner, which the supervisor sees.

The first command of a place is forked before anybody asks for one. It measures what a program is there,
then waits for its request; it is the one process that may become a program without a new start of
Python, because it was forked before its supervisor had heard of any request.
"""

from __future__ import annotations

import json
import math
import os
import resource
import select
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from strop.sandbox.family import find_descendants, kill_biggest, memory_bytes, num_threads, signal_descendants
from strop.sandbox.inside import measure_self, run_builtin
from strop.sandbox.linux import (
    become,
    become_subreaper,
    close_all_but,
    drop_capabilities,
    forbid_privileges,
    hide_from_tracers,
    open_to_tracers,
)
from strop.sandbox.place import Place
from strop.sandbox.seccomp import filter_calls

ASK, KILL = b"T", b"K"
"""Orders to a runner: end the command politely and then by force, or at once by force."""
TERM_GRACE_S = 0.5
_WATCH_PERIOD_S = 0.05
_KILL_PERIOD_S = 0.005
_MEASURE_LIMIT_S = 10.0
_MAX_WALKED_FILES = 100_000


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """What to run."""

    argv: list[str]
    env: dict[str, str]
    cwd: str
    wall_limit_s: float
    builtin: str = ""
    """Something that is done inside on the user's behalf, instead of a program."""
    details: dict[str, Any] = field(default_factory=dict)
    is_main: bool = False
    """Run the `main` that the waiting process was forked with, instead of a program."""


@dataclass(kw_only=True, slots=True)
class Started:
    """A command, from its supervisor's side."""

    control: socket.socket
    stdin: int
    stdout: int
    stderr: int
    orders: socket.socket
    """Leads to the program's process until that has its request."""

    def order(self, request: Request) -> None:
        """Give a waiting process its request. What it says when it is gone, its runner reports."""
        with suppress(OSError):
            self.orders.sendall(json.dumps(as_record(request)).encode())
        self.orders.close()

    def read_facts(self) -> dict[str, Any]:
        """Return what the waiting process found out about itself.

        Raises: OSError if it came to an end before.
        """
        for source in (self.orders, self.control):
            source.settimeout(_MEASURE_LIMIT_S)
        # Said at once, and shorter than what a socket takes whole.
        if facts := self.orders.recv(1 << 16):
            return dict(json.loads(facts))
        report = self.control.recv(1 << 16)
        raise OSError(json.loads(report)["error"] if report else "it ended without a word")

    def close(self) -> None:
        """Let go of a command that is not wanted; without its orders it ends."""
        self.orders.close()
        self.control.close()
        for descriptor in (self.stdin, self.stdout, self.stderr):
            os.close(descriptor)


def as_record(flat: Any) -> dict[str, Any]:
    """Return the fields of a data class with slots. Not `asdict`, which copies nested values too."""
    return {name: getattr(flat, name) for name in flat.__slots__}


def start_command(
    place: Place, request: Request | None = None, *, main: Callable[[], None] | None = None
) -> Started:
    """Fork a command. It reports over `control` when everything has ended.

    Without a request it measures itself and waits for one, which may ask for `main`.

    Raises: OSError if the host gives no process.
    """
    control, runner_end = socket.socketpair()
    orders, order_end = socket.socketpair()
    stdin_r, stdin_w = os.pipe()
    stdout_r, stdout_w = os.pipe()
    stderr_r, stderr_w = os.pipe()
    try:
        if os.fork() == 0:
            program = _Program(place, request, main, (stdin_r, stdout_w, stderr_w, order_end.fileno()))
            _become_runner(program, runner_end)
    finally:
        runner_end.close()
        order_end.close()
        for descriptor in (stdin_r, stdout_w, stderr_w):
            os.close(descriptor)
    if request is not None:
        orders.close()
    return Started(control=control, stdin=stdin_w, stdout=stdout_r, stderr=stderr_r, orders=orders)


class _Program:
    """What a fork of the runner becomes."""

    def __init__(
        self,
        place: Place,
        request: Request | None,
        main: Callable[[], None] | None,
        descriptors: tuple[int, int, int, int],
    ) -> None:
        self.place = place
        self._request = request
        self._main = main
        *self._streams, self._orders = descriptors
        self._members: list[int] = []

    def prepare(self, control: socket.socket) -> None:
        """Keep only the descriptors of this command, and join its place."""
        # A reader of another command's input sees its end only when all copies of the other end are closed.
        kept = {0, 1, 2, *self._streams, self._orders, control.fileno(), self.place.holder}
        close_all_but({descriptor for descriptor in kept if descriptor is not None})
        # From before the change of root.
        paths = self.place.cgroup.member_paths
        self._members = [os.open(path, os.O_WRONLY | os.O_CLOEXEC) for path in paths]
        self.place.enter()

    def close(self) -> None:
        """Close the runner's copies of its descriptors."""
        for descriptor in (*self._streams, *self._members, self._orders):
            os.close(descriptor)

    def begin(self, error_w: int) -> NoReturn:
        """Give up what a program must not have, then turn into it. Ends with 127 if that fails."""
        try:
            os.setsid()
            for member in self._members:
                os.write(member, b"0")
            for target, descriptor in enumerate(self._streams):
                os.dup2(descriptor, target)
            close_all_but((0, 1, 2, error_w, self._orders))
            os.umask(0o022)
            forbid_privileges()
            if self.place.user is not None:
                become(*self.place.user)
            drop_capabilities()
            filter_calls()
            self._run(self._request or self._await_request(), error_w)
        except (OSError, ValueError, MemoryError) as error:
            os.write(error_w, str(error).encode(errors="replace"))
        finally:
            os._exit(127)

    def _await_request(self) -> Request:
        facts = measure_self()
        os.write(self._orders, json.dumps(facts).encode())
        if facts["nested_userns"]:
            # It has entered a user namespace, so it can no longer stand for an ordinary program.
            os._exit(0)
        parts = []
        while part := os.read(self._orders, 1 << 16):
            parts.append(part)
        if not parts:
            os._exit(0)
        return Request(**json.loads(b"".join(parts)))

    def _run(self, request: Request, error_w: int) -> NoReturn:
        os.chdir(request.cwd)
        limits = self.place.limits
        set_limit(resource.RLIMIT_CORE, 0)
        set_limit(resource.RLIMIT_FSIZE, limits.file_bytes)
        set_limit(resource.RLIMIT_NOFILE, limits.max_open_files)
        if math.isfinite(request.wall_limit_s):
            # Of each process; a second more than the wall, so that the wall is what a program meets.
            set_limit(resource.RLIMIT_CPU, math.ceil(request.wall_limit_s) + 1)
        if self.place.max_user_processes is not None:
            set_limit(resource.RLIMIT_NPROC, self.place.max_user_processes)
        if request.builtin:
            os._exit(run_builtin(request.builtin, request.details))
        set_limit(resource.RLIMIT_AS, limits.memory_bytes)
        if request.is_main and self._main is not None:
            os.close(error_w)
            os.close(self._orders)
            _run_main(self._main, request.env)
        # Python ignores these two; a program expects them as they were.
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
        os.execvpe(request.argv[0], request.argv, request.env)


def _run_main(main: Callable[[], None], env: dict[str, str]) -> NoReturn:
    """Go on as an interpreter that has just been started."""
    exit_code = 1
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        open_to_tracers()
        os.environ.update(env)
        sys.argv = ["-c"]
        # The frames below this one do not count against the depth that a program expects.
        sys.setrecursionlimit(sys.getrecursionlimit() + len(list(traceback.walk_stack(None))))
        main()
        exit_code = 0
    finally:
        if exit_code:
            traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(exit_code)


def _become_runner(program: _Program, control: socket.socket) -> NoReturn:
    """Enter the place and see one command through. Nothing returns into the supervisor's code."""
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
    def __init__(self, program: _Program, control: socket.socket) -> None:
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
        """When force begins."""

    def run(self) -> None:
        """Start the program, wait for it and for all that it started, report."""
        wake_r, wake_w = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(wake_w, warn_on_full_buffer=False)
        error_r, error_w = os.pipe2(os.O_CLOEXEC)
        program_pid = os.fork()
        if program_pid == 0:
            signal.set_wakeup_fd(-1)
            self._program.begin(error_w)
        os.close(error_w)
        self._program.close()
        # Ends with the program's start, which closes the other end.
        with open(error_r, "rb") as errors:
            error = errors.read().decode(errors="replace")
        self._wait_for_all(program_pid, wake_r)
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

    def _wait_for_all(self, program_pid: int, wake_r: int) -> None:
        poll = select.poll()
        poll.register(self._control, select.POLLIN)
        poll.register(wake_r, select.POLLIN)
        next_watch_at = time.monotonic() + _WATCH_PERIOD_S
        while self._reap(program_pid):
            now = time.monotonic()
            if now >= self._kill_at:
                signal_descendants(self._pid, signal.SIGKILL)
                wait_s = _KILL_PERIOD_S
            else:
                if now >= next_watch_at:
                    self._look()
                    next_watch_at = now + _WATCH_PERIOD_S
                wait_s = max(0.0, min(next_watch_at, self._kill_at) - time.monotonic())
            for descriptor, _ in poll.poll(wait_s * 1000):
                if descriptor == wake_r:
                    with suppress(BlockingIOError):
                        os.read(wake_r, 4096)
                else:
                    orders = self._control.recv(16)
                    if orders and ASK in orders:
                        signal_descendants(self._pid, signal.SIGTERM)
                        self._kill_at = min(self._kill_at, time.monotonic() + TERM_GRACE_S)
                    if not orders or KILL in orders:
                        # The end of the stream: the supervisor is gone.
                        self._kill_at = time.monotonic()
                    if not orders:
                        poll.unregister(self._control)

    def _reap(self, program_pid: int) -> bool:
        """Collect the dead; return whether any process is left."""
        while True:
            try:
                pid, status, usage = os.wait4(-1, os.WNOHANG)
            except ChildProcessError:
                return False
            if pid == 0:
                return True
            # Of the program this holds all that it waited for; the others are orphans.
            self._cpu_s += usage.ru_utime + usage.ru_stime
            if pid == program_pid:
                self._status = status
                self._ended_at = time.monotonic()
                self._kill_at = self._ended_at

    def _look(self) -> None:
        """Find breaches of limits that the kernel does not enforce."""
        watch = self._place.watch
        pids = find_descendants(self._pid)
        if watch.memory_bytes is not None and memory_bytes(pids, watch.memory_bytes) > watch.memory_bytes:
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
    """Return bytes on the disk and number of files below a directory; links are not followed."""
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
        # Gone meanwhile, or made unreadable: then its files were counted while it was filled.
        return []


def set_limit(kind: int, value: int) -> None:
    """Lower a limit of this process; one that is lower already stays."""
    _, hard = resource.getrlimit(kind)
    value = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(kind, (value, value))


def count_user_tasks(uid: int) -> int:
    """Return how many processes and threads a user has on this host."""
    num_tasks = 0
    for name in os.listdir("/proc"):
        if name.isdigit():
            with suppress(OSError):
                if os.stat(f"/proc/{name}").st_uid == uid:
                    num_tasks += len(os.listdir(Path("/proc", name, "task")))
    return num_tasks
