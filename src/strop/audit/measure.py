"""From judgements to the result of a probe: what was measured, what is allowed, and what shows it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from strop.audit.report import MAX_EVIDENCE, Evidence, ProbeResult, ProbeStatus
from strop.audit.world import AuditWorld, Judged
from strop.rollout import Example
from strop.tasks.failures import describe_failure

_NUM_ERRORS = 3.0
MAX_LATE_FRAC = 0.05
"""Share of replies that may go without a verdict because their time was up."""
MINOR_FRAC = 0.02
"""Up to here, what should earn nothing is a warning: some graders give a hundredth to every reply."""
SLACK = 1e-9


async def judge_kinds(
    world: AuditWorld, texts: Callable[[Example], dict[str, str]], examples: Sequence[Example] = ()
) -> dict[str, list[Judged]]:
    """Judge several kinds of reply to each of some examples; to all if none are given.

    Of replies that are judged slowly, to as many examples as there is time for.
    """
    by_kind: dict[str, list[Judged]] = {}
    for part in world.in_time(examples or world.examples):
        asked = [(kind, example, text) for example in part for kind, text in texts(example).items()]
        judged = await world.judge_all((example, text) for _, example, text in asked)
        for (kind, _, _), one in zip(asked, judged, strict=True):
            by_kind.setdefault(kind, []).append(one)
    return by_kind


def bound(
    world: AuditWorld,
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
        means = {kind: len([j for j in js if is_full(world, j)]) / len(js) for kind, js in by_kind.items()}
    else:
        means = {kind: mean_share(world, judged) for kind, judged in by_kind.items()}
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


def mean_share(world: AuditWorld, judged: Sequence[Judged]) -> float:
    """Mean share of full marks."""
    return math.fsum(j.reward or 0.0 for j in judged) / (len(judged) * world.max_reward)


def is_full(world: AuditWorld, judged: Judged) -> bool:
    """Whether a reply earned full marks."""
    return judged.reward is not None and judged.reward >= world.max_reward - SLACK


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
