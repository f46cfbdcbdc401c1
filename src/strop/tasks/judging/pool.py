"""Calls of one function in worker processes that are killed at their limit.

A hung verifier can ignore an alarm; a killed process cannot. Workers are forked from a process that has
built the function. The parent of each is its guard, which kills it when its connection is closed.
"""

from __future__ import annotations

import asyncio
import os
import pickle
import resource
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from multiprocessing.connection import wait
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
_MAX_DIGITS = 1 << 25
"""Of an answer, which is a line of hexadecimal digits: what a verifier writes itself is none."""
_Worker = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class WorkerPool:
    """Runs `make_handler()(payload)` in up to `num_workers` processes at once, for one event loop.

    `make_handler` is called once, in the process that the workers are forked from; it must be picklable.
    `limit_s` is the wall time of one call (seconds).
    """

    def __init__(self, make_handler: Callable[[], Handler], *, num_workers: int, limit_s: float) -> None:
        self._make_handler = make_handler
        self._limit_s = limit_s
        self._places = asyncio.Semaphore(num_workers)
        self._server: tuple[subprocess.Popen[bytes], socket.socket] | None = None
        self._workers: set[_Worker] = set()
        self._idle: list[_Worker] = []
        self._is_closed = False

    async def call(self, payload: Any, *, num_limits: int = 1) -> Any:
        """Return the handler's result for a value that can be pickled, or its failure.

        It may take `num_limits` times the limit. A failed call is retried once in a fresh worker.
        Raises: CheckRefused if the handler cannot be built.
        """
        data, limit_s = pickle.dumps(payload), self._limit_s * num_limits
        async with self._places:
            reply = await self._try(data, limit_s, self._idle.pop() if self._idle else None)
            if isinstance(reply, Failure):
                reply = await self._try(data, limit_s * _RETRY_FACTOR, None)
        return reply

    async def close(self) -> None:
        """End every process; running and later calls fail. May be called twice."""
        self._is_closed = True
        self._end()

    async def _try(self, data: bytes, limit_s: float, worker: _Worker | None) -> Any:
        try:
            if worker is None:
                worker = await self._fork()
                async with asyncio.timeout(_BUILD_LIMIT_S):
                    _, failure = await _receive(worker[0])
                if failure is not None:
                    raise CheckRefused(
                        f"a verifier's process could not be made ready: {failure.detail}",
                        allowed="a task that can be built in a process of its own",
                        next_step="mend what the last line names",
                    )
            reader, writer = worker
            async with asyncio.timeout(limit_s):
                writer.write(data)
                result, failure = await _receive(reader)
            if failure is not None:
                return failure
            self._idle.append(worker)
            worker = None
            return result
        except CheckRefused:
            raise
        except TimeoutError:
            kind, detail = "timeout", f"no verdict after {limit_s:g} s"
        except Exception as error:
            kind, detail = "crash", f"the verifier's process ended, or gave no answer: {error!r}"
        finally:
            if worker is not None:
                worker[1].transport.abort()
                self._workers.discard(worker)
        owner = FailureOwner.INFRA if self._is_closed else FailureOwner.TASK
        return Failure(owner=owner, kind=kind, detail=detail)

    async def _fork(self) -> _Worker:
        """Return a new worker, which says first whether there is a handler."""
        # The server says nothing: it was killed, for example by the kernel when memory ran out.
        if self._server is None or wait([self._server[1]], timeout=0):
            self._end()
            if self._is_closed:
                raise EOFError
            control, far_end = socket.socketpair()
            devices = os.environ.get(ENV_DEVICES)
            added = {} if devices is None else {VISIBLE_DEVICES: devices}
            with far_end:
                process = subprocess.Popen(  # noqa: ASYNC220 (it takes milliseconds)
                    [sys.executable, "-c", f"import {__name__} as pool; pool.serve({far_end.fileno()})"],
                    pass_fds=[far_end.fileno()],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    start_new_session=True,
                    env={**os.environ, **added},
                )
            self._server = process, control
            assert process.stdin is not None
            with suppress(BrokenPipeError), process.stdin as stdin:
                pickle.dump(self._make_handler, stdin)
        ours, theirs = socket.socketpair()
        with theirs, suppress(OSError):
            socket.send_fds(self._server[1], [b"+"], [theirs.fileno()])
        worker = await asyncio.open_connection(sock=ours, limit=_MAX_DIGITS)
        self._workers.add(worker)
        return worker

    def _end(self) -> None:
        if self._server is not None:
            process, control = self._server
            control.close()
            process.terminate()
            process.wait()
        for _, writer in self._workers:
            writer.transport.abort()
        self._idle.clear()


async def _receive(reader: asyncio.StreamReader) -> tuple[Any, Failure | None]:
    answer: tuple[Any, Failure | None] = pickle.loads(bytes.fromhex((await reader.readline()).decode()))
    return answer


def serve(descriptor: int) -> None:
    """Build the handler, then fork workers until the pool is gone."""
    handler, failure = _attempt(pickle.load(sys.stdin.buffer))
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # Guards that have ended leave no zombies.
    pool = socket.socket(fileno=descriptor)
    while descriptors := socket.recv_fds(pool, 1, 1)[1]:
        with socket.socket(fileno=descriptors[0]) as connection:
            if os.fork() == 0:
                pool.close()
                _guard(connection, partial(_work, connection, handler, failure))


def _guard(connection: socket.socket, work: Callable[[], None]) -> NoReturn:
    """Fork a worker; kill it, with what it has started, when the pool closes its connection."""
    try:
        signal.signal(signal.SIGCHLD, lambda *_: sys.exit())
        pid = os.fork()
        os.setpgid(pid, pid)  # In both processes: whichever comes first.
        if pid == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            work()
        else:
            end = select.poll()
            end.register(connection, 0)
            end.poll()
    finally:
        os.killpg(pid, signal.SIGKILL)  # A worker that has done its calls kills its own group.
        os._exit(0)


def _work(connection: socket.socket, handler: Handler, failure: Failure | None) -> None:
    """Say whether there is a handler, then answer calls."""
    _, hard_bytes = resource.getrlimit(resource.RLIMIT_AS)
    with suppress(ValueError):  # A lower limit that the scheduler has set for the job stays.
        resource.setrlimit(resource.RLIMIT_AS, (_MAX_BYTES, hard_bytes))
    with connection.makefile("rwb") as stream:
        for number in range(_MAX_CALLS + 1):
            answer = _attempt(partial(handler, pickle.load(stream))) if number else (None, failure)
            stream.write(pickle.dumps(answer).hex().encode() + b"\n")
            stream.flush()


def _attempt(work: Callable[[], Any]) -> tuple[Any, Failure | None]:
    """Run a task's own code; return its result, or its failure. Errors of the whole run are reported too."""
    try:
        return work(), None
    except (Exception, SystemExit) as error:
        return None, to_failure(error, FailureOwner.TASK)
