"""The parts that probes share: the task, examples and judgements of an audit, and results from judgements."""

from __future__ import annotations

import asyncio
import hashlib
import math
import random
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import TypeVar

from strop.audit.attacks import as_constant
from strop.audit.report import MAX_EVIDENCE, Evidence, ProbeResult, ProbeStatus
from strop.rollout import Example, FailureOwner, Outcome
from strop.sandbox.contract import IsolationLevel
from strop.tasks.failures import catch_failure, describe_failure
from strop.tasks.judging import Judge, judge_as_attempted
from strop.tasks.task import ProgramForm, Task

_T = TypeVar("_T")
_LATE = "verifier_timeout"
_NUM_FEW = 4
_NUM_FIRST = 4
ENOUGH_S = 10.0
"""Wall time that a probe aims at if judgements are slow."""
_LITERALS = frozenset({"True", "False", "None", "[]", "0", "1", "2"})


@dataclass(frozen=True, kw_only=True, slots=True)
class Judged:
    """One reply and its outcome."""

    example: Example
    text: str
    outcome: Outcome
    cpu_s: float | None = None
    """CPU time of the verifier; None if it ran in another process, which enforces its limits."""

    @property
    def reward(self) -> float | None:
        """The reward, None if the reply could not be judged."""
        return self.outcome.reward

    @property
    def is_late(self) -> bool:
        """Whether it has no score because its verifier was stopped at the time limit."""
        return self.outcome.failure is not None and self.outcome.failure.kind == _LATE


_NUM_ERRORS = 3.0
MAX_LATE_FRAC = 0.05
"""Share of replies that may remain unjudged at the time limit."""
MINOR_FRAC = 0.02
"""Undeserved rewards up to this share are a warning: some graders give a hundredth to every reply."""
SLACK = 1e-9


async def judge_kinds(
    context: AuditContext, texts: Callable[[Example], dict[str, str]], examples: Sequence[Example] = ()
) -> dict[str, list[Judged]]:
    """Judge several kinds of reply to each example of `examples`, or of the audit, as far as time allows."""
    by_kind: dict[str, list[Judged]] = {}
    for part in context.in_time(examples or context.examples):
        replies = [(kind, example, text) for example in part for kind, text in texts(example).items()]
        all_judged = await context.judge_all((example, text) for _, example, text in replies)
        for (kind, _, _), judged in zip(replies, all_judged, strict=True):
            by_kind.setdefault(kind, []).append(judged)
    return by_kind


def bound(
    context: AuditContext,
    probe: str,
    by_kind: dict[str, list[Judged]],
    chance: float,
    *,
    is_partial_fine: bool = False,
) -> ProbeResult:
    """Compare the kind of reply that earns most with the limit of chance; every reply must be judged.

    `is_partial_fine` counts full marks only. A few replies that are not judged in time are a warning, since
    their number depends on the load of this machine.
    """
    everything = [j for judged in by_kind.values() for j in judged]
    late = [j for j in everything if j.is_late]
    unscored = [j for j in everything if j.reward is None and not j.is_late]
    if unscored or len(late) > MAX_LATE_FRAC * len(everything):
        return failed(probe, unscored or late, "replies that could not be judged")
    if is_partial_fine:
        means = {kind: len([j for j in js if is_full(context, j)]) / len(js) for kind, js in by_kind.items()}
    else:
        means = {kind: mean_share(context, judged) for kind, judged in by_kind.items()}
    worst = max(means, key=lambda kind: means[kind])
    paid = sorted(by_kind[worst], key=lambda j: -(j.reward or 0.0))
    paid = [j for j in paid if (j.reward or 0.0) > 0.0]
    num = len(by_kind[worst])
    result = measured(probe, means[worst], chance_limit(chance, num), paid, num, worst)
    return warn_of_late(result, late)


def warn_of_late(result: ProbeResult, late: Sequence[Judged]) -> ProbeResult:
    """Return the result with the number of replies that were not judged in time."""
    if not late:
        return result
    status = ProbeStatus.WARN if result.status is ProbeStatus.PASS else result.status
    detail = f"{result.detail}; {len(late)} not judged in time"
    return replace(result, status=status, detail=detail, evidence=result.evidence or show_evidence(late))


def chance_limit(chance: float, num: int) -> float:
    """Return the limit of a mean over `num` examples that are each right by chance."""
    error = math.sqrt(chance * (1.0 - chance) / num)
    return chance + _NUM_ERRORS * error + SLACK


def mean_share(context: AuditContext, judged: Sequence[Judged]) -> float:
    """Return the mean share of full marks."""
    return math.fsum(j.reward or 0.0 for j in judged) / (len(judged) * context.max_reward)


def is_full(context: AuditContext, judged: Judged) -> bool:
    """Whether a reply earned full marks."""
    return judged.reward is not None and judged.reward >= context.max_reward - SLACK


def measured(
    probe: str, value: float, limit: float, judged: Sequence[Judged], num: int, detail: str
) -> ProbeResult:
    """Compare a figure with its limit; `judged` are the replies that raised it."""
    has_passed = value <= limit + SLACK
    status = ProbeStatus.WARN if value <= MINOR_FRAC else ProbeStatus.FAIL
    return ProbeResult(
        probe=probe,
        status=ProbeStatus.PASS if has_passed else status,
        value=value,
        limit=limit,
        num=num,
        detail=detail,
        evidence=() if has_passed else show_evidence(judged),
    )


def failed(probe: str, judged: Sequence[Judged], detail: str) -> ProbeResult:
    """Return a failure with some judgements as evidence, whatever their rewards."""
    return ProbeResult(
        probe=probe,
        status=ProbeStatus.FAIL,
        value=float(len(judged)),
        limit=0.0,
        num=len(judged),
        detail=detail,
        evidence=show_evidence(judged),
    )


def not_applicable(probe: str, detail: str) -> ProbeResult:
    """Return the result of a probe that does not apply to the task, with the reason."""
    return ProbeResult(probe=probe, status=ProbeStatus.NOT_APPLICABLE, detail=detail)


def show_evidence(judged: Iterable[Judged], most: int = MAX_EVIDENCE) -> tuple[Evidence, ...]:
    """Return the first `most` judgements as evidence."""
    evidence: list[Evidence] = []
    for j in islice(judged, most):
        failure = j.outcome.failure
        detail = "" if failure is None else describe_failure(failure)
        evidence.append(Evidence.of(j.example.example_id, j.text, j.reward, detail))
    return tuple(evidence)


@dataclass(kw_only=True, slots=True)
class AuditContext:
    """A running audit."""

    task: Task
    judge: Judge
    examples: Sequence[Example]
    seed: int
    all_judged: list[Judged] = field(default_factory=list)
    """Every judgement of the audit, for the probe that looks for impossible scores."""
    _kept: dict[tuple[str, str], Judged] = field(default_factory=dict)

    @property
    def max_reward(self) -> float:
        """Full marks."""
        return self.task.limits.max_reward

    @property
    def few_examples(self) -> Sequence[Example]:
        """The first examples if each judgement needs a sandbox, else all; for probes with many replies."""
        return self.examples[:_NUM_FEW] if self.task.is_costly else self.examples

    @property
    def lowest_isolation(self) -> str | None:
        """The weakest isolation that a judged program ran at; None if no program ran."""
        words = {judged.outcome.isolation for judged in self.all_judged} - {None}
        return min(words, key=lambda word: IsolationLevel[str(word).upper()], default=None)

    def in_time(self, examples: Sequence[_T], *, num_first: int = _NUM_FIRST) -> Iterator[Sequence[_T]]:
        """Yield examples in growing parts, while the next part is likely to be judged in time.

        With a slow grader or on a busy machine, a probe then uses fewer examples, and still has a result.
        """
        started_at = time.perf_counter()
        num = 0
        while num < len(examples) and (not num or 2 * (time.perf_counter() - started_at) <= ENOUGH_S):
            size = max(num, num_first)
            yield examples[num : num + size]
            num += size

    def form_of(self, example: Example) -> ProgramForm | None:
        """Return how the program of a reply is called; None if replies are not programs."""
        return self.task.program_form(example)

    def random(self, name: str) -> random.Random:
        """Return a random stream by name, so that no probe changes the draws of another."""
        digest = hashlib.blake2b(f"{self.seed}/{name}".encode(), digest_size=8).digest()
        return random.Random(int.from_bytes(digest, "little"))

    async def judge_all(self, replies: Iterable[tuple[Example, str]]) -> list[Judged]:
        """Judge replies concurrently; an exception becomes an outcome without a score."""
        judged = await asyncio.gather(*(self._judge(example, text) for example, text in replies))
        self.all_judged += judged
        return list(judged)

    async def judge_once(self, replies: Sequence[tuple[Example, str]]) -> list[Judged]:
        """Judge replies as `judge_all`, but reuse the judgements of earlier calls."""
        new = [
            reply for reply in dict.fromkeys((e.example_id, t) for e, t in replies) if reply not in self._kept
        ]
        by_id = {example.example_id: example for example, _ in replies}
        judged = await self.judge_all((by_id[example_id], text) for example_id, text in new)
        self._kept.update(zip(new, judged, strict=True))
        return [self._kept[example.example_id, text] for example, text in replies]

    async def _judge(self, example: Example, text: str) -> Judged:
        # In this process a judgement runs without interruption: the thread computes nothing else meanwhile.
        began_s = time.thread_time() if self.judge.pool is None else None
        with catch_failure(FailureOwner.TASK) as caught:
            outcome = await judge_as_attempted(self.judge, example, text)
        cpu_s = None if began_s is None else time.thread_time() - began_s
        if caught.failure is not None:
            outcome = Outcome(parts={}, failure=caught.failure)
        return Judged(example=example, text=text, outcome=outcome, cpu_s=cpu_s)

    def in_form(self, example: Example, answer: str) -> str:
        """Return a reply with an answer in the gold reply's form, or a program that returns the answer."""
        form = self.form_of(example)
        if form is not None:
            return as_constant(form, answer if answer in _LITERALS else repr(answer))
        golds = self.task.gold_replies(example)
        if not golds or not example.answer or example.answer not in golds[0]:
            return answer
        head, _, tail = golds[0].rpartition(example.answer)
        return head + answer + tail
