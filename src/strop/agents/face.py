"""The OpenAI-compatible face of the model: for each rollout an address `/r/ID/v1`, and a key.

`POST chat/completions` (`chat`) and `POST responses` (`responses`), plain and as a stream (the reply is
sampled whole, then sent), with tools and log-probabilities; `GET models`. The run's sampling is used whatever
a program asks for: other tokens would not be the policy's. Requests that would change the support of the
distribution are refused.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import secrets
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

from strop.agents.chat import Chat
from strop.agents.dialect import Dialect, ModelRequest, Refused
from strop.agents.responses import Responses
from strop.engine.server import LOOPBACK, listen
from strop.engine.wire import require_server_part
from strop.environments.recording import Call, CallsUsedUp, CallTooLong, Recorder
from strop.errors import ConfigError, DataError, StropError, describe_error

_MAX_BODY_BYTES = 64 << 20
_UNREADABLE = (ValueError, LookupError, TypeError, AttributeError, RecursionError, DataError, ImportError)
"""What a dialect raises for a request in another form, or one that a missing package could read."""
_UNSERVED = ("bad_request", "not_found", "too_large", "unsupported_value", "previous_response_not_found")
"""Codes of requests that no attempt serves."""
_MODEL = {"id": "policy", "object": "model", "created": 0, "owned_by": "strop"}

Receive = Callable[[], Awaitable[Mapping[str, Any]]]
Send = Callable[[dict[str, Any]], Awaitable[None]]


@dataclass(kw_only=True, slots=True, eq=False)
class _Open:
    """An open rollout, whose program may send requests."""

    key: str
    recorder: Recorder
    dialects: Mapping[str, Dialect]
    """Dialects by path."""
    answers: dict[bytes, asyncio.Future[list[Call]]] = field(default_factory=dict)
    """The newest calls by a hash of path and body, for a library that repeats a request."""


class Face:
    """Serves all rollouts of a process, within `serving`."""

    def __init__(self) -> None:
        self._open: dict[str, _Open] = {}
        self._closed: set[str] = set()
        self.url = ""

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[Face]:
        """Serve on a free port of the loopback address."""
        require_server_part("uvicorn")
        import uvicorn

        class Server(uvicorn.Server):
            """A server that leaves signals to its process."""

            def capture_signals(self) -> Any:
                """Capture no signals."""
                from contextlib import nullcontext

                return nullcontext()

        listener: socket.socket = listen()
        self.url = f"http://{LOOPBACK}:{listener.getsockname()[1]}"
        config = uvicorn.Config(
            self._answer, interface="asgi3", lifespan="off", log_config=None, access_log=False
        )
        server = Server(config)
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        try:
            # The socket listens already: requests that come before the server runs wait for a moment.
            yield self
        finally:
            server.should_exit = server.force_exit = True
            await asyncio.gather(serving, return_exceptions=True)
            listener.close()

    @asynccontextmanager
    async def open(self, recorder: Recorder) -> AsyncIterator[tuple[str, str]]:
        """Serve a program's requests by a recorder for the block; yield their base URL and key."""
        name, key = secrets.token_hex(8), secrets.token_hex(16)
        tokenizer = recorder.tokenizer
        dialects: dict[str, Dialect] = {
            "chat/completions": Chat(tokenizer),
            "responses": Responses(tokenizer),
        }
        self._open[name] = _Open(key=key, recorder=recorder, dialects=dialects)
        try:
            yield f"{self.url}/r/{name}/v1", key
        finally:
            recorder.is_sealed = True
            del self._open[name]
            self._closed.add(name)

    async def _answer(self, scope: Mapping[str, Any], receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        rollout: _Open | None = None
        try:
            rollout = self._authorize(scope)
            path = scope["path"].split("/v1/", 1)[-1]
            if scope["method"] == "GET" and path == "models":
                model = {**_MODEL, "max_model_len": rollout.recorder.max_positions}
                await _send_json(send, 200, {"object": "list", "data": [model]})
            elif scope["method"] == "POST" and path in rollout.dialects:
                await _complete(rollout, rollout.dialects[path], scope, receive, send)
            else:
                raise Refused(404, f"there is no {scope['method']} {path!r:.100}", "not_found")
        except Refused as refused:
            if rollout is not None and refused.code in _UNSERVED:
                rollout.recorder.refused_request = f"{scope['path'].split('/v1/', 1)[-1]}: {refused}"
            error = {
                "message": str(refused),
                "type": "invalid_request_error",
                "param": None,
                "code": refused.code,
            }
            await _send_json(send, refused.status, {"error": error})

    def _authorize(self, scope: Mapping[str, Any]) -> _Open:
        parts = scope["path"].split("/")
        name = parts[2] if len(parts) > 3 and parts[1] == "r" else ""
        if name in self._closed:
            raise Refused(410, "this rollout is over", "gone")
        rollout = self._open.get(name)
        if rollout is None:
            raise Refused(404, "there is no such rollout", "not_found")
        key = dict(scope["headers"]).get(b"authorization", b"").removeprefix(b"Bearer ")
        if not hmac.compare_digest(key, rollout.key.encode()):
            raise Refused(401, "the key is not this rollout's", "invalid_api_key")
        return rollout


@dataclass(kw_only=True, eq=False)
class _Shared:
    """The face of an event loop."""

    face: Face = field(default_factory=Face)
    stack: AsyncExitStack = field(default_factory=AsyncExitStack)
    num_users: int = 0
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)


_shared: WeakKeyDictionary[asyncio.AbstractEventLoop, _Shared] = WeakKeyDictionary()


@asynccontextmanager
async def lease_face() -> AsyncIterator[Face]:
    """Return the face of this event loop; its server ends with the last attempt that uses it."""
    shared = _shared.setdefault(asyncio.get_running_loop(), _Shared())
    async with shared.lock:
        if not shared.num_users:
            await shared.stack.enter_async_context(shared.face.serving())
        shared.num_users += 1
    try:
        yield shared.face
    finally:
        async with shared.lock:
            shared.num_users -= 1
            if not shared.num_users:
                await shared.stack.aclose()


async def _complete(
    rollout: _Open, dialect: Dialect, scope: Mapping[str, Any], receive: Receive, send: Send
) -> None:
    """Answer a request. A retry that a library declares as one gets the same replies. Raises: Refused."""
    body = await _read_body(receive)
    try:
        request = dialect.read(json.loads(body))
    except _UNREADABLE as error:
        raise Refused(400, f"this request cannot be read: {error}", "bad_request") from error
    digest = hashlib.blake2b(scope["path"].encode() + b"\n" + body).digest()
    asking = rollout.answers.get(digest)
    is_retry = dict(scope["headers"]).get(b"x-stainless-retry-count", b"0") != b"0"
    if asking is None or not is_retry:
        asking = asyncio.ensure_future(_ask(rollout, request))
        rollout.answers[digest] = asking
    gone: asyncio.Future[Any] = asyncio.ensure_future(_wait_for_disconnect(receive))
    try:
        both: list[asyncio.Future[Any]] = [asking, gone]
        await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        if not asking.done():
            # The client is gone, but may retry and still want the reply.
            asking.add_done_callback(_mark_undelivered)
            return
        calls = asking.result()
        for call in calls:
            call.is_delivered = True
        if request.body.get("stream"):
            await _send(send, 200, b"text/event-stream", dialect.stream(request, calls).encode())
        else:
            await _send_json(send, 200, dialect.answer(request, calls))
    finally:
        gone.cancel()


def _mark_undelivered(asking: asyncio.Future[list[Call]]) -> None:
    if not asking.cancelled() and asking.exception() is None:
        for call in asking.result():
            call.is_delivered = False


async def _ask(rollout: _Open, request: ModelRequest) -> list[Call]:
    """Sample a reply for each choice. Raises: Refused."""
    if rollout.recorder.is_sealed:
        raise Refused(410, "this rollout is over", "gone")
    recorder = rollout.recorder
    limit, stop = request.max_tokens, request.stop
    choices = [
        recorder.ask(request.messages, request.tools, limit, is_one_call=request.is_one_call, stop=stop)
        for _ in range(request.num_choices)
    ]
    try:
        calls = await asyncio.gather(*choices)
        recorder.num_format_errors += sum(not request.is_met(call) for call in calls)
        return calls
    except CallTooLong as error:
        raise Refused(400, str(error), "context_length_exceeded") from error
    except CallsUsedUp as error:
        raise Refused(410, str(error), "used_up") from error
    except ConfigError as error:
        # The model's template cannot render the program's messages.
        raise Refused(400, describe_error(error), "unsupported_value") from error
    except StropError as error:
        raise Refused(500, describe_error(error), "engine_error") from error


async def _read_body(receive: Receive) -> bytes:
    body = b""
    while True:
        event = await receive()
        if event["type"] == "http.disconnect":
            raise Refused(400, "the request was cut", "bad_request")
        body += bytes(event.get("body", b""))
        if len(body) > _MAX_BODY_BYTES:
            raise Refused(413, f"a request has {_MAX_BODY_BYTES} bytes at most", "too_large")
        if not event.get("more_body"):
            return body


async def _wait_for_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        continue


async def _send_json(send: Send, status: int, content: Mapping[str, Any]) -> None:
    await _send(send, status, b"application/json", json.dumps(content, ensure_ascii=False).encode())


async def _send(send: Send, status: int, kind: bytes, body: bytes) -> None:
    headers = [(b"content-type", kind), (b"content-length", str(len(body)).encode())]
    if status == 500:
        # An engine's failure loses this rollout: a retry is of no use.
        headers.append((b"x-should-retry", b"false"))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
