"""The record of a step: its rollouts and how they ended, its spans in the timeline, a checkpoint.

    checkpoints/step-000020/model/   loads in transformers and vLLM as it stands
    checkpoints/step-000020/state/   fp32 masters, both moments, counters; groups sampled for later steps
    checkpoints/step-000020/COMPLETE manifest with sizes and digests, written last

All parts of a checkpoint are one unit: they are written aside and appear together. Sampling streams are named
by their inputs and the example order follows from the step, so no generator state is needed.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from strop.cluster import LearnerRole
from strop.errors import CheckRefused, CorruptRecord
from strop.hardware.busy_clock import BusyClock
from strop.io.atomic import AtomicDirectory, is_complete, verify_directory
from strop.policy.learner import Learner
from strop.record import EventKind
from strop.record.fence import require_unfenced
from strop.record.parts import require_same_parts
from strop.record.rollouts import StoredRollout, read_rollouts, write_rollouts
from strop.record.run_dir import WEIGHTS_FACT, RunDir, step_of
from strop.record.timeline import ENVIRONMENTS, VERIFIER, Timeline
from strop.rollout import Group
from strop.tasks.judging import Judge
from strop.train.batch import TrainBatch, TurnAdvantages
from strop.train.generation import Batch, Collector, GroupStatus, age_of, sort_by_status

MAX_ENGINE_SPANS = 128
"""Spans of a timeline's line for one step, over all engines."""
MAX_VERIFIER_SPANS = 32


@dataclass(frozen=True, kw_only=True, slots=True)
class SampledStep:
    """The rollouts that were sampled for one step."""

    trained: tuple[StoredRollout, ...] = ()
    """Rollouts of the batch, whether or not they gave a gradient."""
    discarded: tuple[StoredRollout, ...] = ()
    """Rollouts of groups that were replaced before the batch was complete."""
    statuses: tuple[GroupStatus, ...] = ()
    """How each group of the batch ended."""

    @classmethod
    def of_batch(
        cls,
        collected: Batch,
        batch: TrainBatch,
        advantages: Sequence[Sequence[TurnAdvantages]],
        *,
        version: int,
    ) -> SampledStep:
        """Attach to a step's rollouts how they ended; `version` is that of the weights that they train."""
        statuses = sort_by_status(collected.groups, batch)
        trained: list[StoredRollout] = []
        for group, status, of_group in zip(collected.groups, statuses, advantages, strict=True):
            trained += _store(group, status, version, of_group)
        discarded: list[StoredRollout] = []
        for status, group in collected.discarded:
            discarded += _store(group, status, version, [()] * len(group.rollouts))
        return cls(trained=tuple(trained), discarded=tuple(discarded), statuses=tuple(statuses))

    def write(self, run_dir: RunDir, step: int) -> None:
        """Write the rollouts of a step, if there are any.

        Raises: UnfitRecord if a text is not valid Unicode; StoreError if the disk fails.
        """
        if self.trained:
            write_rollouts(run_dir.rollouts_path(step), self.trained)
        if self.discarded:
            path = run_dir.discarded_path(step)
            path.parent.mkdir(exist_ok=True)
            write_rollouts(path, self.discarded)


_UNSCORED = "unscored"


def _store(
    group: Group, status: GroupStatus, version: int, advantages: Sequence[TurnAdvantages]
) -> list[StoredRollout]:
    is_trained = status is GroupStatus.TRAINED
    return [
        StoredRollout(
            rollout=rollout,
            advantages=of_turns,
            status=_UNSCORED if is_trained and rollout.outcome.reward is None else status.value,
            staleness=age_of(rollout, version),
        )
        for rollout, of_turns in zip(group.rollouts, advantages, strict=True)
    ]


def add_lanes(
    timeline: Timeline,
    collector: Collector,
    judge: Judge,
    collected: Batch | None,
    statuses: Sequence[GroupStatus],
) -> None:
    """Add when a step's groups were attempted, and when engines and verifier worked since the last step."""
    if collected is not None:
        used = zip(collected.numbers, collected.groups, statuses, strict=True)
        discarded = zip(collected.discarded_numbers, collected.discarded, strict=True)
        dropped = ((number, group, status) for number, (status, group) in discarded)
        for number, group, status in (*used, *dropped):
            interval = collector.take_interval(number)
            if interval is not None:
                detail = {"number": number, "example": group.example.example_id, "status": status.value}
                timeline.add(ENVIRONMENTS, "group", *interval, detail)
    clocks: dict[str, BusyClock] = dict(collector.busy)
    verifiers = [judge.busy, *([clocks.pop(VERIFIER)] if VERIFIER in clocks else [])]
    for name, clock in clocks.items():
        for interval in clock.take_intervals(max(MAX_ENGINE_SPANS // len(clocks), 1)):
            timeline.add(name.replace("-", " "), "generate", *interval)
    for clock in verifiers:
        for interval in clock.take_intervals(MAX_VERIFIER_SPANS // len(verifiers)):
            timeline.add(VERIFIER, "verify", *interval)


_WAITING = "waiting.parquet"
_WAITING_NUMBERS = "waiting.json"
"""Number and size of each group in `_WAITING`, in its order."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainerState:
    """The loop's own counters."""

    step: int
    """Batches consumed, each for one optimizer step or several; the next step trains on the examples of this
    index."""
    version: int
    """Batches that have moved the weights; smaller than `step` where updates were refused."""
    num_refused_in_a_row: int
    """Steps without an update since the last good one."""
    num_threads: int
    """Threads of the computation; another count rounds differently."""
    next_group: int = 0
    """Number of the first group that no step has consumed (`RolloutBuffer`)."""
    made_of: Mapping[str, str] = field(default_factory=dict)
    """Digest of every part that the run is made of; with another part the curve would differ."""


async def save_checkpoint(
    run_dir: RunDir,
    learner: LearnerRole,
    tokenizer_dir: Path,
    state: TrainerState,
    waiting: Sequence[tuple[int, Group]] = (),
) -> Path:
    """Write the checkpoint after `state.step` steps, replacing a damaged one of the same step.

    `waiting` are groups that were sampled for steps to come, with their numbers.

    Raises: StoreError if the disk is full or fails; nothing is left half-written. CheckRefused if a later
        attempt has begun.
    """
    require_unfenced(run_dir.path)
    run_dir.sync()
    target = run_dir.checkpoint_path(state.step)
    directory = AtomicDirectory(target, facts=asdict(state), replace=True)
    with directory as partial:
        for part in ("model", "state"):
            (partial / part).mkdir()
        directory.facts[WEIGHTS_FACT] = await learner.call(Learner.export, partial / "model", tokenizer_dir)
        await learner.save_state(partial / "state")
        (partial / "state" / "trainer.json").write_text(json.dumps(asdict(state)))
        if waiting:
            rollouts = [rollout for _, group in waiting for rollout in group.rollouts]
            write_rollouts(partial / "state" / _WAITING, rollouts)
            numbers = [(number, len(group.rollouts)) for number, group in waiting]
            (partial / "state" / _WAITING_NUMBERS).write_text(json.dumps(numbers))
    return target


def choose_checkpoint(run_dir: RunDir) -> tuple[tuple[int, Path] | None, str]:
    """Return step and path of the checkpoint to go on from, and a note for the log ("" for none).

    None instead of a checkpoint: the run never had one and begins at its first step.
    Raises: CheckRefused if it had some, and none of them is complete; CorruptRecord for a damaged log.
    """
    latest = run_dir.latest_checkpoint()
    step = latest[0] if latest is not None else 0
    written = {event.step for event in run_dir.events.read() if event.kind is EventKind.CHECKPOINT}
    present = {step_of(path) for path in run_dir.checkpoints_path.glob("step-*") if path.is_dir()}
    lost = sorted(other for other in written | present if other is not None and other > step)
    names = ", ".join(run_dir.checkpoint_path(other).name for other in lost)
    num_done = max((int(line["step"]) for line in run_dir.metrics.read()), default=0)
    if latest is not None:
        note = f"training goes on from {latest[1].name}"
        return latest, f"{note}; {names}, written later, is not complete any more" if lost else note
    if lost:
        raise CheckRefused(
            f"{run_dir.path} has trained {num_done} steps, and none of its checkpoints ({names}) is"
            " complete any more",
            allowed="a checkpoint with all its files, its COMPLETE among them: what was trained is in no"
            " other place",
            next_step="restore one from a copy, or begin anew: with --new, or in another output.dir",
        )
    return None, f"no checkpoint was written yet: {num_done} steps are trained again" if num_done else ""


async def load_checkpoint(
    path: Path, learner: LearnerRole, *, num_threads: int, made_of: Mapping[str, str] | None = None
) -> TrainerState:
    """Verify a checkpoint and restore the learner from it.

    Raises: CorruptRecord naming the file if a part is missing or damaged; CheckRefused if the run
    would go on with another number of threads, or is now `made_of` other parts.
    """
    remedy = _remedy(path)
    verify_directory(path, remedy=remedy)
    try:
        content = json.loads((path / "state" / "trainer.json").read_text())
        content.pop("demonstrations", None)  # Written by versions that had no `made_of`.
        state = TrainerState(**content)
    except (OSError, ValueError, TypeError) as error:
        raise CorruptRecord(
            f"{path}/state/trainer.json cannot be read ({error})",
            allowed="the counters that strop wrote",
            next_step=remedy,
        ) from error
    if state.num_threads != num_threads:
        raise CheckRefused(
            f"the run was computed with {state.num_threads} threads and would go on with {num_threads}",
            allowed=f"placement.threads={state.num_threads}, so that the curve stays the same",
            next_step=f"free the cores, or start again with placement.threads={state.num_threads}",
        )
    require_same_parts(path, state.made_of, made_of or {})
    await learner.load_state(path / "state")
    return state


def _remedy(path: Path) -> str:
    """Advise on a damaged checkpoint, so that the same command then goes on."""
    names = {step_of(other): other.name for other in path.parent.iterdir() if is_complete(other)}
    before = max((step for step in names if step is not None and step < (step_of(path) or 0)), default=None)
    if before is None:
        return f"restore {path} from a copy: there is none before it; or begin anew with --new"
    return f"restore it from a copy, or remove {path}: the same command then goes on from {names[before]}"


def load_waiting(path: Path) -> list[tuple[int, Group]]:
    """Return the groups that a verified checkpoint kept for later steps, with their numbers."""
    source = path / "state" / _WAITING
    if not source.exists():
        return []
    numbers = json.loads((path / "state" / _WAITING_NUMBERS).read_text())
    rollouts = iter(read_rollouts(source))
    groups = []
    for number, num_rollouts in numbers:
        members = tuple(itertools.islice(rollouts, num_rollouts))
        groups.append((number, Group(example=members[0].example, rollouts=members)))
    return groups
