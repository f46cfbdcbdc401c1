"""The replies of an evaluation, stored in shards so that a killed one can resume, and rescoring.

A shard is a Parquet file of the rollouts of consecutive examples, in training's format. It is written
atomically, with the plan of its evaluation: a shard of another model, task version or seed is refused, with
the differing fields. A shard with rollouts that an engine or a machine lost is attempted again.
Covered: a kill at any moment, two processes in one folder, other evaluations' files, flipped bytes.
Not covered: shards changed on purpose.

`rescore` judges stored replies with the current task. Nothing is generated. A rollout without a reply stays
as it was; every other reply is judged again, including those on which the verifier failed. The new result
names both versions of the task, and is comparable only with results of the same two: its replies answer the
prompts of the older version.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

from pydantic import ValidationError

from strop.environments import RolloutPlan
from strop.environments.groups import score_beside
from strop.environments.single_turn import Answered
from strop.errors import CheckRefused, CorruptRecord, StoreError
from strop.evaluate.comparison import describe_difference, list_plan_differences
from strop.evaluate.result import EvalPlan, EvalResult
from strop.evaluate.scoring import build_result, give_verdict, give_verdicts
from strop.io import FileLock
from strop.io.atomic import explain_write_failure
from strop.io.leftovers import remove_leftovers
from strop.record.files import Shard, list_shards
from strop.rollout import FailureOwner, FinishReason, Outcome, Rollout
from strop.tasks import Task
from strop.tasks.failures import catch_failure, describe_failure
from strop.tasks.judging import Judge

EXAMPLES_PER_SHARD = 32
LOCK_NAME = "lock"
PLAN_FACT = "strop.evaluation"
TASK_FACT = "strop.task"
LOST_FACT = "strop.lost"
"""Number of rollouts of a shard that an engine or a machine lost."""
_MACHINES = frozenset({FailureOwner.ENGINE, FailureOwner.INFRA})


def cut_shards(num_examples: int) -> list[Shard]:
    """Cut the examples into shards; the last one may be smaller."""
    starts = range(0, num_examples, EXAMPLES_PER_SHARD)
    return [Shard(examples=range(start, min(start + EXAMPLES_PER_SHARD, num_examples))) for start in starts]


class ShardFolder:
    """The folder of one evaluation; use it in `with`, which locks it."""

    def __init__(
        self,
        path: Path,
        plan: EvalPlan,
        task_settings: Mapping[str, Any],
        *,
        part: tuple[int, int] = (0, 1),
    ) -> None:
        """`part`: index and number of the processes that share the work; each locks its own file."""
        self.path = path
        self._plan = plan
        self._facts = {
            PLAN_FACT: plan.model_dump_json(include=set(EvalPlan.model_fields)),
            TASK_FACT: json.dumps(dict(task_settings), sort_keys=True),
        }
        own = "" if part == (0, 1) else f"-{part[0]}-of-{part[1]}"
        self._lock = FileLock(path / f"{LOCK_NAME}{own}")
        self._kept: set[str] = set()

    def __enter__(self) -> Self:
        """Make the folder, lock it, and check its shards.

        Raises: CheckRefused if another process works in it, or a shard belongs to another evaluation;
            CorruptRecord if a shard is damaged; StoreError if the disk fails.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise explain_write_failure(error, self.path) from error
        if not self._lock.try_acquire():
            raise CheckRefused(
                f"{self.path} is in use by {self._lock.holder() or 'another process'}",
                allowed="one evaluation per folder at a time",
                next_step="wait for it, or name another folder with --out",
            )
        with ExitStack() as undo:
            undo.callback(self._lock.release)
            remove_leftovers(self.path)
            # Complete shards; those of another evaluation are refused.
            self._kept = set()
            for path in list_shards(self.path):
                refuse_other_plan(path, read_plan(path), self._plan)
                if _read_facts(path).get(LOST_FACT) == "0":
                    self._kept.add(path.name)
            undo.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        """Release the lock."""
        self._lock.release()

    @property
    def num_kept(self) -> int:
        """Number of examples whose replies were stored when the folder was locked."""
        shards = cut_shards(self._plan.num_examples)
        return sum(len(shard.examples) for shard in shards if shard.file_name in self._kept)

    def read(
        self, shard: Shard, plans_P_G: Sequence[Sequence[RolloutPlan]]
    ) -> list[tuple[Rollout, ...]] | None:
        """Return the rollouts of a shard by example, or None if they must be attempted.

        Raises: CorruptRecord if the file is damaged or holds other rollouts than planned.
        """
        if shard.file_name not in self._kept:
            return None
        path = self.path / shard.file_name
        from strop.record.rollouts import read_rollouts

        rollouts = read_rollouts(path)
        planned = [
            (p.example.example_id, p.sample_index, p.sampling) for plans_G in plans_P_G for p in plans_G
        ]
        if planned != [(r.example.example_id, r.sample_index, r.sampling) for r in rollouts]:
            raise CorruptRecord(
                f"{path} holds {len(rollouts)} rollouts that are not the planned ones",
                allowed=f"the {len(planned)} that the evaluation plans for these examples, in order",
                next_step="remove the file; the same command attempts its examples again",
            )
        per_example = len(plans_P_G[0])
        return [
            tuple(rollouts[start : start + per_example]) for start in range(0, len(rollouts), per_example)
        ]

    def write(self, shard: Shard, rollouts_P_G: Sequence[Sequence[Rollout]]) -> None:
        """Store the rollouts of a shard, atomically.

        Raises: DataError if a text is not valid Unicode; StoreError if the disk fails.
        """
        from strop.record.rollouts import write_rollouts

        rollouts = [rollout for rollouts_G in rollouts_P_G for rollout in rollouts_G]
        failures = [rollout.outcome.failure for rollout in rollouts]
        num_lost = sum(failure is not None and failure.owner in _MACHINES for failure in failures)
        facts = {**self._facts, LOST_FACT: str(num_lost)}
        write_rollouts(self.path / shard.file_name, rollouts, facts=facts)


def read_plan(path: Path) -> EvalPlan:
    """Return the plan of a shard's evaluation.

    Raises: StoreError if it cannot be read; CorruptRecord if it is no shard of an evaluation.
    """
    try:
        return EvalPlan.model_validate_json(_read_facts(path).get(PLAN_FACT, ""))
    except ValidationError as error:
        raise _no_shard(path, f"its plan: {error.errors()[0]['msg']}") from error


def read_task_settings(path: Path) -> dict[str, Any]:
    """Return the settings of the task that first judged a shard's replies.

    Raises: like `read_plan`.
    """
    try:
        return dict(json.loads(_read_facts(path)[TASK_FACT]))
    except (KeyError, ValueError, TypeError) as error:
        raise _no_shard(path, f"its task: {error}") from error


def _read_facts(path: Path) -> dict[str, str]:
    # Imported here: pyarrow is heavy, and an evaluation without a folder does not need it.
    from strop.record.rollouts import read_facts

    return read_facts(path)


def refuse_other_plan(path: Path, stored: EvalPlan, planned: EvalPlan) -> None:
    """Refuse the record of another evaluation.

    Raises: CheckRefused naming every field that differs.
    """
    differences = list_plan_differences(stored, planned)
    if differences:
        shown = "; ".join(describe_difference(d, (" there", " now")) for d in differences)
        raise CheckRefused(
            f"{path} belongs to another evaluation: {shown}",
            allowed="an empty folder, or the evaluation that was begun in it",
            next_step="repeat the command that began it, or name another folder with --out",
        )


def read_all_shards(path: Path) -> tuple[EvalPlan, list[Rollout]]:
    """Return the plan and all rollouts of a complete evaluation, in order.

    Raises: StoreError if there is none or it is not complete; CheckRefused if the shards belong to
        several evaluations; CorruptRecord if one is damaged.
    """
    from strop.record.rollouts import read_rollouts

    paths = list_shards(path)
    if not paths:
        raise _incomplete(path, "holds no replies of an evaluation")
    plan = read_plan(paths[0])
    covered = 0
    for shard_path in paths:
        refuse_other_plan(shard_path, read_plan(shard_path), plan)
        shard = Shard.of_file(shard_path)
        if shard is None or shard.examples.start != covered:
            break
        covered = shard.examples.stop
    if covered != plan.num_examples:
        raise _incomplete(path, f"holds the replies to {covered} of {plan.num_examples} examples in a row")
    return plan, [rollout for shard_path in paths for rollout in read_rollouts(shard_path)]


def _incomplete(path: Path, content: str) -> StoreError:
    return StoreError(
        f"{path} {content}",
        allowed="the folder that `strop eval` wrote beside its result, with every shard",
        next_step="repeat the `strop eval` that began it, or name another folder",
    )


def _no_shard(path: Path, cause: str) -> CorruptRecord:
    return CorruptRecord(
        f"{path} is no shard of an evaluation ({cause})",
        allowed="rollouts that `strop eval` wrote, with the plan that they belong to",
        next_step="name a folder that `strop eval` wrote, or remove the file",
    )


MAX_AT_ONCE = 256
"""Concurrent judgements; a judge with workers queues most of them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ChangedVerdict:
    """A rollout whose verdict changed."""

    example_id: str
    reply: str
    """'greedy', 'sample 0', 'sample 1', ..."""
    before: bool | None
    """Whether it was solved; None: unscored."""
    after: bool | None
    extracted: str | None
    """The part of the reply that is compared now."""
    detail: str
    """The failure if there is no verdict now, else empty."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Rescored:
    """A new result, and the changed verdicts."""

    result: EvalResult
    changes: tuple[ChangedVerdict, ...]


async def rescore(
    plan: EvalPlan,
    rollouts: Sequence[Rollout],
    task: Task,
    *,
    judge: Judge | None = None,
    pass_at: Sequence[int] = (),
) -> Rescored:
    """Judge the replies of an evaluation again.

    `rollouts`: all rollouts of the plan, in order. Without a `judge`, replies are judged in this process.
    Raises: CheckRefused if the task is another one, or lacks an example; ConfigError like `build_result`.
    """
    examples = {example.example_id: example for example in task.examples(plan.split)}
    example_ids = dict.fromkeys(rollout.example.example_id for rollout in rollouts)
    missing = [example_id for example_id in example_ids if example_id not in examples]
    if task.name != plan.task or missing:
        first = f", the first is {missing[0]}" if missing else ""
        raise CheckRefused(
            f"replies to {plan.task} of version {plan.replies_version} were given to {task.name} of"
            f" version {task.version}: {len(missing)} of {len(example_ids)} example ids are not in its"
            f" {plan.split.value} split{first}",
            allowed="the task that the replies answer, with all of its examples",
            next_step="give the settings that the evaluation was made with",
        )
    places = asyncio.Semaphore(MAX_AT_ONCE)
    answered = Answered(task, judge)
    answered.is_member = True

    async def judge_again(rollout: Rollout) -> Rollout:
        async with places:
            example = examples[rollout.example.example_id]
            reply, failure = rollout.reply, rollout.outcome.failure
            is_lost = failure is not None and failure.owner is not FailureOwner.TASK
            if reply is None or rollout.outcome.is_too_long or is_lost:
                return rollout
            with catch_failure(FailureOwner.TASK) as caught:
                outcome = await answered.judge_answer(example, reply.text)
            if caught.failure is not None:
                outcome = Outcome(parts={}, failure=caught.failure)
            is_cut = any(turn.finish_reason is FinishReason.LENGTH for turn in rollout.turns)
            return replace(rollout, outcome=replace(outcome, truncated=outcome.truncated or is_cut))

    alone = await asyncio.gather(*(judge_again(rollout) for rollout in rollouts))
    per_example = 1 + (plan.num_samples or 0)
    judged: list[Rollout] = []
    for start in range(0, len(alone), per_example):
        group = alone[start : start + per_example]
        answers = ["" if rollout.reply is None else rollout.reply.text for rollout in group]
        judged += await score_beside(answered, group, answers)
    new_plan = plan.model_copy(update={"task_version": task.version})
    verdicts_P = [
        give_verdicts(judged[start : start + per_example], task, plan)
        for start in range(0, len(judged), per_example)
    ]
    result = build_result(new_plan, verdicts_P, pass_at=pass_at)
    return Rescored(result=result, changes=_list_changes(rollouts, judged, plan))


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
