"""The fork server of verifier workers: it builds the handler once, and forks a worker when its pool asks.

It has one thread, which makes forking safe; as the parent of all workers it kills by ids that are not reused
before it reaps. When the pool's process dies, the connection ends, and all workers with it.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle
from typing import Any, NoReturn

from strop.rollout import Failure, FailureOwner
from strop.tasks.failures import to_failure

Handler = Callable[[Any], Any]
"""Takes a value that can be pickled, returns one."""


def main(descriptor: int) -> None:
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


if __name__ == "__main__":
    main(int(sys.argv[1]))
