"""The supervisor's side of a running command: its pipes, its time limit, its result.

Its output is read as it arrives and kept within bounds, so a slow reader never blocks the command.
"""

from __future__ import annotations

import json
import os
import selectors
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from strop.sandbox.capture import Capture
from strop.sandbox.contract import ExecKind
from strop.sandbox.runner import ASK, DONE, KILL, Started, signal_order

if TYPE_CHECKING:
    from strop.sandbox.supervisor import Supervisor

DETACH_S = 0.2
"""How long output is awaited from a pipe that a process still holds after the command's end."""
STUCK_S = 5.0
"""If a command does not end this long after the order to, its runner is stopped or gone."""
CHUNK_BYTES = 1 << 16
"""Bytes of one read; no less than the capacity of a pipe."""


class Job:
    """A running command."""

    is_counted = True
    """Whether `SandboxStats.commands` counts it."""

    def __init__(
        self,
        number: int,
        start: Callable[[], Started],
        supervisor: Supervisor,
        *,
        wall_limit_s: float,
        kept_bytes: tuple[int, int],
    ) -> None:
        """Raises: OSError if `start` does."""
        self.number = number
        self._oom_kills_before = supervisor.place.cgroup.count_oom_kills()
        self.started_at = time.monotonic()
        self.next_at = self.started_at + wall_limit_s
        """Next deadline: the wall limit at first, later the time to give up on the command."""
        self.started = started = start()
        self.stdout, self.stderr = Capture(*kept_bytes), Capture(*kept_bytes)
        self.report: dict[str, Any] | None = None
        self.is_lost = False
        self._supervisor = supervisor
        self._is_timed_out = False
        self._is_flooding = False
        self._input: deque[tuple[memoryview, int | None]] = deque()
        """Data not yet written, each part with the request that waits for it."""
        self._is_input_open = True
        self._is_input_complete = False
        # Looked up at each call, since a shell replaces its captures for each command.
        self._streams: dict[int, Callable[[], None]] = {
            started.stdout: lambda: self._take_output(started.stdout, self.stdout),
            started.stderr: lambda: self._take_output(started.stderr, self.stderr),
        }
        self._awaited: tuple[int, int, int] | None = None
        """A waiting request for output, and its positions in both streams."""
        for descriptor in (started.stdin, started.stdout, started.stderr):
            os.set_blocking(descriptor, False)
        for descriptor, react in self._streams.items():
            supervisor.selector.register(descriptor, selectors.EVENT_READ, react)
        supervisor.selector.register(started.control, selectors.EVENT_READ, self._on_report)

    # Its input.

    def feed(self, data: bytes, request_id: int | None = None) -> None:
        """Write to standard input; the request is answered once all is written, or cannot be."""
        if not self._is_input_open or self._is_input_complete:
            self._acknowledge(request_id, is_open=False)
            return
        if not self._input:
            self._supervisor.selector.register(self.started.stdin, selectors.EVENT_WRITE, self._on_stdin)
        self._input.append((memoryview(data), request_id))

    def close_stdin(self) -> None:
        """Close standard input behind the data that was fed."""
        self._is_input_complete = True
        if not self._input:
            self._end_input()

    def _on_stdin(self) -> None:
        data, request_id = self._input[0]
        try:
            data = data[os.write(self.started.stdin, data) :]
        except BlockingIOError:
            return
        except BrokenPipeError:
            self._end_input()
            return
        if data:
            self._input[0] = (data, request_id)
            return
        self._input.popleft()
        self._acknowledge(request_id, is_open=True)
        if not self._input:
            self._supervisor.selector.unregister(self.started.stdin)
            if self._is_input_complete:
                self._end_input()

    def _end_input(self) -> None:
        if self._is_input_open:
            self._is_input_open = False
            self._close(self.started.stdin)
        while self._input:
            self._acknowledge(self._input.popleft()[1], is_open=False)

    def _acknowledge(self, request_id: int | None, *, is_open: bool) -> None:
        if request_id is not None:
            self._supervisor.send({"id": request_id, "is_open": is_open})

    # Its output.

    def await_output(self, request_id: int, stdout_at: int, stderr_at: int) -> None:
        """Answer with the output behind the positions, once there is some."""
        self._awaited = (request_id, stdout_at, stderr_at)
        self._answer_awaited()

    def _take_output(self, descriptor: int, into: Capture) -> None:
        try:
            data = os.read(descriptor, CHUNK_BYTES)
        except BlockingIOError:
            return
        if data:
            into.feed(data)
            num_bytes = self.stdout.total + self.stderr.total
            if num_bytes > self._supervisor.place.limits.flood_bytes and not self._is_flooding:
                self._is_flooding = True
                self._stop_flood()
            if self._awaited is not None:
                self._answer_awaited()
            return
        self._close(descriptor)
        del self._streams[descriptor]
        self._end_if_done()

    def _stop_flood(self) -> None:
        self.order(KILL)

    def _answer_awaited(self) -> None:
        if self._awaited is None:
            return
        request_id, stdout_at, stderr_at = self._awaited
        if self.stdout.total > stdout_at or self.stderr.total > stderr_at:
            self._awaited = None
            (out_gone, out), (error_gone, error) = (
                self.stdout.since(stdout_at),
                self.stderr.since(stderr_at),
            )
            header = {"id": request_id, "stdout_bytes": len(out), "omitted": [out_gone, error_gone]}
            self._supervisor.send(header, out + error)

    # Its end.

    def order(self, order: bytes) -> None:
        """Send an order to the runner."""
        with suppress(OSError):
            self.started.control.send(order)

    def look_at_clock(self, now: float) -> None:
        """Act on the deadline `next_at`, which has passed."""
        if self.report is not None or self.is_lost:
            for descriptor in list(self._streams):
                self._close(descriptor)
            self._streams.clear()
            self._end_if_done()
        elif self._is_timed_out:
            self.is_lost = True
            self._supervisor.lose("from_inside")
            self.next_at = now
        else:
            self._is_timed_out = True
            self.next_at = now + STUCK_S
            self.order(ASK)

    def _on_report(self) -> None:
        try:
            text = self.started.control.recv(CHUNK_BYTES)
        except ConnectionResetError:
            text = b""
        if text and not text.strip(DONE):
            for _ in text:
                self.on_order_done()
            return
        self._supervisor.selector.unregister(self.started.control)
        self.started.control.close()
        if text:
            self.report = json.loads(text.lstrip(DONE))
        else:
            # The runner was killed from inside, so the command's descendants can no longer be identified.
            self.is_lost = True
            self._supervisor.lose("from_inside")
        self.next_at = time.monotonic() + DETACH_S
        self._end_if_done()

    def _end_if_done(self) -> None:
        if self._streams or (self.report is None and not self.is_lost):
            return
        self._end_input()
        self._close_rest()
        if self.started.control.fileno() >= 0:
            self._supervisor.selector.unregister(self.started.control)
            self.started.control.close()
        self._supervisor.on_end(self)

    def signal(self, number: int) -> None:
        """Send a signal to the command's process group."""
        self.order(signal_order(number))

    def drop(self) -> None:
        """End the current command of a shell; a hook for `Shell`."""

    def on_order_done(self) -> None:
        """Handle the runner's `DONE`; a hook for `Shell`."""

    def _close_rest(self) -> None:
        """Close further descriptors; a hook for `Shell`."""

    def describe_end(self) -> tuple[dict[str, Any], bytes]:
        """Return the fields of the result, and the output."""
        report = self.report or {}
        status = report.get("status")
        oom_kills = self.count_oom_kills() + report.get("oom_kills", 0)
        end_signal = os.WTERMSIG(status) if status is not None and os.WIFSIGNALED(status) else None
        reasons = (
            (self.is_lost or status is None, ExecKind.FROM_INSIDE),
            (self._is_timed_out, ExecKind.TIMED_OUT),
            (oom_kills > 0, ExecKind.OOM),
            (self._is_flooding, ExecKind.OUTPUT_FLOOD),
            (report.get("breach"), ExecKind.OVER_LIMIT),
            (report.get("error"), ExecKind.NOT_STARTED),
            (end_signal is not None, ExecKind.SIGNALED),
            (True, ExecKind.EXITED),
        )
        fields, output = self.describe_output()
        return {
            **fields,
            "kind": next(kind for applies, kind in reasons if applies),
            "exit_code": os.WEXITSTATUS(status) if status is not None and end_signal is None else None,
            "signal": end_signal,
            "oom_kills": oom_kills,
            "duration_s": report.get("ended_at", time.monotonic()) - self.started_at,
            "cpu_s": report.get("cpu_s", 0.0),
            "why": report.get("error") or report.get("breach") or "",
        }, output

    def describe_output(self) -> tuple[dict[str, Any], bytes]:
        """Return the fields with the output's sizes, and the output."""
        stdout, stderr = self.stdout.kept(), self.stderr.kept()
        return {
            "stdout_bytes": len(stdout),
            "stdout_total": self.stdout.total,
            "stderr_total": self.stderr.total,
            "heads": [self.stdout.num_head_bytes, self.stderr.num_head_bytes],
        }, stdout + stderr

    def count_oom_kills(self) -> int:
        """Return the number of the kernel's OOM kills in the sandbox since the command started."""
        return self._supervisor.place.cgroup.count_oom_kills() - self._oom_kills_before

    def _close(self, descriptor: int) -> None:
        with suppress(KeyError):
            self._supervisor.selector.unregister(descriptor)
        os.close(descriptor)
