"""What the probes share: their thresholds, the judgements of an audit, and results from judgements."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import TypeVar

from strop.audit.report import Evidence, ProbeResult, ProbeStatus
from strop.rollout import Example, FailureOwner, Outcome
from strop.tasks.code.problems import fence
from strop.tasks.failures import catch_failure, describe_failure
from strop.tasks.judging.judge import Judge, judge_as_attempted
from strop.tasks.task import Task, is_within

# Every threshold of the audit. A probe also allows the chance that the task declares, plus three standard
# errors of a mean over its examples.

GOLD_FRAC = 0.95
"""Least share of examples whose right replies earn full marks. A rule that does better is a right reply."""
MINOR_FRAC = 0.02
"""Share of the marks that no reply is red for: some graders give a hundredth to every reply."""
COINCIDENCE_FRAC = 0.01
"""Chance that a repeated question holds its answer."""
WRONG_FRAC = 0.05
"""Share of examples on which a nearly right reply may earn full marks."""
CONSTANT_FRAC = 0.2
"""Share of the marks that one answer to every example may earn; more is a warning."""
PART_FRAC = 0.25
"""Share of the marks that it may earn from partial marks alone."""
UNJUDGED_FRAC = 0.05
"""Share of replies that may remain unjudged, as on a busy machine."""
NULL_LIMIT_S = 0.1
"""Wall time of judging an empty reply; more is a warning."""
LONG_LIMIT_S = 5.0
"""Wall time of judging a long reply."""
ENOUGH_S = 4.0
"""Wall time that a probe aims at if judgements are slow."""
SLACK = 1e-9
MAX_EVIDENCE = 5

_T = TypeVar("_T")
_NUM_ERRORS = 3.0
_LITERALS = frozenset({"True", "False", "None", "[]", "0", "1", "2"})


@dataclass(frozen=True, kw_only=True, slots=True)
class Judged:
    """One reply and its outcome."""

    example: Example
    text: str
    outcome: Outcome
    share: float
    """The share of full marks that it earned: all if it counts as right, none if it was not judged."""
    is_right: bool
    """Whether it earned what a right reply is owed: full marks, and not called wrong."""
    is_within: bool
    """Whether its reward is possible."""

    @property
    def reward(self) -> float | None:
        """The reward, None if the reply could not be judged."""
        return self.outcome.reward

    @property
    def is_full(self) -> bool:
        """Whether it earned full marks."""
        return self.share >= 1.0 - SLACK

    def show(self, detail: str = "") -> Evidence:
        """Return it as evidence; without a detail, with the reason why it was not judged."""
        if not detail and self.outcome.failure is not None:
            detail = describe_failure(self.outcome.failure)
        return Evidence.of(self.example, self.text, self.reward, detail)


def bounded(value: float, limit: float, evidence: Sequence[Evidence], num: int, detail: str) -> ProbeResult:
    """Compare a figure with its limit; the evidence is kept if it is above."""
    result = ProbeResult(status=ProbeStatus.PASS, value=value, limit=limit, num=num, detail=detail)
    if value <= limit + SLACK:
        return result
    return replace(result, status=ProbeStatus.FAIL, evidence=tuple(evidence[:MAX_EVIDENCE]))


def worst_of(
    by_kind: dict[str, list[Judged]],
    measure: Callable[[Judged], float] = lambda judged: judged.share,
    *,
    chance: float = 0.0,
    floor: float = MINOR_FRAC,
    detail: str = "{}",
    nothing: str = "no such reply",
) -> ProbeResult:
    """Compare the kind of reply that earns most with its limit; nearly every reply must be judged.

    The limit is the larger of `floor` and what `chance` gives. `detail` has a place for the kind; `nothing`
    says why there is no reply.
    """
    everything = [j for judged in by_kind.values() for j in judged]
    if not everything:
        return ProbeResult(status=ProbeStatus.NOT_APPLICABLE, detail=nothing)
    unjudged = [j for j in everything if j.reward is None]
    if len(unjudged) > UNJUDGED_FRAC * len(everything):
        shown = [judged.show() for judged in unjudged]
        return bounded(float(len(unjudged)), 0.0, shown, len(everything), "replies that were not judged")
    means = {kind: fmean(map(measure, judged)) for kind, judged in by_kind.items()}
    worst = max(means, key=lambda kind: means[kind])
    num = len(by_kind[worst])
    limit = max(floor, chance + _NUM_ERRORS * math.sqrt(chance * (1.0 - chance) / num))
    ranked = sorted(by_kind[worst], key=lambda j: -j.share)
    late = f"; {len(unjudged)} not judged" if unjudged else ""
    shown = [judged.show() for judged in ranked if measure(judged) > 0.0]
    return bounded(means[worst], limit, shown, num, detail.format(worst) + late)


@dataclass(kw_only=True, slots=True)
class AuditContext:
    """A running audit."""

    task: Task
    judge: Judge
    examples: Sequence[Example]
    seed: int
    all_judged: list[Judged] = field(default_factory=list)
    """Every judgement of the audit."""

    def in_time(self, examples: Sequence[_T]) -> Iterator[Sequence[_T]]:
        """Yield examples in growing parts, while the next part is likely to be judged in time.

        With a slow grader or on a busy machine, a probe then uses fewer examples, and still has a result.
        """
        started_at = time.perf_counter()
        num = 0
        while num < len(examples) and (not num or 2 * (time.perf_counter() - started_at) <= ENOUGH_S):
            size = max(num, 2)
            yield examples[num : num + size]
            num += size

    async def judge_kinds(
        self, texts: Callable[[Example], dict[str, str]], examples: Sequence[Example] | None = None
    ) -> dict[str, list[Judged]]:
        """Judge several kinds of reply to each of these examples, or all, as far as time allows."""
        by_kind: dict[str, list[Judged]] = {}
        for part in self.in_time(self.examples if examples is None else examples):
            replies = [(kind, example, text) for example in part for kind, text in texts(example).items()]
            all_judged = await self.judge_all((example, text) for _, example, text in replies)
            for (kind, _, _), judged in zip(replies, all_judged, strict=True):
                by_kind.setdefault(kind, []).append(judged)
        return by_kind

    async def judge_all(self, replies: Iterable[tuple[Example, str]]) -> list[Judged]:
        """Judge replies concurrently; an exception becomes an outcome without a score."""
        judged = await asyncio.gather(*(self._judge(example, text) for example, text in replies))
        self.all_judged += judged
        return list(judged)

    async def _judge(self, example: Example, text: str) -> Judged:
        with catch_failure(FailureOwner.TASK) as caught:
            outcome = await judge_as_attempted(self.judge, example, text)
        if caught.failure is not None:
            outcome = Outcome(parts={}, failure=caught.failure)
        limits = self.task.limits if caught.failure is not None else self.task.limits_of(example)
        earned = (outcome.reward or 0.0) / limits.max_reward
        return Judged(
            example=example,
            text=text,
            outcome=outcome,
            share=max(earned, 1.0) if outcome.is_correct and outcome.reward is not None else earned,
            is_right=earned >= 1.0 - SLACK and outcome.is_correct is not False,
            is_within=outcome.reward is None or is_within(outcome.reward, limits),
        )

    def golds(self, example: Example) -> list[str]:
        """Return the right replies to an example as they arrive: each ends at the first stop string."""
        stops = self.task.limits_of(example).stop_strings
        golds = self.task.gold_replies(example)
        return [min((gold, *(gold.partition(stop)[0] for stop in stops)), key=len) for gold in golds]

    def prompt(self, example: Example) -> str:
        """Return the text of an example's prompt."""
        return "\n".join(message.text for message in self.task.render(example))

    def spoken(self) -> list[Example]:
        """Return the examples whose replies are no programs."""
        return [example for example in self.examples if self.task.entry_point(example) is None]

    def in_form(self, example: Example, answer: str) -> str:
        """Return a reply with an answer in the shortest right reply's form, or a program that returns it."""
        if (entry_point := self.task.entry_point(example)) is not None:
            name = entry_point or "main"
            body = f"    return {answer if answer in _LITERALS else repr(answer)}"
            call = [] if entry_point else ["print(main())"]
            return fence("\n".join([f"def {name}(*args, **keywords):", body, *call]))
        golds = [
            gold for gold in self.task.gold_replies(example) if example.answer and example.answer in gold
        ]
        if not golds:
            return answer
        head, _, tail = min(golds, key=len).rpartition(example.answer or "")
        return head + answer + tail
