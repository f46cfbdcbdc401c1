"""The evaluations of a run on its held-out examples while it trains, and the outcome of the training."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from strop.errors import RunStopped
from strop.evaluate import (
    EvalResult,
    EvalSettings,
    compare_results,
    plan_evaluation,
    read_result,
    run_evaluation,
    write_result,
)
from strop.evaluate.shards import ShardFolder
from strop.record import RunDir
from strop.record.files import list_shards
from strop.rollout import Example, Sampling, Split
from strop.spec import RunSpec
from strop.spec.train import read_accepted
from strop.tasks import Task
from strop.tasks.failures import add_traces
from strop.tasks.judging import Judge
from strop.tasks.task import list_names
from strop.train.observer import EvalSummary

if TYPE_CHECKING:
    from strop.cluster import Roles


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Evaluates a run's policy on the held-out examples and records the result."""

    spec: RunSpec
    task: Task
    judge: Judge
    roles: Roles
    model_digest: str
    run_dir: RunDir

    async def __call__(self, step: int, on_progress: Callable[[], None]) -> EvalSummary:
        """Evaluate the weights after `step` steps."""
        # Here: it imports torch, which Ray need not wait for.
        from strop.policy.learner import Learner

        spec = self.spec
        settings = EvalSettings(
            run_seed=spec.seed,
            step=step,
            split=Split.HELD_OUT,
            prompt_format=spec.model.prompt_format,
            num_examples=spec.eval.num_examples,
            num_samples=spec.eval.num_samples,
            sampling=Sampling(**spec.sampling.model_dump()),
            dtype=spec.model.dtype,
        )
        roles = self.roles
        # An overlap that the run file accepts is in the gate's report.
        is_accepted = "overlap" in read_accepted(spec.train.accept)
        planned = plan_evaluation(
            task=self.task,
            tokenizer=roles.tokenizer,
            settings=settings,
            # The same digests as `strop eval` of the model, and of the checkpoint of this step.
            model_digest=self.model_digest if step == 0 else await roles.learner.call(Learner.weights_digest),
            trained_ids=() if is_accepted else list_names(self.task, self.task.examples(Split.TRAIN)),
            max_positions=roles.learner.shape.max_positions,
        )
        path = self.run_dir.eval_path(self.task.name, step)
        # Replies kept by a killed attempt are sampled again: that is quick.
        shutil.rmtree(kept_at(path), ignore_errors=True)
        with ShardFolder(kept_at(path), planned.plan, spec.task.model_dump(mode="json")) as folder:
            result = await run_evaluation(
                planned,
                roles.engine,
                roles.tokenizer,
                judge=self.judge,
                folder=folder,
                on_example=on_progress,
            )
        write_result(result, path)
        if result.greedy.accuracy is None:
            kept = "" if self.run_dir.latest_checkpoint() is None else "; the last checkpoint is intact"
            stop = RunStopped(
                f"{result.verdict}: none of {result.greedy.num_rollouts} held-out replies at step {step}"
                " could be judged",
                allowed="an engine that answers and a task that can say right or wrong",
                next_step=f"read {path} and mend the task{kept}",
            )
            add_traces(stop, result.causes)
            raise stop
        best = self._find_best(result)
        change = None if best is None else compare_results(best, result).greedy
        return EvalSummary(
            step=step,
            best_step=None if best is None or change is None else best.step,
            change=None if change is None else change.estimate,
            change_high=None if change is None else change.high,
            num_examples=result.num_examples,
            greedy_accuracy=result.greedy.accuracy,
            greedy_low=result.greedy.low,
            greedy_high=result.greedy.high,
            sampled_accuracy=result.sampled.accuracy if result.sampled is not None else None,
            invalid_cause=None if result.is_valid else result.verdict,
            causes=tuple(result.causes),
        )

    def _find_best(self, result: EvalResult) -> EvalResult | None:
        """Return the best earlier evaluation of the run with the same protocol; None without one."""
        own = self.run_dir.eval_path(self.task.name, 0)
        stored = map(read_result, own.parent.glob(own.name.replace("000000", "*")))
        comparable = [
            earlier
            for earlier in sorted(stored, key=lambda stored: stored.step)
            if earlier.step < result.step
            and earlier.is_valid
            and earlier.protocol_digest == result.protocol_digest
        ]
        if not comparable or not result.is_valid:
            return None
        # Of equals the earliest.
        return max(comparable, key=lambda earlier: earlier.greedy.accuracy or 0.0)


def kept_at(result_path: Path) -> Path:
    """Return the folder of a result's replies: beside it, with the same name."""
    return result_path.with_suffix("")


@dataclass(frozen=True, kw_only=True, slots=True)
class ChangedExample:
    """An example, with its greedy replies before and after training."""

    question: str
    """The last message of the prompt."""
    before: str
    after: str
    """The first 200 characters of the last reply; empty without one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Changes:
    """Examples that only one of two evaluations solved."""

    num_examples: int
    num_gained: int
    """Wrong before and right after."""
    num_lost: int
    """Right before and wrong after."""
    examples: tuple[ChangedExample, ...]
    """The first gained examples."""


def find_changes(
    task: Task, before: EvalResult, after: EvalResult, folders: tuple[Path, Path], *, num_shown: int = 3
) -> Changes | None:
    """Compare the greedy verdicts of two evaluations example by example; None if the protocols differ.

    `folders` are those of the kept replies; examples without kept replies are not shown.
    Raises: CorruptRecord if kept replies are damaged.
    """
    olds, news = before.greedy.by_example, after.greedy.by_example
    if before.protocol_digest != after.protocol_digest or not (before.is_valid and after.is_valid):
        return None
    pairs = {name: (old.solved_frac, news[name].solved_frac) for name, old in olds.items() if name in news}
    gained = [name for name, pair in pairs.items() if pair == (0.0, 1.0)]
    results = zip(folders, (before, after), strict=True)
    replies = [_read_replies(folder, result, gained[:num_shown]) for folder, result in results]
    return Changes(
        num_examples=len(pairs),
        num_gained=len(gained),
        num_lost=sum(pair == (1.0, 0.0) for pair in pairs.values()),
        examples=tuple(
            ChangedExample(
                question=task.render(replies[0][name][0])[-1].text,
                before=replies[0][name][1],
                after=replies[1][name][1],
            )
            for name in gained[:num_shown]
            if name in replies[0] and name in replies[1]
        ),
    )


def _read_replies(folder: Path, result: EvalResult, wanted: Sequence[str]) -> dict[str, tuple[Example, str]]:
    """Return the kept examples of some ids with their greedy replies."""
    from strop.record.rollouts import list_rows, read_row

    replies: dict[str, tuple[Example, str]] = {}
    per_example = 1 + (result.num_samples or 0)
    for path in list_shards(folder) if wanted else ():
        data = path.read_bytes()
        for row in list_rows(data, str(path)):
            if row.example_id in wanted and row.index % per_example == 0:
                replies[row.example_id] = (read_row(data, str(path), row.index).rollout.example, row.reply)
    return replies


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainOutcome:
    """The outcome of a training."""

    run_path: Path
    before: EvalResult | None
    after: EvalResult | None
    changes: Changes | None = None
    """None without two evaluations that can be compared."""


def read_outcome(run_dir: RunDir, task: Task, num_steps: int) -> TrainOutcome:
    """Read a run's evaluations before the first step and after the last, in whichever attempt they were made.

    Raises: CorruptRecord if a result or its replies are damaged.
    """
    first, last = (run_dir.eval_path(task.name, step) for step in (0, num_steps))
    before, after = (read_result(path) if path.exists() else None for path in (first, last))
    changes = None
    if before is not None and after is not None:
        changes = find_changes(task, before, after, (kept_at(first), kept_at(last)))
    return TrainOutcome(run_path=run_dir.path, before=before, after=after, changes=changes)
