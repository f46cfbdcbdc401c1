"""An HTTP proxy to the hosts of an allow-list: `CONNECT` tunnels, and requests with an absolute URL.

It runs one thread per connection, at most 64; further connections wait. A connection carries one tunnel or
one request: bytes behind a request's body are not forwarded, so no second request can hide there. The header
`Host` is rebuilt from the URL. A name is resolved only after it was found in the list.

Not covered: proxies behind this one; the contents of a tunnel, such as another host of the same server.
"""

from __future__ import annotations

import re
import select
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from urllib.parse import urlsplit

from strop.sandbox.allowlist import AllowList, normalize_host, parse_endpoint

MAX_CALLERS = 64
_MAX_HEAD_BYTES = 1 << 16
_CHUNK_BYTES = 1 << 16
_HEAD_LIMIT_S = 30.0
_CONNECT_LIMIT_S = 10.0
_DRAIN_LIMIT_S = 1.0
_MAX_DRAINED_BYTES = 1 << 20
_REFUSAL_PAUSE_S = 0.01
"""The pause between two refusals of one sandbox keeps a program from filling a log."""
_STACK_BYTES = 1 << 18
_MAX_SHOWN_BYTES = 200
_LINE = re.compile(rb"([A-Z][A-Z0-9_-]{0,31}) ([!-~]{1,16384}) (HTTP/1\.[01])")
_HEADER = re.compile(rb"([!#$%&'*+.^_`|~0-9A-Za-z-]+):[ \t]*([^\x00-\x08\x0a-\x1f\x7f]*)")
_HOP_BY_HOP_HEADERS = frozenset(
    b"host connection proxy-connection proxy-authorization keep-alive te trailer upgrade".split()
)
"""They belong to a connection, not to the request."""
_ESTABLISHED = b"HTTP/1.1 200 Connection established\r\n\r\n"

Report = Callable[[str, str], None]
"""Called for each refusal with the requested target and the reason."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _ProxyRequest:
    """A caller's request."""

    host: str
    port: int
    head: bytes
    """The request's head for the server."""
    num_body_bytes: int | None
    """None for a tunnel: no bound."""


class _Refused(Exception):
    """A refusal, and the status line of the answer."""

    def __init__(self, status: str, target: str, why: str, *, is_refusal: bool = True) -> None:
        super().__init__(why)
        self.status, self.target, self.is_refusal = status, target, is_refusal


def serve_callers(listener: socket.socket, owner: socket.socket, allowed: AllowList, report: Report) -> None:
    """Accept connections until the owner closes its end."""
    threading.stack_size(_STACK_BYTES)
    free = threading.BoundedSemaphore(MAX_CALLERS)
    turn = threading.Lock()

    def refuse(target: str, why: str) -> None:
        with turn:
            report(target, why)
            time.sleep(_REFUSAL_PAUSE_S)

    def serve(caller: socket.socket) -> None:
        try:
            with caller, suppress(OSError):
                _serve_one(caller, allowed, refuse)
        finally:
            free.release()

    poll = select.poll()
    for source in (listener, owner):
        poll.register(source, select.POLLIN)
    while owner.fileno() not in {descriptor for descriptor, _ in poll.poll()}:
        free.acquire()
        try:
            caller, _ = listener.accept()
            threading.Thread(target=serve, args=(caller,), daemon=True).start()
        except (OSError, RuntimeError):
            # The caller is gone, or the host has no thread left: the connection is closed; it may try again.
            free.release()


def _serve_one(caller: socket.socket, allowed: AllowList, refuse: Report) -> None:
    try:
        head, rest = _read_head(caller)
        request = _parse_request(head)
        server = _connect(request, allowed)
    except _Refused as refused:
        if refused.is_refusal:
            refuse(refused.target, str(refused))
        body = f"{refused.target}: {refused}\n".encode(errors="replace")
        answer = f"HTTP/1.1 {refused.status}\r\nContent-Type: text/plain\r\nContent-Length: {len(body)}\r\n"
        caller.sendall(answer.encode() + b"Connection: close\r\n\r\n" + body)
        # Read the rest of the request for a while: closing with unread input would drop the answer.
        caller.shutdown(socket.SHUT_WR)
        caller.settimeout(_DRAIN_LIMIT_S)
        num_left = _MAX_DRAINED_BYTES
        while num_left > 0 and (data := caller.recv(_CHUNK_BYTES)):
            num_left -= len(data)
        return
    with server:
        limit = None
        if request.num_body_bytes is None:
            caller.sendall(_ESTABLISHED)
        else:
            limit = max(0, request.num_body_bytes - len(rest))
        _relay(caller, server, request.head + rest[: request.num_body_bytes], limit)


def _read_head(caller: socket.socket) -> tuple[bytes, bytes]:
    """Return the head of a request, and the bytes received behind it. Raises: _Refused."""
    data = b""
    deadline = time.monotonic() + _HEAD_LIMIT_S
    while b"\r\n\r\n" not in data:
        left_s = deadline - time.monotonic()
        if left_s <= 0 or len(data) > _MAX_HEAD_BYTES:
            raise _Refused("400 Bad Request", _show(data), "no end of the request's head")
        caller.settimeout(left_s)
        try:
            more = caller.recv(_CHUNK_BYTES)
        except TimeoutError:
            continue
        if not more:
            # A probe of the port: it connected, asked for nothing and left.
            raise _Refused(
                "400 Bad Request", _show(data), "no end of the request's head", is_refusal=bool(data)
            )
        data += more
    caller.settimeout(_CONNECT_LIMIT_S)
    head, _, rest = data.partition(b"\r\n\r\n")
    return head, rest


def _parse_request(head: bytes) -> _ProxyRequest:
    """Parse a request's head. Raises: _Refused unless it is a proxy request that can hide no other."""
    first, *lines = head.split(b"\r\n")
    line = _LINE.fullmatch(first)
    if line is None:
        raise _Refused("400 Bad Request", _show(first), "it is no request of HTTP")
    method, target, version = (part.decode("ascii", "replace") for part in line.groups())
    headers = [_HEADER.fullmatch(header) for header in lines]
    pairs = [(match[1].lower(), match[0]) for match in headers if match is not None]
    if len(pairs) < len(headers):
        raise _Refused("400 Bad Request", _show(first), "a header of it is none")
    try:
        if method == "CONNECT":
            host, port = parse_endpoint(target)
            return _ProxyRequest(host=host, port=port, head=b"", num_body_bytes=None)
        parts = urlsplit(target)
        if parts.scheme != "http" or not parts.hostname or "@" in parts.netloc:
            raise ValueError("a whole URL with http:// is asked for, or CONNECT HOST:PORT")
        host, port = normalize_host(parts.hostname), parts.port if parts.port is not None else 80
    except ValueError as error:
        raise _Refused("400 Bad Request", _show(first), str(error)) from error
    path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    name = f"[{host}]" if ":" in host else host
    own_lines = [f"{method} {path} {version}".encode()]
    own_lines.append(f"Host: {name}{'' if port == 80 else f':{port}'}".encode())
    passed_on = [header for key, header in pairs if key not in _HOP_BY_HOP_HEADERS]
    return _ProxyRequest(
        host=host,
        port=port,
        head=b"\r\n".join([*own_lines, *passed_on, b"Connection: close", b"", b""]),
        num_body_bytes=_body_bytes(pairs, _show(first)),
    )


def _body_bytes(pairs: list[tuple[bytes, bytes]], target: str) -> int:
    """Return the length of a request's body. Raises: _Refused unless its headers state exactly one."""
    if any(header == b"transfer-encoding" for header, _ in pairs):
        raise _Refused("411 Length Required", target, "a body without Content-Length")
    lengths = {line.partition(b":")[2].strip() for header, line in pairs if header == b"content-length"}
    if not lengths:
        return 0
    length = lengths.pop()
    if lengths or not re.fullmatch(rb"[0-9]{1,15}", length):
        raise _Refused("400 Bad Request", target, "the length of its body is not clear")
    return int(length)


def _connect(request: _ProxyRequest, allowed: AllowList) -> socket.socket:
    """Return a connection to the requested host. Raises: _Refused."""
    host, port = request.host, request.port
    target = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    if not allowed.has(host, port):
        raise _Refused("403 Forbidden", target, "it is not in this sandbox's list of hosts and ports")
    try:
        # Bytes: for a str Python would load an encoding, from files that this user may not read.
        results = socket.getaddrinfo(host.encode(), port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise _Refused(
            "502 Bad Gateway", target, f"its name is not known: {error}", is_refusal=False
        ) from error
    # Resolved once: the addresses that are checked are those that are connected to.
    addresses = [(family, address) for family, _, _, _, address in results]
    allowed_addresses = [pair for pair in addresses if allowed.may_connect(str(pair[1][0]), port)]
    if not allowed_addresses:
        shown = ", ".join(sorted({str(address[0]) for _, address in addresses}))
        raise _Refused("403 Forbidden", target, f"its name leads to {shown}: not public, nor in the list")
    why = ""
    for family, address in allowed_addresses:
        server = socket.socket(family, socket.SOCK_STREAM)
        server.settimeout(_CONNECT_LIMIT_S)
        try:
            server.connect(address)
            return server
        except OSError as error:
            server.close()
            why = str(error)
    raise _Refused("502 Bad Gateway", target, f"no connection: {why}", is_refusal=False)


def _relay(caller: socket.socket, server: socket.socket, ahead: bytes, num_left: int | None) -> None:
    """Forward bytes both ways until both ends close; from the caller `ahead`, then at most `num_left`."""
    for end in (caller, server):
        end.setblocking(False)
    there = _Direction(caller, server, ahead, num_left)
    back = _Direction(server, caller, b"", None)
    while not (there.is_done and back.is_done):
        wanted: dict[int, int] = {}
        for direction in (there, back):
            for descriptor, event in direction.wanted():
                wanted[descriptor] = wanted.get(descriptor, 0) | event
        poll = select.poll()
        for descriptor, events in wanted.items():
            poll.register(descriptor, events)
        if any(events & select.POLLRDHUP for _, events in poll.poll()):
            return
        there.move()
        back.move()
        if back.is_done and num_left is not None:
            # The answer is complete, even if the request was not read to its end.
            return


class _Direction:
    """One direction of a connection. It buffers at most one chunk."""

    def __init__(
        self, source: socket.socket, target: socket.socket, ahead: bytes, num_left: int | None
    ) -> None:
        self._source, self._target = source, target
        self._held = ahead
        self._num_left = num_left
        self._has_end = False
        self.is_done = False

    def wanted(self) -> list[tuple[int, int]]:
        """Return the descriptors and poll events that it waits for."""
        if self._held:
            return [(self._target.fileno(), select.POLLOUT)]
        if self._has_end:
            return []
        if self._num_left == 0:
            # No more is read, but a server that still computes its answer should learn that the caller left.
            return [(self._source.fileno(), select.POLLRDHUP)]
        return [(self._source.fileno(), select.POLLIN)]

    def move(self) -> None:
        """Forward as much as possible without blocking. Raises: OSError if an end is broken."""
        with suppress(BlockingIOError):
            if not self._held and not self._has_end and self._num_left != 0:
                self._held = self._source.recv(min(_CHUNK_BYTES, self._num_left or _CHUNK_BYTES))
                self._has_end = not self._held
                if self._num_left is not None:
                    self._num_left -= len(self._held)
            while self._held:
                self._held = self._held[self._target.send(self._held) :]
        if not self._held and (self._has_end or self._num_left == 0) and not self.is_done:
            self.is_done = True
            if self._has_end:
                with suppress(OSError):
                    self._target.shutdown(socket.SHUT_WR)


def _show(data: bytes) -> str:
    return ascii(data[:_MAX_SHOWN_BYTES].decode("latin-1"))[1:-1]
