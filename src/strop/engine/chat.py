"""An engine behind the chat form of the OpenAI protocol, for clients without token ids, such as judges.

Covered: the socket is held from the choice of its port on; every path but /health requires the key.
Not covered: encryption, streaming, several choices, tools, log-probabilities. Another address than loopback
is bound only where a placement asks for it, and must be on a private network.
"""

from __future__ import annotations

import asyncio
import dataclasses
import hmac
import json
import logging
import secrets
import socket
from collections.abc import Awaitable, Callable, MutableMapping
from contextlib import nullcontext
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import AfterValidator, BaseModel, Field

from strop.engine.contract import Engine, GenerationRequest
from strop.engine.openai import require_server_part
from strop.errors import ConfigError, DataError, EngineError, StropError, describe_error, format_error
from strop.io.endpoints import Endpoint
from strop.rollout import REASONING, FinishReason, Message, Sampling
from strop.tokenizer import Tokenizer

if TYPE_CHECKING:
    from fastapi import FastAPI

CHAT_PATH = "/v1/chat/completions"
LOOPBACK = "127.0.0.1"

_log = logging.getLogger("strop.engine.chat")

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Scope]]
Send = Callable[[Scope], Awaitable[None]]
AsgiApp = Callable[[Scope, Receive, Send], Awaitable[None]]


class KeyGuard:
    """Answers 401 to every request without the key, before its body is read."""

    def __init__(self, app: AsgiApp, key: str) -> None:
        self._app = app
        self._expected = f"Bearer {key}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or refuse it."""
        header = dict(scope.get("headers", ())).get(b"authorization", b"")
        is_open = scope["type"] != "http" or scope["path"] == "/health"
        if is_open or hmac.compare_digest(header, self._expected):
            await self._app(scope, receive, send)
            return
        message = format_error(
            f"{scope['method']} {scope['path']} came without the key of this server",
            allowed="requests that carry the key of this run as a bearer token",
            next_step="take address and key from the run that started the server",
        )
        body = json.dumps({"kind": "EngineError", "message": message}).encode()
        headers = [(b"content-type", b"application/json"), (b"www-authenticate", b"Bearer")]
        await send({"type": "http.response.start", "status": 401, "headers": headers})
        await send({"type": "http.response.body", "body": body})


def _read_messages(values: list[Any]) -> list[Message]:
    """Read the messages of a client; unknown keys are ignored."""
    known = {field.name for field in dataclasses.fields(Message)} | {REASONING}
    try:
        return [
            Message.from_json({key: value for key, value in message.items() if key in known})
            for message in values
        ]
    except (AttributeError, DataError) as error:
        raise ValueError(str(error)) from error


class ChatCall(BaseModel):
    """A chat request."""

    model: str
    messages: Annotated[list[Any], Field(min_length=1), AfterValidator(_read_messages)]
    temperature: float = Field(default=1.0, ge=0.0)
    seed: int = Field(default=0, ge=0, lt=2**64)
    max_tokens: int = Field(default=512, ge=1)


class ChatService:
    """Answers chats with an engine."""

    def __init__(self, engine: Engine, tokenizer: Tokenizer) -> None:
        self._engine = engine
        self._tokenizer = tokenizer

    async def complete(self, call: ChatCall) -> dict[str, Any]:
        """Answer a chat.

        Raises: ConfigError if the model has no chat template; EngineError as the engine does.
        """
        request = GenerationRequest(
            prompt_ids=self._tokenizer.encode(self._tokenizer.render(call.messages)),
            seed=call.seed,
            sampling=Sampling(temperature=call.temperature),
            max_tokens=call.max_tokens,
            stop_token_ids=frozenset(self._tokenizer.stop_token_ids),
        )
        reply = await self._engine.generate(request)
        is_cut = reply.finish_reason is FinishReason.LENGTH
        choice = {
            "index": 0,
            "message": {"role": "assistant", "content": reply.text},
            "finish_reason": "length" if is_cut else "stop",
        }
        return {"object": "chat.completion", "model": call.model, "choices": [choice]}


def build_app(engine: Engine, tokenizer: Tokenizer, *, key: str) -> FastAPI:
    """Build the web application around an engine.

    Raises: ConfigError if the server extra is not installed.
    """
    require_server_part("fastapi")
    from fastapi import FastAPI
    from fastapi.responses import JSONResponse

    # No documentation pages: they would be reachable without the key.
    app = FastAPI(title="strop engine", openapi_url=None, docs_url=None, redoc_url=None)
    app.post(CHAT_PATH)(ChatService(engine, tokenizer).complete)

    @app.get("/health")
    async def health() -> dict[str, str]:
        return {"status": "ok"}

    async def answer_error(request: Any, error: Exception) -> JSONResponse:
        answer = error if isinstance(error, StropError) else as_engine_error(error)
        _log.warning("%s: %s", type(answer).__name__, answer)
        return JSONResponse({"kind": type(answer).__name__, "message": str(answer)}, status_code=500)

    app.add_exception_handler(StropError, answer_error)
    # A bug is also logged by the server, once it is answered.
    app.add_exception_handler(Exception, answer_error)
    app.add_middleware(KeyGuard, key=key)
    return app


def as_engine_error(error: BaseException) -> EngineError:
    """Return the error that a client gets for a bug."""
    failure = EngineError(f"it failed in the engine: {describe_error(error)}")
    failure.__cause__ = error
    return failure


class ChatServer:
    """Serves an engine's chats in this event loop, until it is closed."""

    def __init__(self, engine: Engine, tokenizer: Tokenizer, host: str = LOOPBACK) -> None:
        """Listen on a free port of an address of this machine.

        Raises: ConfigError if the server extra is not installed, or the address is none of this machine's.
        """
        require_server_part("uvicorn")
        import uvicorn

        class Server(uvicorn.Server):
            """A server that leaves signals to its process."""

            def capture_signals(self) -> Any:
                """Capture no signals."""
                return nullcontext()

        key = secrets.token_urlsafe(32)
        self._listener = listen(host)
        self.endpoint = Endpoint(url=f"http://{host}:{self._listener.getsockname()[1]}/v1", key=key)
        app = build_app(engine, tokenizer, key=key)
        self._server = Server(
            uvicorn.Config(app, log_config=None, access_log=False, lifespan="off", ws="none")
        )
        self._serving = asyncio.create_task(self._server.serve(sockets=[self._listener]))

    async def close(self) -> None:
        """Stop serving."""
        self._server.should_exit = self._server.force_exit = True
        await asyncio.gather(self._serving, return_exceptions=True)
        self._listener.close()


def listen(host: str = LOOPBACK) -> socket.socket:
    """Return a listening socket on a free port of an address of this machine, held from here on.

    Raises: ConfigError if the address is none of this machine's.
    """
    # With the protocol named asyncio sets TCP_NODELAY; otherwise an answer of two writes waits 40 ms for the
    # acknowledgement of the first.
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listener.bind((host, 0))
    except OSError as error:
        listener.close()
        raise ConfigError(
            f"the engine's server cannot bind {host} ({error})",
            allowed="an IPv4 address of this machine",
            next_step="let the placement choose it, or correct the address",
        ) from error
    listener.listen(128)
    return listener
