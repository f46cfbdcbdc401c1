"""What is to be sent, held still by hard links, so that the trainer may prune and replace as it likes.

Where the file system knows no hard links, or the disk is nearly full, files are sent from where they are;
one that goes away meanwhile ends the transfer, and the next look begins with what is there then.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from strop.errors import StoreError
from strop.io.atomic import (
    MANIFEST_NAME,
    FileRecord,
    Manifest,
    explain_write_failure,
    read_manifest,
    write_bytes_atomically,
)
from strop.record.mirror.layout import MIRROR_FOLDER, RUN_FOLDER
from strop.record.run_dir import STATE_NAME, RunDir, step_of
from strop.store.record_store import describe_directory, describe_files

_NO_LINKS = frozenset({errno.EPERM, errno.EXDEV, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK})
_PIN_FOLDER = "pinned"
ROOM_FACTOR = 2.5
"""Room for so many checkpoints, or none is held back from being pruned: a run ends below 1.25 of them."""
_WHOLE_FILES = ("spec.toml", "env.txt")


@dataclass(frozen=True, kw_only=True, slots=True)
class PinnedCheckpoint:
    """A checkpoint that stays as it is while it is sent."""

    step: int
    manifest: Manifest
    """The checkpoint's own, with the modification times of the pinned files."""
    paths: Mapping[str, Path]
    """Its files, and below `run/` those of the run that belong to its step."""

    def describe(self, facts: Mapping[str, object]) -> Manifest:
        """Return the manifest of the record that all these files make."""
        added = {name: path for name, path in self.paths.items() if name not in self.manifest.files}
        files = {**self.manifest.files, **describe_files(added)}
        return Manifest(files=files, facts={**self.manifest.facts, "mirror": dict(facts)})

    def model(self) -> tuple[dict[str, Path], dict[str, FileRecord]]:
        """Return the files of the model alone, by their names in it, and what is promised of them."""
        names = [name for name in self.manifest.files if name.startswith("model/")]
        paths = {name.removeprefix("model/"): self.paths[name] for name in names}
        return paths, {name.removeprefix("model/"): self.manifest.files[name] for name in names}


def pin_checkpoint(run: RunDir, step: int) -> PinnedCheckpoint | None:
    """Hold a checkpoint and the run's curve up to it. None: the trainer has just removed it.

    Raises: CorruptRecord if it is damaged; StoreError if the disk fails.
    """
    source, target = run.checkpoint_path(step), run.path / MIRROR_FOLDER / _PIN_FOLDER
    unpin(run.path)
    try:
        sealed = read_manifest(source)
        names = [*sealed.files, MANIFEST_NAME]
        # On a tight disk the trainer's next checkpoint is worth more than this one's way to the store.
        has_room = shutil.disk_usage(run.path).free >= ROOM_FACTOR * sealed.size_bytes
        folder = target if has_room and _link_files(source, target, names) else source
        manifest, paths = describe_directory(folder)
        curve = _write_curve(run, step, target / RUN_FOLDER)
    except FileNotFoundError:
        return None
    except StoreError as error:
        if not (source / MANIFEST_NAME).is_file():
            return None  # Gone in between, not damaged.
        # The reader knows the checkpoint, and not its links.
        raise type(error)(str(error).replace(str(target), str(source))) from error
    except OSError as error:
        raise explain_write_failure(error, target) from error
    return PinnedCheckpoint(step=step, manifest=manifest, paths={**paths, **curve})


def unpin(run_path: Path) -> None:
    """Let go of what is held, also of what a killed uploader held."""
    shutil.rmtree(run_path / MIRROR_FOLDER / _PIN_FOLDER, ignore_errors=True)


def pin_file(run_path: Path, source: Path) -> Path:
    """Return a name under which a file stays as it is; the file itself where there are no hard links."""
    target = run_path / MIRROR_FOLDER / f"one{source.suffix}"
    target.unlink(missing_ok=True)
    try:
        target.parent.mkdir(exist_ok=True)
        os.link(source, target)
    except OSError as error:
        if error.errno in _NO_LINKS:
            return source
        raise
    return target


def _link_files(source: Path, target: Path, names: Sequence[str]) -> bool:
    """Link files of a directory; False: the file system knows no links."""
    try:
        for name in names:
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            os.link(source / name, target / name)
    except OSError as error:
        if error.errno in _NO_LINKS:
            shutil.rmtree(target, ignore_errors=True)
            return False
        raise
    return True


def _write_curve(run: RunDir, step: int, folder: Path) -> dict[str, Path]:
    """Copy what the run recorded up to a step; return the copies by their names in the record."""
    state: dict[str, Any] = json.loads((run.path / STATE_NAME).read_bytes())
    contents = {
        # A run is finished for those elsewhere when its model is in the store as well.
        STATE_NAME: json.dumps({**state, "finished_at": None}, indent=1).encode(),
        "metrics.jsonl": run.metrics.read_until(step),
        "events.jsonl": run.events.read_until(step),
        **{name: (run.path / name).read_bytes() for name in _WHOLE_FILES if (run.path / name).is_file()},
    }
    for path in sorted((run.path / "eval").glob("*.json")):
        if (step_of(path) or 0) <= step:
            contents[f"eval/{path.name}"] = path.read_bytes()
    (folder / "eval").mkdir(parents=True, exist_ok=True)
    for name, data in contents.items():
        write_bytes_atomically(folder / name, data)
    return {f"{RUN_FOLDER}/{name}": folder / name for name in contents}
