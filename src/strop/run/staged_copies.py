"""Copies in a store that stand for the paths of a run file: noted by `strop stage`, used by a submission.

So the run file that was staged is submitted as it is to a site whose machines do not see these paths. Noted
per user, in the cache: which copy a path has, and the files that it was made of with their sizes and times.
A path whose files have changed since is refused, because the copy is of other bytes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from strop.errors import CheckRefused
from strop.io.atomic import write_bytes_atomically
from strop.io.lock import FileLock
from strop.io.variables import user_cache_dir
from strop.spec import ResolvedSpec, RunSpec
from strop.spec.base import DEFAULT
from strop.spec.display import dotted, walk_values
from strop.spec.eval_file import EvalFile

SECTIONS = ("model", "reference", "teacher", "task", "sft", "dpo")
"""Sections in which models and data are named."""


def note_copies(copies: Mapping[str, str], files: Mapping[str, Mapping[str, Path]]) -> None:
    """Note the URI of each name's copy, and the files that it was made of. Earlier notes on others stay.

    Raises: StoreError if the cache cannot be written.
    """
    path = _notes_path()
    path.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(path.with_name(f"{path.name}.lock")):
        notes = _read_notes()
        for name, uri in copies.items():
            notes[name] = {
                "uri": uri,
                "files": {str(one.absolute()): _mark(one) for one in files[name].values()},
            }
        write_bytes_atomically(path, json.dumps(notes, indent=1).encode())


def use_copies(resolved: ResolvedSpec, evaluation: EvalFile | None) -> tuple[ResolvedSpec, EvalFile | None]:
    """Put the copies in S3 in place of the paths that have one, with a notice for each.

    `evaluation`: the file of `job.eval_config`, whose data may be staged too.
    Raises: CheckRefused naming a path whose files have changed since it was staged.
    """
    notes, notices, origins = _read_notes(), list(resolved.notices), dict(resolved.origins)
    values = resolved.spec.model_dump(mode="json")
    for path, name in walk_values({one: values[one] for one in SECTIONS}):
        if (uri := _find_copy(notes, dotted(path), name)) is not None:
            node = values
            for part in path[:-1]:
                node = node[part]
            node[path[-1]] = uri
            origins[dotted(path)] = f"staged copy of {name} ({origins.get(dotted(path), DEFAULT)})"
            notices.append(_describe(dotted(path), uri, name))
    if evaluation is not None:
        asked = dict(evaluation.values)
        for path, name in evaluation.values.items():
            if (uri := _find_copy(notes, dotted(path), name)) is not None:
                asked[path] = uri
                notices.append(f"{evaluation.origin}: {_describe(dotted(path), uri, name)}")
        evaluation = replace(evaluation, values=asked)
    if len(notices) == len(resolved.notices):
        return resolved, evaluation
    spec = RunSpec.model_validate(values)
    return replace(resolved, spec=spec, origins=origins, notices=tuple(notices)), evaluation


def _describe(key: str, uri: str, name: str) -> str:
    return f"{key}: {uri}, which `strop stage` sent, stands for {name}"


def _find_copy(notes: Mapping[str, Any], key: str, name: object) -> str | None:
    """Return the URI in S3 of a name's copy, None where it has none. Raises: CheckRefused."""
    note = notes.get(name) if isinstance(name, str) else None
    if note is None or not str(note["uri"]).startswith("s3://"):
        return None
    changed = [file for file, mark in note["files"].items() if _mark(Path(file)) != mark]
    if changed:
        raise CheckRefused(
            f"{key}={name}: {changed[0]} has changed since it was staged as {note['uri']}",
            allowed="the files that were staged: the job would read other bytes than this machine has",
            next_step="run `strop stage RUN.toml` again",
        )
    return str(note["uri"])


def _notes_path() -> Path:
    return user_cache_dir() / "staged.json"


def _read_notes() -> dict[str, Any]:
    try:
        notes = json.loads(_notes_path().read_bytes())
    except (OSError, ValueError):
        return {}
    return notes if isinstance(notes, dict) else {}


def _mark(path: Path) -> list[int] | None:
    """Return what changes when a file does; None where it is gone."""
    try:
        found = path.stat()
    except OSError:
        return None
    return [found.st_size, found.st_mtime_ns]
