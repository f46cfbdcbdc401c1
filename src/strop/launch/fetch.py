"""Download a job's artefacts, resumably and verified; nothing is removed at the source.

Files are written to `<dest>.incoming`, which is renamed once all requested ones are there. A checkpoint
without `COMPLETE` is not fetched, and a fetched one is verified against it. Growing files are fetched up to
their last complete line. `follow_run` fetches the same into the folder itself while the job runs: a
checkpoint appears there when it is complete and verified, and stays if the run prunes its copy.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from strop.errors import StoreError
from strop.io.atomic import explain_write_failure, verify_directory, write_bytes_atomically
from strop.record.files import CHECKPOINTS, RecordFiles, find_checkpoints, step_of
from strop.record.run_dir import DISCARDED

_GROWING = (".jsonl", ".log")
_NEVER_CHANGING = ("rollouts/", f"{DISCARDED}/")
"""Prefixes of files that are written once."""
_NEVER = ("job/secrets.json", "job/ray.token", "job/env.json", "lock")
"""Never copied: private, or meaningless elsewhere."""


class Part(StrEnum):
    """The part of a run to fetch."""

    ALL = "all"
    TRACES = "traces"
    """Everything but checkpoints."""
    CHECKPOINTS = "checkpoints"
    LATEST = "latest"
    """Only the newest complete checkpoint."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Fetched:
    """The result of a download."""

    path: Path
    num_files: int
    moved_bytes: int
    """Bytes moved by this call, without those of an earlier, interrupted one."""
    steps: tuple[int, ...]
    """Steps of the fetched checkpoints."""


def fetch_run(record: RecordFiles, dest: Path, part: Part, *, step: int | None = None) -> Fetched:
    """Copy a trial's files to a new folder; a repeated call resumes an interrupted one.

    Checkpoints resume at the next byte. Files that a job may still change are small, and fetched again.
    `step`: fetch only this checkpoint.

    Raises: StoreError if the folder exists, there is nothing to fetch, or reading or writing fails;
        CorruptRecord if a checkpoint does not match its manifest.
    """
    if dest.exists():
        raise StoreError(
            f"{dest} exists already",
            allowed="a folder that is not there yet",
            next_step="name another one with --to, or remove it",
        )
    incoming = dest.with_name(dest.name + ".incoming")
    complete = find_checkpoints(record)
    if step is not None:
        if step not in complete:
            raise StoreError(
                f"{record.describe('')} has no complete checkpoint of step {step}",
                allowed=f"one of its steps: {', '.join(map(str, complete)) or 'there is none yet'}",
                next_step="name one of these",
            )
        complete = [step]
    names = _choose(record, part, complete)
    if not names:
        raise _nothing_to_fetch(record, part)
    moved = sum(_copy(record, name, incoming / name) for name in names)
    steps = sorted({step for name in names if (step := step_of(name)) is not None})
    steps = [step for step in steps if _verify(record, incoming, step)]
    if part in {Part.CHECKPOINTS, Part.LATEST} and not steps:
        raise _nothing_to_fetch(record, part)
    kept = {f"step-{step:06d}" for step in steps}
    for path in incoming.glob(f"{CHECKPOINTS}*"):
        # Left unverified by an interrupted call that requested more.
        if path.name not in kept:
            shutil.rmtree(path, ignore_errors=True)
    try:
        incoming.rename(dest)
    except OSError as error:
        raise explain_write_failure(error, dest) from error
    return Fetched(path=dest, num_files=len(names), moved_bytes=moved, steps=tuple(steps))


FOLLOWED_NAME = ".followed"
"""Marks a folder that `follow_run` is filling, and holds the name of its run."""


def follow_run(
    record: RecordFiles,
    dest: Path,
    part: Part,
    *,
    is_over: Callable[[], bool],
    say: Callable[[str], None],
    pause: Callable[[], None],
) -> Fetched:
    """Copy a trial's files as they appear until the trial ends; a repeated call resumes an interrupted one.

    Raises: like `fetch_run`; StoreError if the folder exists and is not a copy of this run.
    """
    _claim_folder(record, dest)
    moved, steps = 0, set[int]()
    while True:
        # Checked before the last copy, so that this includes everything written until the end.
        over = is_over()
        complete = find_checkpoints(record)
        names = _choose(record, part, complete)
        for step in complete if part is not Part.TRACES else []:
            of_step = [name for name in names if step_of(name) == step]
            if of_step and step not in steps:
                size = _fetch_checkpoint(record, of_step, dest, step)
                moved, steps = moved + (size or 0), steps | ({step} if size is not None else set())
                if size:
                    say(f"{dest / CHECKPOINTS}/step-{step:06d}: {size / 1e6:.1f} MB")
        # At the end growing files are compared whole: a resumed attempt may have rewritten them.
        copy = _replace if over else _update_file
        moved += sum(copy(record, name, dest / name) for name in names if step_of(name) is None)
        if over:
            break
        pause()
    (dest / FOLLOWED_NAME).unlink()
    num_files = sum(1 for path in dest.rglob("*") if path.is_file())
    if not num_files:
        raise _nothing_to_fetch(record, part)
    return Fetched(path=dest, num_files=num_files, moved_bytes=moved, steps=tuple(sorted(steps)))


def _claim_folder(record: RecordFiles, dest: Path) -> None:
    """Create and mark the folder, or accept a marked one. Raises: StoreError."""
    mark, source = dest / FOLLOWED_NAME, record.describe("")
    marked = mark.read_text("utf-8") if mark.is_file() else None
    if dest.exists() and marked != source:
        problem = "is no copy of this run" if marked is None else f"is a copy of {marked}"
        raise StoreError(
            f"{dest} exists already and {problem}",
            allowed=f"a folder that is not there yet, or one that --follow of {source} has begun",
            next_step="name another one with --to",
        )
    try:
        dest.mkdir(parents=True, exist_ok=True)
        mark.write_text(source, "utf-8")
    except OSError as error:
        raise explain_write_failure(error, dest) from error


def _fetch_checkpoint(record: RecordFiles, names: Sequence[str], dest: Path, step: int) -> int | None:
    """Copy a complete checkpoint, verify it and move it into place; return None if its run removed it."""
    name = f"step-{step:06d}"
    place = dest / CHECKPOINTS / name
    if place.is_dir():
        return 0
    aside = dest / ".incoming"
    moved = sum(_copy(record, path, aside / path) for path in names)
    if not _verify(record, aside, step):
        return None
    place.parent.mkdir(parents=True, exist_ok=True)
    (aside / CHECKPOINTS / name).rename(place)
    shutil.rmtree(aside, ignore_errors=True)
    return moved


def _update_file(record: RecordFiles, name: str, path: Path) -> int:
    """Update one file, a growing one by its new lines; return the number of bytes moved."""
    if name.startswith(_NEVER_CHANGING) and path.is_file():
        return 0
    if not (name.endswith(_GROWING) and path.is_file()):
        return _replace(record, name, path)
    size = path.stat().st_size
    if not record.read_from(name, size):
        return 0
    last = path.read_bytes().rstrip(b"\n").rpartition(b"\n")[2] + b"\n" if size else b""
    data = record.read_from(name, size - len(last))
    if not data.startswith(last):
        # An attempt that resumed from a checkpoint has truncated the file.
        return _replace(record, name, path)
    new = data[len(last) :].rpartition(b"\n")
    try:
        with path.open("ab") as file:
            return file.write(new[0] + new[1])
    except OSError as error:
        raise explain_write_failure(error, path) from error


def _replace(record: RecordFiles, name: str, path: Path) -> int:
    """Replace a file atomically unless it is unchanged; return the number of bytes moved."""
    data = record.read(name)
    if data is None:
        return 0  # Removed since it was listed.
    if name.endswith(_GROWING):
        data = b"".join(data.rpartition(b"\n")[:2])
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.is_file() and path.read_bytes() == data:
        return 0
    write_bytes_atomically(path, data)
    return len(data)


def _nothing_to_fetch(record: RecordFiles, part: Part) -> StoreError:
    return StoreError(
        f"{record.describe('')} has no {part.value} to fetch",
        allowed="a job that has written something",
        next_step="look at `strop status`",
    )


def _verify(record: RecordFiles, incoming: Path, step: int) -> bool:
    """Verify a checkpoint; return False if its source was removed during the fetch."""
    path = incoming / CHECKPOINTS / f"step-{step:06d}"
    try:
        verify_directory(path)
    except StoreError:
        # The next call fetches it again: the transfer may have damaged it.
        shutil.rmtree(path, ignore_errors=True)
        if step in find_checkpoints(record):
            raise
        return False
    return True


def _choose(record: RecordFiles, part: Part, complete: Sequence[int]) -> list[str]:
    names = [name for name in record.list("") if name not in _NEVER and ".partial-" not in name]
    of_checkpoints = [name for name in names if step_of(name) in set(complete)]
    traces = [name for name in names if not name.startswith(CHECKPOINTS)]
    match part:
        case Part.TRACES:
            return traces
        case Part.CHECKPOINTS:
            return of_checkpoints
        case Part.LATEST:
            return [name for name in of_checkpoints if step_of(name) == max(complete)]
        case Part.ALL:
            return [*traces, *of_checkpoints]


def _copy(record: RecordFiles, name: str, path: Path) -> int:
    """Copy one file, or the rest of a file that never changes; return the number of bytes moved."""
    never_changes = step_of(name) is not None
    rest = b""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        start = moved = path.stat().st_size if never_changes and path.is_file() else 0
        with path.open("ab" if never_changes else "wb") as file:
            while data := record.read_from(name, moved):
                moved += len(data)
                if not never_changes and name.endswith(_GROWING):
                    # A growing file is copied up to its last complete line.
                    whole, newline, rest = (rest + data).rpartition(b"\n")
                    data = whole + newline
                file.write(data)
    except OSError as error:
        raise explain_write_failure(error, path) from error
    return moved - start - len(rest)
