"""The service as an HTTP server.

Every refusal is `{"detail": ...}`; no answer is a redirect. Keys are checked before a body is read, and
bodies are bounded in size and time. A `Gate` bounds connections.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from typing import Any

import uvicorn
from fastapi import FastAPI, HTTPException, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException as AnyHttpException
from starlette.requests import ClientDisconnect
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from strop.errors import CheckRefused, SandboxError, SandboxLost, describe_error, given_of

_KEEP_ALIVE_S = 75
"""Longer than any client keeps an idle connection; else a client may send into a connection that closes."""
_SMALL_BYTES = 256 << 10
_STATUS = {
    "missing": 404,
    "directory": 400,
    "not_regular": 400,
    "denied": 403,
    "too_large": 413,
    "no_space": 507,
    "state": 409,
}
"""Statuses by the kind of a `SandboxError`."""
Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Scope]]
Send = Callable[[Scope], Awaitable[None]]
AsgiApp = Callable[[Scope, Receive, Send], Awaitable[None]]

_log = logging.getLogger("strop.runtime.web")


def make_app() -> FastAPI:
    """Return an application without routes, whose errors are all `{"detail": ...}`."""
    app = FastAPI(openapi_url=None, redirect_slashes=False)
    for kind in (AnyHttpException, RequestValidationError, SandboxError, CheckRefused, Exception):
        app.add_exception_handler(kind, _answer_exception)
    return app


class Guard:
    """Passes on the requests that `admit` lets in, and bounds their bodies."""

    def __init__(
        self, app: AsgiApp, *, admit: Callable[[Scope], None], max_body_bytes: int, body_limit_s: float
    ) -> None:
        """`admit` sees a request's path, headers and state. Raises: HTTPException."""
        self._app = app
        self._admit = admit
        self._max_body_bytes = max_body_bytes
        self._body_limit_s = body_limit_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or refuse it."""
        num_bytes = 0
        has_begun = False
        until = asyncio.get_running_loop().time() + self._body_limit_s

        async def receive_part() -> Scope:
            nonlocal num_bytes
            try:
                async with asyncio.timeout_at(None if has_begun else until):
                    message = await receive()
            except TimeoutError as error:
                raise HTTPException(408, f"the body did not come within {self._body_limit_s:g} s") from error
            num_bytes += len(message.get("body", b""))
            if num_bytes > self._max_body_bytes:
                raise HTTPException(413, f"a body of more than {self._max_body_bytes} bytes")
            return message

        async def note(message: Scope) -> None:
            nonlocal has_begun
            has_begun = True
            await send(message)

        try:
            self._admit(scope)
            if _length_of(scope) > self._max_body_bytes:
                raise HTTPException(413, f"a body of more than {self._max_body_bytes} bytes")
            await self._app(scope, receive_part, note)
        except HTTPException as error:
            await _make_answer(error.status_code, error.detail, scope)(scope, receive, send)


class HttpFace:
    """Serves an application on connections that a gate hands over."""

    def __init__(self, app: AsgiApp) -> None:
        self._config = uvicorn.Config(
            app,
            http=H11Protocol,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            date_header=False,
            proxy_headers=False,
            timeout_keep_alive=_KEEP_ALIVE_S,
        )
        self._config.load()
        self._state = ServerState()

    def protocol(self, state: Mapping[str, Any] | None = None) -> asyncio.Protocol:
        """Return the protocol of one connection; its requests have `state`."""
        return H11Protocol(config=self._config, server_state=self._state, app_state=dict(state or {}))

    async def close(self) -> None:
        """End the requests that still run."""
        tasks = list(self._state.tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def header_of(scope: Scope, name: str) -> str:
    """Return a request's header; empty without one."""
    wanted = name.lower().encode()
    return next((value.decode("latin-1") for key, value in scope["headers"] if key == wanted), "")


def _length_of(scope: Scope) -> int:
    declared = header_of(scope, "content-length")
    return int(declared) if declared.isdecimal() else 0


def _make_answer(status: int, detail: str, scope: Scope) -> JSONResponse:
    # The rest of a short body is read and dropped; for a longer one the connection is closed.
    is_short = _length_of(scope) <= _SMALL_BYTES and not header_of(scope, "transfer-encoding")
    headers = {} if is_short and status != 408 else {"connection": "close"}
    return JSONResponse({"detail": detail}, status_code=status, headers=headers)


async def _answer_exception(request: Request, error: Exception) -> JSONResponse:
    call = f"{request.method} {request.url.path}"
    match error:
        case HTTPException():
            status, detail = error.status_code, str(error.detail)
        case AnyHttpException():
            status, detail = error.status_code, f"no {call} here"
        case RequestValidationError():
            faults = (f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in error.errors())
            status, detail = 422, "; ".join(faults)
        case SandboxLost():
            status, detail = 503, given_of(error)
        case SandboxError():
            status, detail = _STATUS.get(error.kind, 500), given_of(error)
        case CheckRefused():
            _log.error("%s: %s", call, error)
            status, detail = 503, str(error)
        case ClientDisconnect():
            # The client is gone, and no answer is sent.
            status, detail = 400, "the client disconnected"
        case _:
            _log.error("%s: %s", call, describe_error(error))
            status, detail = 500, "a mistake in the service; its log says more"
    return _make_answer(status, detail.encode(errors="replace").decode(), request.scope)
