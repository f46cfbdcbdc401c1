"""Checkpoints of a run: the model as a Hugging Face directory, the learner's state, the counters.

    checkpoints/step-000020/model/   loads in transformers and vLLM as it stands
    checkpoints/step-000020/state/   fp32 masters, both moments, counters
    checkpoints/step-000020/COMPLETE manifest with sizes and digests, written last

All parts are one unit: they are written aside and appear together. Sampling streams are named by
their inputs and the example order follows from the step, so no generator state is needed.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from strop.errors import CheckRefused, CorruptRecord, explain_refusal
from strop.policy.learner import Learner
from strop.policy.weights import export_model
from strop.record.fence import require_unfenced
from strop.record.run_dir import RunDir
from strop.store.atomic import AtomicDirectory, verify_directory


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
    demonstrations: str | None = None
    """Digest of what is imitated, None where nothing is; other data would be another curve."""


def save_checkpoint(run_dir: RunDir, learner: Learner, tokenizer_dir: Path, state: TrainerState) -> Path:
    """Write the checkpoint after `state.step` steps, replacing a damaged one of the same step.

    Raises: StoreError if the disk is full or fails; nothing is left half-written. CheckRefused if a later
        attempt has begun.
    """
    require_unfenced(run_dir.path)
    run_dir.sync()
    target = run_dir.checkpoint_path(state.step)
    with AtomicDirectory(target, facts=asdict(state), replace=True) as partial:
        for part in ("model", "state"):
            (partial / part).mkdir()
        export_model(learner.model, tokenizer_dir, partial / "model")
        learner.save_state(partial / "state")
        (partial / "state" / "trainer.json").write_text(json.dumps(asdict(state)))
    return target


def load_checkpoint(path: Path, learner: Learner, *, num_threads: int) -> TrainerState:
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
    learner.load_state(path / "state")
    return state


def require_same_demonstrations(state: TrainerState, digest: str | None) -> None:
    """Refuse to go on with other demonstrations than before. Raises: CheckRefused with both digests."""
    if state.demonstrations == digest:
        return
    before, now = (text[:12] if text else "none" for text in (state.demonstrations, digest))
    raise CheckRefused(
        explain_refusal(
            f"the run imitated demonstrations {before} until step {state.step} and would go on with {now}",
            allowed="the same demonstrations in the same order, so that the curve stays the same",
            next_step="restore what sft.source held, or start a new run with --new",
        )
    )
