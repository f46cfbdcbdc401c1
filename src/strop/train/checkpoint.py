"""Checkpoints of a run: the model as a Hugging Face directory, the learner's state, the counters.

    checkpoints/step-000020/model/   loads in transformers and vLLM as it stands
    checkpoints/step-000020/state/   fp32 masters, both moments, counters; groups sampled for later steps
    checkpoints/step-000020/COMPLETE manifest with sizes and digests, written last

All parts are one unit: they are written aside and appear together. Sampling streams are named by
their inputs and the example order follows from the step, so no generator state is needed.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from strop.cluster import LearnerRole
from strop.errors import CheckRefused, CorruptRecord
from strop.io.atomic import AtomicDirectory, is_complete, verify_directory
from strop.record import EventKind
from strop.record.fence import require_unfenced
from strop.record.parts import require_same_parts
from strop.record.rollouts import read_rollouts, write_rollouts
from strop.record.run_dir import WEIGHTS_FACT, RunDir, step_of
from strop.rollout import Group

_WAITING = "waiting.parquet"
_WAITING_NUMBERS = "waiting.json"
"""Number and size of each group of the other file, in its order."""


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
    """Threads that the numbers were computed with; another count rounds differently."""
    next_group: int = 0
    """Number of the first group that no step has consumed (`RolloutBuffer`)."""
    made_of: Mapping[str, str] = field(default_factory=dict)
    """Digest of every part that the run is made of; another one would give another curve."""


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
        directory.facts[WEIGHTS_FACT] = await learner.export(partial / "model", tokenizer_dir)
        await learner.save_state(partial / "state")
        (partial / "state" / "trainer.json").write_text(json.dumps(asdict(state)))
        if waiting:
            rollouts = [rollout for _, group in waiting for rollout in group.rollouts]
            write_rollouts(partial / "state" / _WAITING, rollouts)
            numbers = [(number, len(group.rollouts)) for number, group in waiting]
            (partial / "state" / _WAITING_NUMBERS).write_text(json.dumps(numbers))
    return target


def choose_checkpoint(run_dir: RunDir) -> tuple[tuple[int, Path] | None, str]:
    """Return step and place of the checkpoint to go on from, and what is to be said of it; "": nothing.

    None: the run begins at its first step, and never had a checkpoint.
    Raises: CheckRefused if it had some, and none of them is complete; CorruptRecord for a damaged log.
    """
    latest = run_dir.latest_checkpoint()
    step = latest[0] if latest is not None else 0
    written = {event.step for event in run_dir.events.read() if event.kind is EventKind.CHECKPOINT}
    there = {step_of(path) for path in run_dir.checkpoints_path.glob("step-*") if path.is_dir()}
    lost = sorted(found for found in written | there if found is not None and found > step)
    names = ", ".join(run_dir.checkpoint_path(found).name for found in lost)
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
    would go on with another number of threads, or as it is `made_of` now, of other parts.
    """
    remedy = _remedy(path)
    verify_directory(path, remedy=remedy)
    try:
        content = json.loads((path / "state" / "trainer.json").read_text())
        content.pop("demonstrations", None)  # Of a version that knew no other parts.
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
    """Say what to do about a damaged checkpoint, so that the same command then goes on."""
    found = {step_of(other): other.name for other in path.parent.iterdir() if is_complete(other)}
    before = max((step for step in found if step is not None and step < (step_of(path) or 0)), default=None)
    if before is None:
        return f"restore {path} from a copy: there is none before it; or begin anew with --new"
    return f"restore it from a copy, or remove {path}: the same command then goes on from {found[before]}"


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
