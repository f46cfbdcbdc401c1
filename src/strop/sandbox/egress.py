"""The way out of a sandbox that may reach a list of hosts: a proxy beside it, and its door inside.

The proxy is a process outside, below the supervisor, of a user of its own, without any right and with its
calls filtered, since it reads what programs write. The listener that it takes connections from is made
inside, on the loopback of the sandbox's own network, by a fork that hands it out: a socket stays in the
network that it was made in. So nothing runs inside for it, and no packet leaves that network.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NoReturn

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

PROXY_PORT = 3128
_LOOPBACK = ("localhost", "127.0.0.1", "::1")
_REPORT_BYTES = 4096
_LISTEN_LIMIT_S = 20


class Egress:
    """A proxy, from its supervisor's side. Made before the place, so that it is in none of its namespaces."""

    def __init__(self, allowed: AllowList) -> None:
        """Raises: OSError if the host gives no process."""
        self.env: dict[str, str] = {}
        """What programs find it by, once it is open."""
        # Each message whole.
        self.control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._pid = os.fork()
            if self._pid == 0:
                _become_proxy(allowed, theirs)
        self._allowed = allowed

    def open_in(self, place: Place) -> None:
        """Open the door inside. Raises: OSError."""
        ours, theirs = socket.socketpair()
        with ours:
            with theirs:
                pid = os.fork()
                if pid == 0:
                    _listen_and_exit(place, theirs)
            said, descriptors = receive_descriptors(ours, _REPORT_BYTES, 1)
            with suppress(ChildProcessError):
                os.waitpid(pid, 0)
        if not descriptors:
            raise OSError(f"no listener for its proxy: {said.decode(errors='replace') or 'it ended'}")
        socket.send_fds(self.control, [b"listener"], descriptors)
        os.close(descriptors[0])
        named = {host for host, _ in self._allowed.endpoints}
        direct = ",".join(host for host in _LOOPBACK if host not in named)
        values = {"http_proxy": f"http://127.0.0.1:{PROXY_PORT}", "no_proxy": direct}
        values["https_proxy"] = values["http_proxy"]
        # Some programs know one spelling, some the other.
        self.env = {spelling: text for name, text in values.items() for spelling in (name, name.upper())}

    def read_report(self) -> dict[str, Any]:
        """Return what the proxy has refused. Raises: EOFError if it has ended."""
        try:
            data = self.control.recv(_REPORT_BYTES)
        except OSError as error:
            raise EOFError from error
        if not data:
            raise EOFError
        return dict(json.loads(data))

    def kill(self) -> None:
        """End it. Its parent waits for it."""
        with suppress(ProcessLookupError):
            os.kill(self._pid, signal.SIGKILL)


def _become_proxy(allowed: AllowList, control: socket.socket) -> NoReturn:
    try:
        signal.set_wakeup_fd(-1)
        close_all_but({0, 1, 2, control.fileno()})
        # Here: other forks of the daemon need none of it. And before it is another user, who may not find it.
        from strop.sandbox.proxy import serve_callers

        forbid_privileges()
        if os.geteuid() == 0:
            uid, _ = sandbox_uid(os.getpid())
            become(uid, uid)
        drop_capabilities()
        hide_from_tracers()
        filter_calls()
        _, descriptors = receive_descriptors(control, _REPORT_BYTES, 1)
        if descriptors:
            serve_callers(socket.socket(fileno=descriptors[0]), control, allowed, _reporter(control))
    finally:
        if sys.exc_info()[0] is not None:
            # For the daemon's standard error; its supervisor sees its end.
            traceback.print_exc()
            sys.stderr.flush()
        os._exit(0)


def _reporter(control: socket.socket) -> Callable[[str, str], None]:
    def report(target: str, why: str) -> None:
        with suppress(OSError):
            control.sendall(json.dumps({"target": target, "why": why}).encode()[:_REPORT_BYTES])

    return report


def _listen_and_exit(place: Place, answer: socket.socket) -> NoReturn:
    try:
        signal.set_wakeup_fd(-1)
        signal.alarm(_LISTEN_LIMIT_S)
        kept = {0, 1, 2, answer.fileno(), place.holder}
        close_all_but({descriptor for descriptor in kept if descriptor is not None})
        place.enter()
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", PROXY_PORT))
            listener.listen()
            socket.send_fds(answer, [b"0"], [listener.fileno()])
    except OSError as error:
        answer.sendall(str(error).encode(errors="replace")[:_REPORT_BYTES])
    finally:
        os._exit(0)
