"""A proxy for HTTP that leads to a list of hosts and nowhere else: `CONNECT`, and requests by whole URL.

One thread for each connection, at most 64 at once; more wait. A connection carries one tunnel or one request:
what stands behind a request's body is not passed on, so that no second request is hidden there. The header
`Host` is made anew from the URL. No name is resolved before it was found in the list.

Not covered: proxies behind this one; what is said inside a tunnel, such as another host of the same server.
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
"""Between two refusals of one sandbox, so that a program fills no log."""
_STACK_BYTES = 1 << 18
_MAX_SAID = 200
_LINE = re.compile(rb"([A-Z][A-Z0-9_-]{0,31}) ([!-~]{1,16384}) (HTTP/1\.[01])")
_HEADER = re.compile(rb"([!#$%&'*+.^_`|~0-9A-Za-z-]+):[ \t]*([^\x00-\x08\x0a-\x1f\x7f]*)")
_OWN_HEADERS = frozenset(
    b"host connection proxy-connection proxy-authorization keep-alive te trailer upgrade".split()
)
"""Of one connection, not of the request."""
_ESTABLISHED = b"HTTP/1.1 200 Connection established\r\n\r\n"

Report = Callable[[str, str], None]
"""Told of each refusal: what was asked for, and why not."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Ask:
    """A caller's request."""

    host: str
    port: int
    head: bytes
    """What the server is sent first."""
    num_body_bytes: int | None
    """None for a tunnel: whatever comes."""


class _No(Exception):
    """A refusal, and how it is answered."""

    def __init__(self, status: str, target: str, why: str, *, is_refusal: bool = True) -> None:
        super().__init__(why)
        self.status, self.target, self.is_refusal = status, target, is_refusal


def serve_callers(listener: socket.socket, owner: socket.socket, allowed: AllowList, report: Report) -> None:
    """Take connections until the owner's end is closed."""
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
    for one in (listener, owner):
        poll.register(one, select.POLLIN)
    while owner.fileno() not in {descriptor for descriptor, _ in poll.poll()}:
        free.acquire()
        try:
            caller, _ = listener.accept()
            threading.Thread(target=serve, args=(caller,), daemon=True).start()
        except (OSError, RuntimeError):
            # The caller is gone, or this host gives no thread: it is closed then, and may call again.
            free.release()


def _serve_one(caller: socket.socket, allowed: AllowList, refuse: Report) -> None:
    try:
        head, rest = _read_head(caller)
        ask = _understand(head)
        server = _connect(ask, allowed)
    except _No as no:
        if no.is_refusal:
            refuse(no.target, str(no))
        body = f"{no.target}: {no}\n".encode(errors="replace")
        answer = f"HTTP/1.1 {no.status}\r\nContent-Type: text/plain\r\nContent-Length: {len(body)}\r\n"
        caller.sendall(answer.encode() + b"Connection: close\r\n\r\n" + body)
        _drain(caller)
        return
    with server:
        num_left = None
        if ask.num_body_bytes is None:
            caller.sendall(_ESTABLISHED)
        else:
            num_left = max(0, ask.num_body_bytes - len(rest))
        _relay(caller, server, ask.head + rest[: ask.num_body_bytes], num_left)


def _drain(caller: socket.socket) -> None:
    """Read what is still sent, for a while: a connection that is closed before loses its answer."""
    caller.shutdown(socket.SHUT_WR)
    caller.settimeout(_DRAIN_LIMIT_S)
    num_left = _MAX_DRAINED_BYTES
    while num_left > 0 and (data := caller.recv(_CHUNK_BYTES)):
        num_left -= len(data)


def _read_head(caller: socket.socket) -> tuple[bytes, bytes]:
    """Return the head of a request, and what has come behind it. Raises: _No."""
    data = b""
    deadline = time.monotonic() + _HEAD_LIMIT_S
    while b"\r\n\r\n" not in data:
        left_s = deadline - time.monotonic()
        if left_s <= 0 or len(data) > _MAX_HEAD_BYTES:
            raise _No("400 Bad Request", _show(data), "no end of the request's head")
        caller.settimeout(left_s)
        try:
            more = caller.recv(_CHUNK_BYTES)
        except TimeoutError:
            continue
        if not more:
            # A probe of the port: it connected, asked for nothing and left.
            raise _No("400 Bad Request", _show(data), "no end of the request's head", is_refusal=bool(data))
        data += more
    caller.settimeout(_CONNECT_LIMIT_S)
    head, _, rest = data.partition(b"\r\n\r\n")
    return head, rest


def _understand(head: bytes) -> _Ask:
    """Return what a request asks for. Raises: _No for what is no request to a proxy, or may hide another."""
    first, *lines = head.split(b"\r\n")
    line = _LINE.fullmatch(first)
    if line is None:
        raise _No("400 Bad Request", _show(first), "it is no request of HTTP")
    method, target, version = (part.decode("ascii", "replace") for part in line.groups())
    headers = [_HEADER.fullmatch(one) for one in lines]
    pairs = [(match[1].lower(), match[0]) for match in headers if match is not None]
    if len(pairs) < len(headers):
        raise _No("400 Bad Request", _show(first), "a header of it is none")
    try:
        if method == "CONNECT":
            host, port = parse_endpoint(target)
            return _Ask(host=host, port=port, head=b"", num_body_bytes=None)
        parts = urlsplit(target)
        if parts.scheme != "http" or not parts.hostname or "@" in parts.netloc:
            raise ValueError("a whole URL with http:// is asked for, or CONNECT HOST:PORT")
        host, port = normalize_host(parts.hostname), parts.port if parts.port is not None else 80
    except ValueError as error:
        raise _No("400 Bad Request", _show(first), str(error)) from error
    path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    return _Ask(
        host=host,
        port=port,
        head=_head_for_server(f"{method} {path} {version}", host, port, pairs),
        num_body_bytes=_body_bytes(pairs, _show(first)),
    )


def _head_for_server(first: str, host: str, port: int, pairs: list[tuple[bytes, bytes]]) -> bytes:
    """Return the request's head as the server itself is asked."""
    name = f"[{host}]" if ":" in host else host
    lines = [first.encode(), f"Host: {name}{'' if port == 80 else f':{port}'}".encode()]
    lines += [line for header, line in pairs if header not in _OWN_HEADERS]
    return b"\r\n".join([*lines, b"Connection: close", b"", b""])


def _body_bytes(pairs: list[tuple[bytes, bytes]], target: str) -> int:
    """Return how long a request's body is. Raises: _No unless it says so, once and clearly."""
    if any(header == b"transfer-encoding" for header, _ in pairs):
        raise _No("411 Length Required", target, "a body without Content-Length")
    lengths = {line.partition(b":")[2].strip() for header, line in pairs if header == b"content-length"}
    if not lengths:
        return 0
    length = lengths.pop()
    if lengths or not re.fullmatch(rb"[0-9]{1,15}", length):
        raise _No("400 Bad Request", target, "the length of its body is not clear")
    return int(length)


def _connect(ask: _Ask, allowed: AllowList) -> socket.socket:
    """Return a connection to what is asked for. Raises: _No."""
    target = f"[{ask.host}]:{ask.port}" if ":" in ask.host else f"{ask.host}:{ask.port}"
    if not allowed.has(ask.host, ask.port):
        raise _No("403 Forbidden", target, "it is not in this sandbox's list of hosts and ports")
    try:
        # Bytes: of a text Python would look for an encoding, in files that this user may not read.
        found = socket.getaddrinfo(ask.host.encode(), ask.port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise _No("502 Bad Gateway", target, f"its name is not known: {error}", is_refusal=False) from error
    # Once: what was looked at is what is connected to.
    addresses = [(family, address) for family, _, _, _, address in found]
    allowed_ones = [one for one in addresses if allowed.may_connect(str(one[1][0]), ask.port)]
    if not allowed_ones:
        shown = ", ".join(sorted({str(address[0]) for _, address in addresses}))
        raise _No("403 Forbidden", target, f"its name leads to {shown}: not public, nor in the list")
    why = ""
    for family, address in allowed_ones:
        server = socket.socket(family, socket.SOCK_STREAM)
        server.settimeout(_CONNECT_LIMIT_S)
        try:
            server.connect(address)
            return server
        except OSError as error:
            server.close()
            why = str(error)
    raise _No("502 Bad Gateway", target, f"no connection: {why}", is_refusal=False)


def _relay(caller: socket.socket, server: socket.socket, ahead: bytes, num_left: int | None) -> None:
    """Pass bytes both ways until both have ended; of the caller's, behind `ahead`, at most `num_left`."""
    for one in (caller, server):
        one.setblocking(False)
    there = _Way(caller, server, ahead, num_left)
    back = _Way(server, caller, b"", None)
    while not (there.is_done and back.is_done):
        wanted: dict[int, int] = {}
        for way in (there, back):
            for descriptor, event in way.wanted():
                wanted[descriptor] = wanted.get(descriptor, 0) | event
        poll = select.poll()
        for descriptor, events in wanted.items():
            poll.register(descriptor, events)
        if any(events & select.POLLRDHUP for _, events in poll.poll()):
            return
        there.move()
        back.move()
        if back.is_done and num_left is not None:
            # The answer is whole, whatever of the request was not read.
            return


class _Way:
    """One direction of a connection: at most one chunk is held."""

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
            # More is not read; that a caller has gone matters, to a server that still computes its answer.
            return [(self._source.fileno(), select.POLLRDHUP)]
        return [(self._source.fileno(), select.POLLIN)]

    def move(self) -> None:
        """Pass on what can be passed on now. Raises: OSError if an end is broken."""
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
    return ascii(data[:_MAX_SAID].decode("latin-1"))[1:-1]
