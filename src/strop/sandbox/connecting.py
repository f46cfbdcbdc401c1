"""A connection to a server that listens inside a sandbox, opened there and handed out.

A fork enters the sandbox as its user and connects; a socket stays in the network that it was made in, so
what the fork hands back leads inside wherever it goes. The supervisor does not wait for it.
"""

from __future__ import annotations

import errno
import os
import selectors
import signal
import socket
from typing import Any, NoReturn, Protocol

from strop.sandbox.channel import receive_descriptors
from strop.sandbox.linux import become, close_all_but, drop_capabilities, hide_from_tracers
from strop.sandbox.place import Place

CONNECT_LIMIT_S = 10.0
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
_WORDS_BYTES = 4096


class Host(Protocol):
    """What a connection needs of the supervisor that opens it."""

    place: Place
    selector: selectors.BaseSelector

    def send(self, header: dict[str, Any], body: bytes = b"", *, descriptor: int | None = None) -> None:
        """Send a frame to the client, and a descriptor with it."""
        ...

    def on_connected(self) -> None:
        """Note that a connection is open, or has failed."""
        ...


class Connecting:
    """One connection that is being opened."""

    def __init__(self, request_id: int, address: int | str, host: Host) -> None:
        """Raises: OSError if the host gives no process."""
        self._request_id = request_id
        self._address = address
        self._host = host
        self._answer, theirs = socket.socketpair()
        with theirs:
            if os.fork() == 0:
                _connect_and_exit(host.place, address, theirs)
        host.selector.register(self._answer, selectors.EVENT_READ, self._on_answer)

    def _on_answer(self) -> None:
        self._host.selector.unregister(self._answer)
        self._host.on_connected()
        with self._answer:
            said, descriptors = receive_descriptors(self._answer, _WORDS_BYTES, 1)
        if descriptors:
            self._host.send({"id": self._request_id}, descriptor=descriptors[0])
            return
        number, _, why = said.decode(errors="replace").partition(" ")
        kind = _KINDS.get(int(number or errno.EIO), "io")
        self._host.send(
            {
                "id": self._request_id,
                "failed": kind,
                "why": f"no connection to {self._address!r}: {why or kind}",
            }
        )


def _connect_and_exit(place: Place, address: int | str, answer: socket.socket) -> NoReturn:
    try:
        signal.set_wakeup_fd(-1)
        signal.alarm(round(2 * CONNECT_LIMIT_S))
        os.setsid()
        kept = {0, 1, 2, answer.fileno(), place.holder}
        close_all_but({descriptor for descriptor in kept if descriptor is not None})
        place.enter()
        if place.user is not None:
            become(*place.user)
        drop_capabilities()
        hide_from_tracers()
        family = socket.AF_INET if isinstance(address, int) else socket.AF_UNIX
        with socket.socket(family, socket.SOCK_STREAM) as connection:
            connection.settimeout(CONNECT_LIMIT_S)
            connection.connect(("127.0.0.1", address) if isinstance(address, int) else address)
            connection.setblocking(True)
            socket.send_fds(answer, [b"0"], [connection.fileno()])
    except (OSError, OverflowError, ValueError) as error:
        number = getattr(error, "errno", None) or errno.EIO
        if isinstance(error, TimeoutError):
            number = errno.ETIMEDOUT
        answer.sendall(f"{number} {error}".encode(errors="replace")[:_WORDS_BYTES])
    finally:
        os._exit(0)
