"""A sandbox's address: a port that is held for the sandbox's whole life.

The port is listened on, on one interface, before any client learns of it. A connection that has sent its
first bytes is passed on, byte for byte, to where `connect` leads then; the server there asks for the
sandbox's key. While `connect` fails, the answer is 503: the sandbox waits, is paused, or is gone.

Strangers reach the port too: beyond a number of connections, the one that has been idle longest is cut off,
of the peer that has most.
"""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial

from strop.errors import CheckRefused, SandboxError, given_of

MAX_CONNECTIONS = 256
FIRST_BYTES_LIMIT_S = 10.0
_OPENED_AT_ONCE = 32
"""Connections to a sandbox's server; the sandbox refuses more than 64 at once."""
_CHUNK_BYTES = 64 << 10
_LINGER_S = 5.0
_BACKLOG = 2048

Connect = Callable[[], Awaitable[socket.socket]]
"""Returns a connection to what serves the address. Raises: OSError or SandboxError, answered with 503."""


class Connections:
    """The open connections of a port, and a bound of their number."""

    def __init__(self, max_number: int = MAX_CONNECTIONS) -> None:
        self._max_number = max_number
        self._peers: dict[asyncio.WriteTransport, str] = {}
        """The peers of the connections; the one that has been idle longest is first."""
        self.last_used_at = time.monotonic()
        """When one was last used, by the monotonic clock."""

    def note_use(self, transport: asyncio.WriteTransport) -> None:
        """Note bytes of a connection, or a new one; cut one off if there are too many."""
        peer = self._peers.pop(transport, None) or str((transport.get_extra_info("peername") or [""])[0])
        self._peers[transport] = peer
        self.last_used_at = time.monotonic()
        if len(self._peers) > self._max_number:
            (most, _), *_ = Counter(self._peers.values()).most_common(1)
            idlest = next(one for one, its_peer in self._peers.items() if its_peer == most)
            self.forget(idlest)
            idlest.abort()

    def forget(self, transport: asyncio.WriteTransport) -> None:
        """Forget a connection that has ended."""
        self._peers.pop(transport, None)

    def cut_all(self) -> None:
        """End all connections."""
        for transport in self._peers:
            transport.abort()


class Gate:
    """One held port. Listened on from the start, served from `open`, released by `close`."""

    def __init__(self, host: str) -> None:
        """Hold a free port on one address of this machine. Raises: CheckRefused as `hold_listener`."""
        self._listener = hold_listener(host, 0)
        self.host, self.port = self._listener.getsockname()[:2]
        self._server: asyncio.Server | None = None
        self._opening = asyncio.Semaphore(_OPENED_AT_ONCE)
        self._tasks: set[asyncio.Task[None]] = set()
        self.connections = Connections()

    async def open(self, connect: Connect) -> None:
        """Serve connections from now on."""
        serve = partial(self._serve, connect)
        self._server = await asyncio.start_server(serve, sock=self._listener, limit=_CHUNK_BYTES)

    @property
    def url(self) -> str:
        """`http://host:port`, without a path."""
        return f"http://{self.host}:{self.port}"

    async def close(self) -> None:
        """Release the port and end all connections. May be called twice."""
        if self._server is not None:
            self._server.close()
        self._listener.close()
        for task in self._tasks:
            task.cancel()
        self.connections.cut_all()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _serve(
        self, connect: Connect, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self.connections.note_use(writer.transport)
        # It is ended by its peer, by the server inside, or from here.
        with suppress(OSError, TimeoutError, asyncio.CancelledError):
            async with asyncio.timeout(FIRST_BYTES_LIMIT_S):
                first = await reader.read(_CHUNK_BYTES)
            try:
                async with self._opening:
                    inside = await connect()
            except (OSError, SandboxError) as error:
                await _refuse(reader, writer, given_of(error) or type(error).__name__)
            else:
                note_use = partial(self.connections.note_use, writer.transport)
                await _splice(first, reader, writer, inside, note_use)
        self._tasks.discard(task)
        self.connections.forget(writer.transport)
        writer.close()


async def _splice(
    first: bytes,
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    inside: socket.socket,
    note_use: Callable[[], None],
) -> None:
    """Pass bytes on in both directions until the server inside has ended its answers."""
    from_inside, to_inside = await asyncio.open_connection(sock=inside, limit=_CHUNK_BYTES)
    to_inside.write(first)
    up = asyncio.create_task(_copy(reader, to_inside, note_use))
    down = asyncio.create_task(_copy(from_inside, writer, lambda: None))
    try:
        await asyncio.wait({up, down}, return_when=asyncio.FIRST_COMPLETED)
        if up.done() and up.exception() is None:
            # The client has sent all.
            await asyncio.wait({down})
    finally:
        to_inside.transport.abort()
        up.cancel()
        down.cancel()
        await asyncio.gather(up, down, return_exceptions=True)


async def _copy(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, note_use: Callable[[], None]
) -> None:
    """Pass on bytes, and the end of them. A sender waits while nobody reads."""
    while data := await reader.read(_CHUNK_BYTES):
        note_use()
        writer.write(data)
        await writer.drain()
    writer.write_eof()


async def _refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, why: str) -> None:
    """Answer with 503, and read on for a while: a close over unread bytes would lose the answer."""
    body = json.dumps({"detail": why}).encode()
    head = "HTTP/1.1 503 Service Unavailable\r\ncontent-type: application/json\r\nconnection: close\r\n"
    writer.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
    writer.write_eof()
    async with asyncio.timeout(_LINGER_S):
        while await reader.read(_CHUNK_BYTES):
            pass


def hold_listener(host: str, port: int) -> socket.socket:
    """Return a listening socket; with port 0 on a free one, which can be reused once its holder has died.

    Raises: CheckRefused if the port is taken or the address is not this machine's.
    """
    try:
        listener = socket.create_server((host, port), backlog=_BACKLOG)
    except OSError as error:
        raise CheckRefused(
            f"{host}:{port} cannot be listened on ({error.strerror or error})",
            allowed="an address of this machine, and a port that is free",
            next_step="name another port, or 0 for one that is free",
        ) from error
    # Its connections inherit this. An answer in two writes would otherwise wait 40 ms for the acknowledgement
    # of the first.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    listener.setblocking(False)
    return listener


async def dial(url: str) -> socket.socket:
    """Return a connection to a gate of another node. Raises: OSError."""
    host, _, port = url.removeprefix("http://").rpartition(":")
    connection = socket.socket()
    connection.setblocking(False)
    try:
        await asyncio.get_running_loop().sock_connect(connection, (host, int(port)))
    except (OSError, asyncio.CancelledError):
        connection.close()
        raise
    return connection
