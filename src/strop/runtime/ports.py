"""A sandbox's address: a port that is held for the sandbox's whole life, and relayed to its current place.

The port is listened on, on one interface, before any client learns of it. The bytes of each connection are
relayed to the stream that `dial` returns then. While `dial` fails, the answer is 503: the sandbox waits, is
paused, or is gone.

A connection whose first head lacks the sandbox's key is a stranger's. Strangers take no place of those who
have it: beyond a number of them the oldest of the peer with the most is cut off.
"""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from typing import SupportsIndex

from strop.errors import CheckRefused

CHUNK_BYTES = 64 << 10
"""Buffer for each direction of a connection; when it is full, the writer waits."""
_HEAD_LIMIT_S = 10.0
"""From the start of a connection to the end of its first request's head."""
_MAX_HEAD_BYTES = 64 << 10
_MAX_STRANGERS = 256
_DIAL_LIMIT_S = 10.0
_REFUSE_LIMIT_S = 5.0
_BACKLOG = 256

Stream = tuple[asyncio.StreamReader, asyncio.StreamWriter]
Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
"""Serves one connection to its end, in this process."""
Dial = Callable[[], Awaitable[Stream | Serve]]
"""Connects to the sandbox's current place, or returns a function that serves the connection here.

Raises: OSError, whose text is answered with 503.
"""


class _Input(asyncio.StreamReader):
    """The bytes of a connection, with the head of its first request."""

    def __init__(self) -> None:
        super().__init__(limit=CHUNK_BYTES)
        self.head = b""
        self.has_head = asyncio.Event()

    def feed_data(self, data: Iterable[SupportsIndex]) -> None:
        """Take bytes."""
        if not self.has_head.is_set():
            self.head += bytes(data)
            if b"\r\n\r\n" in self.head or len(self.head) > _MAX_HEAD_BYTES:
                self.has_head.set()
        super().feed_data(data)

    def feed_eof(self) -> None:
        """Take the end of the stream."""
        self.has_head.set()
        super().feed_eof()


class PortRelay:
    """One held port. Made by `listen`, released by `close`."""

    def __init__(self, listener: socket.socket, dial: Dial, *, key: str, max_connections: int) -> None:
        self._listener = listener
        self._key = key.encode()
        self._dial = dial
        self._max_connections = max_connections
        self._open: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._strangers: dict[asyncio.Task[None], str] = {}
        """Peers of connections that have not shown the key, the oldest first."""
        self._server: asyncio.Server | None = None
        self.last_used_at = time.monotonic()
        """When bytes last came from a client, by the monotonic clock."""
        self.host, self.port = listener.getsockname()[:2]

    @classmethod
    async def listen(
        cls, dial: Dial, *, key: str = "", host: str = "127.0.0.1", port: int = 0, max_connections: int = 256
    ) -> PortRelay:
        """Hold a port on one address of this machine; 0 lets the system pick a free one.

        `key`: that of the sandbox; empty: every caller is served.

        Raises: CheckRefused if the port is taken or the address is not this machine's.
        """
        listener = hold_listener(host, port, backlog=_BACKLOG)
        relay = cls(listener, dial, key=key, max_connections=max_connections)
        try:
            relay._server = await asyncio.get_running_loop().create_server(
                lambda: asyncio.StreamReaderProtocol(_Input(), relay._serve), sock=listener, backlog=_BACKLOG
            )
        except (asyncio.CancelledError, OSError):
            # If it is cancelled after asyncio began to listen, there is no server to close.
            asyncio.get_running_loop().remove_reader(listener)
            listener.close()
            raise
        return relay

    @property
    def url(self) -> str:
        """`http://host:port`, without a path."""
        return f"http://{self.host}:{self.port}"

    def disconnect(self) -> None:
        """End all connections and keep the port; new ones go where `dial` says."""
        for writer in self._open:
            writer.transport.abort()

    async def close(self) -> None:
        """Release the port and end all connections. May be called twice."""
        if self._server is not None:
            self._server.close()
        self._listener.close()
        self.disconnect()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        # Transports close their sockets in the next turn of the event loop.
        await asyncio.sleep(0)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self._open.add(writer)
        self._strangers[task] = str((writer.get_extra_info("peername") or [""])[0])
        if len(self._strangers) > _MAX_STRANGERS:
            self._cut_off_stranger()
        try:
            assert isinstance(reader, _Input)
            async with asyncio.timeout(_HEAD_LIMIT_S):
                await reader.has_head.wait()
            if self._key in reader.head:
                self._strangers.pop(task, None)
            await self._relay(reader, writer)
        except OSError:
            # One side went away; the other sees the end of its connection.
            pass
        except asyncio.CancelledError:
            # asyncio would log it.
            pass
        finally:
            writer.close()
            self._open.discard(writer)
            self._tasks.discard(task)
            self._strangers.pop(task, None)

    def _cut_off_stranger(self) -> None:
        (peer, _), *_ = Counter(self._strangers.values()).most_common(1)
        oldest = next(task for task, its_peer in self._strangers.items() if its_peer == peer)
        del self._strangers[oldest]
        oldest.cancel()

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(self._tasks) - len(self._strangers) > self._max_connections:
            await _refuse(reader, writer, f"more than {self._max_connections} connections at once")
            return
        try:
            async with asyncio.timeout(_DIAL_LIMIT_S):
                target = await self._dial()
        except OSError as error:
            await _refuse(reader, writer, str(error) or type(error).__name__)
            return
        if callable(target):
            await target(reader, writer)
            return
        inner_writer = target[1]
        self._open.add(inner_writer)
        try:
            await join_streams((reader, writer), target, self._note_use)
        finally:
            self._open.discard(inner_writer)

    def _note_use(self) -> None:
        self.last_used_at = time.monotonic()


async def join_streams(outer: Stream, inner: Stream, note_use: Callable[[], None]) -> None:
    """Relay bytes in both directions until both have ended; bytes from outside call `note_use`.

    If one side fails, the other is cut off. Closes the inner stream.
    """
    try:
        # If one direction fails, the group cancels the other.
        async with asyncio.TaskGroup() as both:
            both.create_task(_pump(outer[0], inner[1], note_use))
            both.create_task(_pump(inner[0], outer[1]))
    except* OSError:
        outer[1].transport.abort()
    finally:
        inner[1].close()


async def _pump(
    source: asyncio.StreamReader, target: asyncio.StreamWriter, note_use: Callable[[], None] = lambda: None
) -> None:
    """Relay bytes until the source ends, then end the target's stream too."""
    target.transport.set_write_buffer_limits(high=CHUNK_BYTES)
    while data := await source.read(CHUNK_BYTES):
        note_use()
        target.write(data)
        await target.drain()
    if target.can_write_eof():
        target.write_eof()


def hold_listener(host: str, port: int, *, backlog: int) -> socket.socket:
    """Return a listening socket. Its port can be reused at once after its holder has died.

    Raises: CheckRefused if the port is taken or the address is not this machine's.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server((host, port), family=family, backlog=backlog)
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


async def _refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, why: str) -> None:
    """Answer a request with 503. Its head is read first, so that the client's sending does not fail."""
    with suppress(asyncio.IncompleteReadError, asyncio.LimitOverrunError, TimeoutError):
        async with asyncio.timeout(_REFUSE_LIMIT_S):
            await reader.readuntil(b"\r\n\r\n")
    body = json.dumps({"detail": why}).encode()
    head = (
        "HTTP/1.1 503 Service Unavailable\r\ncontent-type: application/json\r\n"
        f"content-length: {len(body)}\r\nretry-after: 1\r\nconnection: close\r\n\r\n"
    )
    writer.write(head.encode() + body)
    writer.write_eof()
    with suppress(TimeoutError):
        async with asyncio.timeout(_REFUSE_LIMIT_S):
            # A close over unread bytes would reset the connection, and the answer would be lost.
            while await reader.read(CHUNK_BYTES):
                pass
