"""Engines that answer when a test says so, and a pool over some of them."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar

import numpy as np

from strop.engine import Completion, GenerationRequest, ReplyScore, WeightReceipt, WeightUpdate
from strop.engine.pool import EnginePool, ReplicaCause, ReplicaEvent
from strop.rollout import FinishReason, IntArray
from tests.fixtures.builders import request_for

Result = TypeVar("Result")


class HeldEngine:
    """Answers when it is told to, and fails as it is told to."""

    def __init__(self) -> None:
        self.asked: list[GenerationRequest] = []
        self.waiting: list[asyncio.Future[None]] = []
        self.answers_at_once = False
        self.failure: Exception | None = None
        self.update_failure: Exception | None = None
        self.receipt: WeightReceipt | None = None
        self.updates: list[WeightUpdate] = []
        self.update_gate = asyncio.Event()
        self.update_gate.set()
        self.version = 0
        self.is_closed = False

    async def generate(self, request: GenerationRequest) -> Completion:
        self.asked.append(request)
        version = self.version
        if self.failure is not None:
            raise self.failure
        if not self.answers_at_once:
            self.waiting.append(asyncio.get_running_loop().create_future())
            await self.waiting[-1]
        return Completion(
            token_ids=np.array([request.seed], np.int32),
            logprobs=np.array([-0.5], np.float32),
            text=str(request.seed),
            finish_reason=FinishReason.EOS,
            policy_version=version,
        )

    async def score(self, prompt_ids: IntArray, reply_ids: IntArray, temperature: float) -> ReplyScore:
        if self.failure is not None:
            raise self.failure
        return ReplyScore(logprobs=np.zeros(len(reply_ids), np.float32), policy_version=self.version)

    async def update(self, update: WeightUpdate) -> WeightReceipt:
        self.updates.append(update)
        await self.update_gate.wait()
        if self.update_failure is not None:
            raise self.update_failure
        self.version = update.version
        return self.receipt or WeightReceipt(version=update.version, digest=update.digest)

    async def close(self) -> None:
        self.is_closed = True

    def answer(self, count: int = 1) -> None:
        """Let the longest waiting requests end."""
        pending = [place for place in self.waiting if not place.done()]
        for place in pending[:count]:
            place.set_result(None)

    @property
    def seeds(self) -> list[int]:
        return [request.seed for request in self.asked]


def ask(seed: int, prompt: Sequence[int] = (), *, max_tokens: int = 10) -> GenerationRequest:
    """Build a request; without a prompt it has one of its own."""
    return request_for(
        np.array(prompt or [1000 + seed], np.int32), max_tokens=max_tokens, seed=seed, stops={0}
    )


def start(pool: EnginePool, *requests: GenerationRequest) -> list[asyncio.Task[Completion]]:
    return [asyncio.create_task(pool.generate(request)) for request in requests]


async def turn() -> None:
    """Let everything that can go on go on."""
    for _ in range(20):
        await asyncio.sleep(0)


def run(waiting: Coroutine[Any, Any, Result]) -> Result:
    return asyncio.run(waiting)


class Desk:
    """Some held engines in a pool, and what it told."""

    def __init__(self, num_engines: int) -> None:
        self.engines = [HeldEngine() for _ in range(num_engines)]
        self.events: list[ReplicaEvent] = []
        self.pool = EnginePool({f"e{index}": engine for index, engine in enumerate(self.engines)})
        self.pool.report_to(self.events.append)

    @property
    def seeds(self) -> list[list[int]]:
        return [engine.seeds for engine in self.engines]

    @property
    def causes(self) -> list[tuple[str, ReplicaCause]]:
        return [(event.replica, event.cause) for event in self.events]
