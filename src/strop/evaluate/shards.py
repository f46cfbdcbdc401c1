"""The replies of an evaluation, kept in pieces, so that a killed one goes on where it stopped.

A shard is a Parquet file of the rollouts of some examples in a row, as training writes them. It appears
whole or not at all, and carries the plan that it belongs to: a shard of another model, task version or
seed is refused by what differs. A shard with rollouts that an engine or a machine lost is attempted anew.

Covered: a kill at any moment, two processes in one folder, other evaluations' files, flipped bytes.
Not covered: shards changed on purpose.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from pydantic import ValidationError

from strop.environments import RolloutPlan
from strop.errors import CheckRefused, CorruptRecord, StoreError
from strop.evaluate.comparison import describe_difference, list_plan_differences
from strop.evaluate.result import EvalPlan
from strop.io import FileLock
from strop.io.atomic import explain_write_failure
from strop.io.leftovers import remove_leftovers
from strop.record.shards import Shard, list_shards
from strop.rollout import FailureOwner, Rollout

EXAMPLES_PER_SHARD = 32
LOCK_NAME = "lock"
PLAN_FACT = "strop.evaluation"
TASK_FACT = "strop.task"
LOST_FACT = "strop.lost"
"""Rollouts of a shard that an engine or a machine lost."""
_MACHINES = frozenset({FailureOwner.ENGINE, FailureOwner.INFRA})


def cut_shards(num_examples: int, per_shard: int = EXAMPLES_PER_SHARD) -> list[Shard]:
    """Cut the examples into shards; the last one may be smaller."""
    starts = range(0, num_examples, per_shard)
    return [Shard(examples=range(start, min(start + per_shard, num_examples))) for start in starts]


class ShardFolder:
    """The folder of one evaluation; use it in `with`, which locks it."""

    def __init__(self, path: Path, plan: EvalPlan, task_settings: Mapping[str, Any]) -> None:
        self.path = path
        self._plan = plan
        self._facts = {
            PLAN_FACT: plan.model_dump_json(include=set(EvalPlan.model_fields)),
            TASK_FACT: json.dumps(dict(task_settings), sort_keys=True),
        }
        self._lock = FileLock(path / LOCK_NAME)
        self._kept: set[str] = set()

    def __enter__(self) -> Self:
        """Make the folder, lock it, and look at what is in it.

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
        is_ours = False
        try:
            remove_leftovers(self.path)
            self._kept = self._find_kept()
            is_ours = True
        finally:
            if not is_ours:
                self._lock.release()
        return self

    def _find_kept(self) -> set[str]:
        """Return the names of the shards that need no further attempt; refuse those of others."""
        kept = set()
        for path in list_shards(self.path):
            refuse_other_plan(path, read_plan(path), self._plan)
            if _read_facts(path).get(LOST_FACT) == "0":
                kept.add(path.name)
        return kept

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Give the lock back."""
        self._lock.release()

    @property
    def num_kept(self) -> int:
        """Examples whose replies were here when the folder was locked."""
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
        wanted = [
            (p.example.example_id, p.sample_index, p.sampling) for plans_G in plans_P_G for p in plans_G
        ]
        found = [(r.example.example_id, r.sample_index, r.sampling) for r in rollouts]
        if wanted != found:
            raise CorruptRecord(
                f"{path} holds {len(found)} rollouts that are not the planned ones",
                allowed=f"the {len(wanted)} that the evaluation plans for these examples, in order",
                next_step="remove the file; the same command attempts its examples again",
            )
        per_example = len(plans_P_G[0])
        return [
            tuple(rollouts[start : start + per_example]) for start in range(0, len(rollouts), per_example)
        ]

    def write(self, shard: Shard, rollouts_P_G: Sequence[Sequence[Rollout]]) -> None:
        """Keep the rollouts of a shard, complete or not at all.

        Raises: DataError if a text is not valid Unicode; StoreError if the disk fails.
        """
        from strop.record.rollouts import write_rollouts

        rollouts = [rollout for rollouts_G in rollouts_P_G for rollout in rollouts_G]
        failures = [rollout.outcome.failure for rollout in rollouts]
        num_lost = sum(failure is not None and failure.owner in _MACHINES for failure in failures)
        facts = {**self._facts, LOST_FACT: str(num_lost)}
        write_rollouts(self.path / shard.file_name, rollouts, facts=facts)


def read_plan(path: Path) -> EvalPlan:
    """Return the plan that a shard belongs to.

    Raises: StoreError if it cannot be read; CorruptRecord if it is no shard of an evaluation.
    """
    try:
        return EvalPlan.model_validate_json(_read_facts(path).get(PLAN_FACT, ""))
    except ValidationError as error:
        raise _no_shard(path, f"its plan: {error.errors()[0]['msg']}") from error


def read_task_settings(path: Path) -> dict[str, Any]:
    """Return the settings of the task that a shard's replies were first judged by.

    Raises: like `read_plan`.
    """
    try:
        return dict(json.loads(_read_facts(path)[TASK_FACT]))
    except (KeyError, ValueError, TypeError) as error:
        raise _no_shard(path, f"its task: {error}") from error


def _read_facts(path: Path) -> dict[str, str]:
    # Here, because pyarrow is heavy and an evaluation that keeps nothing does not need it.
    from strop.record.rollouts import read_facts

    return read_facts(path)


def refuse_other_plan(path: Path, found: EvalPlan, wanted: EvalPlan) -> None:
    """Refuse a record of another evaluation where this one would go on.

    Raises: CheckRefused naming every field that differs.
    """
    differences = list_plan_differences(found, wanted)
    if differences:
        shown = "; ".join(describe_difference(d, "and", (" there", " now")) for d in differences)
        raise CheckRefused(
            f"{path} belongs to another evaluation: {shown}",
            allowed="an empty folder, or the evaluation that was begun in it",
            next_step="repeat the command that began it, or name another folder with --out",
        )


def read_all_shards(path: Path) -> tuple[EvalPlan, list[Rollout]]:
    """Return the plan and all rollouts of a complete evaluation, in order.

    Raises: StoreError if there is none or it is not complete; CheckRefused if its shards belong to
        several; CorruptRecord if one is damaged.
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


def _incomplete(path: Path, found: str) -> StoreError:
    return StoreError(
        f"{path} {found}",
        allowed="the folder that `strop eval` wrote beside its result, with every shard",
        next_step="repeat the `strop eval` that began it, or name another folder",
    )


def _no_shard(path: Path, cause: str) -> CorruptRecord:
    return CorruptRecord(
        f"{path} is no shard of an evaluation ({cause})",
        allowed="rollouts that `strop eval` wrote, with the plan that they belong to",
        next_step="name a folder that `strop eval` wrote, or remove the file",
    )
