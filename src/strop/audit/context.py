"""What probes share: the task, examples and judgements of one audit, and how judgements become a result."""

from __future__ import annotations

import asyncio
import hashlib
import math
import random
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, TypeVar

from strop.audit.attacks import as_constant
from strop.audit.report import MAX_EVIDENCE, Evidence, ProbeResult, ProbeStatus
from strop.rollout import Example, FailureOwner, Outcome
from strop.sandbox.contract import IsolationLevel
from strop.tasks.contract import Task
from strop.tasks.failures import catch_failure, describe_failure
from strop.tasks.judging import InlineJudge, Judge
from strop.tasks.traits import ProgramForm, program_form_of

if TYPE_CHECKING:
    from strop.audit.world_probes import Arena

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


_NUM_ERRORS = 3.0
MAX_LATE_FRAC = 0.05
"""Share of replies that may go without a verdict because their time was up."""
MINOR_FRAC = 0.02
"""Up to here, what should earn nothing is a warning: some graders give a hundredth to every reply."""
SLACK = 1e-9


async def judge_kinds(
    context: AuditContext, texts: Callable[[Example], dict[str, str]], examples: Sequence[Example] = ()
) -> dict[str, list[Judged]]:
    """Judge several kinds of reply to each of some examples; to all if none are given.

    Of replies that are judged slowly, to as many examples as there is time for.
    """
    by_kind: dict[str, list[Judged]] = {}
    for part in context.in_time(examples or context.examples):
        asked = [(kind, example, text) for example in part for kind, text in texts(example).items()]
        judged = await context.judge_all((example, text) for _, example, text in asked)
        for (kind, _, _), one in zip(asked, judged, strict=True):
            by_kind.setdefault(kind, []).append(one)
    return by_kind


def bound(
    context: AuditContext,
    probe: str,
    by_kind: dict[str, list[Judged]],
    chance: float,
    *,
    is_partial_fine: bool = False,
) -> ProbeResult:
    """Compare the kind that earns most with what chance may give; every reply must be judged.

    `is_partial_fine` counts full marks only. A few replies that are not judged in time are a warning: how
    many they are depends on what else this machine does.
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
    """Return a result that says how many replies were not judged in time."""
    if not late:
        return result
    status = ProbeStatus.WARN if result.status is ProbeStatus.PASS else result.status
    detail = f"{result.detail}; {len(late)} not judged in time"
    return replace(result, status=status, detail=detail, evidence=result.evidence or show_evidence(late))


def chance_limit(chance: float, num: int) -> float:
    """Return what a mean over `num` examples may be where each is right by chance."""
    error = math.sqrt(chance * (1.0 - chance) / num)
    return chance + _NUM_ERRORS * error + SLACK


def mean_share(context: AuditContext, judged: Sequence[Judged]) -> float:
    """Mean share of full marks."""
    return math.fsum(j.reward or 0.0 for j in judged) / (len(judged) * context.max_reward)


def is_full(context: AuditContext, judged: Judged) -> bool:
    """Whether a reply earned full marks."""
    return judged.reward is not None and judged.reward >= context.max_reward - SLACK


def measured(
    probe: str, value: float, limit: float, judged: Sequence[Judged], num: int, detail: str
) -> ProbeResult:
    """Compare a figure with its limit; `judged` are the replies that made it too large."""
    is_fine = value <= limit + SLACK
    bad = ProbeStatus.WARN if value <= MINOR_FRAC else ProbeStatus.FAIL
    return ProbeResult(
        probe=probe,
        status=ProbeStatus.PASS if is_fine else bad,
        value=value,
        limit=limit,
        num=num,
        detail=detail,
        evidence=() if is_fine else show_evidence(judged),
    )


def failed(probe: str, judged: Sequence[Judged], detail: str) -> ProbeResult:
    """Return a failure that some judgements show, whatever they earned."""
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
    """Return that a probe has nothing to ask of this task, and why."""
    return ProbeResult(probe=probe, status=ProbeStatus.NOT_APPLICABLE, detail=detail)


def show_evidence(judged: Iterable[Judged], most: int = MAX_EVIDENCE) -> tuple[Evidence, ...]:
    """Return the first of some judgements as evidence."""
    found: list[Evidence] = []
    for j in judged:
        if len(found) == most:
            break
        failure = j.outcome.failure
        detail = "" if failure is None else describe_failure(failure)
        found.append(Evidence.of(j.example.example_id, j.text, j.reward, detail))
    return tuple(found)


@dataclass(kw_only=True, slots=True)
class AuditContext:
    """One audit under way."""

    task: Task
    judge: Judge
    examples: Sequence[Example]
    seed: int
    make_task: Callable[[], Task] | None = None
    """Gives an equal task in a process of its own."""
    arena: Arena | None = None
    """Where an environment is attacked, once it has been."""
    all_judged: list[Judged] = field(default_factory=list)
    """Every judgement of the audit, for the probe that looks for impossible scores."""
    nonce: str = field(default_factory=lambda: secrets.token_hex(5))
    """Marks what this audit leaves behind."""
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
        with catch_failure(FailureOwner.TASK) as caught:
            outcome = await self.judge.judge(example, text)
        cpu_s = None if began_s is None else time.thread_time() - began_s
        if caught.failure is not None:
            outcome = Outcome(parts={}, failure=caught.failure)
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
