"""The verifier's self-test before training: gold replies must earn full marks, and nonsense must not.

A verifier that compares with the wrong text, drops a sign or pays for an echo looks healthy in every log
(REW-1, REW-2, REW-4). Not here: adversarial audits of a whole task (`audit`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from strop.errors import DataError
from strop.rollout import Example, Failure, FailureOwner
from strop.tasks.answers import cut_at_first, parse_number
from strop.tasks.failures import catch_failure, describe_failure, find_causes
from strop.tasks.task import Task, within_bounds

if TYPE_CHECKING:
    from strop.tasks.judging import Judge

_NONSENSE = {"empty": "", "blank": " \n", "garbage": "asdf", "letter": "a"}
_MAX_FULL_MARKS_FRAC = {"echo": 0.1, "neighbor": 0.05}
"""Share of examples on which a probe may be right by chance: 'What is 0 + 4?' ends in its answer."""
_MAX_MEAN_FRAC = 0.5
"""Largest mean reward, as a share of full marks, of a reply without any work."""
_WORKLESS = frozenset({*_NONSENSE, "echo"})


@dataclass(frozen=True, kw_only=True, slots=True)
class SelfTestFinding:
    """One judgement that contradicts what the probe expects."""

    probe: str
    """'gold' or the kind of nonsense: empty, blank, garbage, letter, echo, neighbor, sign, ..."""
    example_id: str
    text: str
    """The reply that was judged."""
    gold: str | None
    """The example's answer."""
    reward: float | None
    """None if the verifier raised or did not score."""
    detail: str
    """The expectation, or the failure."""
    failure: Failure | None = None
    """Why it could not be judged; None if it was."""

    def describe(self) -> str:
        """Describe it in one line."""
        return (
            f"probe {self.probe} on example {self.example_id}: reply {self.text[:80]!r}, gold "
            f"{(self.gold or '')[:80]!r}, reward {self.reward}; {self.detail}"
        )


def describe_findings(findings: Sequence[SelfTestFinding]) -> str:
    """Describe findings in one line: the commonest failure, and the first three."""
    causes = find_causes(finding.failure for finding in findings if finding.failure is not None)
    lead = f"{describe_failure(causes[0].failure)} in {causes[0].num} of " if causes else ""
    return f"{lead}{len(findings)} findings: {'; '.join(finding.describe() for finding in findings[:3])}"


@dataclass(frozen=True, kw_only=True, slots=True)
class _Judged:
    finding: SelfTestFinding
    has_full_marks: bool


async def self_test(
    task: Task, examples: Sequence[Example], judge: Judge | None = None
) -> list[SelfTestFinding]:
    """Judge gold and nonsense on each example; an empty list means the verifier passed.

    Without a `judge`, the verifier runs in this process.

    An example without any gold reply is a finding, because nothing shows that it can be solved; if the
    task's limits allow a share of such examples, only an excess over that share is a finding.
    Raises: DataError if there is no example.
    """
    if not examples:
        raise DataError(f"a self-test of task {task.name} on no example")
    if judge is None:
        from strop.tasks.judging import Judge

        judge = Judge(task)
    findings: list[SelfTestFinding] = []
    by_probe: dict[str, list[_Judged]] = {}
    for index, example in enumerate(examples):
        limits = task.limits_of(example)
        for gold in task.gold_replies(example):
            # As the reply arrives: it ends at the first stop string.
            text = cut_at_first(gold, limits.stop_strings)
            expectation = f"a right reply must earn {limits.max_reward}"
            if text != gold:
                stops = list(limits.stop_strings)
                expectation += f", and this one is {gold[:80]!r}, ended by a stop string of {stops}"
            judged = await _judge(judge, task, example, "gold", text, expectation)
            findings += [] if judged.has_full_marks else [judged.finding]
        for probe, text in _probe_texts(task, examples, index):
            expectation = "a wrong reply must earn less than full marks"
            judged = await _judge(judge, task, example, probe, text, expectation)
            by_probe.setdefault(probe, []).append(judged)
    for example in excess_goldless(task, examples):
        allowed = task.limits_of(example).max_goldless_frac
        share = f", and not for so many: its share is at most {allowed:g}" if allowed else ""
        findings.append(
            SelfTestFinding(
                probe="gold",
                example_id=example.example_id,
                text="",
                gold=example.answer,
                reward=None,
                detail=f"the task knows no right reply{share}",
            )
        )
    for probe, judged_replies in by_probe.items():
        findings += _check_probe(task, probe, judged_replies)
    return findings


def excess_goldless(task: Task, examples: Sequence[Example]) -> list[Example]:
    """Return the examples without a right reply, except those that the task's limits allow."""
    goldless = [example for example in examples if not task.gold_replies(example)]
    shares = [task.limits_of(example).max_goldless_frac for example in examples]
    is_within = sum(task.limits_of(e).max_goldless_frac > 0.0 for e in goldless) <= sum(shares)
    return [e for e in goldless if not (is_within and task.limits_of(e).max_goldless_frac > 0.0)]


def _check_probe(task: Task, probe: str, judged_replies: Sequence[_Judged]) -> Iterator[SelfTestFinding]:
    """Yield the wrong replies that earned full marks or no score, and probes that earn too much."""
    yield from (judged.finding for judged in judged_replies if judged.finding.reward is None)
    full = [judged for judged in judged_replies if judged.has_full_marks]
    if len(full) > _MAX_FULL_MARKS_FRAC.get(probe, 0.0) * len(judged_replies):
        yield from (judged.finding for judged in full)
        return
    mean = sum(judged.finding.reward or 0.0 for judged in judged_replies) / len(judged_replies)
    if probe in _WORKLESS and mean > _MAX_MEAN_FRAC * task.limits.max_reward:
        best = max(judged_replies, key=lambda judged: judged.finding.reward or 0.0)
        yield best.finding


def _probe_texts(task: Task, examples: Sequence[Example], index: int) -> Iterator[tuple[str, str]]:
    """Yield wrong replies to one example, by probe."""
    yield from _NONSENSE.items()
    example = examples[index]
    yield "echo", "\n".join(message.text for message in task.render(example))
    others = [*examples[index + 1 :], *examples[:index]]
    neighbor = next((other for other in others if other.answer != example.answer), None)
    if neighbor is not None and (replies := task.gold_replies(neighbor)):
        yield "neighbor", replies[-1]
    answer = example.answer or ""
    gold = parse_number(answer)
    if gold is not None:
        # Wrong numbers in the form of the shortest gold reply that holds the answer.
        forms = [reply for reply in task.gold_replies(example) if answer in reply]
        before, behind = "#### ", ""
        if forms:
            before, _, behind = min(forms, key=len).rpartition(answer)
        misses = {"off-by-one": gold + 1} | ({"sign": -gold, "factor": gold * 10} if gold else {})
        yield from ((probe, f"{before}{number}{behind}") for probe, number in misses.items())


async def _judge(
    judge: Judge, task: Task, example: Example, probe: str, text: str, expectation: str
) -> _Judged:
    from strop.tasks.judging import judge_as_attempted

    limits = task.limits_of(example)
    reward: float | None = None
    is_correct: bool | None = None
    with catch_failure(FailureOwner.TASK) as caught:
        outcome = within_bounds(await judge_as_attempted(judge, example, text), limits)
        reward, is_correct, caught.failure = outcome.reward, outcome.is_correct, outcome.failure
    detail = expectation if caught.failure is None else describe_failure(caught.failure)
    full = reward is not None and reward >= limits.max_reward
    return _Judged(
        finding=SelfTestFinding(
            probe=probe,
            example_id=example.example_id,
            text=text,
            gold=example.answer,
            reward=reward,
            detail=detail,
            failure=caught.failure,
        ),
        # Gold needs both; for nonsense either one is too much.
        has_full_marks=(full and is_correct is not False)
        if probe == "gold"
        else (full or is_correct is True),
    )
