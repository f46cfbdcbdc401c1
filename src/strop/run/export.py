"""Taking a trained model out of its run: a verified copy of a checkpoint's model directory."""

from __future__ import annotations

import shutil
from pathlib import Path

from strop.errors import CheckRefused, ConfigError, explain_refusal
from strop.io import AtomicDirectory, verify_directory
from strop.plan.locate import Checkpoint, find_checkpoint
from strop.store.model_files import check_model_dir


def export_checkpoint(source: Path, target: Path) -> Checkpoint:
    """Copy the model of a run's newest checkpoint, or of a given one, to a new directory.

    The bytes are verified first; the copy appears complete or not at all.
    Raises: ConfigError if the source is no run and no checkpoint; CheckRefused if the target exists;
        CorruptRecord if the checkpoint is damaged; StoreError if the disk fails.
    """
    checkpoint = find_checkpoint(source)
    if checkpoint is None:
        raise ConfigError(
            explain_refusal(
                f"{source} is no run and no checkpoint",
                allowed="a run directory, or checkpoints/step-NNNNNN inside one",
                next_step="`strop ls` lists the runs here",
            )
        )
    if target.exists():
        raise CheckRefused(
            explain_refusal(
                f"{target} exists",
                allowed="a directory that does not exist yet",
                next_step="choose another name, or remove it",
            )
        )
    verify_directory(checkpoint.path)
    check_model_dir(checkpoint.model_path)
    facts = {"run": checkpoint.run_path.name, "step": checkpoint.step}
    with AtomicDirectory(target, facts=facts) as partial:
        # With the adapters in it, where those were trained.
        shutil.copytree(checkpoint.model_path, partial, copy_function=shutil.copyfile, dirs_exist_ok=True)
    return checkpoint
