"""The OpenAI-compatible face of the model: for each rollout an address `/r/ID/v1`, and a key.

`POST chat/completions` and `POST responses` (`protocol`), plain and as a stream, and `GET models`. The run's
sampling is used whatever a program asks for: other tokens would not be the policy's. Requests that would
change the support of the distribution are refused.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from strop.agents.protocol import FORMS, ModelRequest, Refused, read_request
from strop.engine.chat import LOOPBACK, listen
from strop.engine.openai import require_server_part
from strop.environments.recording import Call, CallsUsedUp, CallTooLong, Recorder
from strop.errors import ConfigError, DataError, StropError, describe_error

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response

_MAX_BODY_BYTES = 64 << 20
_UNREADABLE = (ValueError, LookupError, TypeError, AttributeError, RecursionError, DataError, ImportError)
"""What a request in another form raises, or one that a missing package could read."""
_UNSERVED = ("bad_request", "not_found", "too_large", "unsupported_value")
"""Codes of requests that no attempt serves."""
_MODEL = {"id": "policy", "object": "model", "created": 0, "owned_by": "strop"}


@dataclass(kw_only=True, slots=True, eq=False)
class _Open:
    """An open rollout, whose program may send requests."""

    key: str
    recorder: Recorder
    answers: dict[bytes, asyncio.Future[Call]] = field(default_factory=dict)
    """The newest call by a hash of path and body, for a library that repeats a request."""


class Face:
    """Serves the rollouts of an event loop; see `lease_face`."""

    def __init__(self) -> None:
        """Serve on a free port of the loopback address."""
        require_server_part("uvicorn")
        import uvicorn
        from starlette.applications import Starlette
        from starlette.routing import Route

        class Server(uvicorn.Server):
            """A server that leaves signals to its process."""

            def capture_signals(self) -> Any:
                """Capture no signals."""
                return nullcontext()

        self.num_users = 0
        self._open: dict[str, _Open] = {}
        self._closed: set[str] = set()
        self._listener = listen()
        self.url = f"http://{LOOPBACK}:{self._listener.getsockname()[1]}"
        app = Starlette(routes=[Route("/r/{name}/v1/{path:path}", self._answer, methods=["GET", "POST"])])
        self._server = Server(uvicorn.Config(app, lifespan="off", log_config=None, access_log=False))
        # The socket listens already: requests that come before the server runs wait for a moment.
        self._serving = asyncio.create_task(self._server.serve(sockets=[self._listener]))

    async def close(self) -> None:
        """Stop serving."""
        self._server.should_exit = self._server.force_exit = True
        await asyncio.gather(self._serving, return_exceptions=True)
        self._listener.close()

    @asynccontextmanager
    async def open(self, recorder: Recorder) -> AsyncIterator[tuple[str, str]]:
        """Serve a program's requests by a recorder for the block; yield their base URL and key."""
        name, key = secrets.token_hex(8), secrets.token_hex(16)
        self._open[name] = _Open(key=key, recorder=recorder)
        try:
            yield f"{self.url}/r/{name}/v1", key
        finally:
            recorder.is_sealed = True
            del self._open[name]
            self._closed.add(name)

    async def _answer(self, request: Request) -> Response:
        from starlette.responses import JSONResponse

        rollout: _Open | None = None
        path = request.path_params["path"]
        try:
            rollout = self._authorize(request)
            if request.method == "GET" and path == "models":
                model = {**_MODEL, "max_model_len": rollout.recorder.max_positions}
                return JSONResponse({"object": "list", "data": [model]})
            if request.method != "POST" or path not in FORMS:
                raise Refused(404, f"there is no {request.method} {path!r:.100}", "not_found")
            return await _complete(rollout, path, request)
        except Refused as refused:
            if rollout is not None and refused.code in _UNSERVED:
                rollout.recorder.refused_request = f"{path}: {refused}"
            error = {"message": str(refused), "type": "invalid_request_error", "param": None}
            # An engine's failure loses this rollout: a retry is of no use.
            headers = {"x-should-retry": "false"} if refused.status == 500 else None
            return JSONResponse({"error": {**error, "code": refused.code}}, refused.status, headers)

    def _authorize(self, request: Request) -> _Open:
        name = request.path_params["name"]
        if name in self._closed:
            raise Refused(410, "this rollout is over", "gone")
        if (rollout := self._open.get(name)) is None:
            raise Refused(404, "there is no such rollout", "not_found")
        key = request.headers.get("authorization", "").removeprefix("Bearer ")
        if not hmac.compare_digest(key.encode(), rollout.key.encode()):
            raise Refused(401, "the key is not this rollout's", "invalid_api_key")
        return rollout


_faces: WeakKeyDictionary[asyncio.AbstractEventLoop, Face] = WeakKeyDictionary()


@asynccontextmanager
async def lease_face() -> AsyncIterator[Face]:
    """Yield the face of this event loop; its server ends with the last attempt that uses it."""
    loop = asyncio.get_running_loop()
    if (face := _faces.get(loop)) is None:
        face = _faces[loop] = Face()
    face.num_users += 1
    try:
        yield face
    finally:
        face.num_users -= 1
        if not face.num_users:
            del _faces[loop]
            await face.close()


async def _complete(rollout: _Open, path: str, request: Request) -> Response:
    """Answer a request. A retry that a library declares as one gets the same reply. Raises: Refused."""
    from starlette.requests import ClientDisconnect
    from starlette.responses import JSONResponse, Response

    try:
        body = bytearray()
        async for part in request.stream():
            body += part
            if len(body) > _MAX_BODY_BYTES:
                raise Refused(413, f"a request has {_MAX_BODY_BYTES} bytes at most", "too_large")
        wanted = read_request(path, json.loads(body), rollout.recorder.tokenizer)
    except (*_UNREADABLE, ClientDisconnect) as error:
        raise Refused(400, f"this request cannot be read: {error}", "bad_request") from error
    digest = hashlib.blake2b(path.encode() + b"\n" + body).digest()
    asking = rollout.answers.get(digest)
    if asking is None or request.headers.get("x-stainless-retry-count", "0") == "0":
        asking = rollout.answers[digest] = asyncio.ensure_future(_ask(rollout, wanted))
    gone: asyncio.Future[Any] = asyncio.ensure_future(_wait_for_disconnect(request))
    try:
        await asyncio.wait([asking, gone], return_when=asyncio.FIRST_COMPLETED)
        if not asking.done():
            # The client is gone, but may retry and still want the reply.
            asking.add_done_callback(_mark_undelivered)
            return Response()
        call = asking.result()
        call.is_delivered = True
        answer, stream = FORMS[path]
        if wanted.body.get("stream"):
            return Response(stream(wanted, call), media_type="text/event-stream")
        return JSONResponse(answer(wanted, call))
    finally:
        gone.cancel()


def _mark_undelivered(asking: asyncio.Future[Call]) -> None:
    if not asking.cancelled() and asking.exception() is None:
        asking.result().is_delivered = False


async def _ask(rollout: _Open, request: ModelRequest) -> Call:
    """Sample a reply. Raises: Refused."""
    recorder = rollout.recorder
    if recorder.is_sealed:
        raise Refused(410, "this rollout is over", "gone")
    try:
        call = await recorder.ask(
            request.messages,
            request.tools,
            request.max_tokens,
            is_one_call=request.is_one_call,
            stop=request.stop,
        )
    except CallTooLong as error:
        raise Refused(400, str(error), "context_length_exceeded") from error
    except CallsUsedUp as error:
        raise Refused(410, str(error), "used_up") from error
    except ConfigError as error:
        # The model's template cannot render the program's messages.
        raise Refused(400, describe_error(error), "unsupported_value") from error
    except StropError as error:
        raise Refused(500, describe_error(error), "engine_error") from error
    recorder.num_format_errors += not request.is_met(call)
    return call


async def _wait_for_disconnect(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        continue
