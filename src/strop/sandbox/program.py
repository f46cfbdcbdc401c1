"""The steps from a fork of a runner to the program: dropping privileges, setting limits, exec.

The first command of a place is forked before the first request. It measures its own isolation, then waits for
a request. Only this process may run `main` without a new start of Python, because it was forked before its
supervisor had received any request.
"""

from __future__ import annotations

import fcntl
import json
import math
import os
import resource
import signal
import socket
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NoReturn

from strop.sandbox.inside import measure_self, run_builtin
from strop.sandbox.linux import (
    become,
    close_all_but,
    drop_capabilities,
    forbid_privileges,
    open_to_tracers,
)
from strop.sandbox.place import Place
from strop.sandbox.seccomp import filter_calls

STATUS_FD = 9
"""A shell writes the status of its commands to this descriptor."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """A request to run a program, a builtin or `main`."""

    argv: list[str]
    env: dict[str, str]
    cwd: str
    wall_limit_s: float
    builtin: str = ""
    """A file operation of `inside`, instead of a program."""
    details: dict[str, Any] = field(default_factory=dict)
    is_main: bool = False
    """Run the `main` that the waiting process was forked with, instead of a program."""


class Program:
    """The program that a fork of the runner turns into."""

    def __init__(
        self,
        place: Place,
        request: Request | None,
        main: Callable[[], None] | None,
        descriptors: tuple[int, ...],
    ) -> None:
        self.place = place
        self._request = request
        self._main = main
        *self._streams, self._orders = descriptors
        """The standard streams, followed by a shell's status descriptor."""
        self._members: list[int] = []

    def prepare(self, control: socket.socket) -> None:
        """Close the descriptors of other commands, and enter the place."""
        # The input of another command ends only when all copies of its writing end are closed.
        close_all_but({0, 1, 2, *self._streams, self._orders, control.fileno(), self.place.holder})
        # Opened before the change of root.
        paths = self.place.cgroup.member_paths
        self._members = [os.open(path, os.O_WRONLY | os.O_CLOEXEC) for path in paths]
        self.place.enter()

    def close(self) -> None:
        """Close the runner's copies of its descriptors."""
        for descriptor in (*self._streams, *self._members, self._orders):
            os.close(descriptor)

    def begin(self, error_w: int) -> NoReturn:
        """Drop privileges, set limits, then exec the program. Exits with 127 if that fails."""
        try:
            os.setsid()
            for member in self._members:
                os.write(member, b"0")
            kept: tuple[int, ...] = (0, 1, 2)
            for target, descriptor in zip(kept, self._streams, strict=False):
                os.dup2(descriptor, target)
            if len(self._streams) > len(kept):
                # Moved behind STATUS_FD, which the shell's status descriptor gets.
                error_w = fcntl.fcntl(error_w, fcntl.F_DUPFD_CLOEXEC, STATUS_FD + 1)
                os.dup2(self._streams[-1], STATUS_FD)
                kept = (*kept, STATUS_FD)
            close_all_but((*kept, error_w, self._orders))
            os.umask(0o022)
            forbid_privileges(self.place.capabilities)
            if self.place.user is not None:
                become(*self.place.user)
            drop_capabilities(self.place.capabilities)
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
            # The measurement put this process into a user namespace, so it cannot become a program.
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
            # Per process, and a second above the wall limit, so that the wall limit comes first.
            set_limit(resource.RLIMIT_CPU, math.ceil(request.wall_limit_s) + 1)
        if self.place.max_user_processes is not None:
            set_limit(resource.RLIMIT_NPROC, self.place.max_user_processes)
        if request.builtin:
            os._exit(run_builtin(request.builtin, request.details))
        if limits.has_address_limit:
            set_limit(resource.RLIMIT_AS, limits.memory_bytes)
        if request.is_main and self._main is not None:
            os.close(error_w)
            os.close(self._orders)
            _run_main(self._main, request.env)
        restore_signals()
        os.execvpe(request.argv[0], request.argv, request.env)


def restore_signals() -> None:
    """Reset signals that are ignored or blocked, as a program expects.

    Python ignores two; a shell ignores SIGINT for background commands, and `nohup` ignores SIGHUP.
    """
    for number in signal.valid_signals():
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


def _run_main(main: Callable[[], None], env: dict[str, str]) -> NoReturn:
    """Restore the state of a newly started interpreter, and run `main`."""
    exit_code = 1
    try:
        restore_signals()
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for number in (signal.SIGPIPE, signal.SIGXFSZ):
            signal.signal(number, signal.SIG_IGN)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        open_to_tracers()
        os.environ.update(env)
        sys.argv = ["-c"]
        # The frames below this one must not count against the program's recursion limit.
        sys.setrecursionlimit(sys.getrecursionlimit() + len(list(traceback.walk_stack(None))))
        main()
        exit_code = 0
    finally:
        if exit_code:
            traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(exit_code)


def set_limit(kind: int, value: int) -> None:
    """Lower a limit of this process, never raise it."""
    _, hard = resource.getrlimit(kind)
    value = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(kind, (value, value))
