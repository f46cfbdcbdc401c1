"""The files that the uploader sends: a checkpoint, pinned by hard links against pruning, and growing logs.

Without hard links, or on a nearly full disk, files are sent in place; a file that is removed meanwhile ends
the transfer, and the next look starts with the files that remain.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
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
from strop.io.leftovers import LEFTOVER_PATTERN
from strop.record.mirror.layout import MIRROR_FOLDER, RUN_FOLDER, TRACES
from strop.record.prediction import PREDICTION_NAME
from strop.record.run_dir import DISCARDED, STATE_NAME, TIMELINE_NAME, TOKENIZER_NAME, RunDir, step_of
from strop.store.record_store import RecordStore, describe_directory, describe_files
from strop.store.uris import join_uri

_NO_LINKS = frozenset({errno.EPERM, errno.EXDEV, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK})
_PIN_FOLDER = "pinned"
ROOM_FACTOR = 2.5
"""Free space, in checkpoints, that pinning one requires: a run ends below 1.25 of them."""
_WHOLE_FILES = ("spec.toml", "env.txt")


@dataclass(frozen=True, kw_only=True, slots=True)
class PinnedCheckpoint:
    """A checkpoint whose files do not change while they are sent."""

    step: int
    manifest: Manifest
    """The checkpoint's manifest, with the modification times of the pinned files."""
    paths: Mapping[str, Path]
    """Its files, and below `run/` the run's files up to its step."""

    def describe(self, facts: Mapping[str, object]) -> Manifest:
        """Return the manifest of the record with all these files."""
        added = {name: path for name, path in self.paths.items() if name not in self.manifest.files}
        files = {**self.manifest.files, **describe_files(added)}
        return Manifest(files=files, facts={**self.manifest.facts, "mirror": dict(facts)})

    def model(self) -> tuple[dict[str, Path], dict[str, FileRecord]]:
        """Return the paths and the manifest entries of the model's files, by their names in the model."""
        names = [name for name in self.manifest.files if name.startswith("model/")]
        paths = {name.removeprefix("model/"): self.paths[name] for name in names}
        return paths, {name.removeprefix("model/"): self.manifest.files[name] for name in names}


def pin_checkpoint(run: RunDir, step: int) -> PinnedCheckpoint | None:
    """Pin a checkpoint and the run's curve up to it. None: the trainer has just removed it.

    Raises: CorruptRecord if it is damaged; StoreError if the disk fails.
    """
    source, target = run.checkpoint_path(step), run.path / MIRROR_FOLDER / _PIN_FOLDER
    unpin(run.path)
    try:
        sealed = read_manifest(source)
        names = [*sealed.files, MANIFEST_NAME]
        # On a nearly full disk the trainer's next checkpoint matters more than sending this one.
        has_room = shutil.disk_usage(run.path).free >= ROOM_FACTOR * sealed.size_bytes
        folder = target if has_room and _link_files(source, target, names) else source
        manifest, paths = describe_directory(folder)
        curve = _write_curve(run, step, target / RUN_FOLDER)
    except FileNotFoundError:
        return None
    except StoreError as error:
        if not (source / MANIFEST_NAME).is_file():
            return None  # Removed meanwhile, not damaged.
        # Users know the checkpoint, not its links.
        raise type(error)(str(error).replace(str(target), str(source))) from error
    except OSError as error:
        raise explain_write_failure(error, target) from error
    return PinnedCheckpoint(step=step, manifest=manifest, paths={**paths, **curve})


def unpin(run_path: Path) -> None:
    """Remove the links to a checkpoint and to single files, also those of a killed uploader."""
    shutil.rmtree(run_path / MIRROR_FOLDER / _PIN_FOLDER, ignore_errors=True)
    for path in (run_path / MIRROR_FOLDER).glob("one*"):
        path.unlink(missing_ok=True)


def pin_file(run_path: Path, source: Path) -> Path:
    """Return a hard link to a file, which pins it; without hard links, the file itself."""
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
    """Copy the run's records up to a step; return the copies by their names in the mirror's record."""
    state: dict[str, Any] = json.loads((run.path / STATE_NAME).read_bytes())
    contents = {
        # Elsewhere the run counts as finished only when its model is in the store too.
        STATE_NAME: json.dumps({**state, "finished_at": None}, indent=1).encode(),
        "metrics.jsonl": run.metrics.read_until(step),
        "events.jsonl": run.events.read_until(step),
        TIMELINE_NAME: run.timeline.read_until(step),
        **{name: (run.path / name).read_bytes() for name in _WHOLE_FILES if (run.path / name).is_file()},
    }
    for path in sorted((run.path / "eval").glob("*.json")):
        if (step_of(path) or 0) <= step:
            contents[f"eval/{path.name}"] = path.read_bytes()
    (folder / "eval").mkdir(parents=True, exist_ok=True)
    for name, data in contents.items():
        write_bytes_atomically(folder / name, data)
    return {f"{RUN_FOLDER}/{name}": folder / name for name in contents}


# The run's files besides its checkpoints, sent as they grow. Rollouts are sent before the metrics of their
# step, so that a reader finds the rollouts of every step with a line.

LOGS = (TIMELINE_NAME, "events.jsonl", "metrics.jsonl")
"""Sent last, in this order."""
_SINGLE = (
    *("spec.toml", "env.txt", STATE_NAME, PREDICTION_NAME, "audit.json", TOKENIZER_NAME),
    *("report.html", "notes.md"),
)
_GROWING = frozenset({".jsonl", ".log", ".out", ".txt"})
FEW_FILES = 100
SMALL_BYTES = 8 << 20
"""Smaller files are read into memory and sent; larger ones are pinned by a link."""
GROWTH_FRAC = 0.05
"""A large log is sent again when it has grown by this fraction, so in all it is sent about twenty times."""
EAGER_BYTES = 1 << 20
"""A file below this size is sent at every change."""

Signature = tuple[int, int]
"""Size and modification time in nanoseconds."""


class TraceSender:
    """Sends the files that have changed since the last pass."""

    def __init__(self, run_path: Path, store: RecordStore, uri: str) -> None:
        self._run_path = run_path
        self._store = store
        self._uri = join_uri(uri, TRACES)
        self._sent: dict[str, Signature] = {}
        self._has_compared = False
        """Whether the files of earlier uploaders were compared."""

    @property
    def has_much_to_compare(self) -> bool:
        """Whether many files must be compared with the store first, at a request for each."""
        return not self._has_compared and len(list(self._list_names())) > FEW_FILES

    def send(self, *, is_whole: bool, should_yield: Callable[[], bool]) -> bool:
        """Send the changed files. `is_whole`: even logs that have grown little.

        Returns False if it stopped for something more urgent: the next call continues.
        Raises: StoreErrors; OSError if a file cannot be read.
        """
        # Read before the rollouts are listed, and sent after them.
        logs = {
            name: (sign(self._run_path / name), cut_at_line_end((self._run_path / name).read_bytes()))
            for name in LOGS
            if self._is_due(name, is_whole=is_whole)
        }
        names = [name for name in self._list_names() if self._is_due(name, is_whole=is_whole)]
        if not self._has_compared:
            # Leave out the files that an earlier uploader sent; their digests are compared once.
            fixed = {name: self._run_path / name for name in names if Path(name).suffix not in _GROWING}
            missing = set(self._store.plan_put(fixed, self._uri).moved)
            for name in fixed.keys() - missing:
                self._sent[name] = sign(self._run_path / name)
            self._has_compared = True
            names = [name for name in names if name not in fixed or name in missing]
        for name in names:
            path, place = self._run_path / name, join_uri(self._uri, name)
            # A resumed run removes files that it writes again.
            with suppress(FileNotFoundError):
                signature = sign(path)
                is_growing = path.suffix in _GROWING
                if signature[0] <= SMALL_BYTES or is_growing:
                    data = path.read_bytes()
                    self._store.objects.write(place, cut_at_line_end(data) if is_growing else data)
                else:
                    self._store.put_file(pin_file(self._run_path, path), place)
                self._sent[name] = signature
            if should_yield():
                return False
        for name, (signature, content) in logs.items():
            self._store.objects.write(join_uri(self._uri, name), content)
            self._sent[name] = signature
        return True

    def _list_names(self) -> Iterator[str]:
        for folder, pattern in (
            ("rollouts", "*.parquet"),
            (DISCARDED, "*.parquet"),
            ("eval", "*.json"),
            ("eval", "*/*.parquet"),
            ("attempts", "**/*"),
            ("trackers", "**/*"),
        ):
            for path in sorted((self._run_path / folder).glob(pattern)):
                if path.is_file() and not path.is_symlink() and LEFTOVER_PATTERN.search(path.name) is None:
                    yield path.relative_to(self._run_path).as_posix()
        yield from (name for name in _SINGLE if (self._run_path / name).is_file())

    def _is_due(self, name: str, *, is_whole: bool) -> bool:
        try:
            size_bytes, changed_ns = sign(self._run_path / name)
        except FileNotFoundError:
            return False
        before = self._sent.get(name)
        if before is None or is_whole or Path(name).suffix not in _GROWING:
            return before != (size_bytes, changed_ns)
        is_shorter = size_bytes < before[0]
        return is_shorter or size_bytes - before[0] > (
            0 if size_bytes < EAGER_BYTES else GROWTH_FRAC * before[0]
        )


def sign(path: Path) -> Signature:
    """Return a file's size and modification time, which change with it."""
    stat = path.stat()
    return stat.st_size, stat.st_mtime_ns


def cut_at_line_end(data: bytes) -> bytes:
    """Drop a last line that is still being written."""
    return data[: data.rfind(b"\n") + 1]
