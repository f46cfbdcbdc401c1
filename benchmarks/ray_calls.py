"""What 512 rollouts of 200 tokens cost on their way to an engine's actor and back, in both processes."""

from __future__ import annotations

import asyncio
import statistics
import time
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from benchmarks.figures import Figure, Measured
from strop.cluster.ray.engines import ActorEngine, EngineActor
from strop.cluster.ray.runtime import RayHead
from strop.engine import Completion, GenerationRequest
from strop.rollout import FinishReason
from tests.fixtures.builders import request_for

_NUM_REPLIES, _NUM_TOKENS = 512, 200


class ScriptedEngine(EngineActor):
    """An engine's actor whose engine is itself: it replies at once."""

    def __init__(self) -> None:
        self._engine = self  # type: ignore[assignment]

    async def generate(self, request: GenerationRequest) -> Completion:
        """Return a reply of the allowed length."""
        return Completion(
            token_ids=np.full(request.max_tokens, request.seed, np.int32),
            logprobs=np.full(request.max_tokens, -0.5, np.float32),
            text="said " * request.max_tokens,
            finish_reason=FinishReason.LENGTH,
            policy_version=0,
        )

    async def used_s(self) -> float:
        """Return the processor time of the actor's process."""
        return time.process_time()


def measure_ray_calls(*, is_quick: bool) -> Measured:
    """Measure the processor time of a step's requests and replies."""
    taken_ms = tuple(asyncio.run(_measure(2 if is_quick else 30)))
    name, value = f"{_NUM_REPLIES} rollouts to an actor and back", statistics.median(taken_ms)
    return Measured(figures=[Figure(name=name, unit="ms", value=value, measured=taken_ms, at_most=50.0)])


async def _measure(num_repeats: int) -> list[float]:
    prompt_ids = np.arange(_NUM_TOKENS, dtype=np.int32)
    seeds = range(_NUM_REPLIES)
    requests = [request_for(prompt_ids, seed=seed, max_tokens=_NUM_TOKENS, stops={0}) for seed in seeds]
    taken_ms: list[float] = []
    with TemporaryDirectory() as folder:
        head = RayHead(Path(folder), 1, Path(folder) / "ray.token")
        try:
            await head.start()
            import ray

            actor = ray.remote(num_cpus=0)(ScriptedEngine).remote()
            # The first call warms both up.
            for _ in range(num_repeats + 1):
                before = time.process_time() + await actor.used_s.remote()
                await asyncio.gather(*map(ActorEngine(actor).generate, requests))
                taken_ms.append(1e3 * (time.process_time() + await actor.used_s.remote() - before))
        finally:
            await head.stop()
    return taken_ms[1:]
