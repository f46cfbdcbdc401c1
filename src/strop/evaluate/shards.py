"""The replies of an evaluation, stored in shards so that a killed one can resume, and rescoring.

A shard is a Parquet file of the rollouts of consecutive examples, written atomically, with the plan of its
evaluation: one of another model, task version or seed is refused. A shard with rollouts that an engine or a
machine lost is attempted again.

`rescore` judges stored replies with the current task; nothing is generated. A rollout without a reply stays
as it was. The new result names both versions of the task, and is comparable with results of the same two.
"""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

from strop.environments import RolloutPlan
from strop.environments.groups import score_beside
from strop.environments.single_turn import Answered
from strop.errors import CheckRefused, CorruptRecord, StoreError
from strop.evaluate.comparison import list_plan_differences
from strop.evaluate.result import EvalPlan, EvalResult
from strop.evaluate.scoring import build_result, give_verdict, give_verdicts
from strop.io import FileLock
from strop.io.atomic import explain_write_failure
from strop.io.leftovers import remove_leftovers
from strop.record.files import Shard, list_shards
from strop.rollout import FailureOwner, FinishReason, Outcome, Rollout
from strop.tasks import Task
from strop.tasks.failures import catch_failure
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
        """`part`: index and number of the processes that share the work."""
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

        Raises: CheckRefused if another process works in it, or a shard is of another evaluation; StoreError.
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
            for path in list_shards(self.path):
                refuse_other_plan(path, read_plan(path)[0], self._plan)
            complete = [p for p in list_shards(self.path) if _read_facts(p).get(LOST_FACT) == "0"]
            self._kept = {path.name for path in complete}
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
        """Return a shard's rollouts by example; None: to be attempted. Raises: CorruptRecord."""
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
        """Store the rollouts of a shard, atomically. Raises: DataError for an odd text; StoreError."""
        from strop.record.rollouts import write_rollouts

        rollouts = [rollout for rollouts_G in rollouts_P_G for rollout in rollouts_G]
        failures = [rollout.outcome.failure for rollout in rollouts]
        num_lost = sum(failure is not None and failure.owner in _MACHINES for failure in failures)
        facts = {**self._facts, LOST_FACT: str(num_lost)}
        write_rollouts(self.path / shard.file_name, rollouts, facts=facts)


def read_plan(path: Path) -> tuple[EvalPlan, dict[str, Any]]:
    """Return the plan of a shard's evaluation, and the settings of the task that first judged it.

    Raises: StoreError if it cannot be read; CorruptRecord if it is no shard of an evaluation.
    """
    facts = _read_facts(path)
    try:
        return EvalPlan.model_validate_json(facts.get(PLAN_FACT, "")), dict(json.loads(facts[TASK_FACT]))
    except (KeyError, ValueError, TypeError) as error:
        raise CorruptRecord(
            f"{path} is no shard of an evaluation ({type(error).__name__}: {error})",
            allowed="rollouts that `strop eval` wrote, with the plan that they belong to",
            next_step="name a folder that `strop eval` wrote, or remove the file",
        ) from error


def _read_facts(path: Path) -> dict[str, str]:
    # Imported here: pyarrow is heavy, and an evaluation without a folder does not need it.
    from strop.record.rollouts import read_facts

    return read_facts(path)


def refuse_other_plan(path: Path, stored: EvalPlan, planned: EvalPlan) -> None:
    """Refuse the record of another evaluation. Raises: CheckRefused naming every field that differs."""
    if differences := list_plan_differences(stored, planned):
        raise CheckRefused(
            f"{path} belongs to another evaluation, there and now: {'; '.join(map(str, differences))}",
            allowed="an empty folder, or the evaluation that was begun in it",
            next_step="repeat the command that began it, or name another folder with --out",
        )


def read_all_shards(path: Path) -> tuple[EvalPlan, list[Rollout]]:
    """Return the plan and all rollouts of a complete evaluation, in order.

    Raises: StoreError if it is not complete; CheckRefused if the shards belong to several evaluations.
    """
    from strop.record.rollouts import read_rollouts

    paths = list_shards(path)
    plan = read_plan(paths[0])[0] if paths else None
    covered = 0
    for shard_path in paths:
        assert plan is not None
        refuse_other_plan(shard_path, read_plan(shard_path)[0], plan)
        shard = Shard.of_file(shard_path)
        if shard is None or shard.examples.start != covered:
            break
        covered = shard.examples.stop
    if plan is None or covered != plan.num_examples:
        num = "an evaluation" if plan is None else f"{plan.num_examples} examples"
        raise StoreError(
            f"{path} holds the replies to {covered} of {num} in a row",
            allowed="the folder that `strop eval` wrote beside its result, with every shard",
            next_step="repeat the `strop eval` that began it, or name another folder",
        )
    return plan, [rollout for shard_path in paths for rollout in read_rollouts(shard_path)]


async def rescore(
    plan: EvalPlan,
    rollouts: Sequence[Rollout],
    task: Task,
    *,
    judge: Judge | None = None,
    pass_at: Sequence[int] = (),
) -> tuple[EvalResult, list[tuple[Rollout, Rollout]]]:
    """Judge the replies of an evaluation again; return the result, and the rollouts whose verdict changed.

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
    places = asyncio.Semaphore(256)
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
    groups = [alone[start : start + per_example] for start in range(0, len(alone), per_example)]
    judged_P_G = [
        await score_beside(answered, group, ["" if one.reply is None else one.reply.text for one in group])
        for group in groups
    ]
    new_plan = plan.model_copy(update={"task_version": task.version})
    verdicts_P = [give_verdicts(judged_G, task, plan) for judged_G in judged_P_G]
    result = build_result(new_plan, verdicts_P, pass_at=pass_at)
    changed = [
        (old, new)
        for old, new in zip(rollouts, itertools.chain.from_iterable(judged_P_G), strict=True)
        if give_verdict(old).is_solved != give_verdict(new).is_solved
    ]
    return result, changed
