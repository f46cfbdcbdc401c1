"""Bringing a job's artefacts home: resumable, proven, and nothing is removed where they come from.

Files come into `<dest>.incoming`; when all that were asked for are there, the folder gets its name. A
checkpoint without `COMPLETE` is not fetched, and a fetched one is verified against it. What grew meanwhile is
brought up to the last complete line.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from strop.errors import StoreError, explain_refusal
from strop.launch.jobs.contract import RecordFiles
from strop.store.atomic import MANIFEST_NAME, explain_write_failure, verify_directory

CHECKPOINTS = "checkpoints/"
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


def fetch_run(record: RecordFiles, dest: Path, part: Part) -> Fetched:
    """Copy a member's files to a new folder; the same call again goes on where it stopped.

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
    complete = _find_checkpoints(record)
    names = _choose(record, part, complete)
    if not names:
        raise StoreError(
            explain_refusal(
                f"{record.describe('')} has no {part.value} to fetch",
                allowed="a job that has written something",
                next_step="ask `strop status` how it stands",
            )
        )
    moved = sum(_copy(record, name, incoming / name) for name in names)
    steps = sorted({step for name in names if (step := _step_of(name)) is not None})
    for step in steps:
        verify_directory(incoming / CHECKPOINTS / f"step-{step:06d}")
    try:
        incoming.rename(dest)
    except OSError as error:
        raise explain_write_failure(error, dest) from error
    return Fetched(path=dest, num_files=len(names), moved_bytes=moved, steps=tuple(steps))


def _choose(record: RecordFiles, part: Part, complete: Sequence[int]) -> list[str]:
    names = [name for name in record.list("") if name not in _NEVER and ".partial-" not in name]
    of_checkpoints = [name for name in names if _step_of(name) in set(complete)]
    others = [name for name in names if not name.startswith(CHECKPOINTS)]
    match part:
        case Part.TRACES:
            return others
        case Part.CHECKPOINTS:
            return of_checkpoints
        case Part.LATEST:
            return [name for name in of_checkpoints if _step_of(name) == max(complete)]
        case Part.ALL:
            return [*others, *of_checkpoints]


def _find_checkpoints(record: RecordFiles) -> list[int]:
    """Return the steps of complete checkpoints."""
    names = record.list(CHECKPOINTS.rstrip("/"))
    sealed = [name for name in names if name.endswith(f"/{MANIFEST_NAME}")]
    return sorted(step for name in sealed if (step := _step_of(name)) is not None)


def _step_of(name: str) -> int | None:
    """Return the step of the checkpoint that a file belongs to."""
    parts = name.split("/")
    if len(parts) < 3 or parts[0] != "checkpoints" or not parts[1].startswith("step-"):
        return None
    number = parts[1].removeprefix("step-")
    return int(number) if number.isdigit() else None


def _copy(record: RecordFiles, name: str, path: Path) -> int:
    """Bring one file; return the bytes that were moved. One that is there is only continued."""
    is_growing = name.endswith(_GROWING)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        start = path.stat().st_size if path.is_file() else 0
        data = record.read_from(name, start)
        if is_growing and start + len(data):
            data = data[: data.rfind(b"\n") + 1]
        with path.open("ab") as file:
            file.write(data)
    except OSError as error:
        raise explain_write_failure(error, path) from error
    return len(data)
