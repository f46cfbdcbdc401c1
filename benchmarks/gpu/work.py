"""One GRPO step on a colocated engine and learner: generate, judge, learn, publish.

Rewards are forced to differ within each group (z = 0), so every reply is trained on. Reply lengths are
drawn, not sampled: a random model hardly ever ends by itself.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.gpu.device import synchronize
from strop.algorithm import ALGORITHMS
from strop.engine import Completion, GenerationRequest, WeightTransport, WeightUpdate
from strop.engine.native import NativeEngine
from strop.policy.learner import Learner
from strop.policy.optimizer import StepReport
from strop.rollout import Example, Group, Outcome, Rollout, Sampling, Turn, make_example
from strop.train.batch import build_batch


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """The sizes of a step."""

    num_prompts: int
    group_size: int
    prompt_tokens: int
    reply_tokens: int
    """Mean."""
    is_ragged: bool = True
    """Whether prompts lie within a third of their mean, and replies within two thirds of theirs."""

    @property
    def num_rows(self) -> int:
        """Replies of a step."""
        return self.num_prompts * self.group_size


@dataclass(frozen=True, kw_only=True, slots=True)
class StepTimes:
    """One measured step. Seconds, wall time."""

    generate_s: float
    learn_s: float
    """Credit, packing, forward, backward, optimizer."""
    sync_s: float
    step_s: float
    num_tokens: int
    """Sampled and scored tokens."""
    num_positions: int
    """Forwarded in training, each prompt once per micro-batch."""
    num_micro_batches: int
    drift_mean_nats: float
    drift_p99_nats: float
    loss: float
    grad_norm: float


class GrpoStep:
    """Takes steps; every step has prompts and lengths of its own."""

    def __init__(self, engine: NativeEngine, learner: Learner, work: Workload) -> None:
        self._engine = engine
        self._learner = learner
        self._work = work
        self._num_taken = 0

    def take(self) -> StepTimes:
        """Take one step and measure it."""
        device = self._learner.model.device
        self._num_taken += 1
        requests = self._draw_requests(np.random.default_rng(self._num_taken))
        synchronize(device)
        begun_at = time.perf_counter()
        completions = asyncio.run(_generate(self._engine, requests))
        synchronize(device)
        generated_at = time.perf_counter()
        report = self._learn(requests, completions)
        synchronize(device)
        learned_at = time.perf_counter()
        update = WeightUpdate(version=self._learner.version, digest="", transport=WeightTransport.SHARED)
        asyncio.run(self._engine.update(update))
        ended_at = time.perf_counter()
        return StepTimes(
            generate_s=generated_at - begun_at,
            learn_s=learned_at - generated_at,
            sync_s=ended_at - learned_at,
            step_s=ended_at - begun_at,
            num_tokens=sum(len(completion.token_ids) for completion in completions),
            num_positions=report.num_positions,
            num_micro_batches=report.num_micro_batches,
            drift_mean_nats=report.drift.mean,
            drift_p99_nats=report.drift.quantile(0.99),
            loss=report.loss,
            grad_norm=report.grad_norm,
        )

    def _draw_requests(self, random: np.random.Generator) -> list[GenerationRequest]:
        work, vocab = self._work, self._learner.model.shape.vocab_size
        requests: list[GenerationRequest] = []
        for _ in range(work.num_prompts):
            prompt_ids = random.integers(2, vocab, self._length(random, work.prompt_tokens, 3)).astype(
                np.int32
            )
            requests += [
                GenerationRequest(
                    prompt_ids=prompt_ids,
                    seed=int(random.integers(2**63)),
                    sampling=Sampling(),
                    max_tokens=self._length(random, work.reply_tokens, 1.5),
                    stop_token_ids=frozenset(),
                )
                for _ in range(work.group_size)
            ]
        return requests

    def _length(self, random: np.random.Generator, mean: int, divisor: float) -> int:
        """Draw a length within mean / divisor of a mean."""
        spread = int(mean / divisor) if self._work.is_ragged else 0
        return max(int(random.integers(mean - spread, mean + spread + 1)), 1)

    def _learn(self, requests: Sequence[GenerationRequest], completions: Sequence[Completion]) -> StepReport:
        algorithm, size = ALGORITHMS["grpo"], self._work.group_size
        groups = []
        for first in range(0, len(requests), size):
            example = make_example("gpu", {"row": first, "step": self._num_taken}, None)
            pairs = zip(requests[first : first + size], completions[first : first + size], strict=True)
            rollouts = tuple(
                _judge(example, index, request, completion)
                for index, (request, completion) in enumerate(pairs)
            )
            groups.append(Group(example=example, rollouts=rollouts))
        batch = build_batch(algorithm, groups, 2 * self._work.reply_tokens)

        return self._learner.step(batch.groups, temperature=1.0, token_terms=algorithm)


async def _generate(engine: NativeEngine, requests: Sequence[GenerationRequest]) -> list[Completion]:
    return list(await asyncio.gather(*(engine.generate(request) for request in requests)))


def _judge(example: Example, index: int, request: GenerationRequest, completion: Completion) -> Rollout:
    """Give every second member of a group a reward of 1."""
    prompt = Turn(role="prompt", text="", token_ids=request.prompt_ids)
    reply = Turn(
        role="assistant",
        text=completion.text,
        token_ids=completion.token_ids,
        logprobs=completion.logprobs,
        policy_version=completion.policy_version,
    )
    return Rollout(
        example=example,
        step=0,
        sample_index=index,
        turns=(prompt, reply),
        outcome=Outcome(parts={"score": float(index % 2)}),
        sampling=request.sampling,
    )
