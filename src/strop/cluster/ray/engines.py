"""Engines as actors, and the client that speaks to one.

An actor's process holds one engine. Requests that are made together cross as one batch, pickled, so that its
arrays are no views of Ray's shared memory; replies return a batch at a time or, streamed, as they end.
"""

from __future__ import annotations

import asyncio
import logging
import os
import pickle
import secrets
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from strop.cluster.ray.deaths import answer_of
from strop.cluster.ray.roles import AsyncRole, RoleStart
from strop.engine.chat import ChatServer
from strop.engine.contract import (
    Completion,
    Engine,
    GenerationRequest,
    ReplyScore,
    WeightReceipt,
    WeightTransport,
    WeightUpdate,
    closed,
    deliver,
    fail,
    settle,
)
from strop.engine.loading import EngineSettings, load_engine
from strop.errors import EngineError, EngineLost, StropError, describe_error
from strop.hardware.leftovers import MEMORY_PREFIX, SHARED_MEMORY, own_dir
from strop.io.atomic import explain_write_failure
from strop.io.endpoints import Endpoint
from strop.io.variables import LOG_FORMAT
from strop.rollout import IntArray

CALL_LIMIT_S = 3600.0
"""Limit of one batch of replies, or one update."""
PIECE_BYTES = 64 << 20
"""Bytes of a file in one call: some pieces fit into Ray's smallest object store at a time."""
_MAX_TRACE_CHARS = 2500
_PART_S = 0.02
"""Streamed replies that end within it return together: a part costs about a millisecond."""

_log = logging.getLogger("strop.cluster.ray.engines")
Outcome = Completion | ReplyScore | StropError


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ScoreRequest:
    """A reply whose tokens are to be scored."""

    prompt_ids: IntArray
    reply_ids: IntArray
    temperature: float


_Waiting = tuple[GenerationRequest | ScoreRequest, asyncio.Future[Any]]


class EngineActor(AsyncRole):
    """Holds one engine."""

    _engine: Engine
    _chat: ChatServer | None = None

    def __init__(self, start: RoleStart) -> None:
        super().__init__(start)
        self._kept = ExitStack()
        self._weights_dir: Path | None = None

    async def load(self, settings: EngineSettings, version: int = 0) -> None:
        """Load the engine. Raises: ConfigError if model or settings cannot be used."""
        logging.basicConfig(level=logging.INFO, format=LOG_FORMAT)
        self._engine, self._tokenizer = await load_engine(settings, self._source.path, version=version)

    async def serve_chat(self, settings: EngineSettings, host: str) -> Endpoint:
        """Load the engine, and serve chats with it at an address of this machine. See `ChatServer`."""
        await self.load(settings)
        self._chat = ChatServer(self._engine, self._tokenizer, host)
        return self._chat.endpoint

    async def ask(self, batch: bytes) -> bytes:
        """Answer pickled requests together; return the pickled outcomes, in their order."""
        # From the run's own processes, over a connection that carries the run's token.
        return pickle.dumps(await asyncio.gather(*map(self._answer, pickle.loads(batch))))

    async def ask_parts(self, batch: bytes) -> AsyncIterator[bytes]:
        """Answer pickled requests together; yield the pickled outcomes, by place, as they come."""
        tasks = [asyncio.create_task(self._answer(request)) for request in pickle.loads(batch)]
        places = {task: place for place, task in enumerate(tasks)}
        left = set(tasks)
        try:
            while left:
                _, left = await asyncio.wait(left, return_when=asyncio.FIRST_COMPLETED)
                if left:
                    _, left = await asyncio.wait(left, timeout=_PART_S)
                ended = [task for task in places if task not in left]
                yield pickle.dumps([(places.pop(task), task.result()) for task in ended])
        finally:
            for task in left:
                task.cancel()

    async def update(self, update: WeightUpdate) -> WeightReceipt:
        """Serve new weights. See `Engine.update`."""
        receipt = await self._engine.update(update)
        _log.info("serving version %d, digest %s", receipt.version, receipt.digest[:12])
        if self._weights_dir is not None and update.path:
            from strop.cluster.publishers import remove_publication

            # Earlier publications that were sent here have been read.
            for path in set(self._weights_dir.iterdir()) - {Path(update.path)}:
                remove_publication(path)
        return receipt

    async def append(self, name: str, offset: int, piece: bytes) -> str:
        """Add a piece to a file of weights on this machine; return its path. Raises: StoreError."""
        if self._weights_dir is None:
            # After kill -9 the next owner of such a directory, or the job's agent, removes it.
            path = SHARED_MEMORY / f"{MEMORY_PREFIX}{secrets.token_hex(4)}"
            self._kept.enter_context(own_dir(path))
            self._weights_dir = path
        path = self._weights_dir / name
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("r+b" if offset else "wb") as file:
                file.seek(offset)
                file.write(piece)
        except OSError as error:
            raise explain_write_failure(error, path) from error
        return str(self._weights_dir)

    async def end(self) -> None:
        """Close the engine."""
        if self._chat is not None:
            await self._chat.close()
        if hasattr(self, "_engine"):
            await self._engine.close()
        self._kept.close()

    async def _answer(self, request: GenerationRequest | ScoreRequest) -> Outcome:
        """Return the outcome of a request: a failure does not affect others of its batch."""
        try:
            if isinstance(request, GenerationRequest):
                return await self._engine.generate(request)
            return await self._engine.score(request.prompt_ids, request.reply_ids, request.temperature)
        except EngineLost as error:
            self.note_end(str(error))
            return error
        except StropError as error:
            if error.__cause__ is not None:
                # A cause stays behind where an error crosses, and its traceback with it.
                error.add_note("".join(traceback.format_exception(error))[-_MAX_TRACE_CHARS:])
            return error
        except Exception as error:  # A bug is an error of this request alone.
            _log.exception("a reply failed")
            return EngineError(f"it failed in the engine: {describe_error(error)}")


class ActorEngine:
    """An `Engine` in an actor. One instance serves one event loop at a time."""

    def __init__(
        self,
        actor: Any,
        *,
        is_streamed: bool = False,
        sees_files: bool = True,
        guard: Callable[[Awaitable[Any], float], Awaitable[Any]] = answer_of,
    ) -> None:
        """`actor` is of `EngineActor` and has loaded.

        `is_streamed`: replies return as they end; then the batches of later requests depend on the pace of
        both processes. `sees_files`: whether the actor sees this process's files; else weights are sent to
        it. `guard` awaits a call of the actor, within a limit in seconds.
        """
        self._actor = actor
        self._is_streamed = is_streamed
        self._sees_files = sees_files
        self._guard = guard
        self._inbox: list[_Waiting] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_closed = False

    async def generate(self, request: GenerationRequest) -> Completion:
        """Sample one reply. See `Engine.generate`."""
        completion: Completion = await self._ask(request)
        return completion

    async def score(self, prompt_ids: IntArray, reply_ids: IntArray, temperature: float) -> ReplyScore:
        """Return the log-probability of each reply token. See `Engine.score`."""
        request = ScoreRequest(prompt_ids=prompt_ids, reply_ids=reply_ids, temperature=temperature)
        score: ReplyScore = await self._ask(request)
        return score

    async def update(self, update: WeightUpdate) -> WeightReceipt:
        """Serve new weights. See `Engine.update`."""
        if self._is_closed:
            raise closed()
        sent = update
        if update.transport is WeightTransport.FILE and update.path and not self._sees_files:
            sent = replace(update, path=await self._send_files(Path(update.path)))
        receipt: WeightReceipt = await self._guard(self._actor.update.remote(sent), CALL_LIMIT_S)
        return receipt

    async def close(self) -> None:
        """Let nobody wait any longer: waiting requests get an EngineError, and later ones too."""
        self._is_closed = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        fail([answer for _, answer in self._inbox], closed())

    def _ask(self, request: GenerationRequest | ScoreRequest) -> asyncio.Future[Any]:
        """Have a request sent with those that are made together; return its outcome to come."""
        if self._is_closed:
            raise closed()
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._inbox.append((request, answer))
        if len(self._inbox) == 1:
            task = asyncio.create_task(self._send())
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        return answer

    async def _send(self) -> None:
        """Send the waiting requests as one batch, and deliver the outcomes."""
        await settle(lambda: len(self._inbox))
        batch, self._inbox = self._inbox, []
        error: StropError = closed()
        try:
            call = pickle.dumps([request for request, _ in batch])
            if self._is_streamed:
                await self._guard(self._receive_parts(call, batch), CALL_LIMIT_S)
            else:
                outcomes = pickle.loads(await self._guard(self._actor.ask.remote(call), CALL_LIMIT_S))
                for (_, answer), outcome in zip(batch, outcomes, strict=True):
                    _settle(answer, outcome)
            error = EngineError("the engine did not answer a request of its batch")
        except StropError as failure:
            error = failure
        finally:
            # No caller may wait for ever, not even after a bug or a cancellation.
            fail([answer for _, answer in batch], error)

    async def _receive_parts(self, call: bytes, batch: Sequence[_Waiting]) -> None:
        """Deliver outcomes as they come."""
        parts = self._actor.ask_parts.options(num_returns="streaming").remote(call)
        async for part in parts:
            for place, outcome in pickle.loads(await part):
                _settle(batch[place][1], outcome)

    async def _send_files(self, path: Path) -> str:
        """Send a file, or the files of a folder, to the actor's machine; return the path there."""
        folder, pieces = "", _read_pieces(path)
        while (piece := await asyncio.to_thread(next, pieces, None)) is not None:
            folder = await self._guard(self._actor.append.remote(*piece), CALL_LIMIT_S)
        return os.path.join(folder, path.name)


def _read_pieces(path: Path) -> Iterator[tuple[str, int, bytes]]:
    """Yield name, offset and bytes of each piece of a file, or of a folder's files."""
    for file in [path] if path.is_file() else sorted(path.iterdir()):
        with file.open("rb") as source:
            while piece := source.read(PIECE_BYTES):
                yield str(file.relative_to(path.parent)), source.tell() - len(piece), piece


def _settle(answer: asyncio.Future[Any], outcome: Outcome) -> None:
    """Deliver an outcome to a waiting caller."""
    if isinstance(outcome, StropError):
        fail([answer], outcome)
    else:
        deliver(answer, outcome)
