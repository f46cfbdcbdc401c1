"""The process above one sandbox: takes requests, runs commands, enforces their time limits, cleans up.

It is forked from the daemon, so starting one costs a millisecond. It reads every command's output itself, so
time limits hold and pipes are drained even if the client is busy. When its connection or its daemon ends, it
ends everything in the sandbox.
"""

from __future__ import annotations

import math
import os
import selectors
import signal
import sys
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

from strop.sandbox.channel import Channel
from strop.sandbox.contract import KIB, ExecKind, IsolationLevel
from strop.sandbox.family import (
    continue_programs,
    cpu_s,
    find_grandchildren,
    memory_bytes,
    signal_descendants,
    stop_programs,
)
from strop.sandbox.job import DETACH_S, STUCK_S, Job
from strop.sandbox.place import LoadedPython, Place, clean_env
from strop.sandbox.program import Request
from strop.sandbox.runner import ASK, KILL, Started, as_record, measure_tree, start_command
from strop.sandbox.shell import Shell
from strop.sandbox.sockets import Egress, start_connect

_NAMESPACE_KILL_S = 0.05
_MAX_CONNECTING = 64
"""Connections that are opened at once. Opening takes long only if the server does not accept."""
_NUM_DURATIONS = 256
_PROBE, _PROBE_LIMIT_S = -1, 60.0
"""The number of the supervisor's own job, which no client uses."""
_MEDIAN, _TAIL = 0.5, 0.99


class Supervisor:
    """Serve one client connection for one place."""

    def __init__(
        self,
        place: Place,
        python: LoadedPython,
        channel: Channel,
        daemon_end: int,
        egress: Egress | None = None,
    ) -> None:
        self.place = place
        self._num_connecting = 0
        self.selector: selectors.BaseSelector = selectors.DefaultSelector()
        self._python = python
        self._first: Started | None = None
        """The command that was started ahead and waits for the first request."""
        self._channel = channel
        self._daemon_end = daemon_end
        self._egress = egress
        self._env = clean_env(place.scratch) | (egress.env if egress is not None else {})
        self._num_refused_calls = 0
        self._jobs: dict[int, Job] = {}
        self._is_ending = False
        self._lost_kind = self._lost_why = ""
        self._accounts = _Accounts()
        self._stopped: dict[int, str] = {}
        """The processes that a pause has stopped, with their start times."""
        self._begins: dict[str, Callable[[dict[str, Any], bytes], None]] = {
            "start": self._start,
            "open_shell": self._open_shell,
            "run": self._run,
            "connect": self._connect,
        }
        """Requests that run something in the sandbox."""
        self._states: dict[str, Callable[[], dict[str, Any]]] = {
            "pause": self._pause,
            "resume": self._resume,
            "stats": self._describe,
        }
        """Requests about the sandbox, answered at once."""
        self._steps: dict[str, Callable[[Job, dict[str, Any], bytes], None]] = {
            "cancel": lambda job, header, body: job.order(KILL),
            "end": lambda job, header, body: job.order(ASK),
            "signal": lambda job, header, body: job.signal(header["number"]),
            "drop": lambda job, header, body: job.drop(),
            "input": lambda job, header, body: job.feed(body, header["id"]),
            "input_end": lambda job, header, body: job.close_stdin(),
            "output": lambda job, header, body: job.await_output(header["id"], *header["positions"]),
        }
        """Requests to a running command, by its number `job`."""

    def serve(self, min_level: IsolationLevel) -> None:
        """Measure the place, then serve requests until the end."""
        self.selector.register(self._channel.socket, selectors.EVENT_READ, self._on_connection)
        self.selector.register(self._daemon_end, selectors.EVENT_READ, lambda: self.lose("infra"))
        if self.place.holder is not None:
            self.selector.register(
                self.place.holder,
                selectors.EVENT_READ,
                lambda: self.lose("from_inside" if self._jobs else "infra"),
            )
        if self._egress is not None:
            self.selector.register(self._egress.control, selectors.EVENT_READ, self._on_refused_call)
        self._measure(min_level)
        while not self._is_ending:
            self._turn()
        self._end()

    def _measure(self, min_level: IsolationLevel) -> None:
        try:
            first = start_command(self.place, main=self._python.main)
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
        isolation = self.place.describe(facts)
        if isolation.level < min_level:
            self.refuse("level", f"{isolation.level.word} was reached: {isolation}")
            return
        header = {"ready": as_record(isolation), "scratch": self.place.scratch, "pid": os.getpid()}
        self.send({**header, "moved_mounts": dict(self.place.moved_mounts)})

    def refuse(self, kind: str, why: str) -> None:
        """Report why there is no sandbox, and end."""
        self.send({"refused": kind, "why": why})
        self._is_ending = True

    def _turn(self) -> None:
        soonest_at = min((job.next_at for job in self._jobs.values()), default=math.inf)
        wait_s = None if math.isinf(soonest_at) else max(0.0, soonest_at - time.monotonic())
        for key, _ in self.selector.select(wait_s):
            if key.fd in self.selector.get_map():
                key.data()
        now = time.monotonic()
        for job in list(self._jobs.values()):
            if now >= job.next_at:
                job.look_at_clock(now)

    # Requests.

    def _on_connection(self) -> None:
        try:
            self._flush()
            for header, body in self._channel.receive():
                self._obey(header, body)
        except EOFError:
            self._is_ending = True

    def _obey(self, header: dict[str, Any], body: bytes) -> None:
        operation = header["op"]
        if operation == "stop":
            self._is_ending = True
            return
        try:
            if operation in self._states:
                self.send({"id": header["id"], **self._states[operation]()})
            elif operation in self._begins:
                self._begins[operation](header, body)
            elif operation not in self._steps:
                why = f"it knows no request {operation!r}"
                self.send({"id": header.get("id"), "failed": "unknown", "why": why})
            elif (job := self._jobs.get(header["job"])) is not None:
                self._steps[operation](job, header, body)
            elif "id" in header:
                # The job has ended; its result was sent.
                self.send({"id": header["id"], "is_open": False, "has_ended": True})
        except OSError as error:
            self.send({"id": header["id"], "lost": "infra", "why": str(error)})

    def _start(self, header: dict[str, Any], body: bytes) -> None:
        argv, is_main = header.get("argv", []), header.get("is_main", False)
        if is_main and (self._first is None or argv[:1] != [sys.executable]):
            # Later processes would inherit earlier requests; and a program may not be able to run this
            # Python.
            argv, is_main = [*argv, "-c", f"{self._python.source}\nmain()\n"], False
        request = Request(
            argv=argv,
            env={**self._env, **header.get("env", {})},
            cwd=header.get("cwd") or self.place.scratch,
            wall_limit_s=header["wall_limit_s"],
            builtin=header.get("builtin", ""),
            details=header.get("details", {}),
            is_main=is_main,
        )
        limits = self.place.limits
        # The output of a builtin is kept completely.
        head_bytes = request.details.get("max_bytes", KIB) if request.builtin else limits.output_head_bytes
        kept_bytes = (head_bytes, limits.output_tail_bytes)
        begin = partial(self._begin, request)
        job = Job(header["id"], begin, self, wall_limit_s=request.wall_limit_s, kept_bytes=kept_bytes)
        job.is_counted = not request.builtin
        self._jobs[job.number] = job
        if body:
            job.feed(body)
        if not header.get("has_stdin", False):
            job.close_stdin()

    def _open_shell(self, header: dict[str, Any], _: bytes) -> None:
        request = Request(
            argv=header["argv"],
            env={**self._env, **header["env"]},
            cwd=header["cwd"] or self.place.scratch,
            wall_limit_s=math.inf,
        )
        limits = self.place.limits
        begin = partial(start_command, self.place, request, has_status=True)
        kept_bytes = (limits.output_head_bytes, limits.output_tail_bytes)
        self._jobs[header["id"]] = Shell(header["id"], begin, self, kept_bytes=kept_bytes)

    def _begin(self, request: Request) -> Started:
        started, self._first = self._first, None
        if started is None:
            return start_command(self.place, request)
        started.order(request)
        return started

    def _run(self, header: dict[str, Any], command: bytes) -> None:
        shell = self._jobs.get(header["shell"])
        if isinstance(shell, Shell):
            shell.run(header["id"], command, header["wall_limit_s"])
        else:
            self.send({"id": header["id"], "failed": "ended", "why": "the shell has ended"})

    def _connect(self, header: dict[str, Any], _: bytes) -> None:
        if self._num_connecting >= _MAX_CONNECTING:
            self.send({"id": header["id"], "failed": "busy", "why": f"{_MAX_CONNECTING} connections wait"})
            return
        start_connect(header["id"], header["address"], self)
        self._num_connecting += 1

    def on_connected(self) -> None:
        """Count a connection attempt that has ended."""
        self._num_connecting -= 1
        _collect_children()

    def _pause(self) -> dict[str, Any]:
        try:
            self._stopped |= stop_programs(lambda: find_grandchildren(os.getpid()))
        except OSError as error:
            return {"failed": "busy", "why": f"it cannot be paused: {error}"}
        return {}

    def _resume(self) -> dict[str, Any]:
        continue_programs(self._stopped)
        self._stopped.clear()
        return {}

    def _describe(self) -> dict[str, Any]:
        return self._accounts.describe(self.place) | {"refused_calls": self._num_refused_calls}

    def _on_refused_call(self) -> None:
        assert self._egress is not None
        try:
            report = self._egress.read_report()
        except EOFError:
            self.selector.unregister(self._egress.control)
            self.lose("infra")
            return
        self._num_refused_calls += 1
        self.send({"refused_call": report})

    def on_run_end(self, header: dict[str, Any]) -> None:
        """Count a command that has ended."""
        self._accounts.add(header["duration_s"], oom_kills=header["oom_kills"])
        if header["oom_kills"] and _PROBE not in self._jobs:
            self._free_memory()

    def _free_memory(self) -> None:
        """Remove what no kill frees, by the smallest command; if that is killed too, the sandbox is lost."""
        request = Request(
            argv=[],
            env={},
            cwd="/",
            wall_limit_s=_PROBE_LIMIT_S,
            builtin="free",
            details={"uid": self.place.ipc_uid},
        )
        with suppress(OSError):
            begin = partial(start_command, self.place, request)
            job = Job(_PROBE, begin, self, wall_limit_s=_PROBE_LIMIT_S, kept_bytes=(KIB, KIB))
            job.is_counted = False
            self._jobs[_PROBE] = job
            job.close_stdin()

    def on_end(self, job: Job) -> None:
        """Send the result of a command that has ended."""
        del self._jobs[job.number]
        _collect_children()
        if self._is_ending and self._lost_kind != "from_inside":
            # Killed from outside, which is no result of the program; the client sees the connection close.
            return
        header, output = job.describe_end()
        self._accounts.add_cpu(header["cpu_s"])
        if job.number == _PROBE:
            if header["kind"] in (ExecKind.OOM, ExecKind.SIGNALED) and header["signal"] == signal.SIGKILL:
                self.lose("from_inside", "no memory is left for any command")
            return
        if job.is_counted:
            self.on_run_end(header)
        self.send({"id": job.number, **header}, output)

    # The end.

    def lose(self, kind: str, why: str = "") -> None:
        """End the sandbox and report the reason; once it is ending, a loss is this process's own doing."""
        if not self._is_ending:
            self._lost_kind, self._lost_why = kind, why
        self._is_ending = True

    def _end(self) -> None:
        """Kill everything, report the results that are still awaited, remove the place."""
        if self._egress is not None:
            self._egress.kill()
        if self.place.holder is not None:
            with suppress(KeyError):
                self.selector.unregister(self.place.holder)
        self.place.kill()
        now = time.monotonic()
        # With a holder the kernel kills all its processes, so a search is rarely needed.
        search_at = now if self.place.holder is None else now + _NAMESPACE_KILL_S
        stuck_at = search_at + STUCK_S
        while now < stuck_at:
            if now >= search_at:
                signal_descendants(os.getpid(), signal.SIGKILL)
            if not _collect_children():
                break
            time.sleep(0.001)
            now = time.monotonic()
        give_up_at = time.monotonic() + 2 * DETACH_S
        # All processes are dead, so every pipe ends.
        while self._jobs and time.monotonic() < give_up_at:
            for job in self._jobs.values():
                job.next_at = min(job.next_at, give_up_at)
            self._turn()
        self.place.close()
        if self._lost_kind:
            self.send({"lost": self._lost_kind, "why": self._lost_why})
        self._channel.socket.setblocking(True)
        self._flush()

    def send(self, header: dict[str, Any], body: bytes = b"", *, descriptor: int | None = None) -> None:
        """Send a frame, with a descriptor if there is one; if the client is gone, end."""
        if descriptor is not None:
            header["has_descriptor"] = True
        try:
            self._channel.send(header, body, descriptor=descriptor)
        except ConnectionError:
            self._is_ending = True
        self._watch_channel()

    def _flush(self) -> None:
        try:
            self._channel.flush()
        except ConnectionError:
            self._is_ending = True
        self._watch_channel()

    def _watch_channel(self) -> None:
        unsent = selectors.EVENT_WRITE if self._channel.num_unsent_bytes else 0
        key = self.selector.get_key(self._channel.socket)
        if key.events != selectors.EVENT_READ | unsent:
            self.selector.modify(self._channel.socket, selectors.EVENT_READ | unsent, key.data)


class _Accounts:
    """Counters of a sandbox's commands and resource use."""

    def __init__(self) -> None:
        self._num_commands = 0
        self._cpu_s = 0.0
        self._oom_kills = 0
        self._durations: deque[float] = deque(maxlen=_NUM_DURATIONS)

    def add(self, duration_s: float, *, oom_kills: int) -> None:
        """Count a command that has ended."""
        self._num_commands += 1
        self._oom_kills += oom_kills
        self._durations.append(duration_s)

    def add_cpu(self, used_s: float) -> None:
        """Count the processor time of a process tree that has ended."""
        self._cpu_s += used_s

    def describe(self, place: Place) -> dict[str, Any]:
        """Return the fields of `SandboxStats`, except those of the supervisor's own state."""
        pids = find_grandchildren(os.getpid())
        counted = place.cgroup.read_memory()
        now, peak = counted if counted is not None else (memory_bytes(pids, 0), None)
        if place.has_own_disk:
            disk = os.statvfs(place.changes)
            num_bytes = (disk.f_blocks - disk.f_bfree) * disk.f_frsize
            num_files = disk.f_files - disk.f_ffree
        else:
            num_bytes, num_files = measure_tree(place.changes)
        return {
            "cpu_s": self._cpu_s + cpu_s(pids),
            "memory_bytes": now,
            "memory_peak_bytes": peak,
            "processes": len(pids),
            "disk_bytes": num_bytes,
            "disk_files": num_files,
            "oom_kills": max(self._oom_kills, place.cgroup.count_oom_kills()),
            "commands": self._num_commands,
            "exec_p50_s": self._quantile(_MEDIAN),
            "exec_p99_s": self._quantile(_TAIL),
        }

    def _quantile(self, share: float) -> float | None:
        ordered = sorted(self._durations)
        return ordered[int(share * (len(ordered) - 1))] if ordered else None


def _collect_children() -> bool:
    """Reap children that have ended; return whether any still runs."""
    while True:
        try:
            pid, _ = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return False
        if pid == 0:
            return True
