"""Compute scores from rollouts: solved, unscored, and when a result is invalid.

Every prompt is counted. A prompt too long for the model counts as not solved; a rollout that could not be
judged is neither solved nor wrong and is counted separately. A partial reward is not solved: `is_correct` of
the task decides, or the declared threshold.

Shapes: P = examples, G = rollouts of one kind of one example.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

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
from strop.rollout import Failure, FailureOwner, Rollout
from strop.tasks import Task
from strop.tasks.failures import FailureCause, add_traces, find_causes, sum_up

MAX_TRUNCATED_FRAC = 0.05
"""Share of replies cut by a budget below the task's own, above which a result is invalid."""
MAX_UNSCORED_FRAC = 0.02
"""Share of rollouts that could not be judged, whatever the cause, above which a result is invalid."""
MAX_VERIFIER_ERROR_FRAC = 0.005
"""Share of rollouts whose verifier failed, above which a result is invalid."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """The facts of one rollout that scores need; the rollout itself is on the disk, or dropped."""

    is_solved: bool | None
    """None: it could not be judged."""
    has_reply: bool
    """Whether there was a judged attempt."""
    format_ok: bool | None
    truncated: bool
    timed_out: bool
    reward: float | None
    num_tokens: int
    failure: Failure | None
    versions: frozenset[int]
    """Policy versions that served it."""

    @property
    def is_verifier_error(self) -> bool:
        """Whether the verifier failed."""
        return self.failure is not None and self.failure.owner is FailureOwner.TASK


@dataclass(frozen=True, kw_only=True, slots=True)
class ExampleVerdicts:
    """All rollouts of one example."""

    example_id: str
    task: str
    """The task of the example; in a mixture, the task of its part."""
    part: str | None
    """Label of the part of a mixture; None: the task has no parts."""
    problem: str | None
    """Name shared by all examples of its problem; None if unknown."""
    is_budget_cut: bool
    """Whether its replies had a smaller budget than the task's own."""
    greedy: Verdict
    sampled_G: tuple[Verdict, ...]


def give_verdict(rollout: Rollout, pass_threshold: float | None) -> Verdict:
    """Reduce a rollout to its verdict. Solved means correct, or a reward of at least the threshold."""
    outcome = rollout.outcome
    is_solved = outcome.is_correct
    if pass_threshold is not None and outcome.reward is not None:
        is_solved = outcome.reward >= pass_threshold
    if not outcome.is_scored:
        is_solved = False if outcome.is_too_long else None
    failure = None if outcome.is_too_long else outcome.failure
    return Verdict(
        is_solved=is_solved,
        has_reply=outcome.is_scored and is_solved is not None,
        format_ok=outcome.format_ok,
        truncated=outcome.truncated,
        timed_out=outcome.timed_out,
        reward=outcome.reward,
        num_tokens=rollout.num_sampled_tokens,
        # Thousands of equal failures share one text.
        failure=failure and replace(failure, detail=sys.intern(failure.detail)),
        versions=frozenset(
            turn.policy_version
            for turn in rollout.turns
            if turn.is_sampled and turn.policy_version is not None
        ),
    )


def give_verdicts(rollouts_G: Sequence[Rollout], task: Task, plan: EvalPlan) -> ExampleVerdicts:
    """Reduce the rollouts of an example, the greedy one first, to their verdicts."""
    example = rollouts_G[0].example
    greedy, *sampled_G = (give_verdict(rollout, plan.pass_threshold) for rollout in rollouts_G)
    part = task.part_of(example)
    return ExampleVerdicts(
        example_id=example.example_id,
        task=example.task,
        part=part,
        problem=task.problem_of(example),
        is_budget_cut=plan.budget_of(part) < task.limits_of(example).own_reply_tokens,
        greedy=greedy,
        sampled_G=tuple(sampled_G),
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
    for verdicts in verdicts_P:
        if verdicts.part is not None:
            by_part.setdefault(verdicts.part, []).append(verdicts)
    audit = find_audit(plan.task, plan.task_version)
    return EvalResult(
        **{name: getattr(plan, name) for name in EvalPlan.model_fields},
        policy_version=_single_version(verdicts_P),
        causes=list(_find_causes(verdicts_P)),
        **_score_kinds(
            plan,
            verdicts_P,
            pass_at,
            lambda kind_P: Score(
                **_summarize(kind_P).model_dump(),
                by_example={kind.example.example_id: _score_example(kind) for kind in kind_P},
            ),
        ),
        parts={
            label: PartScores(
                task=mine_P[0].task,
                example_ids=[verdicts.example_id for verdicts in mine_P],
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
    score: Callable[[Sequence[_Kind]], Summary],
) -> dict[str, Any]:
    """Score the greedy rollouts, the sampled ones if there are any, and pass@k."""
    sampled_P = [_Kind(verdicts, verdicts.sampled_G) for verdicts in verdicts_P]
    return {
        "greedy": score([_Kind(verdicts, (verdicts.greedy,)) for verdicts in verdicts_P]),
        "sampled": None if plan.num_samples is None else score(sampled_P),
        "pass_at_k": {k: _pass_at_k(sampled_P, k) for k in pass_at},
    }


class _Kind(NamedTuple):
    """The rollouts of one kind of an example."""

    example: ExampleVerdicts
    verdicts_G: Sequence[Verdict]

    @property
    def problem(self) -> str:
        """The unit that counts as one independent draw."""
        return self.example.problem or self.example.example_id

    @property
    def solved_G(self) -> list[bool]:
        """Whether each judged rollout solved the example."""
        return [verdict.is_solved for verdict in self.verdicts_G if verdict.is_solved is not None]


def check_pass_at(pass_at: Sequence[int], num_samples: int | None) -> None:
    """Refuse a k above the number of samples.

    Raises: ConfigError naming the first one.
    """
    for k in pass_at:
        if not 1 <= k <= (num_samples or 0):
            raise ConfigError(
                f"pass@{k} from {num_samples or 'no'} sampled rollouts per example",
                allowed=f"k from 1 to {num_samples}" if num_samples else "k up to the number of samples",
                next_step=f"draw more rollouts per example, with --num-samples {max(k, 1)}, or lower k",
            )


def _pass_at_k(kind_P: Sequence[_Kind], k: int) -> PassAtK:
    solved_P_G = [kind.solved_G for kind in kind_P]
    num_examples = sum(len(solved_G) >= k for solved_G in solved_P_G)
    interval = pass_at_k_interval(solved_P_G, k, [kind.problem for kind in kind_P])
    return PassAtK(
        value=interval.estimate if num_examples else None,
        low=interval.low,
        high=interval.high,
        num_examples=num_examples,
        num_left_out=len(solved_P_G) - num_examples,
    )


def _summarize(kind_P: Sequence[_Kind]) -> Summary:
    """Summarise the rollouts of one kind."""
    verdicts = [verdict for kind in kind_P for verdict in kind.verdicts_G]
    replies = [verdict for verdict in verdicts if verdict.has_reply]
    solved_P_G = [kind.solved_G for kind in kind_P]
    num_judged = sum(len(solved_G) for solved_G in solved_P_G)
    interval = clustered_interval(solved_P_G, [kind.problem for kind in kind_P])
    unscored = [verdict for verdict in verdicts if verdict.is_solved is None]
    return Summary(
        accuracy=interval.estimate if num_judged else None,
        low=interval.low,
        high=interval.high,
        num_samples=len(kind_P[0].verdicts_G),
        num_rollouts=len(verdicts),
        num_too_long=sum(verdict.is_solved is not None and not verdict.has_reply for verdict in verdicts),
        num_unscored=len(unscored),
        verifier_error_frac=sum(verdict.is_verifier_error for verdict in verdicts) / len(verdicts),
        failures=dict(
            sorted(Counter(v.failure.kind if v.failure else "no verdict" for v in unscored).items())
        ),
        timed_out_frac=_mean([verdict.timed_out for verdict in replies]),
        truncated_frac=_mean([verdict.truncated for verdict in replies]),
        cut_unsolved_frac=_mean([verdict.truncated and not verdict.is_solved for verdict in replies]),
        format_ok_frac=_mean([v.format_ok for v in replies if v.format_ok is not None]),
        reply_tokens_mean=_mean([verdict.num_tokens for verdict in replies]),
        reward_mean=_mean([verdict.reward for verdict in replies if verdict.reward is not None]),
    )


def _score_example(kind: _Kind) -> ExampleScore:
    judged = [verdict for verdict in kind.verdicts_G if verdict.is_solved is not None]
    replies = [verdict for verdict in judged if verdict.has_reply]
    return ExampleScore(
        problem=kind.example.problem,
        num_judged=len(judged),
        solved_frac=_mean([bool(verdict.is_solved) for verdict in judged]),
        format_ok_frac=_mean([v.format_ok for v in replies if v.format_ok is not None]),
        in_format_solved_frac=_mean([bool(verdict.is_solved) for verdict in replies if verdict.format_ok]),
        reward_mean=_mean([verdict.reward for verdict in replies if verdict.reward is not None]),
    )


def _mean(values: Sequence[float]) -> float | None:
    return float(np.mean(values)) if values else None


def _list_all(verdicts_P: Sequence[ExampleVerdicts]) -> list[Verdict]:
    return [verdict for verdicts in verdicts_P for verdict in (verdicts.greedy, *verdicts.sampled_G)]


def _find_causes(verdicts_P: Sequence[ExampleVerdicts]) -> tuple[FailureCause, ...]:
    return find_causes(v.failure for v in _list_all(verdicts_P) if v.failure is not None)


def _single_version(verdicts_P: Sequence[ExampleVerdicts]) -> int:
    verdicts = _list_all(verdicts_P)
    versions = frozenset[int]().union(*(verdict.versions for verdict in verdicts))
    if not versions:
        causes = _find_causes(verdicts_P)
        why = sum_up(causes, len(verdicts)) if causes else "no prompt leaves room for one"
        error = EngineError(
            f"{why}; none of {len(verdicts)} rollouts brought a reply",
            allowed="an engine that answers with the version it serves",
            next_step="mend the cause and evaluate again",
        )
        add_traces(error, causes)
        raise error
    if len(versions) > 1:
        raise EngineError(
            f"one evaluation was served by the policy versions {sorted(versions)}",
            allowed="one version for all rollouts",
            next_step="evaluate while no weights are published",
        )
    return next(iter(versions))


def _judge_validity(verdicts_P: Sequence[ExampleVerdicts]) -> Validity:
    """Judge the whole and each part of a mixture: a small part must not hide in a large one."""
    labels = dict.fromkeys([None, *(verdicts.part for verdicts in verdicts_P)])
    for label in labels:
        mine_P = [verdicts for verdicts in verdicts_P if label is None or verdicts.part == label]
        for kind_P in ([(v.greedy,) for v in mine_P], [v.sampled_G for v in mine_P]):
            rollouts = [verdict for verdicts_G in kind_P for verdict in verdicts_G]
            if sum(v.is_verifier_error for v in rollouts) > MAX_VERIFIER_ERROR_FRAC * len(rollouts):
                return Validity.VERIFIER
            if sum(v.is_solved is None for v in rollouts) > MAX_UNSCORED_FRAC * len(rollouts):
                return Validity.UNSCORED
            # Only replies with a budget below the task's own count.
            curtailed = [
                verdict.truncated
                for example, verdicts_G in zip(mine_P, kind_P, strict=True)
                for verdict in verdicts_G
                if example.is_budget_cut and verdict.has_reply
            ]
            if sum(curtailed) > MAX_TRUNCATED_FRAC * len(curtailed):
                return Validity.TRUNCATION
    return Validity.VALID
