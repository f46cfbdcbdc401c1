"""Judging kept replies anew, with the task as it is now.

Nothing is generated. A rollout that never brought a reply stays what it was; every other reply is
judged again, those included that the verifier failed on. The new result names both versions of the task,
and is compared with results of the same two only: its replies answered the older one's prompts.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from strop.errors import CheckRefused
from strop.evaluate.result import EvalPlan, EvalResult
from strop.evaluate.scoring import Limits, build_result, give_verdict, give_verdicts
from strop.rollout import Example, FailureOwner, FinishReason, Outcome, Rollout
from strop.tasks import Task, limits_of
from strop.tasks.contract import TaskLimits, within_bounds
from strop.tasks.failures import catch_failure, describe_failure
from strop.tasks.judging import InlineJudge, Judge

MAX_AT_ONCE = 256
"""Judgements under way at once; a judge with workers queues most of them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ChangedVerdict:
    """A rollout that is judged otherwise than before."""

    example_id: str
    reply: str
    """'greedy', or 'sample 0' and so on."""
    before: bool | None
    """Whether it was solved; None: unscored."""
    after: bool | None
    extracted: str | None
    """What of the reply is compared now."""
    detail: str
    """Why there is no verdict now; empty where there is one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Rescored:
    """A new result, and what became of the old one's verdicts."""

    result: EvalResult
    changes: tuple[ChangedVerdict, ...]


async def rescore(
    plan: EvalPlan,
    rollouts: Sequence[Rollout],
    task: Task,
    *,
    judge: Judge | None = None,
    pass_at: Sequence[int] = (),
    limits: Limits | None = None,
) -> Rescored:
    """Judge the replies of an evaluation anew.

    `rollouts` are all of the plan's, in order. Without a `judge`, replies are judged in this process.
    Raises: CheckRefused if the task is another one, or lacks an example; ConfigError like `build_result`.
    """
    examples = _find_examples(plan, rollouts, task)
    places = asyncio.Semaphore(MAX_AT_ONCE)
    chosen = judge or InlineJudge(task)

    async def judge_anew(rollout: Rollout) -> Rollout:
        async with places:
            example = examples[rollout.example.example_id]
            return await _judge_anew(rollout, example, chosen, limits_of(task, example))

    judged = await asyncio.gather(*(judge_anew(rollout) for rollout in rollouts))
    new_plan = plan.model_copy(update={"task_version": task.version})
    per_example = 1 + (plan.num_samples or 0)
    verdicts_P = [
        give_verdicts(judged[start : start + per_example], task, plan)
        for start in range(0, len(judged), per_example)
    ]
    result = build_result(new_plan, verdicts_P, pass_at=pass_at, limits=limits or Limits())
    return Rescored(result=result, changes=_list_changes(rollouts, judged, plan))


def _find_examples(plan: EvalPlan, rollouts: Sequence[Rollout], task: Task) -> Mapping[str, Example]:
    found = {example.example_id: example for example in task.examples(plan.split)}
    wanted = dict.fromkeys(rollout.example.example_id for rollout in rollouts)
    missing = [example_id for example_id in wanted if example_id not in found]
    if task.name != plan.task or missing:
        first = f", the first is {missing[0]}" if missing else ""
        raise CheckRefused(
            f"replies to {plan.task} of version {plan.replies_version} were given to {task.name} of"
            f" version {task.version}: {len(missing)} of {len(wanted)} example ids are not in its"
            f" {plan.split.value} split{first}",
            allowed="the task that the replies answer, with all of its examples",
            next_step="give the settings that the evaluation was made with",
        )
    return found


async def _judge_anew(rollout: Rollout, example: Example, judge: Judge, bounds: TaskLimits) -> Rollout:
    reply, failure = rollout.reply, rollout.outcome.failure
    is_lost = failure is not None and failure.owner is not FailureOwner.TASK
    if reply is None or rollout.outcome.is_too_long or is_lost:
        return rollout
    with catch_failure(lambda: FailureOwner.TASK) as caught:
        outcome = within_bounds(await judge.judge(example, reply.text), bounds)
    if caught.failure is not None:
        outcome = Outcome(parts={}, failure=caught.failure)
    is_cut = any(turn.finish_reason is FinishReason.LENGTH for turn in rollout.turns)
    return replace(rollout, outcome=replace(outcome, truncated=outcome.truncated or is_cut))


def _list_changes(
    before: Sequence[Rollout], after: Sequence[Rollout], plan: EvalPlan
) -> tuple[ChangedVerdict, ...]:
    changes = []
    per_example = 1 + (plan.num_samples or 0)
    for index, (old, new) in enumerate(zip(before, after, strict=True)):
        was_solved = give_verdict(old, plan.pass_threshold).is_solved
        is_solved = give_verdict(new, plan.pass_threshold).is_solved
        if was_solved == is_solved:
            continue
        failure = new.outcome.failure
        changes.append(
            ChangedVerdict(
                example_id=new.example.example_id,
                reply="greedy" if index % per_example == 0 else f"sample {new.sample_index}",
                before=was_solved,
                after=is_solved,
                extracted=new.outcome.extracted,
                detail="" if failure is None else describe_failure(failure),
            )
        )
    return tuple(changes)
