"""An engine behind the chat form of the OpenAI protocol, for clients without token ids, such as judges.

Covered: the socket is held from the choice of its port on; every path requires the key.
Not covered: encryption, streaming, several choices, tools, log-probabilities. Another address than loopback
is bound only where a placement asks for it, and must be on a private network.
"""

from __future__ import annotations

import asyncio
import dataclasses
import hmac
import logging
import secrets
import socket
from contextlib import nullcontext
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import AfterValidator, BaseModel, Field

from strop.engine.contract import Engine, GenerationRequest
from strop.engine.openai import require_server_part
from strop.errors import DataError, StropError
from strop.io.endpoints import Endpoint
from strop.rollout import REASONING, FinishReason, Message, Sampling
from strop.tokenizer import Tokenizer

if TYPE_CHECKING:
    from fastapi import FastAPI

CHAT_PATH = "/v1/chat/completions"
LOOPBACK = "127.0.0.1"

_log = logging.getLogger("strop.engine.chat")


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


def build_app(engine: Engine, tokenizer: Tokenizer, *, key: str) -> FastAPI:
    """Build the web application around an engine.

    Raises: ConfigError if the server extra is not installed.
    """
    require_server_part("fastapi")
    from fastapi import FastAPI
    from fastapi.responses import JSONResponse

    app = FastAPI(title="strop engine", openapi_url=None, docs_url=None, redoc_url=None)
    expected = f"Bearer {key}".encode()

    @app.middleware("http")
    async def require_key(request: Any, pass_on: Any) -> Any:
        if hmac.compare_digest(request.headers.get("authorization", "").encode(), expected):
            return await pass_on(request)
        body = {"kind": "EngineError", "message": "the request came without the key of this server"}
        return JSONResponse(body, status_code=401, headers={"WWW-Authenticate": "Bearer"})

    @app.exception_handler(StropError)
    async def answer_error(request: Any, error: StropError) -> Any:
        _log.warning("%s: %s", type(error).__name__, error)
        return JSONResponse({"kind": type(error).__name__, "message": str(error)}, status_code=500)

    @app.post(CHAT_PATH)
    async def complete(call: ChatCall) -> dict[str, Any]:
        request = GenerationRequest(
            prompt_ids=tokenizer.encode(tokenizer.render(call.messages)),
            seed=call.seed,
            sampling=Sampling(temperature=call.temperature),
            max_tokens=call.max_tokens,
            stop_token_ids=frozenset(tokenizer.stop_token_ids),
        )
        reply = await engine.generate(request)
        is_cut = reply.finish_reason is FinishReason.LENGTH
        choice = {
            "index": 0,
            "message": {"role": "assistant", "content": reply.text},
            "finish_reason": "length" if is_cut else "stop",
        }
        return {"object": "chat.completion", "model": call.model, "choices": [choice]}

    return app


class ChatServer:
    """Serves an engine's chats in this event loop, until it is closed."""

    def __init__(self, engine: Engine, tokenizer: Tokenizer, host: str = LOOPBACK) -> None:
        """Listen on a free port of an address of this machine.

        Raises: ConfigError if the server extra is not installed.
        """
        require_server_part("uvicorn")
        import uvicorn

        key = secrets.token_urlsafe(32)
        self._listener = listen(host)
        self.endpoint = Endpoint(url=f"http://{host}:{self._listener.getsockname()[1]}/v1", key=key)
        app = build_app(engine, tokenizer, key=key)
        config = uvicorn.Config(app, log_config=None, access_log=False, lifespan="off", ws="none")
        self._server = uvicorn.Server(config)
        # Signals are its process's.
        self._server.capture_signals = nullcontext  # type: ignore[method-assign,assignment]
        self._serving = asyncio.create_task(self._server.serve(sockets=[self._listener]))

    async def close(self) -> None:
        """Stop serving."""
        self._server.should_exit = self._server.force_exit = True
        await asyncio.gather(self._serving, return_exceptions=True)
        self._listener.close()


def listen(host: str = LOOPBACK) -> socket.socket:
    """Return a listening socket on a free port of an address of this machine, held from here on."""
    # With the protocol named asyncio sets TCP_NODELAY; otherwise an answer of two writes waits 40 ms for the
    # acknowledgement of the first.
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.bind((host, 0))
    listener.listen(128)
    return listener
