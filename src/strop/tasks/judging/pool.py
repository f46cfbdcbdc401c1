"""Calls of one function in worker processes that are killed at their deadline.

A hung verifier can ignore an alarm; a killed process cannot. Workers are forked from a process that has
built the function. A call that takes long gives its place to the next one, and goes on at low priority if it
computes: an endless one costs the others little.
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
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle, send_handle
from typing import Any, NoReturn

from strop.errors import CheckRefused
from strop.hardware.process import step_back
from strop.hardware.visible_devices import ENV_DEVICES, VISIBLE_DEVICES
from strop.rollout import Failure, FailureOwner
from strop.tasks.failures import to_failure

Handler = Callable[[Any], Any]
"""Takes a value that can be pickled, returns one."""
_SLOW_S = 0.5
_MAX_SLOW = 16
"""Calls that go on beside those that have places."""
_BUILD_LIMIT_S = 600.0
_RETRY_FACTOR = 4.0
"""How much longer a call may take after a time-out: the machine may be busy."""
_MAX_BYTES = 1 << 32  # Of a worker's memory.
_MAX_CALLS = 1000
"""Calls of one worker: leaks do not add up."""
_MAX_ANSWER_BYTES = 1 << 24
"""Also finds what a verifier wrote into its connection: the length that a text begins with is larger."""
_TIMEOUT = "timeout"
_CLOSED = Failure(
    owner=FailureOwner.INFRA, kind="closed", detail="the pool was closed before there was a result"
)


@dataclass(eq=False, kw_only=True, slots=True)
class _Worker:
    pid: int
    pipe: Connection
    server: Connection
    """Of its fork server, which ends it."""
    calls_left: int
    """0 where it has a low priority, which cannot be raised again."""

    @property
    def cpu_s(self) -> float:
        """Processor time (seconds) of its process; the clock's where the system has none of a process."""
        try:
            # Linux's number for the clock that clock_getcpuclockid(3) returns.
            return time.clock_gettime((~self.pid << 3) | 2)
        except OSError:
            return time.monotonic()


class WorkerPool:
    """Runs `make_handler()(payload)` in up to `num_workers` processes at once.

    `make_handler` is called once, in the process that the workers are forked from; it must be picklable.
    `limit_s` is the wall time of one call (seconds). A thread waits for each call.
    """

    def __init__(self, make_handler: Callable[[], Handler], *, num_workers: int, limit_s: float) -> None:
        self._job = (make_handler, _MAX_BYTES)
        self._limit_s = limit_s
        self._places = threading.Semaphore(num_workers)
        self._slow = threading.Semaphore(_MAX_SLOW)
        self._threads = ThreadPoolExecutor(num_workers + _MAX_SLOW, thread_name_prefix="judge")
        self._ordering = threading.Lock()
        self._server: tuple[subprocess.Popen[bytes], Connection] | None = None
        self._idle: list[_Worker] = []
        self._is_closed = False
        # Python waits for these threads before anything else: no call that hangs may hold up its exit.
        threading._register_atexit(self._close)  # type: ignore[attr-defined]

    async def call(self, payload: Any, *, num_limits: int = 1) -> Any:
        """Return the handler's result for a value that can be pickled, or its failure.

        It may take `num_limits` times the limit. A failed call is retried once in a fresh worker. A cancelled
        one ends by itself, and its result is dropped.
        Raises: CheckRefused if the handler cannot be built.
        """
        if self._is_closed:
            return _CLOSED
        work = partial(self._call, payload, self._limit_s * num_limits)
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    async def close(self) -> None:
        """End every process; running and later calls fail. May be called twice."""
        await asyncio.to_thread(self._close)

    def _close(self) -> None:
        self._is_closed = True
        with self._ordering:
            self._end_server()
        self._threads.shutdown()

    def _call(self, payload: Any, limit_s: float) -> Any:
        reply = self._try(payload, limit_s)
        if isinstance(reply, Failure) and not self._is_closed:
            limit_s *= _RETRY_FACTOR if reply.kind == _TIMEOUT else 1.0
            reply = self._try(payload, limit_s, is_retry=True)
        return _CLOSED if isinstance(reply, Failure) and self._is_closed else reply

    def _try(self, payload: Any, limit_s: float, *, is_retry: bool = False) -> Any:
        worker = None
        with ExitStack() as place:
            place.enter_context(self._places)
            try:
                worker = self._take_worker(is_fresh=is_retry)
                worker.pipe.send(payload)
                if not self._wait(worker, limit_s, place):
                    self._end(worker)
                    return _fail(_TIMEOUT, f"no verdict after {limit_s:g} s")
                result, failure = pickle.loads(worker.pipe.recv_bytes(_MAX_ANSWER_BYTES))
            except (EOFError, OSError, pickle.UnpicklingError) as error:
                self._end(worker)
                return _fail("crash", str(error) or "the verifier's process ended")
            worker.calls_left -= 1
            if worker.calls_left > 0:
                self._idle.append(worker)
            else:
                self._end(worker)
        return result if failure is None else failure

    def _wait(self, worker: _Worker, limit_s: float, place: ExitStack) -> bool:
        """Wait for an answer; return whether it came in time."""
        begun_s, until = worker.cpu_s, time.monotonic() + limit_s
        is_slow = False
        while not worker.pipe.poll(max(min(until - time.monotonic(), _SLOW_S), 0.0)):
            if time.monotonic() >= until:
                return False
            if not is_slow and (is_slow := self._slow.acquire(blocking=False)):
                place.close()
                place.callback(self._slow.release)
            # On a busy machine each call takes long: its processor time tells those that compute.
            is_low = worker.calls_left == 0
            if not is_low and worker.cpu_s - begun_s >= _SLOW_S and step_back(worker.pid, by=10):
                worker.calls_left = 0
        return True

    def _take_worker(self, *, is_fresh: bool) -> _Worker:
        if not is_fresh:
            with suppress(IndexError):
                return self._idle.pop()
        with self._ordering:
            if self._is_closed:
                raise EOFError
            try:
                return self._fork()
            except (EOFError, OSError):
                # The fork server was killed, for example by the kernel when memory ran out.
                self._end_server()
                return self._fork()

    def _fork(self) -> _Worker:
        if self._server is None:
            self._server = _start_server(self._job)
        process, control = self._server
        ours, theirs = Pipe()
        with theirs:
            control.send(None)
            send_handle(control, theirs.fileno(), process.pid)
        return _Worker(pid=control.recv(), pipe=ours, server=control, calls_left=_MAX_CALLS)

    def _end(self, worker: _Worker | None) -> None:
        if worker is not None:
            worker.pipe.close()
            with self._ordering, suppress(OSError):  # A dead fork server has taken its workers with it.
                worker.server.send(worker.pid)

    def _end_server(self) -> None:
        if self._server is not None:
            process, control = self._server
            self._server = None
            control.close()
            process.wait()


def _fail(kind: str, detail: str) -> Failure:
    return Failure(owner=FailureOwner.TASK, kind=kind, detail=detail)


def _start_server(job: Any) -> tuple[subprocess.Popen[bytes], Connection]:
    """Start a fork server. Raises: CheckRefused if it cannot build the handler."""
    ours, theirs = Pipe()
    devices = os.environ.get(ENV_DEVICES)
    added = {} if devices is None else {VISIBLE_DEVICES: devices}
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-c", f"import {__name__} as pool; pool.serve({theirs.fileno()})"],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            env={**os.environ, **added},
        )
    failure: Failure | None = _fail(_TIMEOUT, f"not ready after {_BUILD_LIMIT_S:g} s")
    try:
        ours.send(job)
        if ours.poll(_BUILD_LIMIT_S):
            failure = ours.recv()
    except (EOFError, OSError):
        failure = _fail("crash", "it ended without a word")
    if failure is None:
        return process, ours
    ours.close()
    process.kill()
    process.wait()
    raise CheckRefused(
        f"a verifier's process could not be made ready: {failure.detail}",
        allowed="a task that can be built in a process of its own",
        next_step="mend what the last line names",
    )


# The fork server. It has one thread, which makes forking safe; as the parent of all workers it kills by ids
# that are not reused before it reaps. When the process of the pool dies, the connection ends, and so do they.


def serve(descriptor: int) -> None:
    """Build the handler, tell the pool, then fork and end workers until it is gone."""
    pool = Connection(descriptor)
    make_handler, max_bytes = pool.recv()
    handler, failure = _attempt(make_handler)
    pool.send(failure)
    workers: set[int] = set()
    try:
        while failure is None:
            if (ended := pool.recv()) is not None:
                workers.discard(ended)
                _end(ended)
                continue
            theirs, own_pid = recv_handle(pool), os.getpid()
            if (pid := os.fork()) == 0:
                pool.close()
                _become_worker(handler, Connection(theirs), max_bytes, own_pid)
            os.close(theirs)
            workers.add(pid)
            pool.send(pid)
    except (EOFError, OSError):
        pass  # The pool is gone.
    finally:
        for pid in workers:
            _end(pid)


def _end(pid: int) -> None:
    for kill in (os.killpg, os.kill):
        # The group does not exist before the worker has called setsid.
        with suppress(ProcessLookupError):
            kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


def _become_worker(handler: Handler, pool: Connection, max_bytes: int, server_pid: int) -> NoReturn:
    """Serve one connection, then exit; never return into the server's loop."""
    try:
        os.setsid()
        if sys.platform == "linux":
            ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)  # PR_SET_PDEATHSIG
        _, hard_bytes = resource.getrlimit(resource.RLIMIT_AS)
        # Keep a lower limit that the scheduler has set for the job.
        bound = max_bytes if hard_bytes == resource.RLIM_INFINITY else min(max_bytes, hard_bytes)
        resource.setrlimit(resource.RLIMIT_AS, (bound, bound))
        while os.getppid() == server_pid:
            pool.send(_attempt(partial(handler, pool.recv())))
    finally:
        os._exit(0)


def _attempt(work: Callable[[], Any]) -> tuple[Any, Failure | None]:
    """Run a task's own code; return its result, or its failure. Errors of the whole run are reported too."""
    try:
        return work(), None
    except (Exception, SystemExit) as error:
        return None, to_failure(error, FailureOwner.TASK)
