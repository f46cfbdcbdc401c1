"""Calls of one function in worker processes that are killed at their deadline.

A hung verifier can ignore an alarm; a killed process cannot. Workers are forked from a process that has
built the function.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import pickle
import resource
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle, send_handle
from typing import Any, NoReturn

from strop.errors import CheckRefused
from strop.hardware.visible_devices import ENV_DEVICES, VISIBLE_DEVICES
from strop.rollout import Failure, FailureOwner
from strop.tasks.failures import to_failure

Handler = Callable[[Any], Any]
"""Takes a value that can be pickled, returns one."""
_BUILD_LIMIT_S = 600.0
_RETRY_FACTOR = 4.0
"""How much longer a call may take the second time: the machine may be busy."""
_MAX_BYTES = 1 << 32  # Of a worker's memory.
_MAX_CALLS = 1000
"""Calls of one worker: leaks do not add up."""
_MAX_ANSWER_BYTES = 1 << 24
"""Also finds what a verifier wrote into its connection: the length that a text begins with is larger."""
_Worker = tuple[int, Connection]
"""Its process id and its connection."""


class WorkerPool:
    """Runs `make_handler()(payload)` in up to `num_workers` processes at once, for one event loop.

    `make_handler` is called once, in the process that the workers are forked from; it must be picklable.
    `limit_s` is the wall time of one call (seconds).
    """

    def __init__(self, make_handler: Callable[[], Handler], *, num_workers: int, limit_s: float) -> None:
        self._make_handler = make_handler
        self._limit_s = limit_s
        self._places = asyncio.Semaphore(num_workers)
        self._starting = asyncio.Lock()
        self._server: tuple[subprocess.Popen[bytes], Connection] | None = None
        self._idle: list[_Worker] = []
        self._is_closed = False

    async def call(self, payload: Any, *, num_limits: int = 1) -> Any:
        """Return the handler's result for a value that can be pickled, or its failure.

        It may take `num_limits` times the limit. A failed call is retried once in a fresh worker.
        Raises: CheckRefused if the handler cannot be built.
        """
        limit_s = self._limit_s * num_limits
        async with self._places:
            reply = await self._try(payload, limit_s)
            if isinstance(reply, Failure):
                reply = await self._try(payload, limit_s * _RETRY_FACTOR, is_retry=True)
        return reply

    async def close(self) -> None:
        """End every process; running and later calls fail. May be called twice."""
        self._is_closed = True
        self._end_server()

    async def _try(self, payload: Any, limit_s: float, *, is_retry: bool = False) -> Any:
        worker = self._idle.pop() if self._idle and not is_retry else None
        is_sound = False
        try:
            pid, pipe = worker = worker or await self._fork()
            pipe.send(payload)
            await _wait_for(pipe, limit_s)
            result, failure = pickle.loads(pipe.recv_bytes(_MAX_ANSWER_BYTES))
            is_sound = failure is None
        except TimeoutError:
            failure = self._fail("timeout", f"no verdict after {limit_s:g} s")
        except (EOFError, OSError, pickle.UnpicklingError) as error:
            failure = self._fail("crash", str(error) or "the verifier's process ended")
        finally:
            if worker is not None and is_sound:
                self._idle.append(worker)
            elif worker is not None:
                pipe.close()
                if self._server is not None:
                    with suppress(OSError):  # A dead fork server has taken its workers with it.
                        self._server[1].send(pid)
        return result if failure is None else failure

    async def _fork(self) -> _Worker:
        async with self._starting:
            # It may have been killed, for example by the kernel when memory ran out.
            if self._server is None or self._server[0].poll() is not None:
                await self._start_server()
        if self._server is None:
            raise EOFError
        process, control = self._server
        ours, theirs = Pipe()
        try:
            with theirs:
                control.send(None)
                send_handle(control, theirs.fileno(), process.pid)
            return control.recv(), ours
        except (EOFError, OSError):
            # It is dying: the next try makes another one.
            self._end_server()
            raise

    async def _start_server(self) -> None:
        """Raises: CheckRefused if the handler cannot be built; EOFError if the pool is closed."""
        if self._is_closed:
            raise EOFError
        ours, theirs = Pipe()
        devices = os.environ.get(ENV_DEVICES)
        added = {} if devices is None else {VISIBLE_DEVICES: devices}
        with theirs:
            process = subprocess.Popen(  # noqa: ASYNC220 (it takes milliseconds)
                [sys.executable, "-c", f"import {__name__} as pool; pool.serve({theirs.fileno()})"],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
                env={**os.environ, **added},
            )
        self._server = process, ours
        failure: Failure | None = self._fail("crash", "it ended without a word, or took too long")
        try:
            with suppress(EOFError, OSError):
                ours.send(self._make_handler)
                await _wait_for(ours, _BUILD_LIMIT_S)
                failure = ours.recv()
        finally:
            if failure is not None:
                self._end_server()
        if failure is not None and not self._is_closed:
            raise CheckRefused(
                f"a verifier's process could not be made ready: {failure.detail}",
                allowed="a task that can be built in a process of its own",
                next_step="mend what the last line names",
            )

    def _end_server(self) -> None:
        if self._server is not None:
            process, _ = self._server
            self._server = None
            process.terminate()
            process.wait()

    def _fail(self, kind: str, detail: str) -> Failure:
        owner = FailureOwner.INFRA if self._is_closed else FailureOwner.TASK
        return Failure(owner=owner, kind=kind, detail=detail)


async def _wait_for(pipe: Connection, limit_s: float) -> None:
    """Wait until something can be read. Raises: TimeoutError."""
    ready, loop = asyncio.Event(), asyncio.get_running_loop()
    loop.add_reader(pipe.fileno(), ready.set)
    try:
        async with asyncio.timeout(limit_s):
            await ready.wait()
    finally:
        loop.remove_reader(pipe.fileno())


# The fork server. It has one thread, which makes forking safe; as the parent of all workers it kills by ids
# that are not reused before it reaps. When the process of the pool dies, the connection ends, and so do they.


def serve(descriptor: int) -> None:
    """Build the handler, tell the pool, then fork and end workers until it is gone."""
    pool = Connection(descriptor)
    handler, failure = _attempt(pool.recv())
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())
    pool.send(failure)
    workers: set[int] = set()
    try:
        while failure is None:
            if (ended := pool.recv()) is None:
                theirs = recv_handle(pool)
                if (pid := os.fork()) == 0:
                    pool.close()
                    _become_worker(handler, Connection(theirs))
                os.close(theirs)
                os.setpgid(pid, pid)
                workers.add(pid)
                pool.send(pid)
            elif ended in workers:
                workers.remove(ended)
                _end(ended)
    finally:
        for pid in workers:
            _end(pid)


def _end(pid: int) -> None:
    with suppress(OSError):
        os.killpg(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


def _become_worker(handler: Handler, pool: Connection) -> NoReturn:
    """Serve one connection, then exit; never return into the server's loop."""
    try:
        if sys.platform == "linux":
            ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)  # PR_SET_PDEATHSIG
        _, hard_bytes = resource.getrlimit(resource.RLIMIT_AS)
        with suppress(ValueError):  # A lower limit that the scheduler has set for the job stays.
            resource.setrlimit(resource.RLIMIT_AS, (_MAX_BYTES, hard_bytes))
        for _ in range(_MAX_CALLS):
            pool.send(_attempt(partial(handler, pool.recv())))
    finally:
        os._exit(0)


def _attempt(work: Callable[[], Any]) -> tuple[Any, Failure | None]:
    """Run a task's own code; return its result, or its failure. Errors of the whole run are reported too."""
    try:
        return work(), None
    except (Exception, SystemExit) as error:
        return None, to_failure(error, FailureOwner.TASK)
