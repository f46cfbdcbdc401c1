"""Calls of one function in worker processes that are killed at their deadline.

A hung verifier neither holds a thread nor can ignore an alarm. Every call gets the result of its own request
or a `CallFailure`.

A call that has used `SLOW_CPU_S` of CPU time gives its slot to the next one and continues in the background
at low priority, so an endless call costs the others that time and a fork. CPU time counts because every call
takes long on a busy machine; a call that only waits gives up its slot after `SLOW_WALL_S`. At low priority
it gets a tenth of a contended core: with a limit of 2 s, and four times that for the retry, a call that
takes 0.8 s alone still finishes under contention.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import pickle
import socket
import struct
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from strop.errors import CheckRefused, CorruptRecord
from strop.hardware.process import step_back
from strop.hardware.visible_devices import ENV_DEVICES, VISIBLE_DEVICES
from strop.sandbox.frames import pack, unpack
from strop.tasks.judging import fork_server

SLOW_CPU_S = 0.05
SLOW_WALL_S = 0.5
_LOOK_EVERY_S = 0.02
MAX_SLOW = 16
"""Default number of calls that may run in the background at once; further ones keep their slots."""
_BUILD_LIMIT_S = 600.0
_RETRY_FACTOR = 4.0
CLOSED = "closed"


@dataclass(frozen=True, kw_only=True, slots=True)
class CallFailure:
    """The failure of a call, after a retry in a fresh process."""

    kind: str
    """'timeout', 'crash', 'closed', or the class of the exception that was raised."""
    detail: str


class _PoolClosed(Exception):
    """Raised where the pool was closed during a call, which then ends as a `CallFailure`."""


class WorkerPool:
    """Runs `make_handler()(payload)` in up to `num_workers` processes at once.

    `make_handler` is called once, in the process that the workers are forked from; it must be
    picklable. `limit_s` is the wall time of one call (seconds). `max_slow` calls may run in the
    background at once. Usable from one event loop.
    """

    def __init__(
        self,
        make_handler: Callable[[], fork_server.Handler],
        *,
        num_workers: int,
        limit_s: float,
        max_bytes: int = 1 << 32,
        max_slow: int = MAX_SLOW,
    ) -> None:
        self._make_handler = make_handler
        self._limit_s = limit_s
        self._max_bytes = max_bytes
        self._num_workers = num_workers
        self._slots = _Slots(num_workers, max_slow)
        self._starting = asyncio.Lock()
        self._starts: set[asyncio.Task[Worker]] = set()
        self._nonces = itertools.count()
        self._idle: list[Worker] = []
        self._busy: set[Worker] = set()
        self._is_closed = False
        self._num_under_way = 0
        self._none_under_way = asyncio.Event()
        self._fork_server: tuple[subprocess.Popen[bytes], socket.socket] | None = None
        self.counts: Counter[str] = Counter()
        """Counts of 'call', 'start' (of a worker), 'timeout', 'crash', 'error', 'retry'."""

    async def call(self, payload: Any, *, num_limits: int = 1) -> Any:
        """Return the handler's result for a JSON value, or a `CallFailure`.

        It may take `num_limits` times the limit. A failed call is retried once in a fresh worker; after a
        time-out with four times that.
        Raises: CheckRefused if the handler cannot be built.
        """
        self.counts["call"] += 1
        self._num_under_way += 1
        try:
            limit_s = self._limit_s * num_limits
            reply = await self._try(payload, limit_s)
            if not isinstance(reply, CallFailure):
                return reply
            self.counts["retry"] += 1
            factor = _RETRY_FACTOR if reply.kind == "timeout" else 1.0
            return await self._try(payload, limit_s * factor, is_retry=True)
        except _PoolClosed:
            return CallFailure(kind=CLOSED, detail="the pool was closed before there was a result")
        finally:
            self._num_under_way -= 1
            if not self._num_under_way:
                self._none_under_way.set()

    async def close(self) -> None:
        """End every process; running and later calls fail. May be called twice."""
        self._is_closed = True
        for worker in self._busy:
            worker.close()
        # A cancelled call may have left a start behind.
        await asyncio.gather(*self._starts, return_exceptions=True)
        if self._num_under_way:
            self._none_under_way.clear()
            await self._none_under_way.wait()
        await self._end_fork_server()

    def _require_open(self) -> None:
        if self._is_closed:
            raise _PoolClosed

    async def _try(self, payload: Any, limit_s: float, *, is_retry: bool = False) -> Any:
        self._require_open()
        slot = await self._slots.acquire()
        try:
            self._require_open()
            worker = await self._take_worker(is_fresh=is_retry)
            is_usable = False
            self._busy.add(worker)
            try:
                self._require_open()
                reply = await self._ask(worker, payload, limit_s, slot)
                is_usable = not isinstance(reply, CallFailure)
            finally:
                self._busy.discard(worker)
                # A cancelled call leaves its worker in the middle of the request.
                if is_usable and not worker.is_spent and len(self._idle) < self._num_workers:
                    self._idle.append(worker)
                else:
                    self._end(worker)
            return reply
        finally:
            self._slots.release(slot)

    async def _ask(self, worker: Worker, payload: Any, limit_s: float, slot: _Slot) -> Any:
        nonce = next(self._nonces)
        try:
            answer = worker.ask({"nonce": nonce, "payload": payload})
            await self._wait(answer, worker, limit_s, slot)
            if answer.cancelled():
                self.counts["timeout"] += 1
                return CallFailure(kind="timeout", detail=f"no verdict after {limit_s:g} s")
            reply = answer.result()
        except (OSError, CorruptRecord) as error:
            self._require_open()
            self.counts["crash"] += 1
            return CallFailure(kind="crash", detail=f"the verifier's process ended ({error})")
        if reply.get("nonce") != nonce:
            self.counts["crash"] += 1
            return CallFailure(kind="crash", detail="the verifier's process answered another request")
        worker.note_use(reply)
        if "error" in reply:
            self.counts["error"] += 1
            kind, detail = reply["error"]
            return CallFailure(kind=kind, detail=detail)
        return reply["result"]

    async def _wait(self, answer: asyncio.Future[Any], worker: Worker, limit_s: float, slot: _Slot) -> None:
        """Wait for an answer, cancelled at the limit; move the call to the background if it is slow."""
        clock = asyncio.get_running_loop().time
        began_at = clock()
        try:
            while not answer.done() and (rest_s := began_at + limit_s - clock()) > 0:
                await asyncio.wait({answer}, timeout=rest_s if worker.is_low else min(rest_s, _LOOK_EVERY_S))
                if answer.done() or worker.is_low:
                    continue
                has_computed = worker.call_cpu_s >= SLOW_CPU_S
                is_slow = has_computed or clock() - began_at >= SLOW_WALL_S
                if is_slow and self._slots.move_to_background(slot) and has_computed:
                    worker.step_back()
        finally:
            answer.cancel()  # No effect if it is done.

    async def _take_worker(self, *, is_fresh: bool) -> Worker:
        while self._idle and not is_fresh:
            worker = self._idle.pop()
            if not worker.is_gone:
                return worker
            self._end(worker)
        start = asyncio.ensure_future(self._start_worker())
        self._starts.add(start)
        start.add_done_callback(self._starts.discard)
        try:
            return await asyncio.shield(start)
        except asyncio.CancelledError:
            start.add_done_callback(self._keep_started)
            raise

    def _keep_started(self, start: asyncio.Task[Worker]) -> None:
        """Keep a worker whose call was cancelled while it started."""
        if not start.cancelled() and start.exception() is None:
            self._idle.append(start.result())

    async def _start_worker(self) -> Worker:
        async with self._starting:
            self._require_open()
            try:
                pid, connection = await asyncio.to_thread(_fork, await self._require_control())
            except (OSError, struct.error):
                # The fork server was killed, for example by the kernel when memory ran out.
                await self._end_fork_server()
                pid, connection = await asyncio.to_thread(_fork, await self._require_control())
        self.counts["start"] += 1
        _, worker = await asyncio.get_running_loop().create_connection(lambda: Worker(pid), sock=connection)
        return worker

    def _end(self, worker: Worker) -> None:
        worker.close()
        if self._fork_server is not None:
            with suppress(OSError):  # A dead fork server has taken its workers with it.
                # Orders are a few bytes: sending never blocks.
                self._fork_server[1].send(fork_server.ORDER.pack(fork_server.END, worker.pid))

    async def _end_fork_server(self) -> None:
        for worker in self._idle:
            worker.close()
        self._idle.clear()
        if self._fork_server is not None:
            process, control = self._fork_server
            self._fork_server = None
            control.close()
            await asyncio.to_thread(process.wait)

    async def _require_control(self) -> socket.socket:
        """Return the control socket of the fork server; start the server if there is none.

        Raises: CheckRefused if it cannot build the handler.
        """
        if self._fork_server is None:
            self._fork_server = await asyncio.to_thread(self._start_fork_server)
        return self._fork_server[1]

    def _start_fork_server(self) -> tuple[subprocess.Popen[bytes], socket.socket]:
        job = pickle.dumps((self._make_handler, self._max_bytes))
        ours, theirs = socket.socketpair()
        devices = os.environ.get(ENV_DEVICES)
        added = {} if devices is None else {VISIBLE_DEVICES: devices}
        with theirs:
            process = subprocess.Popen(
                [sys.executable, "-m", fork_server.__name__, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
                env={**os.environ, **added},
            )
        ours.settimeout(_BUILD_LIMIT_S)
        ours.sendall(struct.pack("!I", len(job)) + job)
        report = b""
        try:
            while not report.startswith(fork_server.READY) and (part := ours.recv(1 << 16)):
                report += part
        except TimeoutError:
            report = fork_server.BROKEN + f"not ready after {_BUILD_LIMIT_S:g} s".encode()
        if not report.startswith(fork_server.READY):
            ours.close()
            process.kill()
            process.wait()
            cause = report[1:].decode(errors="replace") if report else "it ended without a word"
            raise CheckRefused(
                f"a verifier's process could not be made ready: {cause}",
                allowed="a task that can be built in a process of its own",
                next_step="mend what the last line names",
            )
        ours.settimeout(None)
        return process, ours


@dataclass(kw_only=True, slots=True)
class _Slot:
    """The slot of one call."""

    is_background: bool = False


class _Slots:
    """Limits how many calls run at once, and how many slow ones run in the background."""

    def __init__(self, num_slots: int, max_background: int) -> None:
        self._free = asyncio.Semaphore(num_slots)
        self._max_background = max_background
        self._num_background = 0

    async def acquire(self) -> _Slot:
        await self._free.acquire()
        return _Slot()

    def move_to_background(self, slot: _Slot) -> bool:
        """Free a slow call's slot if the background has room; return whether the call is there."""
        if not slot.is_background and self._num_background < self._max_background:
            slot.is_background = True
            self._num_background += 1
            self._free.release()
        return slot.is_background

    def release(self, slot: _Slot) -> None:
        if slot.is_background:
            self._num_background -= 1
        else:
            self._free.release()


def _fork(control: socket.socket) -> tuple[int, socket.socket]:
    """Fork a worker; return its process id and our end of its connection.

    Raises: OSError or struct.error if the fork server is gone.
    """
    ours, theirs = socket.socketpair()
    try:
        with theirs:
            socket.send_fds(control, [fork_server.ORDER.pack(fork_server.FORK, 0)], [theirs.fileno()])
        (pid,) = struct.unpack("!i", control.recv(4, socket.MSG_WAITALL))
    except (OSError, struct.error):
        ours.close()
        raise
    return int(pid), ours


_NICENESS_STEP = 10
_MAX_CALLS = 1000
_MAX_PEAK_BYTES = 1 << 30


class Worker(asyncio.Protocol):
    """The pool's side of a worker process: connection, priority and resource use. One call at a time."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.is_gone = False
        self.is_low = False
        """Whether it has a low priority, which cannot be raised again."""
        self._num_calls = 0
        self._peak_bytes = 0
        self._cpu_s = 0.0
        self._asked_at = 0.0
        self._received = bytearray()
        self._answer: asyncio.Future[dict[str, Any]] | None = None
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        """Resolve the call once its answer is complete."""
        self._received += data
        try:
            for answer, _ in unpack(self._received):
                if self._answer is not None and not self._answer.done():
                    self._answer.set_result(answer)
        except CorruptRecord as error:
            self._fail(error)

    def connection_lost(self, exc: Exception | None) -> None:
        """Fail the pending call."""
        self.is_gone = True
        self._fail(exc or ConnectionResetError("its connection was closed"))

    def ask(self, call: Any) -> asyncio.Future[dict[str, Any]]:
        """Send a call; the future gets its answer, CorruptRecord or OSError.

        Raises: CorruptRecord if the call is too large.
        """
        self._num_calls += 1
        self._asked_at = time.monotonic()
        self._answer = asyncio.get_running_loop().create_future()
        assert self._transport is not None
        self._transport.write(pack(call))
        if self.is_gone:
            self._fail(ConnectionResetError("it ended before it was asked"))
        return self._answer

    def note_use(self, answer: Mapping[str, Any]) -> None:
        """Record the memory and CPU time that an answer reports."""
        self._peak_bytes, self._cpu_s = answer["peak_bytes"], answer["cpu_s"]

    def close(self) -> None:
        """Close our end."""
        if self._transport is not None:
            self._transport.abort()

    def step_back(self) -> None:
        """Lower the priority for good. Only after a first answer: the worker then has its own session."""
        # Linux limits how often a niceness may change; the next poll tries again.
        self.is_low = step_back(self.pid, by=_NICENESS_STEP)

    @property
    def call_cpu_s(self) -> float:
        """CPU time (seconds) of its current call; wall time if the system has no such clock."""
        try:
            # Linux's number for the clock that clock_getcpuclockid(3) returns.
            return time.clock_gettime((~self.pid << 3) | 2) - self._cpu_s
        except OSError:
            return time.monotonic() - self._asked_at

    @property
    def is_spent(self) -> bool:
        """Whether to replace it: before leaks add up, or because its priority cannot be raised again."""
        return (
            self.is_gone or self.is_low or self._num_calls >= _MAX_CALLS or self._peak_bytes > _MAX_PEAK_BYTES
        )

    def _fail(self, error: Exception) -> None:
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(error)
