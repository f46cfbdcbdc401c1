"""The process above one sandbox: takes requests, runs commands, keeps their clocks, cleans up.

It is forked from the daemon, so starting one costs a millisecond. It reads every command's output
itself: time limits hold and pipes are drained however busy the process is that asked. When its
connection or its daemon ends, it ends everything in the sandbox.
"""

from __future__ import annotations

import json
import math
import os
import selectors
import signal
import socket
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from strop.sandbox.command import ASK, KILL, Request, Started, as_record, start_command
from strop.sandbox.contract import KIB, ExecKind, IsolationLevel
from strop.sandbox.family import signal_descendants
from strop.sandbox.frames import pack, unpack
from strop.sandbox.place import LoadedPython, Place, clean_env

DETACH_S = 0.2
"""How long output is awaited from a pipe that a process still holds after a command."""
_CHUNK_BYTES = 1 << 16
_NAMESPACE_KILL_S = 0.05
_STUCK_S = 5.0
"""A command that was told to end and has not: what is above it is stopped or gone."""


@dataclass(kw_only=True, slots=True)
class _Running:
    started: Started
    rest: memoryview
    stdout: Capture
    stderr: Capture
    started_at: float
    next_at: float
    """When its clock is looked at next: first its wall limit, later when to give up on it."""
    oom_kills_before: int
    report: dict[str, Any] | None = None
    is_timed_out: bool = False
    is_flooding: bool = False
    is_lost: bool = False
    open_streams: set[int] = field(default_factory=set)


class Supervisor:
    """Serves one connection over one place."""

    def __init__(
        self, place: Place, python: LoadedPython, connection: socket.socket, daemon_end: int
    ) -> None:
        self._place = place
        self._python = python
        self._first: Started | None = None
        """The command that waits for the first request."""
        self._connection = connection
        self._daemon_end = daemon_end
        self._selector = selectors.DefaultSelector()
        self._incoming = bytearray()
        self._outgoing = bytearray()
        self._running: dict[int, _Running] = {}
        self._is_ending = False
        self._lost_kind = ""

    def serve(self, min_level: IsolationLevel) -> None:
        """Measure the place, then take requests until the end."""
        self._connection.setblocking(False)
        self._selector.register(self._connection, selectors.EVENT_READ, self._on_connection)
        self._selector.register(self._daemon_end, selectors.EVENT_READ, lambda: self._lose("infra"))
        if self._place.holder is not None:
            self._selector.register(
                self._place.holder,
                selectors.EVENT_READ,
                lambda: self._lose("from_inside" if self._running else "infra"),
            )
        self._measure(min_level)
        while not self._is_ending:
            self._turn()
        self._end()

    def _measure(self, min_level: IsolationLevel) -> None:
        try:
            first = start_command(self._place, main=self._python.main)
        except OSError as error:
            self.refuse("probe", f"a first process inside did not start: {error}")
            return
        try:
            facts = first.read_facts()
        except OSError as error:
            first.close()
            self.refuse("probe", f"a first process inside failed: {error}")
            return
        if facts["nested_userns"]:
            first.close()
        else:
            self._first = first
        isolation = self._place.describe(facts)
        if isolation.level < min_level:
            self.refuse("level", f"{isolation.level.word} was reached: {isolation}")
            return
        self._send({"ready": as_record(isolation), "scratch": self._place.scratch})

    def refuse(self, kind: str, why: str) -> None:
        """Report why there is no sandbox, and end."""
        self._send({"refused": kind, "why": why})
        self._is_ending = True

    def _turn(self) -> None:
        soonest_at = min((running.next_at for running in self._running.values()), default=math.inf)
        wait_s = None if math.isinf(soonest_at) else max(0.0, soonest_at - time.monotonic())
        for key, _ in self._selector.select(wait_s):
            if key.fd in self._selector.get_map():
                key.data()
        now = time.monotonic()
        for command_id, running in list(self._running.items()):
            if now >= running.next_at:
                if running.report is not None or running.is_lost:
                    running.open_streams -= {self._close_stream(fd) for fd in list(running.open_streams)}
                    self._finish_if_done(command_id, running)
                elif running.is_timed_out:
                    running.is_lost = True
                    self._lose("from_inside")
                    running.next_at = now
                else:
                    running.is_timed_out = True
                    running.next_at = now + _STUCK_S
                    self._order(running, ASK)

    # Requests.

    def _on_connection(self) -> None:
        if self._outgoing:
            self._flush()
        try:
            data = self._connection.recv(_CHUNK_BYTES)
        except BlockingIOError:
            return
        except ConnectionResetError:
            data = b""
        if not data:
            self._is_ending = True
            return
        self._incoming += data
        for header, body in unpack(self._incoming):
            self._obey(header, body)

    def _obey(self, header: dict[str, Any], body: bytes) -> None:
        if header["op"] == "stop":
            self._is_ending = True
            return
        command_id = header["id"]
        if header["op"] == "cancel":
            if (running := self._running.get(command_id)) is not None:
                self._order(running, KILL)
            return
        try:
            argv, is_main = header.get("argv", []), header.get("is_main", False)
            if is_main and (self._first is None or argv[0] != sys.executable):
                # Later processes know of earlier requests; and this Python may be out of a program's reach.
                argv, is_main = [*argv, "-c", f"{self._python.source}\nmain()\n"], False
            self._start(
                command_id,
                Request(
                    argv=argv,
                    env={**clean_env(self._place.scratch), **header.get("env", {})},
                    cwd=header.get("cwd") or self._place.scratch,
                    wall_limit_s=header["wall_limit_s"],
                    builtin=header.get("builtin", ""),
                    details=header.get("details", {}),
                    is_main=is_main,
                ),
                body,
            )
        except OSError as error:
            self._send({"id": command_id, "lost": "infra", "why": str(error)})

    # Commands.

    def _start(self, command_id: int, request: Request, stdin: bytes) -> None:
        limits = self._place.limits
        oom_kills = self._place.cgroup.count_oom_kills()
        now = time.monotonic()
        started, self._first = self._first, None
        if started is None:
            started = start_command(self._place, request)
        else:
            started.order(request)
        # What is done inside on the user's behalf answers whole.
        head_bytes = request.details.get("max_bytes", KIB) if request.builtin else limits.output_head_bytes
        running = _Running(
            started=started,
            rest=memoryview(stdin),
            stdout=Capture(head_bytes, limits.output_tail_bytes),
            stderr=Capture(head_bytes, limits.output_tail_bytes),
            started_at=now,
            next_at=now + request.wall_limit_s,
            oom_kills_before=oom_kills,
            open_streams={started.stdout, started.stderr},
        )
        self._running[command_id] = running
        for descriptor in (started.stdin, started.stdout, started.stderr):
            os.set_blocking(descriptor, False)
        for descriptor, capture in ((started.stdout, running.stdout), (started.stderr, running.stderr)):
            self._selector.register(
                descriptor,
                selectors.EVENT_READ,
                lambda fd=descriptor, into=capture: self._on_output(command_id, running, fd, into),
            )
        self._selector.register(
            started.control, selectors.EVENT_READ, lambda: self._on_report(command_id, running)
        )
        if stdin:
            self._selector.register(started.stdin, selectors.EVENT_WRITE, lambda: self._on_stdin(running))
        else:
            os.close(started.stdin)

    def _on_stdin(self, running: _Running) -> None:
        try:
            running.rest = running.rest[os.write(running.started.stdin, running.rest) :]
        except BlockingIOError:
            return
        except BrokenPipeError:
            running.rest = memoryview(b"")
        if not running.rest:
            self._close_stream(running.started.stdin)

    def _on_output(self, command_id: int, running: _Running, descriptor: int, capture: Capture) -> None:
        try:
            data = os.read(descriptor, _CHUNK_BYTES)
        except BlockingIOError:
            return
        if data:
            capture.feed(data)
            num_bytes = running.stdout.total + running.stderr.total
            if num_bytes > self._place.limits.flood_bytes and not running.is_flooding:
                running.is_flooding = True
                self._order(running, KILL)
            return
        self._close_stream(descriptor)
        running.open_streams.discard(descriptor)
        self._finish_if_done(command_id, running)

    def _on_report(self, command_id: int, running: _Running) -> None:
        try:
            text = running.started.control.recv(_CHUNK_BYTES)
        except ConnectionResetError:
            text = b""
        self._selector.unregister(running.started.control)
        running.started.control.close()
        if text:
            running.report = json.loads(text)
        else:
            # It was killed from inside; its descendants can no longer be told from the others.
            running.is_lost = True
            self._lose("from_inside")
        running.next_at = time.monotonic() + DETACH_S
        self._finish_if_done(command_id, running)

    def _order(self, running: _Running, order: bytes) -> None:
        with suppress(OSError):
            running.started.control.send(order)

    def _finish_if_done(self, command_id: int, running: _Running) -> None:
        if running.open_streams or (running.report is None and not running.is_lost):
            return
        if running.rest:
            self._close_stream(running.started.stdin)
        if running.is_lost and running.report is None and running.started.control.fileno() >= 0:
            self._selector.unregister(running.started.control)
            running.started.control.close()
        del self._running[command_id]
        _collect_children()
        if self._is_ending and self._lost_kind != "from_inside":
            # Killed from outside: that is no result of the program, and the closed connection shows it.
            return
        stdout, stderr = running.stdout.kept(), running.stderr.kept()
        self._send({"id": command_id, **self._describe_end(running, stdout)}, stdout + stderr)

    def _describe_end(self, running: _Running, stdout: bytes) -> dict[str, Any]:
        report = running.report or {}
        status = report.get("status")
        oom_kills = (
            self._place.cgroup.count_oom_kills() - running.oom_kills_before + report.get("oom_kills", 0)
        )
        end_signal = os.WTERMSIG(status) if status is not None and os.WIFSIGNALED(status) else None
        reasons = (
            (running.is_lost or status is None, ExecKind.FROM_INSIDE),
            (running.is_timed_out, ExecKind.TIMED_OUT),
            (oom_kills > 0, ExecKind.OOM),
            (running.is_flooding, ExecKind.OUTPUT_FLOOD),
            (report.get("breach"), ExecKind.OVER_LIMIT),
            (report.get("error"), ExecKind.NOT_STARTED),
            (end_signal is not None, ExecKind.SIGNALED),
            (True, ExecKind.EXITED),
        )
        return {
            "kind": next(kind for applies, kind in reasons if applies),
            "exit_code": os.WEXITSTATUS(status) if status is not None and end_signal is None else None,
            "signal": end_signal,
            "stdout_bytes": len(stdout),
            "stdout_total": running.stdout.total,
            "stderr_total": running.stderr.total,
            "oom_kills": oom_kills,
            "duration_s": report.get("ended_at", time.monotonic()) - running.started_at,
            "cpu_s": report.get("cpu_s", 0.0),
            "why": report.get("error") or report.get("breach") or "",
        }

    # The end.

    def _lose(self, kind: str) -> None:
        self._lost_kind = self._lost_kind or kind
        self._is_ending = True

    def _end(self) -> None:
        """Kill everything, report the results that are still awaited, remove the place."""
        self._kill_all()
        give_up_at = time.monotonic() + 2 * DETACH_S
        # All processes are dead, so every pipe has an end.
        while self._running and time.monotonic() < give_up_at:
            for running in self._running.values():
                running.next_at = min(running.next_at, give_up_at)
            self._turn()
        self._place.close()
        if self._lost_kind:
            self._send({"lost": self._lost_kind})
        self._connection.setblocking(True)
        with suppress(OSError):
            self._connection.sendall(self._outgoing)

    def _kill_all(self) -> None:
        if self._place.holder is not None:
            with suppress(KeyError):
                self._selector.unregister(self._place.holder)
        self._place.kill()
        now = time.monotonic()
        # Where the kernel kills all with process 1, there is nothing to search for.
        look_at = now if self._place.holder is None else now + _NAMESPACE_KILL_S
        while now < look_at + _STUCK_S:
            if now >= look_at:
                signal_descendants(os.getpid(), signal.SIGKILL)
            if not _collect_children():
                return
            time.sleep(0.001)
            now = time.monotonic()

    def _close_stream(self, descriptor: int) -> int:
        with suppress(KeyError):
            self._selector.unregister(descriptor)
        os.close(descriptor)
        return descriptor

    def _send(self, header: dict[str, Any], body: bytes = b"") -> None:
        self._outgoing += pack(header, body)
        self._flush()

    def _flush(self) -> None:
        try:
            del self._outgoing[: self._connection.send(self._outgoing)]
        except BlockingIOError:
            pass
        except OSError:
            # The client has gone.
            self._outgoing.clear()
            self._is_ending = True
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if self._outgoing else 0)
        self._selector.modify(self._connection, events, self._on_connection)


def _collect_children() -> bool:
    """Reap children that have ended; return whether one still runs."""
    while True:
        try:
            pid, _ = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return False
        if pid == 0:
            return True


class Capture:
    """Keeps `head_bytes` of the beginning and `tail_bytes` of the end of what is fed to it."""

    def __init__(self, head_bytes: int, tail_bytes: int) -> None:
        self._head_bytes = head_bytes
        self._tail_bytes = tail_bytes
        self._head = bytearray()
        self._tail = bytearray()
        self.total = 0

    def feed(self, data: bytes) -> None:
        """Take the next bytes of the stream."""
        self.total += len(data)
        room = self._head_bytes - len(self._head)
        if room > 0:
            self._head += data[:room]
            data = data[room:]
        if data:
            self._tail += data
            # Cut seldom: each cut moves the whole tail.
            if len(self._tail) > 2 * self._tail_bytes + (1 << 16):
                self._cut()

    def kept(self) -> bytes:
        """Return head and tail; all of the stream if it fits."""
        self._cut()
        return bytes(self._head + self._tail)

    def _cut(self) -> None:
        surplus = len(self._tail) - self._tail_bytes
        if surplus > 0:
            del self._tail[:surplus]
