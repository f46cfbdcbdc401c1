"""What the probes work with: a task, some of its examples, and everything that was judged so far."""

from __future__ import annotations

import asyncio
import hashlib
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from strop.rollout import Example, FailureOwner, Outcome
from strop.tasks.contract import Task
from strop.tasks.failures import catch_failure
from strop.tasks.judging import Judge


@dataclass(frozen=True, kw_only=True, slots=True)
class Judged:
    """One reply and what it earned."""

    example: Example
    text: str
    outcome: Outcome

    @property
    def reward(self) -> float | None:
        """None where it could not be judged."""
        return self.outcome.reward


@dataclass(kw_only=True, slots=True)
class AuditWorld:
    """One audit under way."""

    task: Task
    judge: Judge
    examples: Sequence[Example]
    seed: int
    all_judged: list[Judged] = field(default_factory=list)
    """Every judgement of the audit, for the probe that looks for impossible scores."""

    @property
    def max_reward(self) -> float:
        """Full marks."""
        return self.task.limits.max_reward

    def random(self, name: str) -> random.Random:
        """Return a random stream of its own, named so that no probe disturbs another."""
        digest = hashlib.blake2b(f"{self.seed}/{name}".encode(), digest_size=8).digest()
        return random.Random(int.from_bytes(digest, "little"))

    async def judge_all(self, replies: Iterable[tuple[Example, str]]) -> list[Judged]:
        """Judge replies at once; an exception becomes an outcome without a score."""
        judged = list(await asyncio.gather(*(self._judge(example, text) for example, text in replies)))
        self.all_judged += judged
        return judged

    async def _judge(self, example: Example, text: str) -> Judged:
        with catch_failure(lambda: FailureOwner.TASK) as caught:
            outcome = await self.judge.judge(example, text)
        if caught.failure is not None:
            outcome = Outcome(parts={}, failure=caught.failure)
        return Judged(example=example, text=text, outcome=outcome)

    def in_form(self, example: Example, answer: str) -> str:
        """Return a reply that gives an answer in the form of the task's own gold reply."""
        golds = self.task.gold_replies(example)
        if not golds or not example.answer or example.answer not in golds[0]:
            return answer
        head, _, tail = golds[0].rpartition(example.answer)
        return head + answer + tail
