"""The proxy of a sandbox with an allow-list: tunnels by `CONNECT`, and requests with an absolute URL of http.

The agent listens inside and passes accepted connections out; this process serves them in its event loop. A
connection carries one tunnel or one request: bytes behind a request's body are not forwarded, so no second
request can hide there, and the header `Host` is rebuilt from the URL. A name is resolved only after it was
found in the list, and once: the addresses that are checked are those that are connected to. Not covered: the
contents of a tunnel, such as another host of the same server.
"""

from __future__ import annotations

import asyncio
import re
import socket
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from urllib.parse import urlsplit

from strop.sandbox.allowlist import AllowList, normalize_host, parse_endpoint

_MAX_HEAD_BYTES = 1 << 16
_CHUNK_BYTES = 1 << 16
_HEAD_LIMIT_S = 30.0
_CONNECT_LIMIT_S = 10.0
_REFUSAL_PAUSE_S = 0.01
"""The pause of a refusal keeps a program from filling a log."""
_MAX_SHOWN_BYTES = 200
_LINE = re.compile(r"([A-Z][A-Z0-9_-]{0,31}) ([!-~]{1,16384}) (HTTP/1\.[01])")
_HEADER = re.compile(r"([!#$%&'*+.^_`|~0-9A-Za-z-]+):[ \t]*([^\x00-\x08\x0a-\x1f\x7f]*)")
_HOP_BY_HOP_HEADERS = (
    *("host", "connection", "proxy-connection", "proxy-authorization", "keep-alive", "te", "trailer"),
    "upgrade",
)
"""They belong to a connection, not to the request."""
_ESTABLISHED = b"HTTP/1.1 200 Connection established\r\n\r\n"


@dataclass(frozen=True, kw_only=True, slots=True)
class _ProxyRequest:
    """A caller's request."""

    host: str
    port: int
    head: bytes = b""
    """The request's head for the server."""
    num_body_bytes: int | None = None
    """None for a tunnel: no bound."""


class _Refused(Exception):
    """A refusal: the status line of the answer, the target, the reason."""

    def __init__(self, status: str, target: str, why: str, *, is_reported: bool = True) -> None:
        super().__init__(why)
        self.status, self.target, self.is_reported = status, target, is_reported


async def serve_caller(
    caller: socket.socket, report: Callable[[str, str], None], *, allowed: AllowList
) -> None:
    """Serve a program's connection to its end; report the target and the reason if it is refused."""
    reader, writer = await asyncio.open_connection(sock=caller.dup(), limit=_MAX_HEAD_BYTES)
    try:
        request = await _read_request(reader)
        server_reader, server_writer = await _connect(request, allowed)
        try:
            if request.num_body_bytes is None:
                writer.write(_ESTABLISHED)
                await asyncio.gather(_copy(reader, server_writer), _copy(server_reader, writer))
            else:
                server_writer.write(request.head)
                sending = asyncio.create_task(_copy(reader, server_writer, request.num_body_bytes))
                # The answer may be complete before the request was read to its end.
                await _copy(server_reader, writer)
                sending.cancel()
                await asyncio.gather(sending, return_exceptions=True)
        finally:
            server_writer.close()
    except _Refused as error:
        if error.is_reported:
            report(error.target, str(error))
            await asyncio.sleep(_REFUSAL_PAUSE_S)
        body = f"{error.target}: {error}\n".encode(errors="replace")
        head = f"HTTP/1.1 {error.status}\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
        with suppress(OSError, TimeoutError):
            writer.write(head.encode() + body)
            writer.write_eof()
            # Read the rest of the request for a while: closing with unread input would drop the answer.
            async with asyncio.timeout(1.0):
                while await reader.read(_CHUNK_BYTES):
                    pass
    except OSError:
        # One of both is gone.
        pass
    finally:
        writer.close()


async def _read_request(reader: asyncio.StreamReader) -> _ProxyRequest:
    """Read a request's head. Raises: _Refused unless it is a proxy request that can hide no other."""
    data = b""
    try:
        async with asyncio.timeout(_HEAD_LIMIT_S):
            data = await reader.readuntil(b"\r\n\r\n")
    except (asyncio.IncompleteReadError, asyncio.LimitOverrunError, TimeoutError) as error:
        data = getattr(error, "partial", b"?")
        # A probe of the port asks for nothing and leaves.
        why = "no end of the request's head"
        raise _Refused("400 Bad Request", _show(data), why, is_reported=bool(data)) from error
    first, *lines = data.decode("latin-1").removesuffix("\r\n\r\n").split("\r\n")
    line, headers = _LINE.fullmatch(first), [_HEADER.fullmatch(header) for header in lines]
    try:
        if line is None or None in headers:
            raise ValueError("CONNECT HOST:PORT is served, and requests with a whole URL of http")
        method, target, version = line.groups()
        if method == "CONNECT":
            host, port = parse_endpoint(target)
            return _ProxyRequest(host=host, port=port)
        parts = urlsplit(target)
        if parts.scheme != "http" or not parts.hostname or "@" in parts.netloc:
            raise ValueError("a whole URL with http:// is asked for, or CONNECT HOST:PORT")
        host, port = normalize_host(parts.hostname), parts.port if parts.port is not None else 80
        pairs = [(match[1].lower(), match) for match in headers if match is not None]
        lengths = {match[2].strip() for name, match in pairs if name == "content-length"}
        if len(lengths) > 1 or not all(re.fullmatch(r"[0-9]{1,15}", length) for length in lengths):
            raise ValueError("the length of its body is not clear")
    except ValueError as error:
        raise _Refused("400 Bad Request", _show(data), str(error)) from error
    if any(name == "transfer-encoding" for name, _ in pairs):
        raise _Refused("411 Length Required", _show(data), "a body without Content-Length")
    path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    name = f"[{host}]" if ":" in host else host
    own_lines = [f"{method} {path} {version}", f"Host: {name}{'' if port == 80 else f':{port}'}"]
    own_lines += [match[0] for header, match in pairs if header not in _HOP_BY_HOP_HEADERS]
    head = "\r\n".join([*own_lines, "Connection: close", "", ""]).encode("latin-1")
    return _ProxyRequest(host=host, port=port, head=head, num_body_bytes=int(*lengths))


async def _connect(
    request: _ProxyRequest, allowed: AllowList
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Connect to the requested host. Raises: _Refused."""
    host, port = request.host, request.port
    target = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    if not allowed.has(host, port):
        raise _Refused("403 Forbidden", target, "it is not in this sandbox's list of hosts and ports")
    loop = asyncio.get_running_loop()
    try:
        found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise _Refused(
            "502 Bad Gateway", target, f"its name is not known: {error}", is_reported=False
        ) from error
    addresses = sorted({str(address[0]) for *_, address in found})
    good = [address for address in addresses if allowed.may_connect(address, port)]
    if not good:
        why = f"its name leads to {', '.join(addresses)}: not public, nor in the list"
        raise _Refused("403 Forbidden", target, why)
    why = ""
    for address in good:
        try:
            async with asyncio.timeout(_CONNECT_LIMIT_S):
                return await asyncio.open_connection(address, port)
        except (OSError, TimeoutError) as error:
            why = str(error)
    raise _Refused("502 Bad Gateway", target, f"no connection: {why}", is_reported=False)


async def _copy(
    source: asyncio.StreamReader, target: asyncio.StreamWriter, num_left: int | None = None
) -> None:
    """Forward bytes until the source ends, at most `num_left`."""
    while num_left != 0 and (data := await source.read(min(num_left or _CHUNK_BYTES, _CHUNK_BYTES))):
        target.write(data)
        await target.drain()
        num_left = None if num_left is None else num_left - len(data)
    if num_left is None:
        target.write_eof()


def _show(data: bytes) -> str:
    return ascii(data[:_MAX_SHOWN_BYTES].decode("latin-1"))[1:-1]
