"""The HTTP side of the controller: authentication, limits on size and time, and the form of errors.

Every refusal is `{"detail": ...}`; no answer is a redirect. Keys are checked before a body is read. Idle
connections are closed, so that many of them do not block other clients.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from uvicorn.protocols.http.h11_impl import H11Protocol

from strop.errors import CheckRefused, StoreError, describe_error
from strop.runtime.contract import NODE_KEY_HEADER
from strop.runtime.http_server import HttpError
from strop.runtime.keys import ANYONE, KeyRing
from strop.sandbox.wire import SERVICE_KEY_HEADER

OPEN_PATHS = frozenset({"/health", "/liveness", "/readiness"})
MAX_BODY_BYTES = 256 << 10
BODY_LIMIT_S = 20.0
HEAD_LIMIT_S = 10.0
"""From the start of a connection to the end of its first request's head."""
KEEP_ALIVE_S = 75.0
"""Longer than any client keeps an idle connection; else a client may send into a connection that closes."""
_NODES = "/nodes/"

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Scope]]
Send = Callable[[Scope], Awaitable[None]]
AsgiApp = Callable[[Scope, Receive, Send], Awaitable[None]]

_log = logging.getLogger("strop.runtime.web")


class Guard:
    """Passes on requests with a valid key; `scope["owner"]` is its owner. Node agents have separate keys."""

    def __init__(self, app: AsgiApp, *, keys: KeyRing | None, node_keys: KeyRing) -> None:
        """`keys` is None if clients need no key."""
        self._app = app
        self._keys = keys
        self._node_keys = node_keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or refuse it."""
        if scope["type"] == "http" and scope["path"] not in OPEN_PATHS:
            scope["owner"] = self._owner_of(scope)
            if scope["owner"] is None:
                answer = make_answer(HttpError(401, "Unauthorized"), scope)
                await answer(scope, receive, send)
                return
        has_begun = False

        async def note(message: Scope) -> None:
            nonlocal has_begun
            has_begun = True
            await send(message)

        try:
            await self._app(scope, receive, note)
        except asyncio.CancelledError:
            # The controller ends, and may have done what the request asks for; the client may repeat it.
            if has_begun or scope["type"] != "http":
                raise
            await make_answer(HttpError(503, "the controller ends; ask again"), scope)(scope, receive, send)

    def _owner_of(self, scope: Scope) -> str | None:
        headers = dict(scope["headers"])
        if scope["path"].startswith(_NODES):
            return self._node_keys.owner_of(_text(headers.get(NODE_KEY_HEADER.lower().encode(), b"")))
        if self._keys is None:
            return ANYONE
        key = _text(headers.get(SERVICE_KEY_HEADER.lower().encode(), b""))
        # Prometheus sends a key from a file as a bearer token.
        bearer = _text(headers.get(b"authorization", b"")).partition("Bearer ")[2]
        return self._keys.owner_of(key or bearer)


class BoundedProtocol(H11Protocol):
    """HTTP/1.1 on one connection, with a limit on the time without a complete request."""

    max_connections = 10_000

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Take a connection. Beyond the limit, abort another one without a request, or else this one."""
        super().connection_made(transport)
        self.idle_since = time.monotonic()
        if len(self.connections) > self.max_connections:
            protocols = (other for other in self.connections if isinstance(other, H11Protocol))
            silent = (other for other in protocols if other is not self and not _has_asked(other))
            next(silent, self).transport.abort()

    def on_response_complete(self) -> None:
        """Restart the idle time."""
        self.idle_since = time.monotonic()
        super().on_response_complete()

    def is_over(self, now: float) -> bool:
        """Whether it was idle for too long. Bytes of an incomplete request do not count."""
        if not _has_asked(self):
            return now - self.idle_since > HEAD_LIMIT_S
        return self.cycle.response_complete and now - self.idle_since > KEEP_ALIVE_S


def _has_asked(connection: H11Protocol) -> bool:
    # The attribute is None before the first request, contrary to uvicorn's annotation.
    return getattr(connection, "cycle", None) is not None


def close_idle(connections: Iterable[Any]) -> None:
    """Close the connections that were idle for too long."""
    now = time.monotonic()
    for connection in list(connections):
        if isinstance(connection, BoundedProtocol) and connection.is_over(now):
            connection.transport.abort()


async def read_body(
    request: Request, *, max_bytes: int = MAX_BODY_BYTES, limit_s: float = BODY_LIMIT_S
) -> bytes:
    """Return the body of a request. Raises: HttpError 413 if it is too large, 408 if it comes too slowly."""
    declared = request.headers.get("content-length", "0")
    if declared.isdecimal() and int(declared) > max_bytes:
        raise HttpError(413, f"the body has {declared} bytes; at most {max_bytes} are taken")
    parts: list[bytes] = []
    size = 0
    try:
        async with asyncio.timeout(limit_s):
            async for part in request.stream():
                size += len(part)
                if size > max_bytes:
                    raise HttpError(413, f"the body has more than {max_bytes} bytes")
                parts.append(part)
    except TimeoutError as error:
        raise HttpError(408, f"the body did not come within {limit_s:g} s") from error
    return b"".join(parts)


def add_error_answers(app: Starlette) -> None:
    """Answer exceptions of an application's routes, and requests without a route, as `{"detail": ...}`."""
    for kind in (HttpError, StoreError, CheckRefused, HTTPException, ClientDisconnect, Exception):
        app.add_exception_handler(kind, _answer_exception)


def make_answer(error: HttpError, scope: Scope) -> JSONResponse:
    """Return the answer for an error."""
    headers = dict(scope["headers"])
    declared = headers.get(b"content-length", b"0")
    is_short = declared.isdigit() and int(declared) <= MAX_BODY_BYTES and b"transfer-encoding" not in headers
    # The rest of a short body is read and dropped; for a longer one the connection is closed.
    closing = {} if is_short and error.status != 408 else {"connection": "close"}
    return JSONResponse({"detail": error.detail}, status_code=error.status, headers=closing)


async def _answer_exception(request: Request, error: Exception) -> Response:
    call = f"{request.method} {request.url.path}"
    match error:
        case HttpError():
            refusal = error
        case StoreError() | CheckRefused():
            _log.error("%s: %s", call, error)
            refusal = HttpError(503, str(error))
        case HTTPException():
            refusal = HttpError(error.status_code, f"no {call} here")
        case ClientDisconnect():
            # The client is gone, and no answer is sent.
            refusal = HttpError(400, "the client disconnected")
        case _:
            _log.error("%s: %s", call, describe_error(error))
            refusal = HttpError(500, "a mistake in the service; its log says more")
    return make_answer(refusal, request.scope)


def _text(value: bytes) -> str:
    return value.decode("latin-1")
