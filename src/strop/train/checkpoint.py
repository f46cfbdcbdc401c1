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
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from strop.cluster import LearnerRole
from strop.errors import CheckRefused, CorruptRecord, explain_refusal
from strop.record.fence import require_unfenced
from strop.record.rollouts import read_rollouts, write_rollouts
from strop.record.run_dir import RunDir
from strop.rollout import Group
from strop.store.atomic import AtomicDirectory, verify_directory

_WAITING = "waiting.parquet"
_WAITING_NUMBERS = "waiting.json"
"""Number and size of each group of the other file, in its order."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainerState:
    """The loop's own counters."""

    step: int
    """Batches consumed; the next step trains on the examples of this index."""
    version: int
    """Optimizer steps taken; smaller than `step` where updates were refused."""
    num_refused_in_a_row: int
    """Steps without an update since the last good one."""
    num_threads: int
    """Threads that the numbers were computed with; another count rounds differently."""
    next_group: int = 0
    """Number of the first group that no step has consumed (`GroupSource`)."""
    demonstrations: str | None = None
    """Digest of what is imitated, None where nothing is; other data would be another curve."""


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
    with AtomicDirectory(target, facts=asdict(state), replace=True) as partial:
        for part in ("model", "state"):
            (partial / part).mkdir()
        await learner.export(partial / "model", tokenizer_dir)
        await learner.save_state(partial / "state")
        (partial / "state" / "trainer.json").write_text(json.dumps(asdict(state)))
        if waiting:
            _write_waiting(partial / "state", waiting)
    return target


async def load_checkpoint(path: Path, learner: LearnerRole, *, num_threads: int) -> TrainerState:
    """Verify a checkpoint and restore the learner from it.

    Raises: CorruptRecord naming the file if a part is missing or damaged; CheckRefused if the run
    would go on with another number of threads.
    """
    verify_directory(path)
    try:
        state = TrainerState(**json.loads((path / "state" / "trainer.json").read_text()))
    except (OSError, ValueError, TypeError) as error:
        raise CorruptRecord(
            explain_refusal(
                f"{path}/state/trainer.json cannot be read ({error})",
                allowed="the counters that strop wrote",
                next_step=f"remove {path.name}; the run then resumes from the checkpoint before",
            )
        ) from error
    if state.num_threads != num_threads:
        raise CheckRefused(
            explain_refusal(
                f"the run was computed with {state.num_threads} threads and would go on with {num_threads}",
                allowed=f"placement.threads={state.num_threads}, so that the curve stays the same",
                next_step=f"free the cores, or start again with placement.threads={state.num_threads}",
            )
        )
    await learner.load_state(path / "state")
    return state


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


def _write_waiting(target: Path, waiting: Sequence[tuple[int, Group]]) -> None:
    write_rollouts(target / _WAITING, [rollout for _, group in waiting for rollout in group.rollouts])
    numbers = [(number, len(group.rollouts)) for number, group in waiting]
    (target / _WAITING_NUMBERS).write_text(json.dumps(numbers))


def require_same_demonstrations(state: TrainerState, digest: str | None) -> None:
    """Refuse to go on with other demonstrations than before. Raises: CheckRefused with both digests."""
    if state.demonstrations == digest:
        return
    before, now = (text[:12] if text else "none" for text in (state.demonstrations, digest))
    raise CheckRefused(
        explain_refusal(
            f"the run imitated demonstrations {before} until step {state.step} and would go on with {now}",
            allowed="the same demonstrations in the same order, so that the curve stays the same",
            next_step="restore what sft.source or dpo.source held, or start a new run with --new",
        )
    )
