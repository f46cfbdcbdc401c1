"""Requests to servers that are asked often, and hundreds of times at once: node agents and sandboxes.

A general client looks at all of its connections with each request and each answer, which for hundreds at once
costs many times what the requests cost. This one keeps a stack of idle connections for each server.

Not covered: TLS, redirects, proxies, answers as they come.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from strop.runtime.ports import Stream

_CHUNK_BYTES = 1 << 16
_MAX_IDLE = 64
"""Connections that are kept to one server."""
_MAX_IDLE_S = 30.0
"""Less than a server keeps them. One that is gone leaves nothing here for longer."""


_Place = tuple[str, int]
_Head = tuple[str, str, Mapping[str, str]]
"""Method, path with query, fields."""


class RequestFailed(Exception):
    """There was no answer: nobody listens, the time was over, or what came is no HTTP."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Reply:
    """An answer, read to its end."""

    status: int
    body: bytes

    @property
    def is_success(self) -> bool:
        """Whether it is one of 200 to 299."""
        return 200 <= self.status < 300


class HttpClient:
    """Asks servers over HTTP/1.1. Closed by `close`."""

    def __init__(self, *, max_connections: int) -> None:
        """More than `max_connections` requests at once wait for their turn."""
        self._turn = asyncio.Semaphore(max_connections)
        self._idle: defaultdict[_Place, list[tuple[Stream, asyncio.TimerHandle]]] = defaultdict(list)

    async def ask(
        self,
        method: str,
        url: str,
        *,
        headers: Mapping[str, str],
        content: bytes | AsyncIterator[bytes] = b"",
        limit_s: float,
    ) -> Reply:
        """Send a request and return its answer. The limit counts from its turn on.

        It is sent a second time where the server had closed a kept connection meanwhile.
        Raises: RequestFailed.
        """
        where = urlsplit(url)
        if where.scheme != "http" or not where.hostname:
            raise RequestFailed(f"{url} is no address of a node: http://HOST:PORT")
        place = (where.hostname, where.port or 80)
        target = where.path + (f"?{where.query}" if where.query else "")
        fields = {"host": where.netloc, **headers}
        async with self._turn:
            try:
                async with asyncio.timeout(limit_s):
                    return await self._ask_once_or_twice(place, (method, target, fields), content)
            except (OSError, TimeoutError) as error:
                raise RequestFailed(f"{type(error).__name__} {error}".rstrip()) from error

    async def _ask_once_or_twice(
        self, place: _Place, head: _Head, content: bytes | AsyncIterator[bytes]
    ) -> Reply:
        while True:
            # A body that comes cannot be sent again.
            kept = self._take_idle(place) if isinstance(content, bytes) else None
            stream = kept or await asyncio.open_connection(*place)
            reply = await self._exchange(stream, place, head, content)
            if reply is not None:
                return reply
            if kept is None:
                raise ConnectionError("the connection ended before an answer")

    async def aclose(self) -> None:
        """Close all connections that are kept."""
        for place in list(self._idle):
            for stream, _ in list(self._idle[place]):
                self._expire(place, stream)

    def _take_idle(self, place: _Place) -> Stream | None:
        while self._idle[place]:
            stream, timer = self._idle[place].pop()
            timer.cancel()
            if not stream[0].at_eof():
                return stream
            stream[1].close()
        del self._idle[place]
        return None

    def _expire(self, place: _Place, stream: Stream) -> None:
        stream[1].close()
        for _, timer in (one for one in self._idle[place] if one[0] is stream):
            timer.cancel()
        self._idle[place] = [one for one in self._idle[place] if one[0] is not stream]
        if not self._idle[place]:
            del self._idle[place]

    async def _exchange(
        self,
        stream: Stream,
        place: _Place,
        head: _Head,
        content: bytes | AsyncIterator[bytes],
    ) -> Reply | None:
        """Send and receive; None if the connection ended before anything of an answer came."""
        import h11

        protocol = h11.Connection(h11.CLIENT)
        is_kept = False
        try:
            await _send(protocol, stream[1], head, content)
            reply = await _receive(protocol, stream[0])
            is_kept = protocol.our_state is h11.DONE and protocol.their_state is h11.DONE
        except (ConnectionResetError, BrokenPipeError):
            return None
        except (h11.RemoteProtocolError, h11.LocalProtocolError) as error:
            raise ConnectionError(f"no HTTP: {error}") from error
        finally:
            if is_kept and len(self._idle[place]) < _MAX_IDLE:
                timer = asyncio.get_running_loop().call_later(_MAX_IDLE_S, self._expire, place, stream)
                self._idle[place].append((stream, timer))
            else:
                stream[1].close()
        return reply


async def _send(
    protocol: Any,
    writer: asyncio.StreamWriter,
    head: _Head,
    content: bytes | AsyncIterator[bytes],
) -> None:
    import h11

    method, target, fields = head
    framing = ("transfer-encoding", "chunked")
    if isinstance(content, bytes):
        framing = ("content-length", str(len(content)))
    request = h11.Request(method=method, target=target, headers=[*fields.items(), framing])
    data = protocol.send(request)
    if isinstance(content, bytes):
        # In one piece: two would be two packets, and the second might wait for the first.
        data += protocol.send(h11.Data(data=content)) if content else b""
    else:
        writer.write(data)
        async for part in content:
            writer.write(protocol.send(h11.Data(data=part)))
            await writer.drain()
        data = b""
    writer.write(data + protocol.send(h11.EndOfMessage()))
    await writer.drain()


async def _receive(protocol: Any, reader: asyncio.StreamReader) -> Reply | None:
    import h11

    status, parts = 0, list[bytes]()
    has_any = False
    while True:
        event = protocol.next_event()
        if event is h11.NEED_DATA:
            data = await reader.read(_CHUNK_BYTES)
            if not data and not has_any:
                return None
            has_any = True
            protocol.receive_data(data)
        elif isinstance(event, h11.Response):
            status = event.status_code
        elif isinstance(event, h11.Data):
            parts.append(bytes(event.data))
        elif isinstance(event, h11.EndOfMessage):
            return Reply(status=status, body=b"".join(parts))
        elif not isinstance(event, h11.InformationalResponse):
            raise ConnectionError("the connection ended within an answer")
