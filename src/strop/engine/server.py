"""An engine in a process of its own, for the loop of another process on the same machine.

    python -m strop.engine.server --model DIR --dtype bfloat16 --key-file F --ready-file F --threads 2

loads its own copy of the model, listens on a free port of the loopback address, writes the port into
the ready file and serves until it is told to end. POST /v1/generate takes a whole batch and answers
when all its replies have ended; POST /v1/score, POST /v1/weights, GET /health do what they say.

Covered: the socket is held from the choice of its port on; every path but /health wants the key,
which stands in a file that only its owner may read and never in arguments.
Not covered: other machines (nothing but loopback is ever bound), encryption, several users. Weights
come as a file, so both processes need to see the same disk.
"""

from __future__ import annotations

import argparse
import asyncio
import hmac
import json
import logging
import os
import socket
import stat
import sys
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from strop.engine.contract import Completion, Engine, GenerationRequest
from strop.engine.wire import (
    CompletionForm,
    ErrorForm,
    GenerateAnswer,
    GenerateCall,
    HealthForm,
    ReadyForm,
    ReceiptForm,
    ReplyForm,
    ScoreAnswer,
    ScoreCall,
    ScoreForm,
    UpdateForm,
    require_server_part,
)
from strop.errors import ConfigError, StropError, explain_refusal
from strop.store.atomic import write_bytes_atomically

if TYPE_CHECKING:
    from fastapi import FastAPI

LOOPBACK = "127.0.0.1"
SHUTDOWN_GRACE_S = 1

_log = logging.getLogger("strop.engine.server")

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Scope]]
Send = Callable[[Scope], Awaitable[None]]
AsgiApp = Callable[[Scope, Receive, Send], Awaitable[None]]


class KeyGuard:
    """Answers 401 to every request without the key, before anything of it is read."""

    def __init__(self, app: AsgiApp, key: str) -> None:
        self._app = app
        self._expected = f"Bearer {key}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or refuse it."""
        if scope["type"] != "http" or scope["path"] == "/health" or self._is_authorized(scope):
            await self._app(scope, receive, send)
            return
        message = explain_refusal(
            f"{scope['method']} {scope['path']} came without the key of this server",
            allowed="requests that carry the key of this run as a bearer token",
            next_step="start the engine through its placement, which hands the key over",
        )
        body = json.dumps({"kind": "EngineError", "message": message}).encode()
        headers = [(b"content-type", b"application/json"), (b"www-authenticate", b"Bearer")]
        await send({"type": "http.response.start", "status": 401, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    def _is_authorized(self, scope: Scope) -> bool:
        given = dict(scope["headers"]).get(b"authorization", b"")
        return hmac.compare_digest(given, self._expected)


class EngineDesk:
    """Answers in wire form for one engine, and remembers what it serves."""

    def __init__(self, engine: Engine, *, model_digest: str, version: int = 0) -> None:
        self._engine = engine
        self._health = HealthForm(
            pid=os.getpid(), version=version, digest=model_digest, model_digest=model_digest
        )

    async def generate(self, call: GenerateCall) -> GenerateAnswer:
        """Ask for all replies together; what became of one says nothing about the others."""
        requests = [form.read() for form in call.requests]
        replies = await asyncio.gather(*(self._reply(request) for request in requests))
        return GenerateAnswer(replies=list(replies))

    async def score(self, call: ScoreCall) -> ScoreAnswer:
        """Score all replies together."""
        prompt_ids = np.array(call.prompt_ids, np.int32)
        replies = [np.array(reply_ids, np.int32) for reply_ids in call.replies]
        scores = await asyncio.gather(
            *(self._engine.score(prompt_ids, reply_ids, call.temperature) for reply_ids in replies)
        )
        return ScoreAnswer(scores=[ScoreForm.of(score) for score in scores])

    async def update(self, form: UpdateForm) -> ReceiptForm:
        """Serve new weights."""
        receipt = await self._engine.update(form.read())
        self._health = self._health.model_copy(update={"version": receipt.version, "digest": receipt.digest})
        _log.info("serving version %d, digest %s", receipt.version, receipt.digest[:12])
        return ReceiptForm.of(receipt)

    async def health(self) -> HealthForm:
        """Say what is served."""
        return self._health

    async def close(self) -> None:
        """Close the engine."""
        await self._engine.close()

    async def _reply(self, request: GenerationRequest) -> ReplyForm:
        try:
            completion: Completion = await self._engine.generate(request)
        except StropError as error:
            return ReplyForm(error=ErrorForm.of(error))
        return ReplyForm(completion=CompletionForm.of(completion))


def build_app(engine: Engine, *, key: str, model_digest: str, version: int = 0) -> FastAPI:
    """Build the web application around an engine that has loaded weights of a version.

    Raises: ConfigError if the server extra is not installed.
    """
    require_server_part("fastapi")
    from fastapi import FastAPI
    from fastapi.responses import JSONResponse

    desk = EngineDesk(engine, model_digest=model_digest, version=version)
    # No pages about itself: they would be a second face that nobody guards.
    app = FastAPI(title="strop engine", openapi_url=None, docs_url=None, redoc_url=None)
    app.post("/v1/generate")(desk.generate)
    app.post("/v1/score")(desk.score)
    app.post("/v1/weights")(desk.update)
    app.get("/health")(desk.health)

    async def answer_error(request: Any, error: Exception) -> JSONResponse:
        assert isinstance(error, StropError)
        _log.warning("%s: %s", type(error).__name__, error)
        return JSONResponse(ErrorForm.of(error).model_dump(), status_code=500)

    app.add_exception_handler(StropError, answer_error)
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


def listen() -> socket.socket:
    """Return a listening socket on a free port of the loopback address, held from here on."""
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.bind((LOOPBACK, 0))
    listener.listen(128)
    return listener


def announce(listener: socket.socket, ready_path: Path) -> str:
    """Write the ready file; from now on clients may connect. Returns the address."""
    url = f"http://{LOOPBACK}:{listener.getsockname()[1]}"
    write_bytes_atomically(ready_path, ReadyForm(url=url, pid=os.getpid()).model_dump_json().encode())
    return url


async def serve(engine: Engine, *, key: str, model_digest: str, version: int = 0, ready_path: Path) -> None:
    """Serve an engine until SIGTERM or SIGINT.

    Raises: ConfigError if the server extra is not installed; StoreError if the ready file cannot be
    written.
    """
    require_server_part("uvicorn")
    import uvicorn

    app = build_app(engine, key=key, model_digest=model_digest, version=version)
    config = uvicorn.Config(
        app,
        log_config=None,
        access_log=False,
        lifespan="off",
        ws="none",
        timeout_graceful_shutdown=SHUTDOWN_GRACE_S,
    )
    listener = listen()
    try:
        _log.info("listening on %s", announce(listener, ready_path))
        await uvicorn.Server(config).serve(sockets=[listener])
    finally:
        listener.close()
        await engine.close()


def main(arguments: Sequence[str] | None = None) -> int:
    """Load the model and serve it. Returns the exit code."""
    options = _parse(arguments)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    try:
        asyncio.run(_load_and_serve(options))
    except StropError as error:
        _log.error("%s: %s", type(error).__name__, error)
        return error.exit_code
    return 0


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m strop.engine.server", description=__doc__)
    parser.add_argument("--model", type=Path, required=True, help="Hugging Face model directory")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), required=True)
    parser.add_argument("--device", default="cpu", help="where torch puts the model")
    parser.add_argument("--key-file", type=Path, required=True, help="mode 0600, holds the bearer key")
    parser.add_argument("--ready-file", type=Path, required=True, help="gets the address once it listens")
    parser.add_argument("--threads", type=int, required=True, help="compute threads, as many as the learner")
    parser.add_argument("--version", type=int, default=0, help="of the weights in the model directory")
    parser.add_argument("--max-rows", type=int, help="replies decoded at the same time")
    return parser.parse_args(arguments)


async def _load_and_serve(options: argparse.Namespace) -> None:
    key = read_key(options.key_file)
    for module in ("fastapi", "uvicorn"):
        require_server_part(module)
    import torch

    from strop.engine.native import NativeEngine
    from strop.policy.language_model import DTYPES, LanguageModel
    from strop.policy.weights import weights_digest
    from strop.tokenizer import Tokenizer

    # Kernels split sums by thread, so the learner's count gives the learner's values.
    torch.set_num_threads(options.threads)
    model = LanguageModel.load(options.model, dtype=DTYPES[options.dtype], device=options.device)
    engine = NativeEngine(
        model, Tokenizer.load(options.model), max_rows=options.max_rows, version=options.version
    )
    await serve(
        engine,
        key=key,
        model_digest=weights_digest(model),
        version=options.version,
        ready_path=options.ready_file,
    )


def _bad_key(given: str) -> ConfigError:
    return ConfigError(
        explain_refusal(
            given,
            allowed="a file of mode 0600 with a random key of at least 16 characters",
            next_step="let the placement of the run write it, or make one with `chmod 600`",
        )
    )


if __name__ == "__main__":
    sys.exit(main())
