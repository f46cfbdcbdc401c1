"""An HTTP client for hundreds of concurrent requests to node agents and sandboxes.

A general client scans all of its connections at each request and each answer, which for hundreds at once
costs many times as much as the requests. This one keeps a stack of idle connections for each server.

Not covered: TLS, redirects, proxies, streamed answers.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from strop.runtime.ports import Stream

_CHUNK_BYTES = 1 << 16
_MAX_REPLY_BYTES = 64 << 20
PROBE_BYTES = 64 << 10
"""Longest answer of a sandbox's server to a probe: any program may be that server."""
_MAX_IDLE = 64
"""Idle connections kept for one server."""
_MAX_IDLE_S = 30.0
"""Shorter than the servers' own limit. The connections of a vanished server are dropped after it too."""


_Server = tuple[str, int]
_Head = tuple[str, str, Mapping[str, str]]
"""Method, path with query, fields."""


class RequestFailed(Exception):
    """There was no answer: nothing listens, the time limit passed, or the answer is no HTTP."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Reply:
    """An answer, read to its end."""

    status: int
    body: bytes

    @property
    def is_success(self) -> bool:
        """Whether the status is from 200 to 299."""
        return 200 <= self.status < 300


class HttpClient:
    """An HTTP/1.1 client. Closed by `aclose`."""

    def __init__(self, *, max_connections: int) -> None:
        """At most `max_connections` requests run at once; further ones wait."""
        self._turn = asyncio.Semaphore(max_connections)
        self._idle: defaultdict[_Server, list[tuple[Stream, asyncio.TimerHandle]]] = defaultdict(list)

    async def ask(
        self,
        method: str,
        url: str,
        *,
        headers: Mapping[str, str],
        content: bytes = b"",
        limit_s: float,
        max_bytes: int = _MAX_REPLY_BYTES,
    ) -> Reply:
        """Send a request and return its answer. The limit does not count the wait for other requests.

        It is sent again if the server has closed the kept connection meanwhile.
        Raises: RequestFailed, also for a body of more than `max_bytes`.
        """
        parts = urlsplit(url)
        if parts.scheme != "http" or not parts.hostname:
            raise RequestFailed(f"{url} is no address of a node: http://HOST:PORT")
        server = (parts.hostname, parts.port or 80)
        target = parts.path + (f"?{parts.query}" if parts.query else "")
        head = (method, target, {"host": parts.netloc, **headers})
        async with self._turn:
            try:
                async with asyncio.timeout(limit_s):
                    return await self._ask(server, head, content, max_bytes)
            except (OSError, TimeoutError) as error:
                raise RequestFailed(f"{type(error).__name__} {error}".rstrip()) from error

    async def _ask(self, server: _Server, head: _Head, content: bytes, max_bytes: int) -> Reply:
        while True:
            kept = self._take_idle(server)
            stream = kept or await asyncio.open_connection(*server)
            reply = await self._exchange(stream, server, head, content, max_bytes)
            if reply is not None:
                return reply
            if kept is None:
                raise ConnectionError("the connection ended before an answer")

    async def aclose(self) -> None:
        """Close all idle connections."""
        for server in list(self._idle):
            for stream, _ in list(self._idle[server]):
                self._expire(server, stream)

    def _take_idle(self, server: _Server) -> Stream | None:
        while self._idle[server]:
            stream, timer = self._idle[server].pop()
            timer.cancel()
            if not stream[0].at_eof():
                return stream
            stream[1].close()
        del self._idle[server]
        return None

    def _expire(self, server: _Server, stream: Stream) -> None:
        stream[1].close()
        for kept, timer in self._idle[server]:
            if kept is stream:
                timer.cancel()
        self._idle[server] = [entry for entry in self._idle[server] if entry[0] is not stream]
        if not self._idle[server]:
            del self._idle[server]

    async def _exchange(
        self,
        stream: Stream,
        server: _Server,
        head: _Head,
        content: bytes,
        max_bytes: int,
    ) -> Reply | None:
        """Send a request and read its answer; None if the connection ended before any of the answer came."""
        import h11

        protocol = h11.Connection(h11.CLIENT)
        is_kept = False
        try:
            await _send(protocol, stream[1], head, content)
            reply = await _receive(protocol, stream[0], max_bytes)
            is_kept = protocol.our_state is h11.DONE and protocol.their_state is h11.DONE
        except (ConnectionResetError, BrokenPipeError):
            return None
        except (h11.RemoteProtocolError, h11.LocalProtocolError) as error:
            raise ConnectionError(f"no HTTP: {error}") from error
        finally:
            if is_kept and len(self._idle[server]) < _MAX_IDLE:
                timer = asyncio.get_running_loop().call_later(_MAX_IDLE_S, self._expire, server, stream)
                self._idle[server].append((stream, timer))
            else:
                stream[1].close()
        return reply


async def _send(
    protocol: Any,
    writer: asyncio.StreamWriter,
    head: _Head,
    content: bytes,
) -> None:
    import h11

    method, target, fields = head
    framing = ("content-length", str(len(content)))
    request = h11.Request(method=method, target=target, headers=[*fields.items(), framing])
    # One write: the packet of a second one might wait until the first is acknowledged.
    data = protocol.send(request) + (protocol.send(h11.Data(data=content)) if content else b"")
    writer.write(data + protocol.send(h11.EndOfMessage()))
    await writer.drain()


async def _receive(protocol: Any, reader: asyncio.StreamReader, max_bytes: int) -> Reply | None:
    import h11

    status, body = 0, bytearray()
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
            body += event.data
            if len(body) > max_bytes:
                raise ConnectionError(f"an answer of more than {max_bytes} bytes")
        elif isinstance(event, h11.EndOfMessage):
            return Reply(status=status, body=bytes(body))
        elif not isinstance(event, h11.InformationalResponse):
            raise ConnectionError("the connection ended within an answer")
