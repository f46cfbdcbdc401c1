"""The page: running and finished runs in a browser.

HTML, style and script are files in `page/`, served unchanged: there is no build, and nothing is fetched from
elsewhere. News are sent as server-sent events. Only GET is answered, except
for notes if the page may write them. On a loopback address, only requests for this machine's own names are
answered (against DNS rebinding); on another address, or with STROP_VIEW_TOKEN set, requests need the token.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import os
import re
import secrets
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, MutableMapping
from dataclasses import dataclass
from http.cookies import SimpleCookie
from importlib.resources import files
from ipaddress import ip_address
from typing import Any
from urllib.parse import parse_qs, urlsplit

import uvicorn
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, RedirectResponse, Response, StreamingResponse
from starlette.routing import Route

from strop.errors import ConfigError, StropError
from strop.record.files import LineFollower
from strop.view.answers import compare, describe_row, describe_run, list_runs
from strop.view.live import EVALUATION, EVENTS, METRICS, TRAINING, LiveRun
from strop.view.places import Runs

LOOPBACK = "127.0.0.1"
DEFAULT_PORT = 8421
NOTES_PATH = "/api/notes"
MAX_NOTES_BYTES = 1 << 20
TOKEN_VARIABLE = "STROP_VIEW_TOKEN"
_COOKIE = "strop_view"
_POLL_S, _REMOTE_POLL_S = 0.25, 5.0
_BEAT_S = 15.0
_HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self';"
    " img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-store",
}
_TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}
_PORT = re.compile(r":\d+$")
_LOCAL_NAMES = frozenset({"localhost", "127.0.0.1", "::1"})

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Scope]]
Send = Callable[[Scope], Awaitable[None]]
AsgiApp = Callable[[Scope, Receive, Send], Awaitable[None]]


class Guard:
    """Lets through GET requests for this machine's own names, or with the token; guards every answer."""

    def __init__(self, app: AsgiApp, *, token: str | None, host: str, writes_notes: bool) -> None:
        self._app, self._token, self._writes_notes = app, token, writes_notes
        self._names = _LOCAL_NAMES | {host}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or refuse it."""
        if scope["type"] != "http":
            return

        async def send_guarded(message: Scope) -> None:
            if message["type"] == "http.response.start":
                message["headers"] += [(name.encode(), value.encode()) for name, value in _HEADERS.items()]
            await send(message)

        refusal = self._refuse(scope)
        await (self._app if refusal is None else refusal)(scope, receive, send_guarded)

    def _refuse(self, scope: Scope) -> Response | None:
        headers = {name.decode(): value.decode("latin-1") for name, value in scope["headers"]}
        if scope["method"] not in ("GET", "HEAD"):
            # Another site's script can send a form here, but no request with this header.
            is_note = scope["method"] == "PUT" and scope["path"] == NOTES_PATH and "x-strop" in headers
            if not (is_note and self._writes_notes):
                return _plain("this page is read-only: GET alone is answered", 405)
        if self._token is None:
            name = _PORT.sub("", headers.get("host", "")).strip("[]")
            return None if name in self._names else _plain("this is another machine's page", 403)
        token = parse_qs(scope["query_string"].decode("latin-1")).get("token", [""])[0]
        if token and self._is_token(token):
            # Remove the token from the address: addresses are copied and kept in histories.
            answer = RedirectResponse(scope["path"])
            answer.set_cookie(_COOKIE, token, httponly=True, samesite="strict")
            return answer
        cookie = SimpleCookie(headers.get("cookie", "")).get(_COOKIE)
        bearer = headers.get("authorization", "").removeprefix("Bearer ")
        if self._is_token(bearer) or (cookie is not None and self._is_token(cookie.value)):
            return None
        return _plain("open the address with the token that `strop view` printed", 401)

    def _is_token(self, text: str) -> bool:
        return hmac.compare_digest(text.encode(), (self._token or "").encode())


def _plain(text: str, status: int) -> Response:
    return Response(f"{text}\n", status, media_type="text/plain")


def build_app(
    runs: Runs, *, token: str | None = None, host: str = LOOPBACK, writes_notes: bool = False
) -> AsgiApp:
    """Return the page's application."""
    routes = _Routes(runs, writes_notes=writes_notes)
    app = Starlette(
        routes=[
            Route("/", _send_file),
            Route("/page/{name}", _send_file),
            Route("/api/runs", routes.list),
            Route("/api/compare", routes.compare),
            Route("/api/run", routes.run),
            Route("/api/metrics", routes.metrics),
            Route("/api/steps", routes.steps),
            Route("/api/rollouts", routes.rollouts),
            Route("/api/rollout", routes.rollout),
            Route("/api/search", routes.search),
            Route("/api/timeline", routes.timeline),
            Route("/api/news", routes.news),
            Route(NOTES_PATH, routes.write_notes, methods=["PUT"]),
        ],
        exception_handlers={StropError: _answer_error},
    )
    return Guard(app, token=token, host=host, writes_notes=writes_notes)


async def _send_file(request: Request) -> Response:
    name = request.path_params.get("name", "index.html")
    place = files("strop.view") / "page" / name
    if "/" in name or not place.is_file():
        raise HTTPException(404)
    return Response(place.read_bytes(), media_type=_TYPES.get(name.rpartition(".")[2], "text/plain"))


async def _answer_error(_: Request, error: Exception) -> Response:
    return JSONResponse({"error": str(error)}, 404)


def _json(value: Any) -> Response:
    # NaN is no JSON: numbers that were not measured must be absent.
    return Response(json.dumps(value, allow_nan=False), media_type="application/json")


class _Routes:
    """The request handlers.

    Handlers that only read are plain functions, which Starlette calls in a thread: a store may be slow.
    """

    def __init__(self, runs: Runs, *, writes_notes: bool) -> None:
        self._runs, self._writes_notes = runs, writes_notes

    def _open(self, request: Request) -> LiveRun:
        return self._runs.open(request.query_params.get("run", ""))

    def list(self, request: Request) -> Response:
        return _json(list_runs(self._runs.list()))

    def compare(self, request: Request) -> Response:
        return _json(compare([self._runs.open(key) for key in request.query_params.getlist("run")]))

    def run(self, request: Request) -> Response:
        run = self._open(request)
        return _json({**describe_run(run), "writes_notes": self._writes_notes and run.path is not None})

    async def write_notes(self, request: Request) -> Response:
        run, body = self._open(request), b""
        async for part in request.stream():
            body += part
            if len(body) > MAX_NOTES_BYTES:
                return _plain(f"notes of more than {MAX_NOTES_BYTES} bytes", 413)
        await run_in_threadpool(lambda: run.write_notes(body.decode(errors="replace")))
        return _json({})

    def metrics(self, request: Request) -> Response:
        return _json(self._open(request).list_metrics())

    def steps(self, request: Request) -> Response:
        return _json({"steps": self._open(request).rollout_steps(_source(request))})

    def rollouts(self, request: Request) -> Response:
        step, of = _number(request, "step"), _source(request)
        return _json({"step": step, "rows": self._open(request).list_rows(step, of)})

    def rollout(self, request: Request) -> Response:
        step, key, of = _number(request, "step"), request.query_params.get("key", ""), _source(request)
        return _json(describe_row(self._open(request), step, key, of))

    def search(self, request: Request) -> Response:
        run, of = self._open(request), _source(request)
        first, last = _number(request, "first", 0), _number(request, "last", 2**62)
        steps = [step for step in reversed(run.rollout_steps(of)) if first <= step <= last]
        return _json(run.search(request.query_params.get("text", ""), steps, of))

    def timeline(self, request: Request) -> Response:
        first, last = _number(request, "first", 0), _number(request, "last", 2**62)
        return _json(self._open(request).read_timeline(first, last))

    def news(self, request: Request) -> Response:
        # Byte offsets of metrics and events: where the browser lost the connection, or as requested.
        cursor = request.headers.get("last-event-id") or request.query_params.get("from", "0.0")
        metrics, _, events = cursor.partition(".")
        is_valid = metrics.isdecimal() and events.isdecimal()
        return StreamingResponse(
            follow(self._open(request), (int(metrics), int(events)) if is_valid else (0, 0)),
            headers={"x-accel-buffering": "no"},
            media_type="text/event-stream",
        )


def _number(request: Request, name: str, default: int | None = None) -> int:
    text = request.query_params.get(name, "" if default is None else str(default))
    if not text.isdecimal():
        raise ConfigError(f"{name}={text!r}", allowed="a number from 0", next_step="correct the address")
    return int(text)


def _source(request: Request) -> str:
    of = request.query_params.get("of", TRAINING)
    if of not in (TRAINING, EVALUATION):
        raise ConfigError(
            f"of={of!r}", allowed=f"{TRAINING} or {EVALUATION}", next_step="correct the address"
        )
    return of


async def follow(run: LiveRun, cursor: tuple[int, int], *, poll_s: float | None = None) -> AsyncIterator[str]:
    """Yield a run's news as server-sent events until the client disconnects.

    `restart`: a resume has cut the log back; the following lines replace all earlier ones. `metrics` and
    `event`: one line of the log. `state`: another change, such as an evaluation or the run's end.
    """
    logs = {
        kind: LineFollower(run.record, name, offset)
        for (kind, name), offset in zip({"metrics": METRICS, "event": EVENTS}.items(), cursor, strict=True)
    }
    poll_s = poll_s or (_POLL_S if run.path is not None else _REMOTE_POLL_S)
    last_marks, quiet_s = None, 0.0
    yield "retry: 1000\n\n"
    while True:
        news: list[tuple[str, Mapping[str, Any]]] = []
        for kind, log in logs.items():
            is_restarted, lines = await run_in_threadpool(log.read_records)
            if is_restarted:
                news.append(("restart", {"log": kind}))
            news += [(kind, line) for line in lines]
        marks = await run_in_threadpool(run.read_marks)
        if last_marks is not None and marks != last_marks:
            news.append(("state", {}))
        last_marks = marks
        offsets = ".".join(str(log.offset) for log in logs.values())
        for kind, content in news:
            yield f"id: {offsets}\nevent: {kind}\ndata: {json.dumps(content)}\n\n"
        quiet_s = 0.0 if news else quiet_s + poll_s
        if quiet_s >= _BEAT_S:
            quiet_s = 0.0
            yield ": still here\n\n"
        await asyncio.sleep(poll_s)


@dataclass(frozen=True, kw_only=True, slots=True)
class Address:
    """The page's address."""

    host: str = LOOPBACK
    port: int | None = None
    """None: the default port, or a free one if it is taken."""

    @classmethod
    def parse(cls, text: str) -> Address:
        """Read HOST, :PORT or HOST:PORT, an IPv6 address in brackets. Raises: ConfigError."""
        try:
            parts = urlsplit(f"//{text}")
            host, port = parts.hostname, parts.port
        except ValueError:
            host, port = None, None
        if (host is None and port is None) or f"//{parts.netloc}" != parts.geturl() or parts.username:
            raise ConfigError(
                f"--address {text}",
                allowed="HOST, :PORT or HOST:PORT, such as 127.0.0.1:8421",
                next_step="correct the address",
            )
        return cls(host=host or LOOPBACK, port=port)

    def listen(self) -> socket.socket:
        """Return a listening socket. Raises: ConfigError if the address is taken, or of another machine."""
        family = socket.AF_INET6 if ":" in self.host else socket.AF_INET
        for port in (DEFAULT_PORT, 0) if self.port is None else (self.port,):
            try:
                return socket.create_server((self.host, port), family=family, backlog=128)
            except OSError as error:
                reason = error.strerror
        raise ConfigError(
            f"the page cannot listen on {self.host}:{port} ({reason})",
            allowed="an address of this machine, with a port that is free",
            next_step="leave --address out, and a free port is taken",
        )


def serve(runs: Runs, address: Address, *, writes_notes: bool, say: Callable[[str], None]) -> None:
    """Serve the page until SIGINT or SIGTERM; `say` gets its address. Raises: ConfigError, see `listen`."""
    listener = address.listen()
    port = listener.getsockname()[1]
    token = os.environ.get(TOKEN_VARIABLE) or (
        None if _is_loopback(address.host) else secrets.token_urlsafe(24)
    )
    host = f"[{address.host}]" if ":" in address.host else address.host
    say(f"http://{host}:{port}/" + (f"?token={token}" if token else ""))
    config = uvicorn.Config(
        build_app(runs, token=token, host=address.host, writes_notes=writes_notes),
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        # A page that follows a run never ends its request.
        timeout_graceful_shutdown=1,
    )
    uvicorn.Server(config).run(sockets=[listener])


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False
