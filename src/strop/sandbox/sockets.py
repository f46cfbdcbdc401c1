"""Sockets that are created inside a sandbox and used outside: connections, and the proxy's listener.

A fork enters the sandbox, creates the socket and passes it out. A socket stays in the network namespace that
it was created in, so it leads inside from anywhere, without a helper process and without a packet leaving.

The proxy is the only way out of a sandbox with an allow-list: a process outside, below the supervisor. Since
it parses bytes from untrusted programs, it has a private user, no capability and a system call filter.
"""

from __future__ import annotations

import errno
import json
import os
import selectors
import signal
import socket
import sys
import traceback
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NoReturn

from strop.sandbox.allowlist import AllowList
from strop.sandbox.channel import receive_descriptors
from strop.sandbox.linux import (
    become,
    close_all_but,
    drop_capabilities,
    forbid_privileges,
    hide_from_tracers,
    sandbox_uid,
)
from strop.sandbox.place import Place
from strop.sandbox.seccomp import filter_calls

if TYPE_CHECKING:
    from strop.sandbox.supervisor import Supervisor

_CONNECT_LIMIT_S = 10.0
_KINDS = {
    errno.ECONNREFUSED: "refused",
    errno.ENOENT: "missing",
    errno.ENOTDIR: "missing",
    errno.EACCES: "denied",
    errno.EPERM: "denied",
    errno.ENOTSOCK: "refused",
    errno.EPROTOTYPE: "refused",
    errno.ETIMEDOUT: "timed_out",
    errno.EAGAIN: "busy",
}
_PROXY_PORT = 3128
_LOOPBACK = ("localhost", "127.0.0.1", "::1")
_MESSAGE_BYTES = 4096
_LISTEN_LIMIT_S = 20


def start_connect(request_id: int, address: int | str, supervisor: Supervisor) -> None:
    """Open a connection inside, in a fork, and answer the request.

    Raises: OSError if the host gives no process.
    """
    answer, theirs = socket.socketpair()
    with theirs:
        if os.fork() == 0:
            _connect_and_exit(supervisor.place, address, theirs)

    def on_answer() -> None:
        supervisor.selector.unregister(answer)
        supervisor.on_connected()
        with answer:
            message, descriptors = receive_descriptors(answer, _MESSAGE_BYTES, 1)
        if descriptors:
            supervisor.send({"id": request_id}, descriptor=descriptors[0])
            return
        number, _, why = message.decode(errors="replace").partition(" ")
        kind = _KINDS.get(int(number or errno.EIO), "io")
        why = f"no connection to {address!r}: {why or kind}"
        supervisor.send({"id": request_id, "failed": kind, "why": why})

    supervisor.selector.register(answer, selectors.EVENT_READ, on_answer)


def _connect_and_exit(place: Place, address: int | str, answer: socket.socket) -> NoReturn:
    try:
        os.setsid()
        _enter(place, answer, round(2 * _CONNECT_LIMIT_S))
        if place.user is not None:
            become(*place.user)
        drop_capabilities()
        hide_from_tracers()
        family = socket.AF_INET if isinstance(address, int) else socket.AF_UNIX
        with socket.socket(family, socket.SOCK_STREAM) as connection:
            connection.settimeout(_CONNECT_LIMIT_S)
            connection.connect(("127.0.0.1", address) if isinstance(address, int) else address)
            connection.setblocking(True)
            socket.send_fds(answer, [b"0"], [connection.fileno()])
    except (OSError, OverflowError, ValueError) as error:
        number = getattr(error, "errno", None) or errno.EIO
        if isinstance(error, TimeoutError):
            number = errno.ETIMEDOUT
        answer.sendall(f"{number} {error}".encode(errors="replace")[:_MESSAGE_BYTES])
    finally:
        os._exit(0)


class Egress:
    """The supervisor's handle of a proxy, which is created before the place: outside of its namespaces."""

    def __init__(self, allowed: AllowList) -> None:
        """Raises: OSError if the host gives no process."""
        self.env: dict[str, str] = {}
        """The proxy variables for programs, set by `open_in`."""
        # SEQPACKET keeps message boundaries.
        self.control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._pid = os.fork()
            if self._pid == 0:
                _become_proxy(allowed, theirs)
        self._allowed = allowed

    def open_in(self, place: Place) -> None:
        """Let the proxy listen inside a place. Raises: OSError."""
        ours, theirs = socket.socketpair()
        with ours:
            with theirs:
                pid = os.fork()
                if pid == 0:
                    _listen_and_exit(place, theirs)
            message, descriptors = receive_descriptors(ours, _MESSAGE_BYTES, 1)
            with suppress(ChildProcessError):
                os.waitpid(pid, 0)
        if not descriptors:
            raise OSError(f"no listener for its proxy: {message.decode(errors='replace') or 'it ended'}")
        socket.send_fds(self.control, [b"listener"], descriptors)
        os.close(descriptors[0])
        listed = {host for host, _ in self._allowed.endpoints}
        direct = ",".join(host for host in _LOOPBACK if host not in listed)
        values = {"http_proxy": f"http://127.0.0.1:{_PROXY_PORT}", "no_proxy": direct}
        values["https_proxy"] = values["http_proxy"]
        # Some programs read the lower-case names, some the upper-case ones.
        self.env = {spelling: text for name, text in values.items() for spelling in (name, name.upper())}

    def read_report(self) -> dict[str, Any]:
        """Return one refusal of the proxy. Raises: EOFError if it has ended."""
        try:
            data = self.control.recv(_MESSAGE_BYTES)
        except OSError as error:
            raise EOFError from error
        if not data:
            raise EOFError
        return dict(json.loads(data))

    def kill(self) -> None:
        """Kill the proxy. Its parent waits for it."""
        with suppress(ProcessLookupError):
            os.kill(self._pid, signal.SIGKILL)


def _become_proxy(allowed: AllowList, control: socket.socket) -> NoReturn:
    def report(target: str, why: str) -> None:
        with suppress(OSError):
            control.sendall(json.dumps({"target": target, "why": why}).encode()[:_MESSAGE_BYTES])

    try:
        signal.set_wakeup_fd(-1)
        close_all_but({0, 1, 2, control.fileno()})
        # Imported here, while this user may still read it; other forks of the daemon do not need it.
        from strop.sandbox.proxy import serve_callers

        forbid_privileges()
        if os.geteuid() == 0:
            uid, _ = sandbox_uid(os.getpid())
            become(uid, uid)
        drop_capabilities()
        hide_from_tracers()
        filter_calls()
        _, descriptors = receive_descriptors(control, _MESSAGE_BYTES, 1)
        if descriptors:
            serve_callers(socket.socket(fileno=descriptors[0]), control, allowed, report)
    finally:
        if sys.exc_info()[0] is not None:
            # For the daemon's standard error; the supervisor only sees that the proxy ended.
            traceback.print_exc()
            sys.stderr.flush()
        os._exit(0)


def _listen_and_exit(place: Place, answer: socket.socket) -> NoReturn:
    try:
        _enter(place, answer, _LISTEN_LIMIT_S)
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", _PROXY_PORT))
            listener.listen()
            socket.send_fds(answer, [b"0"], [listener.fileno()])
    except OSError as error:
        answer.sendall(str(error).encode(errors="replace")[:_MESSAGE_BYTES])
    finally:
        os._exit(0)


def _enter(place: Place, answer: socket.socket, limit_s: int) -> None:
    """Enter a place with only the answer's descriptor; SIGALRM ends this process later. Raises: OSError."""
    signal.set_wakeup_fd(-1)
    signal.alarm(limit_s)
    close_all_but({0, 1, 2, answer.fileno(), place.holder})
    place.enter()
