"""Calls of one function in processes that can be killed.

Deadlines are kept here, by kill: a hung verifier neither holds a thread nor ignores an alarm. Every
call gets the result of its own request or a `CallFailure`; nothing is lost and nothing waits for ever.

A call that has had `SLOW_CPU_S` gives its place to the next one and goes on at low priority: so an
endless one costs the others that time and a fork. CPU time is counted, because on a busy machine every
call takes long; one that only waits gives its place away after `SLOW_WALL_S`. At low priority it gets a
tenth of a core that another process wants: with a limit of 2 s, and four times as much for the second
try, a call that takes 0.8 s alone has its verdict even there.
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
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from strop.errors import CheckRefused, CorruptRecord, explain_refusal
from strop.tasks.judging import nursery
from strop.tasks.judging.worker import Worker

SLOW_CPU_S = 0.05
SLOW_WALL_S = 0.5
_LOOK_EVERY_S = 0.02
MAX_SLOW = 16
"""Calls that may be aside at once, where nothing else is said; beyond them, others wait."""
_BUILD_LIMIT_S = 600.0
_RETRY_FACTOR = 4.0
CLOSED = "closed"


@dataclass(frozen=True, kw_only=True, slots=True)
class CallFailure:
    """Why a call has no result, after it was tried a second time in a fresh process."""

    kind: str
    """'timeout', 'crash', 'closed', or the class of the exception that was raised."""
    detail: str


class _PoolClosed(Exception):
    """Raised where a call would go on in a pool that was closed under it; it ends as a `CallFailure`."""


class WorkerPool:
    """Runs `make_handler()(payload)` in up to `num_workers` processes at once.

    `make_handler` is called once, in the process that the workers are forked from; it must be
    picklable. Units: `limit_s` is the wall time of one call. `max_slow` calls may be aside at once.
    Usable from one event loop.
    """

    def __init__(
        self,
        make_handler: Callable[[], nursery.Handler],
        *,
        num_workers: int,
        limit_s: float,
        max_bytes: int = 1 << 32,
        max_slow: int = MAX_SLOW,
        log_path: Path | None = None,
    ) -> None:
        self._make_handler = make_handler
        self._limit_s = limit_s
        self._max_bytes = max_bytes
        self._log_path = log_path
        self._num_workers = num_workers
        self._places = _Places(num_workers, max_slow)
        self._starting = asyncio.Lock()
        self._starts: set[asyncio.Task[Worker]] = set()
        self._nonces = itertools.count()
        self._idle: list[Worker] = []
        self._busy: set[Worker] = set()
        self._is_closed = False
        self._num_under_way = 0
        self._none_under_way = asyncio.Event()
        self._nursery: tuple[subprocess.Popen[bytes], socket.socket] | None = None
        self.counts: Counter[str] = Counter()
        """How often: 'call', 'start' (of a worker), 'timeout', 'crash', 'error', 'retry'."""

    async def call(self, payload: Any) -> Any:
        """Return what the handler makes of a JSON value, or a `CallFailure`.

        What fails is tried once more in a fresh worker; after a time-out with four times the limit.
        Raises: CheckRefused if the handler cannot be built.
        """
        self.counts["call"] += 1
        self._num_under_way += 1
        try:
            return await self._try_twice(payload)
        except _PoolClosed:
            return CallFailure(kind=CLOSED, detail="the pool was closed before there was a result")
        finally:
            self._num_under_way -= 1
            if not self._num_under_way:
                self._none_under_way.set()

    async def close(self) -> None:
        """End every process; what is under way, and what is called later, fails. May be called twice."""
        self._is_closed = True
        for worker in self._busy:
            worker.close()
        # A call that was cancelled may have left a start behind.
        await asyncio.gather(*self._starts, return_exceptions=True)
        if self._num_under_way:
            self._none_under_way.clear()
            await self._none_under_way.wait()
        await self._end_nursery()

    async def _try_twice(self, payload: Any) -> Any:
        reply = await self._try(payload, self._limit_s)
        if not isinstance(reply, CallFailure):
            return reply
        self.counts["retry"] += 1
        factor = _RETRY_FACTOR if reply.kind == "timeout" else 1.0
        return await self._try(payload, self._limit_s * factor, is_retry=True)

    def _require_open(self) -> None:
        if self._is_closed:
            raise _PoolClosed

    async def _try(self, payload: Any, limit_s: float, *, is_retry: bool = False) -> Any:
        self._require_open()
        place = await self._places.take()
        try:
            self._require_open()
            worker = await self._take_worker(is_fresh=is_retry)
            is_usable = False
            self._busy.add(worker)
            try:
                self._require_open()
                reply = await self._ask(worker, payload, limit_s, place)
                is_usable = not isinstance(reply, CallFailure)
            finally:
                self._busy.discard(worker)
                # A call that was cancelled leaves its worker in the middle of something.
                if is_usable and not worker.is_spent and len(self._idle) < self._num_workers:
                    self._idle.append(worker)
                else:
                    self._end(worker)
            return reply
        finally:
            self._places.give_back(place)

    async def _ask(self, worker: Worker, payload: Any, limit_s: float, place: _Place) -> Any:
        nonce = next(self._nonces)
        try:
            answer = worker.ask({"nonce": nonce, "payload": payload})
            await self._wait(answer, worker, limit_s, place)
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

    async def _wait(self, answer: asyncio.Future[Any], worker: Worker, limit_s: float, place: _Place) -> None:
        """Wait until an answer is there or, at the limit, cancelled; let others go first if it takes long."""
        clock = asyncio.get_running_loop().time
        began_at = clock()
        try:
            while not answer.done() and (rest_s := began_at + limit_s - clock()) > 0:
                await asyncio.wait({answer}, timeout=rest_s if worker.is_low else min(rest_s, _LOOK_EVERY_S))
                if answer.done() or worker.is_low:
                    continue
                has_computed = worker.call_cpu_s >= SLOW_CPU_S
                is_slow = has_computed or clock() - began_at >= SLOW_WALL_S
                if is_slow and self._places.move_aside(place) and has_computed:
                    worker.step_back()
        finally:
            answer.cancel()  # Which changes nothing where it is there.

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
                # The nursery was killed, for example by the kernel when memory ran out.
                await self._end_nursery()
                pid, connection = await asyncio.to_thread(_fork, await self._require_control())
        self.counts["start"] += 1
        _, worker = await asyncio.get_running_loop().create_connection(lambda: Worker(pid), sock=connection)
        return worker

    def _end(self, worker: Worker) -> None:
        worker.close()
        if self._nursery is not None:
            with suppress(OSError):  # A dead nursery has taken its workers with it.
                # Orders are a few bytes: they never wait for the nursery.
                self._nursery[1].send(nursery.ORDER.pack(nursery.END, worker.pid))

    async def _end_nursery(self) -> None:
        for worker in self._idle:
            worker.close()
        self._idle.clear()
        if self._nursery is not None:
            process, control = self._nursery
            self._nursery = None
            control.close()
            await asyncio.to_thread(process.wait)

    async def _require_control(self) -> socket.socket:
        """Return the socket that orders go over; start the process behind it if there is none.

        Raises: CheckRefused if it cannot build the handler.
        """
        if self._nursery is None:
            process, control = await asyncio.to_thread(self._spawn_nursery)
            answer = await asyncio.to_thread(_hear, control)
            if answer[:1] != nursery.READY:
                control.close()
                process.kill()
                await asyncio.to_thread(process.wait)
                cause = answer[1:].decode(errors="replace")
                raise CheckRefused(
                    explain_refusal(
                        f"a verifier's process could not be made ready: {cause}",
                        allowed="a task that can be built in a process of its own",
                        next_step="mend what the last line names",
                    )
                )
            control.settimeout(None)
            self._nursery = process, control
        return self._nursery[1]

    def _spawn_nursery(self) -> tuple[subprocess.Popen[bytes], socket.socket]:
        job = pickle.dumps((self._make_handler, self._max_bytes))
        ours, theirs = socket.socketpair()
        log_path = Path(os.devnull) if self._log_path is None else self._log_path
        with theirs, log_path.open("ab") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", nursery.__name__, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        ours.settimeout(_BUILD_LIMIT_S)
        ours.sendall(struct.pack("!I", len(job)) + job)
        return process, ours


@dataclass(kw_only=True, slots=True)
class _Place:
    """One call's place among those that run at once."""

    is_aside: bool = False


class _Places:
    """Lets a number of calls run at once, and slow ones beside them."""

    def __init__(self, num_places: int, max_aside: int) -> None:
        self._free = asyncio.Semaphore(num_places)
        self._max_aside = max_aside
        self._num_aside = 0

    async def take(self) -> _Place:
        await self._free.acquire()
        return _Place()

    def move_aside(self, place: _Place) -> bool:
        """Give a slow call's place to the next one, if it may be aside; return whether it is."""
        if not place.is_aside and self._num_aside < self._max_aside:
            place.is_aside = True
            self._num_aside += 1
            self._free.release()
        return place.is_aside

    def give_back(self, place: _Place) -> None:
        if place.is_aside:
            self._num_aside -= 1
        else:
            self._free.release()


def _fork(control: socket.socket) -> tuple[int, socket.socket]:
    """Have a worker forked. Returns its process id and our end of its connection.

    Raises: OSError or struct.error if the nursery is gone.
    """
    ours, theirs = socket.socketpair()
    try:
        with theirs:
            socket.send_fds(control, [nursery.ORDER.pack(nursery.FORK, 0)], [theirs.fileno()])
        (pid,) = struct.unpack("!i", control.recv(4, socket.MSG_WAITALL))
    except (OSError, struct.error):
        ours.close()
        raise
    return int(pid), ours


def _hear(connection: socket.socket) -> bytes:
    """Return all that a nursery says about its start; empty if it ended or took too long."""
    said = b""
    try:
        while not said.startswith(nursery.READY) and (part := connection.recv(1 << 16)):
            said += part
    except TimeoutError:
        return nursery.BROKEN + f"not ready after {_BUILD_LIMIT_S:g} s".encode()
    return said or nursery.BROKEN + b"it ended without a word"
