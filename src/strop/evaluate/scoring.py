"""Compute scores from rollouts: solved, unscored, and when a result is invalid.

Every prompt is counted. A prompt too long for the model counts as not solved; a rollout that could not be
judged is neither solved nor wrong. A partial reward is not solved: `is_correct` of the task decides.

Shapes: P = examples, G = rollouts of one kind of one example.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

from strop.audit import find_audit
from strop.errors import ConfigError, EngineError
from strop.evaluate.comparison import clustered_interval, pass_at_k_interval
from strop.evaluate.result import (
    EvalPlan,
    EvalResult,
    ExampleScore,
    PartScores,
    PassAtK,
    Score,
    Summary,
    Validity,
)
from strop.rollout import FailureOwner, Outcome, Rollout
from strop.tasks import Task
from strop.tasks.failures import FailureCause, add_traces, find_causes, sum_up

MAX_TRUNCATED_FRAC = 0.05
"""Share of replies cut by a budget below the task's own, above which a result is invalid."""
MAX_UNSCORED_FRAC = 0.02
"""Share of rollouts that could not be judged, whatever the cause, above which a result is invalid."""
MAX_VERIFIER_ERROR_FRAC = 0.005
"""Share of rollouts whose verifier failed, above which a result is invalid."""
_GREEDY, _SAMPLED = slice(0, 1), slice(1, None)
"""The kinds of an example's rollouts."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """The facts of one rollout that scores need; the rollout itself is on the disk, or dropped."""

    is_solved: bool | None
    """None: it could not be judged."""
    outcome: Outcome
    num_tokens: int
    versions: frozenset[int | None]
    """Policy versions that served it."""

    @property
    def has_reply(self) -> bool:
        """Whether there was a judged attempt."""
        return self.outcome.is_scored and self.is_solved is not None

    @property
    def is_verifier_error(self) -> bool:
        """Whether the verifier failed."""
        failure = None if self.outcome.is_too_long else self.outcome.failure
        return failure is not None and failure.owner is FailureOwner.TASK


@dataclass(frozen=True, kw_only=True, slots=True)
class ExampleVerdicts:
    """All rollouts of one example."""

    example_id: str
    task: str
    """In a mixture, the task of its part."""
    part: str | None
    problem: str | None
    is_budget_cut: bool
    """Whether its replies had a smaller budget than the task's own."""
    verdicts_G: Sequence[Verdict]
    """The greedy one, then the sampled ones."""

    def solved_G(self, kind: slice) -> list[bool]:
        """Return whether each judged rollout of a kind solved the example."""
        return [one.is_solved for one in self.verdicts_G[kind] if one.is_solved is not None]


def give_verdict(rollout: Rollout) -> Verdict:
    """Reduce a rollout to its verdict."""
    outcome = rollout.outcome
    is_solved = outcome.is_correct
    if not outcome.is_scored:
        is_solved = False if outcome.is_too_long else None
    if outcome.failure is not None:
        # Thousands of equal failures share one text.
        failure = replace(outcome.failure, detail=sys.intern(outcome.failure.detail))
        outcome = replace(outcome, failure=failure)
    return Verdict(
        is_solved=is_solved,
        outcome=replace(outcome, extracted=None),
        num_tokens=rollout.num_sampled_tokens,
        versions=frozenset(turn.policy_version for turn in rollout.turns if turn.is_sampled) - {None},
    )


def give_verdicts(rollouts_G: Sequence[Rollout], task: Task, plan: EvalPlan) -> ExampleVerdicts:
    """Reduce the rollouts of an example, the greedy one first, to their verdicts."""
    example = rollouts_G[0].example
    part = task.part_of(example)
    return ExampleVerdicts(
        example_id=example.example_id,
        task=example.task,
        part=part,
        problem=task.problem_of(example),
        is_budget_cut=plan.budget_of(part) < task.limits_of(example).own_reply_tokens,
        verdicts_G=[give_verdict(rollout) for rollout in rollouts_G],
    )


def build_result(
    plan: EvalPlan, verdicts_P: Sequence[ExampleVerdicts], *, pass_at: Sequence[int] = ()
) -> EvalResult:
    """Summarise an evaluation, and each part of a mixture.

    Raises: ConfigError if a k of `pass_at` is below 1 or above the number of samples; EngineError if
        no rollout has a reply, or they have several policy versions.
    """
    check_pass_at(pass_at, plan.num_samples)
    by_part: dict[str, list[ExampleVerdicts]] = {}
    for one in verdicts_P:
        if one.part is not None:
            by_part.setdefault(one.part, []).append(one)
    verdicts = [verdict for one in verdicts_P for verdict in one.verdicts_G]
    causes = find_causes(verdict.outcome for verdict in verdicts)
    audit = find_audit(plan.task, plan.task_version)

    def score(mine_P: Sequence[ExampleVerdicts], kind: slice) -> Score:
        by_example = {one.example_id: _score_example(one, kind) for one in mine_P}
        return Score(**_summarize(mine_P, kind).model_dump(), by_example=by_example)

    return EvalResult(
        **{name: getattr(plan, name) for name in EvalPlan.model_fields},
        policy_version=_single_version(verdicts, causes),
        causes=list(causes),
        **_score_kinds(plan, verdicts_P, pass_at, score),
        parts={
            label: PartScores(
                task=mine_P[0].task,
                example_ids=[one.example_id for one in mine_P],
                **_score_kinds(plan, mine_P, pass_at, _summarize),
            )
            for label, mine_P in by_part.items()
        },
        validity=_judge_validity(verdicts_P),
        audit=None if audit is None else audit.verdict.value,
    )


def _score_kinds(
    plan: EvalPlan,
    verdicts_P: Sequence[ExampleVerdicts],
    pass_at: Sequence[int],
    score: Callable[[Sequence[ExampleVerdicts], slice], Summary],
) -> dict[str, Any]:
    """Score the greedy rollouts, the sampled ones if there are any, and pass@k."""
    return {
        "greedy": score(verdicts_P, _GREEDY),
        "sampled": None if plan.num_samples is None else score(verdicts_P, _SAMPLED),
        "pass_at_k": {k: _pass_at_k(verdicts_P, k) for k in pass_at},
    }


def check_pass_at(pass_at: Sequence[int], num_samples: int | None) -> None:
    """Refuse a k above the number of samples. Raises: ConfigError naming it."""
    for k in pass_at:
        if not 1 <= k <= (num_samples or 0):
            raise ConfigError(
                f"pass@{k} from {num_samples or 'no'} sampled rollouts per example",
                allowed="k from 1 to the number of samples",
                next_step=f"draw more rollouts per example, with --num-samples {max(k, 1)}, or lower k",
            )


def _problems(verdicts_P: Sequence[ExampleVerdicts]) -> list[str]:
    """Return the units that count as independent draws."""
    return [one.problem or one.example_id for one in verdicts_P]


def _pass_at_k(verdicts_P: Sequence[ExampleVerdicts], k: int) -> PassAtK:
    solved_P_G = [one.solved_G(_SAMPLED) for one in verdicts_P]
    num_examples = sum(len(solved_G) >= k for solved_G in solved_P_G)
    interval = pass_at_k_interval(solved_P_G, k, _problems(verdicts_P))
    return PassAtK(
        value=interval.estimate if num_examples else None,
        low=interval.low,
        high=interval.high,
        num_examples=num_examples,
        num_left_out=len(solved_P_G) - num_examples,
    )


def _summarize(verdicts_P: Sequence[ExampleVerdicts], kind: slice) -> Summary:
    """Summarise the rollouts of one kind."""
    verdicts = [verdict for one in verdicts_P for verdict in one.verdicts_G[kind]]
    replies = [verdict for verdict in verdicts if verdict.has_reply]
    outcomes = [verdict.outcome for verdict in replies]
    solved_P_G = [one.solved_G(kind) for one in verdicts_P]
    interval = clustered_interval(solved_P_G, _problems(verdicts_P))
    return Summary(
        accuracy=interval.estimate if any(solved_P_G) else None,
        low=interval.low,
        high=interval.high,
        num_rollouts=len(verdicts),
        num_too_long=sum(verdict.is_solved is not None and not verdict.has_reply for verdict in verdicts),
        num_unscored=sum(verdict.is_solved is None for verdict in verdicts),
        verifier_error_frac=sum(verdict.is_verifier_error for verdict in verdicts) / len(verdicts),
        timed_out_frac=_mean([outcome.timed_out for outcome in outcomes]),
        truncated_frac=_mean([outcome.truncated for outcome in outcomes]),
        format_ok_frac=_mean([outcome.format_ok for outcome in outcomes]),
        reply_tokens_mean=_mean([verdict.num_tokens for verdict in replies]),
        reward_mean=_mean([outcome.reward for outcome in outcomes]),
    )


def _score_example(example: ExampleVerdicts, kind: slice) -> ExampleScore:
    solved_G = example.solved_G(kind)
    replies = [verdict for verdict in example.verdicts_G[kind] if verdict.has_reply]
    return ExampleScore(
        problem=example.problem,
        num_judged=len(solved_G),
        solved_frac=_mean(solved_G),
        format_ok_frac=_mean([verdict.outcome.format_ok for verdict in replies]),
        in_format_solved_frac=_mean([one.is_solved for one in replies if one.outcome.format_ok]),
        reward_mean=_mean([verdict.outcome.reward for verdict in replies]),
    )


def _mean(values: Sequence[float | None]) -> float | None:
    """Return the mean of the known values."""
    known = [float(value) for value in values if value is not None]
    return fmean(known) if known else None


def _single_version(verdicts: Sequence[Verdict], causes: Sequence[FailureCause]) -> int:
    versions = {version for verdict in verdicts for version in verdict.versions if version is not None}
    if len(versions) == 1:
        return versions.pop()
    if versions:
        raise EngineError(
            f"one evaluation was served by the policy versions {sorted(versions)}",
            allowed="one version for all rollouts",
            next_step="evaluate while no weights are published",
        )
    why = sum_up(causes, len(verdicts)) if causes else "no prompt leaves room for one"
    error = EngineError(
        f"{why}; none of {len(verdicts)} rollouts brought a reply",
        allowed="an engine that answers with the version it serves",
        next_step="mend the cause and evaluate again",
    )
    add_traces(error, causes)
    raise error


def _judge_validity(verdicts_P: Sequence[ExampleVerdicts]) -> Validity:
    """Judge the whole and each part of a mixture: a small part must not hide in a large one."""
    labels = dict.fromkeys([None, *(one.part for one in verdicts_P)])
    for label, kind in ((label, kind) for label in labels for kind in (_GREEDY, _SAMPLED)):
        mine_P = [one for one in verdicts_P if label is None or one.part == label]
        all_G = [(one, verdict) for one in mine_P for verdict in one.verdicts_G[kind]]
        if sum(verdict.is_verifier_error for _, verdict in all_G) > MAX_VERIFIER_ERROR_FRAC * len(all_G):
            return Validity.VERIFIER
        if sum(verdict.is_solved is None for _, verdict in all_G) > MAX_UNSCORED_FRAC * len(all_G):
            return Validity.UNSCORED
        # Only replies with a budget below the task's own count.
        cut = [one.outcome.truncated for example, one in all_G if example.is_budget_cut and one.has_reply]
        if sum(cut) > MAX_TRUNCATED_FRAC * len(cut):
            return Validity.TRUNCATION
    return Validity.VALID
