"""Engines as actors, and the client that speaks to one.

An actor's process holds one engine. Requests that are made together cross as one batch, pickled, so that its
arrays are no views of Ray's shared memory; replies return together or, streamed, as they end.
"""

from __future__ import annotations

import asyncio
import logging
import os
import pickle
import secrets
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from strop.cluster.contract import Files, keep_only, read_files, write_files
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
from strop.io.endpoints import Endpoint
from strop.io.variables import LOG_FORMAT
from strop.rollout import IntArray

_MAX_TRACE_CHARS = 2500
_PART_S = 0.02
"""Streamed replies that end within it return together: a part costs about a millisecond."""

_log = logging.getLogger("strop.cluster.ray.engines")


class EngineActor(AsyncRole):
    """Holds one engine."""

    _engine: Engine

    def __init__(self, start: RoleStart) -> None:
        super().__init__(start)
        # For weights that are sent here. After kill -9 the next owner of such a directory removes it.
        self._weights_dir = SHARED_MEMORY / f"{MEMORY_PREFIX}{secrets.token_hex(4)}"

    async def load(
        self, settings: EngineSettings, version: int = 0, chat_host: str | None = None
    ) -> Endpoint | None:
        """Load the engine, and serve chats with it at `chat_host`, an address of this machine, if any.

        Raises: ConfigError if model or settings cannot be used.
        """
        logging.basicConfig(level=logging.INFO, format=LOG_FORMAT)
        self._engine, tokenizer = await load_engine(settings, self._source.path, version=version)
        self.undo.push_async_callback(self._engine.close)
        if chat_host is None:
            return None
        chat = ChatServer(self._engine, tokenizer, chat_host)
        self.undo.push_async_callback(chat.close)
        return chat.endpoint

    async def ask(self, batch: bytes, is_streamed: bool) -> AsyncIterator[bytes]:
        """Answer pickled requests together; yield the pickled outcomes, by place, as they come or at once."""
        # From the run's own processes, over a connection that carries the run's token.
        requests = enumerate(pickle.loads(batch))
        places = {asyncio.create_task(self._answer(*request)): place for place, request in requests}
        left = set(places)
        until = asyncio.FIRST_COMPLETED if is_streamed else asyncio.ALL_COMPLETED
        try:
            while left:
                _, left = await asyncio.wait(left, return_when=until)
                if left:
                    _, left = await asyncio.wait(left, timeout=_PART_S)
                ended = places.keys() - left
                # In order of places: who asks again then forms the same batches each time.
                yield pickle.dumps(sorted((places.pop(task), task.result()) for task in ended))
        finally:
            for task in left:
                task.cancel()

    async def update(self, update: WeightUpdate, files: Files) -> WeightReceipt:
        """Serve new weights, from `files` where this machine does not see `update.path`.

        See `Engine.update`. Raises also: StoreError if there is no room for the files.
        """
        if files:
            if not self._weights_dir.exists():
                self.undo.enter_context(own_dir(self._weights_dir))
            await asyncio.to_thread(write_files, self._weights_dir, files)
            update = replace(update, path=str(self._weights_dir / Path(update.path or "").name))
        receipt = await self._engine.update(update)
        _log.info("serving version %d, digest %s", receipt.version, receipt.digest[:12])
        if files:
            keep_only(self._weights_dir, Path(update.path or ""))
        return receipt

    async def _answer(self, name: str, arguments: Sequence[Any]) -> Completion | ReplyScore | StropError:
        """Return the outcome of a request: a failure does not affect others of its batch."""
        try:
            outcome: Completion | ReplyScore = await getattr(self._engine, name)(*arguments)
            return outcome
        except EngineLost:
            # Whoever waits for this process is told of its end with the last lines of its log.
            _log.exception("the engine is lost")
            os._exit(1)
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
        guard: Callable[[Awaitable[Any]], Awaitable[Any]] = answer_of,
    ) -> None:
        """`actor` is of `EngineActor` and has loaded.

        `is_streamed`: replies return as they end; then the batches of later requests depend on the pace of
        both processes. `sees_files`: whether the actor sees this process's files; else weights are sent to
        it. `guard` awaits a call of the actor.
        """
        self._actor = actor
        self._is_streamed = is_streamed
        self._sees_files = sees_files
        self._guard = guard
        self._inbox: list[tuple[str, Sequence[Any], asyncio.Future[Any]]] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_closed = False

    async def generate(self, request: GenerationRequest) -> Completion:
        """Sample one reply. See `Engine.generate`."""
        completion: Completion = await self._ask("generate", request)
        return completion

    async def score(self, prompt_ids: IntArray, reply_ids: IntArray, temperature: float) -> ReplyScore:
        """Return the log-probability of each reply token. See `Engine.score`."""
        score: ReplyScore = await self._ask("score", prompt_ids, reply_ids, temperature)
        return score

    async def update(self, update: WeightUpdate) -> WeightReceipt:
        """Serve new weights. See `Engine.update`."""
        if self._is_closed:
            raise closed()
        files: Files = {}
        if update.transport is WeightTransport.FILE and update.path and not self._sees_files:
            files = await asyncio.to_thread(read_files, Path(update.path))
        receipt: WeightReceipt = await self._guard(self._actor.update.remote(update, files))
        return receipt

    async def close(self) -> None:
        """Let nobody wait any longer: waiting requests get an EngineError, and later ones too."""
        self._is_closed = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        fail([answer for *_, answer in self._inbox], closed())

    def _ask(self, name: str, *arguments: Any) -> asyncio.Future[Any]:
        """Have a request sent with those that are made together; return its outcome to come."""
        if self._is_closed:
            raise closed()
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._inbox.append((name, arguments, answer))
        if len(self._inbox) == 1:
            task = asyncio.create_task(self._send())
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        return answer

    async def _send(self) -> None:
        """Send the waiting requests as one batch, and deliver the outcomes."""
        await settle(lambda: len(self._inbox))
        batch, self._inbox = self._inbox, []
        answers = [answer for *_, answer in batch]
        error: StropError = closed()
        try:
            call = pickle.dumps([(name, arguments) for name, arguments, _ in batch])
            await self._guard(self._receive(call, answers))
            error = EngineError("the engine did not answer a request of its batch")
        except StropError as failure:
            error = failure
        finally:
            # No caller may wait for ever, not even after a bug or a cancellation.
            fail(answers, error)

    async def _receive(self, call: bytes, answers: Sequence[asyncio.Future[Any]]) -> None:
        """Deliver outcomes as they come."""
        async for part in self._actor.ask.remote(call, self._is_streamed):
            for place, outcome in pickle.loads(await part):
                if isinstance(outcome, StropError):
                    fail([answers[place]], outcome)
                else:
                    deliver(answers[place], outcome)
