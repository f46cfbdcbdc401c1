"""Bringing a job's artefacts home: resumable, proven, and nothing is removed where they come from.

Files come into `<dest>.incoming`; when all that were asked for are there, the folder gets its name. A
checkpoint without `COMPLETE` is not fetched, and a fetched one is verified against it. What grew meanwhile is
brought up to the last complete line.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from strop.errors import StoreError, explain_refusal
from strop.io.atomic import explain_write_failure, verify_directory
from strop.record.checkpoints import CHECKPOINTS, find_checkpoints, step_of
from strop.record.files import RecordFiles

_GROWING = (".jsonl", ".log")
_NEVER = ("job/secrets.json", "job/env.json", "lock")
"""Never copied: nobody else's business, or without meaning elsewhere."""


class Part(StrEnum):
    """What of a run is wanted."""

    ALL = "all"
    TRACES = "traces"
    """Everything but checkpoints."""
    CHECKPOINTS = "checkpoints"
    LATEST = "latest"
    """The newest complete checkpoint alone."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Fetched:
    """What was brought."""

    path: Path
    num_files: int
    moved_bytes: int
    """Without what an earlier, interrupted call had brought."""
    steps: tuple[int, ...]
    """Of the checkpoints."""


def fetch_run(record: RecordFiles, dest: Path, part: Part, *, step: int | None = None) -> Fetched:
    """Copy a member's files to a new folder; the same call again goes on where it stopped.

    Checkpoints are continued byte by byte. What a job may still change is small, and brought anew. `step`:
    of the checkpoints this one alone.

    Raises: StoreError if the folder is there already, there is nothing to fetch, or a place fails;
        CorruptRecord if a checkpoint is not what its manifest promises.
    """
    if dest.exists():
        raise StoreError(
            explain_refusal(
                f"{dest} exists already",
                allowed="a folder that is not there yet",
                next_step="name another one with --to, or remove it",
            )
        )
    incoming = dest.with_name(dest.name + ".incoming")
    complete = find_checkpoints(record)
    if step is not None:
        if step not in complete:
            raise _no_step(record, step, complete)
        complete = [step]
    names = _choose(record, part, complete)
    if not names:
        raise _nothing(record, part)
    moved = sum(_copy(record, name, incoming / name) for name in names)
    steps = sorted({step for name in names if (step := step_of(name)) is not None})
    steps = [step for step in steps if _verify(record, incoming, step)]
    if part in {Part.CHECKPOINTS, Part.LATEST} and not steps:
        raise _nothing(record, part)
    _drop_others(incoming, steps)
    try:
        incoming.rename(dest)
    except OSError as error:
        raise explain_write_failure(error, dest) from error
    return Fetched(path=dest, num_files=len(names), moved_bytes=moved, steps=tuple(steps))


def _drop_others(incoming: Path, steps: Sequence[int]) -> None:
    """Remove what an interrupted call for more had begun: nothing of it is proven."""
    kept = {f"step-{step:06d}" for step in steps}
    for path in incoming.glob(f"{CHECKPOINTS}*"):
        if path.name not in kept:
            shutil.rmtree(path, ignore_errors=True)


def _nothing(record: RecordFiles, part: Part) -> StoreError:
    return StoreError(
        explain_refusal(
            f"{record.describe('')} has no {part.value} to fetch",
            allowed="a job that has written something",
            next_step="ask `strop status` how it stands",
        )
    )


def _no_step(record: RecordFiles, step: int, complete: Sequence[int]) -> StoreError:
    return StoreError(
        explain_refusal(
            f"{record.describe('')} has no complete checkpoint of step {step}",
            allowed=f"one of its steps: {', '.join(map(str, complete)) or 'there is none yet'}",
            next_step="name one of these",
        )
    )


def _verify(record: RecordFiles, incoming: Path, step: int) -> bool:
    """Prove a checkpoint; False for one that was removed at its source while it was fetched."""
    path = incoming / CHECKPOINTS / f"step-{step:06d}"
    try:
        verify_directory(path)
    except StoreError:
        # The next call brings it anew: what is wrong with it may have happened on the way.
        shutil.rmtree(path, ignore_errors=True)
        if step in find_checkpoints(record):
            raise
        return False
    return True


def _choose(record: RecordFiles, part: Part, complete: Sequence[int]) -> list[str]:
    names = [name for name in record.list("") if name not in _NEVER and ".partial-" not in name]
    of_checkpoints = [name for name in names if step_of(name) in set(complete)]
    others = [name for name in names if not name.startswith(CHECKPOINTS)]
    match part:
        case Part.TRACES:
            return others
        case Part.CHECKPOINTS:
            return of_checkpoints
        case Part.LATEST:
            return [name for name in of_checkpoints if step_of(name) == max(complete)]
        case Part.ALL:
            return [*others, *of_checkpoints]


def _copy(record: RecordFiles, name: str, path: Path) -> int:
    """Bring one file; return the bytes that were moved. What never changes is only continued."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if step_of(name) is None:
            return _copy_whole(record, name, path)
        start = moved = path.stat().st_size if path.is_file() else 0
        with path.open("ab") as file:
            while data := record.read_from(name, moved):
                moved += file.write(data)
    except OSError as error:
        raise explain_write_failure(error, path) from error
    return moved - start


def _copy_whole(record: RecordFiles, name: str, path: Path) -> int:
    """Bring a file that may have been replaced or cut since the last call."""
    moved, rest = 0, b""
    with path.open("wb") as file:
        while data := record.read_from(name, moved):
            moved += len(data)
            if name.endswith(_GROWING):
                # What was written meanwhile is brought up to its last complete line.
                whole, newline, rest = (rest + data).rpartition(b"\n")
                data = whole + newline
            file.write(data)
    return moved - len(rest)
