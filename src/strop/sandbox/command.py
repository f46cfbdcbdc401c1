"""One command in a place, from its supervisor's side: its pipes, and the way to the process above it.

A command is a runner (`runner`) and the program below it (`program`).
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from strop.sandbox.place import Place
from strop.sandbox.program import Program, Request
from strop.sandbox.runner import become_runner

_MEASURE_LIMIT_S = 10.0


@dataclass(kw_only=True, slots=True)
class Started:
    """A command, from its supervisor's side."""

    control: socket.socket
    stdin: int
    stdout: int
    stderr: int
    orders: socket.socket
    """Leads to the program's process until that has its request."""
    status: int
    """Where a shell says what became of a command; -1 for other programs."""

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
    place: Place,
    request: Request | None = None,
    *,
    main: Callable[[], None] | None = None,
    has_status: bool = False,
) -> Started:
    """Fork a command. It reports over `control` when everything has ended.

    Without a request it measures itself and waits for one, which may ask for `main`. `has_status`: the
    program is a shell that tells of its commands on `STATUS_FD`.

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
            become_runner(program, runner_end)
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
