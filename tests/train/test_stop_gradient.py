"""What a stop string does to the gradient, exactly: a policy so small that every reply is enumerated.

The policy is a table: one row of three logits for each place of a reply and token before it. It says `a`, `b`
or its terminator, at most four tokens, and the stop string is `ab`. Replies go through the real rollout path,
credit, packing and loss; their expectation is compared with the derivative of the expected reward.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import pytest
import torch

from strop.algorithm import ALGORITHMS
from strop.engine import Completion, GenerationRequest
from strop.environments import SingleTurn, run_group
from strop.policy.packing import PackedBatch
from strop.rollout import (
    Example,
    FinishReason,
    Group,
    Message,
    Outcome,
    Rollout,
    Split,
    make_example,
)
from strop.tasks import Task, TaskLimits
from strop.tokenizer import Tokenizer
from strop.train.batch import build_batch
from tests.fixtures.builders import plan_for
from tests.fixtures.dummy_engine import DummyEngine, ScriptedReply
from tests.incidents.faulty_engines import TamperedEngine

MAX_TOKENS = 4
STOP = "ab"
A, B, END = range(3)


class Letters(Task):
    """Earns by what stands before the stop string: the end has no reward of its own."""

    name = "letters"
    version = "1"
    limits = TaskLimits(max_reply_tokens=MAX_TOKENS, stop_strings=(STOP,), max_reward=2.0)

    def examples(self, split: Split) -> Sequence[Example]:
        return [make_example(self.name, {"question": "?"}, None)]

    def render(self, example: Example) -> tuple[Message, ...]:
        return (Message(role="user", content="?"),)

    async def verify(self, example: Example, text: str) -> Outcome:
        return Outcome(parts={"short": 1.0 / (1.0 + len(text)), "b": 0.3 * text.count("b")})

    def gold_replies(self, example: Example) -> tuple[str, ...]:
        return ("b",)


@dataclass
class Table:
    """Logits by place, token before (3: none) and token."""

    logits: np.ndarray
    ids: list[int]
    """Of `a`, `b` and the terminator."""

    def log_probabilities(self) -> np.ndarray:
        shifted = self.logits - self.logits.max(-1, keepdims=True)
        return np.asarray(shifted - np.log(np.exp(shifted).sum(-1, keepdims=True)))

    def steps(self, token_ids: Sequence[int]) -> list[tuple[int, int, int]]:
        """Return place, token before and token of every token of a reply."""
        tokens = [self.ids.index(token_id) for token_id in token_ids]
        return list(zip(itertools.count(), [3, *tokens], tokens, strict=False))

    def logprobs(self, token_ids: Sequence[int]) -> np.ndarray:
        table = self.log_probabilities()
        return np.array([table[step] for step in self.steps(token_ids)])

    def slope(self, step: tuple[int, int, int]) -> np.ndarray:
        """Return the derivative of one token's log-probability."""
        place, before, token = step
        slope = np.zeros_like(self.logits)
        slope[place, before] = -np.exp(self.log_probabilities()[place, before])
        slope[place, before, token] += 1.0
        return slope


def all_replies() -> Iterator[str]:
    """Yield every reply that can be sampled, in letters; `.` is the terminator."""

    def grow(said: str) -> Iterator[str]:
        if said.endswith((".", STOP)) or len(said) == MAX_TOKENS:
            yield said
        else:
            yield from itertools.chain.from_iterable(grow(said + letter) for letter in "ab.")

    return grow("")


@pytest.fixture
def table(tokenizer: Tokenizer) -> Table:
    ids = [*tokenizer.encode("a").tolist(), *tokenizer.encode("b").tolist(), tokenizer.eos_id]
    return Table(logits=np.random.default_rng(3).normal(size=(MAX_TOKENS, 4, 3)), ids=ids)


@pytest.fixture
def rollouts(tokenizer: Tokenizer, table: Table) -> list[Rollout]:
    """Return each reply once, as the rollout path records it."""
    task = Letters()

    def fill(request: GenerationRequest, completion: Completion) -> Completion:
        logprobs = table.logprobs(completion.token_ids.tolist()).astype(np.float32)
        return replace(completion, logprobs=logprobs)

    said = [ScriptedReply(text=reply.removesuffix("."), ends=reply.endswith(".")) for reply in all_replies()]
    plans = [
        plan_for(task.examples(Split.TRAIN)[0], max_reply_tokens=MAX_TOKENS, sample_index=index)
        for index in range(len(said))
    ]
    engine = TamperedEngine(DummyEngine(tokenizer, said), tamper=fill)
    found = list(asyncio.run(run_group(partial(SingleTurn, task), engine, tokenizer, plans)).rollouts)
    assert {r.reply.finish_reason for r in found if r.reply} == {
        FinishReason.EOS,
        FinishReason.LENGTH,
        FinishReason.STOP_STRING,
    }
    return found


def expected_step(rollouts: Sequence[Rollout], chances: Sequence[float], table: Table) -> np.ndarray:
    """Return the expectation of the step that a batch of one pair of replies takes."""
    total = np.zeros_like(table.logits)
    algorithm = ALGORITHMS["dr_grpo"]
    members = list(zip(rollouts, chances, strict=True))
    for (one, one_chance), (other, other_chance) in itertools.product(members, members):
        group = Group(example=one.example, rollouts=(one, other))
        packed = build_batch(algorithm, [group], MAX_TOKENS).groups
        if not packed:
            continue
        batch = PackedBatch.of_groups(packed, torch.device("cpu"))
        replies = [reply for packed_group in packed for reply in packed_group.replies]
        steps = [iter(table.steps(reply.token_ids.tolist())) for reply in replies]
        # Tokens of a reply are in order, those of different replies may alternate.
        taken = [next(steps[index]) for index in batch.reply_M.tolist()]
        logprob_M = torch.tensor([table.log_probabilities()[step] for step in taken])
        terms = algorithm(batch.scored_tokens(logprob_M))
        pulls = (-batch.weight_M * terms.grad_N).tolist()
        slopes = [pull * table.slope(step) for pull, step in zip(pulls, taken, strict=True)]
        total += one_chance * other_chance * np.sum(slopes, axis=0)
    return total


def true_gradient(rollouts: Sequence[Rollout], chances: Sequence[float], table: Table) -> np.ndarray:
    """Return the derivative of the expected reward, over everything that is sampled."""
    total = np.zeros_like(table.logits)
    for rollout, chance, said in zip(rollouts, chances, all_replies(), strict=True):
        ids = [table.ids["ab.".index(letter)] for letter in said]
        total += chance * (rollout.outcome.reward or 0.0) * sum(map(table.slope, table.steps(ids)))
    return total


def cosine(one: np.ndarray, other: np.ndarray) -> float:
    return float((one * other).sum() / np.linalg.norm(one) / np.linalg.norm(other))


def as_sampled(rollout: Rollout) -> Rollout:
    return rollout


def without_stop_string(rollout: Rollout) -> Rollout:
    """Leave out the tokens that lie in the stop string, as strop did once."""
    prompt, reply = rollout.turns
    if reply.finish_reason is not FinishReason.STOP_STRING or reply.logprobs is None:
        return rollout
    num_kept = len(reply.text)
    kept = replace(reply, token_ids=reply.token_ids[:num_kept], logprobs=reply.logprobs[:num_kept])
    return replace(rollout, turns=(prompt, kept))


@pytest.mark.parametrize(
    ("rule", "low", "high"), [(as_sampled, 0.999999, 1.000001), (without_stop_string, -1.0, 0.9)]
)
def test_the_step_is_the_gradient_of_the_expected_reward_with_a_stop_string(
    rollouts: list[Rollout], table: Table, rule: Callable[[Rollout], Rollout], low: float, high: float
) -> None:
    chances = [float(np.exp(sum(r.reply.logprobs.tolist()))) for r in rollouts if r.reply]  # type: ignore[union-attr]
    assert sum(chances) == pytest.approx(1.0)
    step = expected_step([rule(rollout) for rollout in rollouts], chances, table)
    found = cosine(step, true_gradient(rollouts, chances, table))
    assert low <= found <= high, found
