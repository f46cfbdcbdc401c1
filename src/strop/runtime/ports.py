"""A sandbox's address: a port that is held for the sandbox's whole life.

The port is listened on, on one interface, before any client learns of it. Once a connection has sent the head
of its first request, it is handed to the protocol that `connect` returns then. While `connect` fails, the
answer is 503: the sandbox waits, is paused, or is gone.

A connection whose first head lacks the key is a stranger's. Strangers take no place of those who have it:
beyond a number of them the oldest of the peer with the most is cut off.
"""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine
from typing import cast

from strop.errors import CheckRefused

HEAD_LIMIT_S = 10.0
"""From the start of a connection to the end of its first request's head."""
MAX_STRANGERS = 256
MAX_CONNECTIONS = 256
_CHUNK_BYTES = 64 << 10
"""Buffer for each direction of a connection; when it is full, the writer waits."""
_MAX_HEAD_BYTES = 64 << 10
_CONNECT_LIMIT_S = 10.0
_REFUSE_LIMIT_S = 5.0
_BACKLOG = 2048

Connect = Callable[[], Awaitable[asyncio.Protocol]]
"""Returns the protocol that takes a connection over. Raises: OSError, whose text is answered with 503."""


class Gate:
    """One held port. Made by `listen`, released by `close`."""

    def __init__(
        self, listener: socket.socket, connect: Connect, *, is_known: Callable[[bytes], bool]
    ) -> None:
        self.connect = connect
        """May be replaced; the next connection uses it."""
        self.is_known = is_known
        """Whether the head of a request has the key."""
        self.max_connections = MAX_CONNECTIONS
        self.last_used_at = time.monotonic()
        """When a client last used it, by the monotonic clock."""
        self.host, self.port = listener.getsockname()[:2]
        self._listener = listener
        self._server: asyncio.Server | None = None
        self._strangers: dict[asyncio.Transport, str] = {}
        """Their peers; the oldest first."""
        self._known: set[asyncio.Transport] = set()
        self._entering: set[asyncio.Task[None]] = set()

    @classmethod
    async def listen(cls, connect: Connect, *, key: str = "", host: str = "127.0.0.1", port: int = 0) -> Gate:
        """Hold a port on one address of this machine; 0 lets the system pick a free one.

        `key`: that of the sandbox; empty: every caller is served.

        Raises: CheckRefused if the port is taken or the address is not this machine's.
        """
        listener = hold_listener(host, port)
        gate = cls(listener, connect, is_known=lambda head: key.encode() in head)
        try:
            gate._server = await asyncio.get_running_loop().create_server(
                lambda: _Door(gate), sock=listener, backlog=_BACKLOG
            )
        except (asyncio.CancelledError, OSError):
            # If it is cancelled after asyncio began to listen, there is no server to close.
            asyncio.get_running_loop().remove_reader(listener)
            listener.close()
            raise
        return gate

    @property
    def url(self) -> str:
        """`http://host:port`, without a path."""
        return f"http://{self.host}:{self.port}"

    def note_use(self) -> None:
        """Note that a client uses it."""
        self.last_used_at = time.monotonic()

    def disconnect(self) -> None:
        """End all connections and keep the port."""
        for transport in (*self._known, *self._strangers):
            transport.abort()

    async def close(self) -> None:
        """Release the port and end all connections. May be called twice."""
        if self._server is not None:
            self._server.close()
        self._listener.close()
        self.disconnect()
        for task in self._entering:
            task.cancel()
        await asyncio.gather(*self._entering, return_exceptions=True)
        # Transports close their sockets in the next turn of the event loop.
        await asyncio.sleep(0)

    def add_stranger(self, transport: asyncio.Transport) -> None:
        """Count a new connection, and cut one off if there are too many."""
        peer = str((transport.get_extra_info("peername") or [""])[0])
        self._strangers = {one: its for one, its in self._strangers.items() if not one.is_closing()}
        self._strangers[transport] = peer
        if len(self._strangers) > MAX_STRANGERS:
            (most, _), *_ = Counter(self._strangers.values()).most_common(1)
            oldest = next(one for one, its_peer in self._strangers.items() if its_peer == most)
            del self._strangers[oldest]
            oldest.abort()

    def spawn(self, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        """Run a coroutine, until `close` at the latest."""
        task = asyncio.get_running_loop().create_task(work)
        self._entering.add(task)
        task.add_done_callback(self._entering.discard)
        return task

    async def enter(self, transport: asyncio.Transport, head: bytes) -> asyncio.Protocol:
        """Return the protocol for a connection. Raises: OSError."""
        if self.is_known(head) and self._strangers.pop(transport, None) is not None:
            self._known = {one for one in self._known if not one.is_closing()} | {transport}
            if len(self._known) > self.max_connections:
                raise ConnectionError(f"more than {self.max_connections} connections at once")
        async with asyncio.timeout(_CONNECT_LIMIT_S):
            return await self.connect()


class _Door(asyncio.Protocol):
    """A connection until it is handed over: reads the first head."""

    def __init__(self, gate: Gate) -> None:
        self._gate = gate
        self._head = b""
        self._entering: asyncio.Task[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Take a connection, for a time."""
        self._transport = cast(asyncio.Transport, transport)
        self._gate.add_stranger(self._transport)
        self._limit = asyncio.get_running_loop().call_later(HEAD_LIMIT_S, self._transport.abort)

    def data_received(self, data: bytes) -> None:
        """Take bytes; at the end of the head, hand the connection over."""
        if self._entering is not None:
            # It was refused; the rest of its request is dropped.
            return
        self._head += data
        if b"\r\n\r\n" in self._head or len(self._head) > _MAX_HEAD_BYTES:
            self._enter()

    def eof_received(self) -> bool:
        """Hand over what has come, which may be no HTTP."""
        if self._entering is not None or not self._head:
            return False
        self._enter()
        return True

    def connection_lost(self, _error: Exception | None) -> None:
        """Stop waiting."""
        self._limit.cancel()

    def _enter(self) -> None:
        self._limit.cancel()
        self._transport.pause_reading()
        self._entering = self._gate.spawn(self._hand_over())

    async def _hand_over(self) -> None:
        try:
            protocol = await self._gate.enter(self._transport, self._head)
        except OSError as error:
            self._refuse(str(error) or type(error).__name__)
            return
        if self._transport.is_closing():
            # The client went away meanwhile; the other side of the protocol has to end too.
            protocol.connection_made(self._transport)
            protocol.connection_lost(None)
            return
        self._gate.note_use()
        self._transport.set_write_buffer_limits(high=_CHUNK_BYTES)
        self._transport.set_protocol(protocol)
        protocol.connection_made(self._transport)
        self._transport.resume_reading()
        protocol.data_received(self._head)

    def _refuse(self, why: str) -> None:
        """Answer with 503, and read on for a while: a close over unread bytes would lose the answer."""
        body = json.dumps({"detail": why}).encode()
        head = (
            "HTTP/1.1 503 Service Unavailable\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\nretry-after: 1\r\nconnection: close\r\n\r\n"
        )
        self._transport.write(head.encode() + body)
        if self._transport.can_write_eof():
            self._transport.write_eof()
        self._transport.resume_reading()
        self._limit = asyncio.get_running_loop().call_later(_REFUSE_LIMIT_S, self._transport.abort)


class Splice(asyncio.Protocol):
    """One side of two connections whose bytes are passed on to each other; made by `splice`."""

    def __init__(self, note_use: Callable[[], None] = lambda: None) -> None:
        self._note_use = note_use
        self.transport: asyncio.Transport | None = None
        self.other: Splice
        self.ended = asyncio.Event()
        """Set once its connection is lost."""
        self._has_ended = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Take this side; once both are there, read."""
        self.transport = cast(asyncio.Transport, transport)
        self.transport.set_write_buffer_limits(high=_CHUNK_BYTES)
        if self.other.transport is None:
            self.transport.pause_reading()
        elif not self.other.transport.is_reading():
            self.other.transport.resume_reading()

    def data_received(self, data: bytes) -> None:
        """Pass bytes on."""
        self._note_use()
        if self.other.transport is not None:
            self.other.transport.write(data)

    def pause_writing(self) -> None:
        """Let the other side's sender wait."""
        if self.other.transport is not None and not self.other.transport.is_closing():
            self.other.transport.pause_reading()

    def resume_writing(self) -> None:
        """Let the other side's sender go on."""
        if self.other.transport is not None and not self.other.transport.is_closing():
            self.other.transport.resume_reading()

    def eof_received(self) -> bool:
        """Pass the end on; the other direction stays open."""
        self._has_ended = True
        other = self.other.transport
        if self.other._has_ended:
            for transport in (self.transport, other):
                if transport is not None:
                    transport.close()
        elif other is not None and other.can_write_eof():
            other.write_eof()
        return True

    def connection_lost(self, _error: Exception | None) -> None:
        """Cut the other side off, unless both had ended."""
        self.ended.set()
        if self.other.transport is not None and not self.other.transport.is_closing():
            self.other.transport.abort()


async def splice_to(note_use: Callable[[], None], host: str, port: int) -> Splice:
    """Return a protocol as `splice`, for a server that listens. Raises: OSError."""
    connection = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    connection.setblocking(False)
    try:
        await asyncio.get_running_loop().sock_connect(connection, (host, port))
        return await splice(note_use, connection)
    except (OSError, asyncio.CancelledError):
        connection.close()
        raise


async def splice(note_use: Callable[[], None], connection: socket.socket) -> Splice:
    """Return a protocol whose bytes are passed to and from a connected socket; its bytes call `note_use`.

    Raises: ConnectionRefusedError if the socket is connected to itself.
    """
    # Where nothing listens yet, the system may choose the very port as its own, which then is taken.
    if connection.family == socket.AF_INET and connection.getsockname() == connection.getpeername():
        connection.close()
        raise ConnectionRefusedError("nothing listens there yet")
    connection.setblocking(False)
    outer, inner = Splice(note_use), Splice()
    outer.other, inner.other = inner, outer
    await asyncio.get_running_loop().create_connection(lambda: inner, sock=connection)
    return outer


def hold_listener(host: str, port: int) -> socket.socket:
    """Return a listening socket. Its port can be reused at once after its holder has died.

    Raises: CheckRefused if the port is taken or the address is not this machine's.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server((host, port), family=family, backlog=_BACKLOG)
    except OSError as error:
        raise CheckRefused(
            f"{host}:{port} cannot be listened on ({error.strerror or error})",
            allowed="an address of this machine, and a port that is free",
            next_step="name another port, or 0 for one that is free",
        ) from error
    # Its connections inherit this; asyncio sets it only on sockets that name their protocol, unlike these. An
    # answer in two writes would otherwise wait 40 ms for the acknowledgement of the first.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    listener.setblocking(False)
    return listener
