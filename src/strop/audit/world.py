"""What the probes work with: a task, some of its examples, and everything that was judged so far."""

from __future__ import annotations

import asyncio
import hashlib
import random
import secrets
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

from strop.audit.attacks import as_constant
from strop.rollout import Example, FailureOwner, Outcome
from strop.sandbox.contract import IsolationLevel
from strop.tasks.contract import Task
from strop.tasks.failures import catch_failure, owner_of_error
from strop.tasks.judging import InlineJudge, Judge
from strop.tasks.traits import ProgramForm, program_form_of

_T = TypeVar("_T")
_LATE = "verifier_timeout"
_NUM_FEW = 4
_NUM_FIRST = 4
ENOUGH_S = 10.0
"""Wall time that a probe aims at where judgements are slow."""
_LITERALS = frozenset({"True", "False", "None", "[]", "0", "1", "2"})


@dataclass(frozen=True, kw_only=True, slots=True)
class Judged:
    """One reply and what it earned."""

    example: Example
    text: str
    outcome: Outcome
    cpu_s: float | None = None
    """What the verifier computed; None where it ran in another process, whose limits are kept there."""

    @property
    def reward(self) -> float | None:
        """None where it could not be judged."""
        return self.outcome.reward

    @property
    def is_late(self) -> bool:
        """Whether it has no score because its verifier was ended at its limit."""
        return self.outcome.failure is not None and self.outcome.failure.kind == _LATE


@dataclass(kw_only=True, slots=True)
class AuditWorld:
    """One audit under way."""

    task: Task
    judge: Judge
    examples: Sequence[Example]
    seed: int
    all_judged: list[Judged] = field(default_factory=list)
    """Every judgement of the audit, for the probe that looks for impossible scores."""
    nonce: str = field(default_factory=lambda: secrets.token_hex(5))
    """Tells what this audit left behind from what another did."""
    _kept: dict[tuple[str, str], Judged] = field(default_factory=dict)

    @property
    def max_reward(self) -> float:
        """Full marks."""
        return self.task.limits.max_reward

    @property
    def few_examples(self) -> Sequence[Example]:
        """The first examples where each judgement needs a sandbox, else all; for probes that ask often."""
        return self.examples[:_NUM_FEW] if self.task.limits.verify_keeps_time else self.examples

    @property
    def lowest_isolation(self) -> str | None:
        """The weakest sandbox that a judged program ran in; None where none did."""
        words = {judged.outcome.isolation for judged in self.all_judged} - {None}
        return min(words, key=lambda word: IsolationLevel[str(word).upper()], default=None)

    def in_time(self, examples: Sequence[_T], *, num_first: int = _NUM_FIRST) -> Iterator[Sequence[_T]]:
        """Yield examples in growing parts, as long as the next part is likely to be judged in time.

        So a slow grader or a busy machine costs a probe examples, and not its result.
        """
        started_at = time.perf_counter()
        num = 0
        while num < len(examples) and (not num or 2 * (time.perf_counter() - started_at) <= ENOUGH_S):
            size = max(num, num_first)
            yield examples[num : num + size]
            num += size

    def form_of(self, example: Example) -> ProgramForm | None:
        """Return how the program of a reply is used; None where replies are not programs."""
        return program_form_of(self.task, example)

    def random(self, name: str) -> random.Random:
        """Return a random stream of its own, named so that no probe disturbs another."""
        digest = hashlib.blake2b(f"{self.seed}/{name}".encode(), digest_size=8).digest()
        return random.Random(int.from_bytes(digest, "little"))

    async def judge_all(self, replies: Iterable[tuple[Example, str]]) -> list[Judged]:
        """Judge replies at once; an exception becomes an outcome without a score."""
        judged = await asyncio.gather(*(self._judge(example, text) for example, text in replies))
        self.all_judged += judged
        return list(judged)

    async def judge_once(self, replies: Sequence[tuple[Example, str]]) -> list[Judged]:
        """Judge replies as `judge_all`, but for those that were judged so before."""
        new = [
            reply for reply in dict.fromkeys((e.example_id, t) for e, t in replies) if reply not in self._kept
        ]
        by_id = {example.example_id: example for example, _ in replies}
        judged = await self.judge_all((by_id[example_id], text) for example_id, text in new)
        self._kept.update(zip(new, judged, strict=True))
        return [self._kept[example.example_id, text] for example, text in replies]

    async def _judge(self, example: Example, text: str) -> Judged:
        # In this process a judgement is one piece of work: nothing else computes in between.
        began_s = time.thread_time() if isinstance(self.judge, InlineJudge) else None
        with catch_failure(lambda: FailureOwner.TASK) as caught:
            outcome = await self.judge.judge(example, text)
        cpu_s = None if began_s is None else time.thread_time() - began_s
        if caught.failure is not None:
            owner = owner_of_error(caught.failure.kind)
            outcome = Outcome(parts={}, failure=replace(caught.failure, owner=owner))
        return Judged(example=example, text=text, outcome=outcome, cpu_s=cpu_s)

    def in_form(self, example: Example, answer: str) -> str:
        """Return a reply that gives an answer in the form of the task's own gold reply.

        Where replies are programs, one that returns it.
        """
        form = self.form_of(example)
        if form is not None:
            return as_constant(form, answer if answer in _LITERALS else repr(answer))
        golds = self.task.gold_replies(example)
        if not golds or not example.answer or example.answer not in golds[0]:
            return answer
        head, _, tail = golds[0].rpartition(example.answer)
        return head + answer + tail
