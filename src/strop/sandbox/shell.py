"""The supervisor's side of a shell that stays open: it evaluates commands one by one and reports their ends.

The shell is interactive, without a terminal, since only an interactive shell survives an interrupt or an
error in the code it evaluates. It reads from a pipe a line that evaluates the command, with an empty standard
input, and then a line that writes the exit status and the CPU times to a descriptor which programs do not
inherit. The second line is written once the shell has read the first: some shells drop their read-ahead when
a command fails.

Code that the shell itself evaluates can write a false status of its own to that descriptor, or close it,
which ends the shell at the wall limit. It can do nothing beyond that.
"""

from __future__ import annotations

import fcntl
import os
import re
import selectors
import signal
import struct
import termios
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from strop.sandbox.capture import Capture
from strop.sandbox.contract import ExecKind
from strop.sandbox.job import CHUNK_BYTES, Job
from strop.sandbox.program import STATUS_FD
from strop.sandbox.runner import ASK_NEW, KILL, KILL_NEW, MARK, TERM_GRACE_S, Started, signal_order

if TYPE_CHECKING:
    from strop.sandbox.supervisor import Supervisor

_INTERRUPT = signal_order(signal.SIGINT)
_LOOK_PERIOD_S = 0.001
_INSIST_PERIOD_S = 0.1
_GIVE_UP_S = 1.0
"""A shell that does not drop its command within this and the grace period is killed."""
_INTERRUPTED = 128 + signal.SIGINT
_STATUS = re.compile(rb"(\d+) (\d+)\n" + rb"(\d+)m([\d.]+)s (\d+)m([\d.]+)s\n" * 2)
_MAX_LINES = 12
"""Lines other than a status; interrupts leave fewer."""
# The leading empty line: after an unfinished quotation bash takes the next line's first word for an argument.
_ASK_STATUS = b"\n{ \\command printf '%%s %d\\n' \"$?\"; \\command times; } >&%d\n"


@dataclass(kw_only=True, slots=True)
class _Run:
    """A command that the shell evaluates."""

    request_id: int
    command: bytes
    is_sent: bool = False
    """Whether the shell has the command: later children of the shell belong to it."""
    started_at: float
    deadline: float
    oom_kills_before: int
    cpu_s_before: float
    look_s: float = _LOOK_PERIOD_S
    """How soon to look again whether the shell has read its command."""
    has_asked: bool = False
    """Whether the line was written that makes the shell report the command's exit status."""
    status: int | None = None
    give_up_at: float | None = None
    """When the shell is killed; set when the command is interrupted."""
    insist_at: float = float("inf")
    """When the command is ended by force."""
    num_awaited: int = 0
    """Orders to kill the command's processes that the runner has not finished yet."""


class Shell(Job):
    """A running shell."""

    is_counted = False

    def __init__(
        self,
        number: int,
        start: Callable[[], Started],
        supervisor: Supervisor,
        *,
        kept_bytes: tuple[int, int],
    ) -> None:
        super().__init__(number, start, supervisor, wall_limit_s=float("inf"), kept_bytes=kept_bytes)
        self._kept_bytes = kept_bytes
        self._run: _Run | None = None
        self._reports = b""
        """Unparsed bytes from the status descriptor."""
        self._cpu_s = 0.0
        os.set_blocking(self.started.status, False)
        supervisor.selector.register(self.started.status, selectors.EVENT_READ, self._on_status)

    def run(self, request_id: int, command: bytes, wall_limit_s: float) -> None:
        """Evaluate a command; the caller runs one at a time."""
        now = time.monotonic()
        oom_kills = self._supervisor.place.cgroup.count_oom_kills()
        self._run = _Run(
            request_id=request_id,
            command=command,
            started_at=now,
            deadline=now + wall_limit_s,
            oom_kills_before=oom_kills,
            cpu_s_before=self._cpu_s,
        )
        self._is_timed_out = self._is_flooding = False
        self.order(MARK)
        self.next_at = now + wall_limit_s

    def drop(self) -> None:
        """End the current command, as at its wall limit."""
        if self._run is not None:
            self._run.deadline = self.next_at = time.monotonic()

    def look_at_clock(self, now: float) -> None:
        """Act on the deadline `next_at`, which has passed."""
        run = self._run
        if self.report is not None or self.is_lost or run is None:
            super().look_at_clock(now)
            return
        if run.is_sent and not run.has_asked and self._has_read_all():
            run.has_asked = True
            self.feed(_ASK_STATUS % (run.request_id, STATUS_FD))
        if run.give_up_at is None and now >= run.deadline:
            self._is_timed_out = True
            self._drop(run, now)
        elif run.give_up_at is not None and now >= run.give_up_at:
            self.order(KILL)
            self.next_at = float("inf")
            return
        elif run.give_up_at is not None and now >= run.insist_at:
            run.insist_at = now + _INSIST_PERIOD_S
            self._insist(run)
        self.next_at = self._next_look(run, now)

    def _next_look(self, run: _Run, now: float) -> float:
        if run.give_up_at is None:
            if run.has_asked:
                return run.deadline
            run.look_s = min(2 * run.look_s, _INSIST_PERIOD_S)
            return min(run.deadline, now + run.look_s)
        if not run.has_asked:
            return now + _LOOK_PERIOD_S
        return run.insist_at

    def _has_read_all(self) -> bool:
        if self._input or not self._is_input_open:
            return False
        left = fcntl.ioctl(self.started.stdin, termios.FIONREAD, bytes(4))
        return bool(struct.unpack("i", left)[0] == 0)

    def _drop(self, run: _Run, now: float) -> None:
        """Interrupt the shell and terminate the command's processes; `look_at_clock` repeats it by force."""
        run.insist_at = now + TERM_GRACE_S
        run.give_up_at = run.insist_at + _GIVE_UP_S
        self.order(_INTERRUPT + ASK_NEW)

    def _insist(self, run: _Run) -> None:
        # If the interrupt cut the report off, ask again; a second report has the same number and is ignored.
        run.has_asked = run.has_asked and not (run.status is None and self._has_read_all())
        run.num_awaited += 1
        self.order((b"" if run.status is not None else _INTERRUPT) + KILL_NEW)

    def _stop_flood(self) -> None:
        if self._run is None or self._run.give_up_at is not None:
            self.order(KILL)
            return
        now = time.monotonic()
        self._drop(self._run, now)
        self.next_at = self._next_look(self._run, now)

    def _on_status(self) -> None:
        try:
            data = os.read(self.started.status, CHUNK_BYTES)
        except BlockingIOError:
            return
        self._reports += data
        # A report that an interrupt cut off may precede the complete one.
        while (report := _STATUS.search(self._reports)) is not None:
            self._reports = self._reports[report.end() :]
            self._take_status(int(report[1]), int(report[2]), [float(word) for word in report.groups()[2:]])
        if not data:
            # The shell has become another program, whose end is reported as that of the shell.
            self._close_status()
        elif self._reports.count(b"\n") >= _MAX_LINES or len(self._reports) > CHUNK_BYTES:
            # A program wrote something else to the descriptor, so reports can no longer be parsed.
            self._close_status()
            self.order(KILL)

    def _take_status(self, status: int, request_id: int, times: list[float]) -> None:
        minutes, seconds = sum(times[::2]), sum(times[1::2])
        self._cpu_s = 60 * minutes + seconds
        run = self._run
        if run is None or run.request_id != request_id or run.status is not None:
            return
        run.status = status
        if run.give_up_at is None:
            self._end_run(run)
        else:
            self._insist(run)

    def on_order_done(self) -> None:
        """Continue after the runner has marked the running processes, or killed the command's."""
        run = self._run
        if run is None:
            return
        if not run.is_sent and run.give_up_at is None:
            run.is_sent = True
            quoted = run.command.replace(b"'", b"'\\''")
            self.feed(b"\\eval '%b' </dev/null %d>&-\n" % (quoted, STATUS_FD))
            self.next_at = time.monotonic()
            return
        if run.is_sent:
            run.num_awaited -= 1
        else:
            # The wall limit passed before the shell had the command.
            run.is_sent, run.status = True, _INTERRUPTED
        if run.status is not None and run.num_awaited <= 0:
            self._end_run(run)

    def _end_run(self, run: _Run) -> None:
        # The command's remaining output is in the pipes, which one read empties.
        for react in list(self._streams.values()):
            react()
        oom_kills = self._supervisor.place.cgroup.count_oom_kills() - run.oom_kills_before
        reasons = (
            (self._is_timed_out, ExecKind.TIMED_OUT),
            (oom_kills > 0, ExecKind.OOM),
            (self._is_flooding, ExecKind.OUTPUT_FLOOD),
            (True, ExecKind.EXITED),
        )
        fields, output = self.describe_output()
        header = {
            **fields,
            "kind": next(kind for applies, kind in reasons if applies),
            "exit_code": run.status,
            "signal": None,
            "oom_kills": oom_kills,
            "duration_s": time.monotonic() - run.started_at,
            "cpu_s": max(0.0, self._cpu_s - run.cpu_s_before),
            "why": "",
        }
        self._answer_run(run, header, output, has_shell=True)

    def _answer_run(self, run: _Run, header: dict[str, Any], output: bytes, *, has_shell: bool) -> None:
        self._run = None
        self.next_at = float("inf")
        self.stdout, self.stderr = Capture(*self._kept_bytes), Capture(*self._kept_bytes)
        self._supervisor.on_run_end(header)
        self._supervisor.send({"id": run.request_id, **header, "has_shell": has_shell}, output)

    def _close_status(self) -> None:
        if self.started.status >= 0:
            self._close(self.started.status)
            self.started.status = -1

    def _close_rest(self) -> None:
        self._close_status()
        if self._run is not None and (self.report is not None or self.is_lost):
            # The shell ended in the middle of a command, so its end is the command's.
            run = self._run
            header, output = self.describe_end()
            header["duration_s"] = time.monotonic() - run.started_at
            header["cpu_s"] = max(0.0, header["cpu_s"] - run.cpu_s_before)
            self._answer_run(run, header, output, has_shell=False)
