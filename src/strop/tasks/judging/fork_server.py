"""The fork server of verifier workers.

Importing sympy takes seconds, forking a process that has done it milliseconds. The server has one thread,
which makes forking safe; as the parent of all workers it kills by ids that are not reused before it reaps.
Orders come over a socket: `fork` with the worker's end of its connection, `end` with a process id. When the
pool's process dies, the socket closes, and the server kills all workers and their process groups.
"""

from __future__ import annotations

import ctypes
import os
import pickle
import resource
import signal
import socket
import struct
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, NoReturn

from strop.errors import StropError
from strop.rollout import Failure, FailureOwner
from strop.sandbox.frames import pack, unpack
from strop.tasks.failures import catch_failure, to_failure

ORDER = struct.Struct("!ci")
"""An order and a process id, which is 0 for `FORK`."""
FORK, END = b"F", b"E"
READY, BROKEN = b"R", b"B"
"""First byte from a fork server: the handler is built, or failed to build; then the reason follows."""
_PR_SET_PDEATHSIG = 1
_CHUNK_BYTES = 1 << 18

Handler = Callable[[Any], Any]
"""Takes a JSON value, returns one."""


def main(descriptor: int) -> None:
    """Build the handler, then fork and end workers until the pool is gone."""
    control = socket.socket(fileno=descriptor)
    (length,) = struct.unpack("!I", control.recv(4, socket.MSG_WAITALL))
    make_handler, max_bytes = pickle.loads(control.recv(length, socket.MSG_WAITALL))
    handler, failure = _attempt(make_handler)
    if failure is not None:
        control.sendall(BROKEN + failure.detail.encode())
        return
    control.sendall(READY)
    fork_server_pid = os.getpid()
    workers: set[int] = set()
    try:
        while True:
            order, descriptors, _, _ = socket.recv_fds(control, ORDER.size, 1)
            if len(order) < ORDER.size:
                return
            kind, pid = ORDER.unpack(order)
            if kind == END:
                # Other ids are workers of an earlier server: gone, and maybe reused.
                if pid in workers:
                    workers.discard(pid)
                    _end(pid)
                continue
            (descriptor,) = descriptors
            pid = os.fork()
            if pid == 0:
                control.close()
                _become_worker(handler, descriptor, max_bytes, fork_server_pid)
            os.close(descriptor)
            workers.add(pid)
            control.sendall(struct.pack("!i", pid))
    finally:
        for pid in workers:
            _end(pid)


def _end(pid: int) -> None:
    for kill in (os.killpg, os.kill):
        # The group does not exist before the worker has called setsid.
        with suppress(ProcessLookupError):
            kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


def _become_worker(handler: Handler, descriptor: int, max_bytes: int, fork_server_pid: int) -> NoReturn:
    """Serve one connection, then exit; never return into the server's loop."""
    exit_code = 1
    try:
        os.setsid()
        if sys.platform == "linux":
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        _, hard_bytes = resource.getrlimit(resource.RLIMIT_AS)
        # Keep a lower limit that the scheduler has set for the job.
        bound = max_bytes if hard_bytes == resource.RLIM_INFINITY else min(max_bytes, hard_bytes)
        resource.setrlimit(resource.RLIMIT_AS, (bound, bound))
        if os.getppid() == fork_server_pid:
            _serve_calls(handler, socket.socket(fileno=descriptor))
            exit_code = 0
    finally:
        os._exit(exit_code)


def _serve_calls(handler: Handler, connection: socket.socket) -> None:
    received = bytearray()
    while data := connection.recv(_CHUNK_BYTES):
        received += data
        for call, _ in unpack(received):
            result, failure = _attempt(partial(handler, call["payload"]))
            reply = {"result": result} if failure is None else {"error": [failure.kind, failure.detail]}
            connection.sendall(pack({"nonce": call["nonce"], **reply}))


def _attempt(work: Callable[[], Any]) -> tuple[Any, Failure | None]:
    """Run a task's own code; return its result, or its failure."""
    result = None
    try:
        with catch_failure(FailureOwner.TASK) as caught:
            result = work()
    except StropError as error:
        # In this process errors of the whole run are reported like any other.
        return None, to_failure(error, FailureOwner.TASK)
    return result, caught.failure


if __name__ == "__main__":
    main(int(sys.argv[1]))
