"""An engine in a process of its own, for the loop of another process.

    python -m strop.engine.server --model DIR --dtype bfloat16 --key-file F --ready-file F --threads 2

loads its own copy of the model, listens on a free port of the loopback address, writes the port into
the ready file and serves until SIGTERM. POST /v1/generate takes a whole batch and answers
when all its replies have ended, POST /v1/replies line by line as they end; POST /v1/score, POST
/v1/weights, GET /health do what they say, and POST /v1/chat/completions serves clients
without token ids (`ChatService`).
`strop.engine.vllm.serve` serves vLLM by the same app, with the same arguments and more.

Covered: the socket is held from the choice of its port on; every path but /health requires the key,
which is in a file that only its owner may read and never in arguments.
Not covered: encryption, several users. Another address than loopback is bound only where a placement
asks for it, and must be on a private network. Weights come as a file, so both processes need to see the same
disk, or as an object in a store.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import hmac
import json
import logging
import os
import socket
import stat
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import AfterValidator, BaseModel, Field

from strop.engine.contract import Completion, Engine, GenerationRequest
from strop.engine.wire import (
    AnswerPart,
    ErrorForm,
    GenerateAnswer,
    GenerateCall,
    HealthForm,
    ReadyForm,
    ReceiptForm,
    ScoreAnswer,
    ScoreCall,
    ScoreForm,
    UpdateForm,
    read_ids,
    require_server_part,
)
from strop.errors import ConfigError, DataError, EngineError, StropError, describe_error, format_error
from strop.hardware.busy_clock import BusyClock
from strop.hardware.tuning import importing
from strop.io.atomic import write_bytes_atomically
from strop.io.variables import LOG_FORMAT, log_from
from strop.rollout import REASONING, FinishReason, Message, Sampling
from strop.tokenizer import Tokenizer

if TYPE_CHECKING:
    from fastapi import FastAPI
    from starlette.responses import StreamingResponse

    from strop.tokenizer import Tokenizer

CHAT_PATH = "/v1/chat/completions"
LOOPBACK = "127.0.0.1"
SHUTDOWN_GRACE_S = 1

_log = logging.getLogger("strop.engine.server")

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
            next_step="start the engine through its placement, which hands the key over",
        )
        body = json.dumps({"kind": "EngineError", "message": message}).encode()
        headers = [(b"content-type", b"application/json"), (b"www-authenticate", b"Bearer")]
        await send({"type": "http.response.start", "status": 401, "headers": headers})
        await send({"type": "http.response.body", "body": body})


class EngineService:
    """Answers in wire form for one engine, and keeps its status."""

    def __init__(
        self, engine: Engine, *, model_digest: str, tokenizer_digest: str = "", version: int = 0
    ) -> None:
        self._engine = engine
        self._sampling = BusyClock()
        self._health = HealthForm(
            pid=os.getpid(),
            version=version,
            digest=model_digest,
            model_digest=model_digest,
            tokenizer_digest=tokenizer_digest,
        )

    async def generate(self, call: GenerateCall) -> GenerateAnswer:
        """Ask for all replies together; the failure of one does not affect the others."""
        replies = [asyncio.create_task(self._reply(request)) for request in call.read()]
        with self._sampling.running():
            await asyncio.gather(*replies, return_exceptions=True)
        return GenerateAnswer.of(list(map(_outcome, replies)))

    async def generate_parts(self, call: GenerateCall) -> StreamingResponse:
        """Ask for all replies together, and stream a line for those that end at the same time."""
        from starlette.responses import StreamingResponse

        return StreamingResponse(self._list_parts(call.read()), media_type="application/x-ndjson")

    async def score(self, call: ScoreCall) -> ScoreAnswer:
        """Score all replies together."""
        prompt_ids = read_ids(call.prompt_ids)
        replies = [read_ids(reply_ids) for reply_ids in call.replies]
        scores = await asyncio.gather(
            *(self._engine.score(prompt_ids, reply_ids, call.temperature) for reply_ids in replies)
        )
        return ScoreAnswer(scores=[ScoreForm.of(score) for score in scores])

    async def update(self, form: UpdateForm) -> ReceiptForm:
        """Serve new weights."""
        receipt = await self._engine.update(form.read())
        self._health = self._health.model_copy(update={"version": receipt.version, "digest": receipt.digest})
        _log.info(
            "serving version %d, digest %s; sampled for %.3f s since the update before",
            *(receipt.version, receipt.digest[:12], self._sampling.take_s()),
        )
        return ReceiptForm.of(receipt)

    async def health(self) -> HealthForm:
        """Return the status."""
        return self._health

    async def close(self) -> None:
        """Close the engine."""
        await self._engine.close()

    async def _list_parts(self, requests: Sequence[GenerationRequest]) -> AsyncIterator[str]:
        """Yield lines until all replies have ended. If the client disconnects, they are cancelled."""
        tasks = [asyncio.create_task(self._reply(request)) for request in requests]
        places = {task: place for place, task in enumerate(tasks)}
        left = set(places)
        try:
            with self._sampling.running():
                while left:
                    ended, left = await asyncio.wait(left, return_when=asyncio.FIRST_COMPLETED)
                    outcomes = {
                        places[task]: _outcome(task) for task in sorted(ended, key=places.__getitem__)
                    }
                    yield AnswerPart.of(outcomes).model_dump_json(exclude_defaults=True) + "\n"
        finally:
            for task in left:
                task.cancel()
            await asyncio.gather(*left, return_exceptions=True)

    async def _reply(self, request: GenerationRequest) -> Completion | StropError:
        try:
            return await self._engine.generate(request)
        except StropError as error:
            return error


def _outcome(task: asyncio.Task[Completion | StropError]) -> Completion | StropError:
    """Return the reply to a request or its error. A bug counts as an error of this request alone."""
    error = task.exception()
    if error is None:
        return task.result()
    _log.error("a reply failed", exc_info=error)
    return _as_engine_error(error)


def _as_engine_error(error: BaseException) -> EngineError:
    """Return the error that the client gets for a bug."""
    failure = EngineError(f"it failed in the engine: {describe_error(error)}")
    failure.__cause__ = error
    return failure


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
    """The chat form of the OpenAI protocol over an engine, as far as a judge needs it.

    Not covered: streaming, several choices, tools, log-probabilities; they are ignored.
    """

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


def build_app(
    engine: Engine,
    *,
    key: str,
    model_digest: str,
    tokenizer_digest: str = "",
    version: int = 0,
    tokenizer: Tokenizer | None = None,
) -> FastAPI:
    """Build the web application around an engine that has loaded weights of a version.

    With its `tokenizer` it also answers chats, for clients without token ids, such as judging tasks.

    Raises: ConfigError if the server extra is not installed.
    """
    require_server_part("fastapi")
    from fastapi import FastAPI
    from fastapi.responses import JSONResponse

    service = EngineService(
        engine, model_digest=model_digest, tokenizer_digest=tokenizer_digest, version=version
    )
    # No documentation pages: they would be reachable without the key.
    app = FastAPI(title="strop engine", openapi_url=None, docs_url=None, redoc_url=None)
    app.post("/v1/generate", response_model_exclude_defaults=True)(service.generate)
    app.post("/v1/replies", response_model=None)(service.generate_parts)
    app.post("/v1/score")(service.score)
    app.post("/v1/weights")(service.update)
    app.get("/health")(service.health)
    if tokenizer is not None:
        app.post(CHAT_PATH)(ChatService(engine, tokenizer).complete)

    async def answer_error(request: Any, error: Exception) -> JSONResponse:
        answer = error if isinstance(error, StropError) else _as_engine_error(error)
        _log.warning("%s: %s", type(answer).__name__, answer)
        return JSONResponse(ErrorForm.of(answer).model_dump(), status_code=500)

    app.add_exception_handler(StropError, answer_error)
    # A bug is also logged by the server, once it is answered.
    app.add_exception_handler(Exception, answer_error)
    app.add_middleware(KeyGuard, key=key)
    return app


def read_key(path: Path) -> str:
    """Read the key of a server.

    Raises: ConfigError if the file is missing, empty, or open to others than its owner.
    """
    try:
        mode, key = stat.S_IMODE(path.stat().st_mode), path.read_text().strip()
    except OSError as error:
        raise _bad_key(f"the key file {path} cannot be read ({error.strerror})") from error
    if mode & 0o077:
        raise _bad_key(f"the key file {path} has mode {mode:04o}, so others can read it")
    if len(key) < 16:
        raise _bad_key(f"the key in {path} has {len(key)} characters")
    return key


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


def announce(listener: socket.socket, ready_path: Path) -> str:
    """Write the ready file; from now on clients may connect. Returns the address."""
    host, port = listener.getsockname()[:2]
    url = f"http://{host}:{port}"
    write_bytes_atomically(ready_path, ReadyForm(url=url, pid=os.getpid()).model_dump_json().encode())
    return url


@dataclass(frozen=True, kw_only=True, slots=True)
class Loaded:
    """An engine to serve, and the digests of its model and tokenizer."""

    engine: Engine
    model_digest: str
    tokenizer: Tokenizer


async def serve(loaded: Loaded, *, key: str, version: int, host: str, ready_path: Path) -> None:
    """Serve an engine until SIGTERM or SIGINT.

    Raises: ConfigError if the server extra is not installed or the address is not this machine's;
    StoreError if the ready file cannot be written.
    """
    require_server_part("uvicorn")
    import uvicorn

    app = build_app(
        loaded.engine,
        key=key,
        model_digest=loaded.model_digest,
        tokenizer_digest=loaded.tokenizer.digest,
        version=version,
        tokenizer=loaded.tokenizer,
    )
    config = uvicorn.Config(
        app,
        log_config=None,
        access_log=False,
        lifespan="off",
        ws="none",
        timeout_graceful_shutdown=SHUTDOWN_GRACE_S,
    )
    listener = listen(host)
    try:
        _log.info("listening on %s", announce(listener, ready_path))
        await uvicorn.Server(config).serve(sockets=[listener])
    finally:
        listener.close()
        await loaded.engine.close()


def server_parser(program: str, description: str | None) -> argparse.ArgumentParser:
    """Return a parser of the arguments that all engine servers share."""
    parser = argparse.ArgumentParser(prog=f"python -m {program}", description=description)
    parser.add_argument("--model", type=Path, required=True, help="Hugging Face model directory")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), required=True)
    parser.add_argument("--key-file", type=Path, required=True, help="mode 0600, holds the bearer key")
    parser.add_argument("--ready-file", type=Path, required=True, help="gets the address once it listens")
    parser.add_argument("--host", default=LOOPBACK, help="address of this machine that it listens on")
    parser.add_argument("--version", type=int, default=0, help="of the weights in the model directory")
    parser.add_argument("--max-num-seqs", type=int, help="replies decoded at the same time")
    return parser


def run_server(options: argparse.Namespace, load: Callable[[argparse.Namespace], Awaitable[Loaded]]) -> int:
    """Load an engine and serve it. Returns the exit code."""
    logging.basicConfig(level=logging.INFO, format=LOG_FORMAT)
    log_from(None)

    async def act() -> None:
        key = read_key(options.key_file)
        for module in ("fastapi", "uvicorn"):
            require_server_part(module)
        await serve(
            await load(options),
            key=key,
            version=options.version,
            host=options.host,
            ready_path=options.ready_file,
        )

    try:
        asyncio.run(act())
    except StropError as error:
        _log.error("%s: %s", type(error).__name__, error)
        return error.exit_code
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Load the model into the native engine and serve it. Returns the exit code."""
    parser = server_parser("strop.engine.server", __doc__)
    parser.add_argument("--device", default="cpu", help="where torch puts the model")
    parser.add_argument("--threads", type=int, required=True, help="compute threads, as many as the learner")
    return run_server(parser.parse_args(arguments), _load)


async def _load(options: argparse.Namespace) -> Loaded:
    with importing():
        import torch

        from strop.engine.native import NativeEngine
        from strop.policy.language_model import DTYPES, LanguageModel
        from strop.policy.weights import weights_digest
        from strop.tokenizer import Tokenizer

    # Kernels split sums by thread, so the learner's number of threads gives the learner's values.
    torch.set_num_threads(options.threads)
    model = LanguageModel.load(options.model, dtype=DTYPES[options.dtype], device=options.device)
    tokenizer = Tokenizer.load(options.model)
    engine = NativeEngine(model, tokenizer, max_num_seqs=options.max_num_seqs, version=options.version)
    return Loaded(engine=engine, model_digest=weights_digest(model), tokenizer=tokenizer)


def _bad_key(problem: str) -> ConfigError:
    return ConfigError(
        problem,
        allowed="a file of mode 0600 with a random key of at least 16 characters",
        next_step="let the placement of the run write it, or make one with `chmod 600`",
    )


if __name__ == "__main__":
    sys.exit(main())
