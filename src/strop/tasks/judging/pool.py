"""Calls of one function in worker processes that are killed at their deadline.

A hung verifier neither holds a thread nor can ignore an alarm. Every call gets the result of its own request
or a `CallFailure`. A call that takes long gives its place to the next one and goes on at low priority: an
endless one costs the others little.
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
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from strop.errors import CheckRefused, CorruptRecord
from strop.hardware.process import step_back
from strop.hardware.visible_devices import ENV_DEVICES, VISIBLE_DEVICES
from strop.sandbox.frames import pack, unpack
from strop.tasks.judging import fork_server

_SLOW_S = 0.5
_MAX_SLOW = 16
"""Calls that go on beside those that have places."""
_NICENESS_STEP = 10
_BUILD_LIMIT_S = 600.0
_RETRY_FACTOR = 4.0
_MAX_CALLS = 1000
"""Calls of one worker: leaks do not add up."""
_CHUNK_BYTES = 1 << 16
CLOSED = "closed"


@dataclass(frozen=True, kw_only=True, slots=True)
class CallFailure:
    """The failure of a call, after a retry in a fresh process."""

    kind: str
    """'timeout', 'crash', 'closed', or the class of the exception that was raised."""
    detail: str


class WorkerPool:
    """Runs `make_handler()(payload)` in up to `num_workers` processes at once.

    `make_handler` is called once, in the process that the workers are forked from; it must be
    picklable. `limit_s` is the wall time of one call (seconds). Usable from one event loop.
    """

    def __init__(
        self,
        make_handler: Callable[[], fork_server.Handler],
        *,
        num_workers: int,
        limit_s: float,
        max_bytes: int = 1 << 32,
    ) -> None:
        self._job = (make_handler, max_bytes)
        self._limit_s = limit_s
        self._places = asyncio.Semaphore(num_workers)
        self._slow: set[Worker] = set()
        self._starting = asyncio.Lock()
        self._nonces = itertools.count()
        self._idle: list[Worker] = []
        self._starts: set[asyncio.Task[Worker]] = set()
        self._calls: set[asyncio.Task[Any]] = set()
        self._is_closed = False
        self._fork_server: tuple[subprocess.Popen[bytes], socket.socket] | None = None
        self.counts: Counter[str] = Counter()
        """Counts of 'call', 'start' (of a worker), 'timeout', 'crash', 'error', 'retry'."""

    async def call(self, payload: Any, *, num_limits: int = 1) -> Any:
        """Return the handler's result for a JSON value, or a `CallFailure`.

        It may take `num_limits` times the limit. A failed call is retried once in a fresh worker; after a
        time-out with four times that: the machine may be busy.
        Raises: CheckRefused if the handler cannot be built.
        """
        self.counts["call"] += 1
        call = asyncio.ensure_future(self._call(payload, self._limit_s * num_limits))
        self._calls.add(call)
        call.add_done_callback(self._calls.discard)
        try:
            return await call
        except asyncio.CancelledError:
            call.cancel()
            if self._is_closed and not _is_cancelled():
                return CallFailure(kind=CLOSED, detail="the pool was closed before there was a result")
            raise

    async def close(self) -> None:
        """End every process; running and later calls fail. May be called twice."""
        self._is_closed = True
        for call in self._calls:
            call.cancel()
        await asyncio.gather(*self._calls, *self._starts, return_exceptions=True)
        await asyncio.sleep(0)  # Those that wait for them hear of it.
        await self._end_fork_server()

    async def _call(self, payload: Any, limit_s: float) -> Any:
        if self._is_closed:
            raise asyncio.CancelledError
        reply = await self._try(payload, limit_s)
        if isinstance(reply, CallFailure):
            self.counts["retry"] += 1
            factor = _RETRY_FACTOR if reply.kind == "timeout" else 1.0
            reply = await self._try(payload, limit_s * factor, is_retry=True)
        return reply

    async def _try(self, payload: Any, limit_s: float, *, is_retry: bool = False) -> Any:
        await self._places.acquire()
        try:
            worker = await self._take_worker(is_fresh=is_retry)
        except BaseException:
            self._places.release()
            raise
        watching = asyncio.ensure_future(self._watch(worker))
        try:
            return await self._ask(worker, payload, limit_s)
        finally:
            watching.cancel()
            if worker in self._slow:
                self._slow.discard(worker)
            else:
                self._places.release()

    async def _watch(self, worker: Worker) -> None:
        """Let a slow call go on beside those that have places, if there is room, and low if it computes."""
        begun_s = worker.cpu_s
        await asyncio.sleep(_SLOW_S)
        if len(self._slow) < _MAX_SLOW:
            self._slow.add(worker)
            self._places.release()
        # On a busy machine each call takes long: its processor time tells those that compute.
        while worker.cpu_s - begun_s < _SLOW_S or not step_back(worker.pid, by=_NICENESS_STEP):  # noqa: ASYNC110
            await asyncio.sleep(_SLOW_S)
        worker.is_low = True

    async def _ask(self, worker: Worker, payload: Any, limit_s: float) -> Any:
        nonce = next(self._nonces)
        try:
            async with asyncio.timeout(limit_s):
                answer = await worker.ask({"nonce": nonce, "payload": payload})
            if answer["nonce"] != nonce:
                raise CorruptRecord("the verifier's process answered another request")
        except (TimeoutError, OSError, CorruptRecord) as error:
            kind = "timeout" if isinstance(error, TimeoutError) else "crash"
            detail = f"no verdict after {limit_s:g} s" if kind == "timeout" else str(error)
            self.counts[kind] += 1
            self._end(worker)
            return CallFailure(kind=kind, detail=detail)
        except BaseException:
            # A cancelled call leaves its worker in the middle of the request.
            self._end(worker)
            raise
        if worker.is_low or worker.num_calls >= _MAX_CALLS:
            self._end(worker)
        else:
            self._idle.append(worker)
        if "error" in answer:
            self.counts["error"] += 1
            kind, detail = answer["error"]
            return CallFailure(kind=kind, detail=detail)
        return answer["result"]

    async def _take_worker(self, *, is_fresh: bool) -> Worker:
        while self._idle and not is_fresh:
            worker = self._idle.pop()
            if not worker.reader.at_eof():
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
            try:
                pid, connection = await asyncio.to_thread(_fork, await self._require_control())
            except (OSError, struct.error):
                # The fork server was killed, for example by the kernel when memory ran out.
                await self._end_fork_server()
                pid, connection = await asyncio.to_thread(_fork, await self._require_control())
        self.counts["start"] += 1
        return Worker(pid, *await asyncio.open_connection(sock=connection))

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
            self._fork_server = await asyncio.to_thread(_start_fork_server, pickle.dumps(self._job))
        return self._fork_server[1]


class Worker:
    """The pool's side of a worker process. One call at a time."""

    def __init__(self, pid: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.pid = pid
        self.reader = reader
        self.num_calls = 0
        self.is_low = False
        """Whether it has a low priority, which cannot be raised again."""
        self._writer = writer

    @property
    def cpu_s(self) -> float:
        """Processor time (seconds) of its process; the clock's where the system has none of a process."""
        try:
            # Linux's number for the clock that clock_getcpuclockid(3) returns.
            return time.clock_gettime((~self.pid << 3) | 2)
        except OSError:
            return time.monotonic()

    async def ask(self, call: Any) -> dict[str, Any]:
        """Return the answer to a call. Raises: CorruptRecord; OSError if the process has ended."""
        self.num_calls += 1
        self._writer.write(pack(call))
        received = bytearray()
        while data := await self.reader.read(_CHUNK_BYTES):
            received += data
            for answer, _ in unpack(received):
                return answer
        raise ConnectionResetError("the verifier's process ended")

    def close(self) -> None:
        """Close our end."""
        self._writer.transport.abort()


def _is_cancelled() -> bool:
    """Whether the running task itself was cancelled, and not only what it waits for."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def _start_fork_server(job: bytes) -> tuple[subprocess.Popen[bytes], socket.socket]:
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
        while not report.startswith(fork_server.READY) and (part := ours.recv(_CHUNK_BYTES)):
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
