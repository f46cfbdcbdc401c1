"""Training examples in the order, or of the difficulty, that an order file sets.

An order file is JSONL: one object per line with an `example_id`, and `solved_frac` where the file was
made from measured pass rates; an optional first line names the `task` and `task_version` it was made for.
Or it is plain text: one id, or one row number from 0, per line. Ids are hashes of content, so a file made
with other settings or data does not match, and is refused instead of silently shrunk (DAT-1).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cached_property
from pathlib import Path
from typing import Any

from strop.errors import DataError
from strop.rollout import Example, Split
from strop.spec.task import TaskSpec
from strop.store.data_files import locate_named
from strop.tasks.task import Task, TaskWrapper

_MAX_SHOWN = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class OrderEntry:
    """One line of an order file."""

    example_id: str
    solved_frac: float | None
    """Share of attempts that solved it; None if unknown."""


class Curriculum(TaskWrapper):
    """A task that trains on the examples of an order file, in its order, within the difficulty bounds.

    Held-out examples and the version are those of the wrapped task, so scores with and without a curriculum
    are comparable: an order changes neither prompts nor scores.
    """

    def __init__(self, task: Task, spec: TaskSpec) -> None:
        super().__init__(task)
        self.is_ordered = True
        self._spec = spec

    def examples(self, split: Split) -> Sequence[Example]:
        """Return the ordered training examples, or the task's held-out ones.

        Raises: DataError if an id of the file is no training example, or none is within the bounds.
        """
        return self._choice[0] if split is Split.TRAIN else self._task.examples(split)

    @property
    def counts(self) -> Mapping[str, int]:
        """The task's counts, and how many lines of the file are left out; reads the data and the file."""
        return {**self._task.counts, **self._choice[1]}

    def epoch_order(self, seed: int, epoch: int) -> Sequence[int]:
        """Return the positions of an epoch: every epoch goes through the file from its first line."""
        return range(len(self._choice[0]))

    @cached_property
    def _choice(self) -> tuple[tuple[Example, ...], dict[str, int]]:
        """The training examples, and the number of lines left out by reason."""
        spec = self._spec
        entries = read_order_file(locate_named(spec.order_file or ""))
        by_id = {example.example_id: example for example in self._task.examples(Split.TRAIN)}
        num_repeated = 0
        if all(entry.example_id.isdecimal() and entry.example_id not in by_id for entry in entries):
            # Rows with the same question became one example, which is trained on once per epoch.
            keys = self._task.row_keys()
            numbers = [int(entry.example_id) for entry in entries]
            ids = [keys.get(str(number)) or f"row {number}" for number in numbers]
            num_repeated = len(ids) - len(set(ids))
            entries = [OrderEntry(example_id=key, solved_frac=None) for key in dict.fromkeys(ids)]
        _refuse_unmatched(spec, entries, by_id)
        kept = [entry for entry in entries if self._is_within(entry)]
        if not kept:
            raise DataError(
                f"none of {len(entries)} examples in {spec.order_file} has a solved_frac from"
                f" {spec.min_solved_frac:g} to {spec.max_solved_frac:g}",
                allowed="bounds that leave at least one example",
                next_step="widen task.min_solved_frac and task.max_solved_frac",
            )
        left_out = {
            "of the order file, outside the bounds": len(entries) - len(kept),
            "of the order file, rows that ask what another row asks": num_repeated,
        }
        return tuple(by_id[entry.example_id] for entry in kept), left_out

    def _is_within(self, entry: OrderEntry) -> bool:
        spec = self._spec
        if entry.solved_frac is not None:
            return spec.min_solved_frac <= entry.solved_frac <= spec.max_solved_frac
        if (spec.min_solved_frac, spec.max_solved_frac) == (0.0, 1.0):
            return True
        raise DataError(
            f"{spec.order_file} has no solved_frac for example {entry.example_id}, and the run bounds it",
            allowed="a file with the solved share of every example, or no bounds",
            next_step="make the file from an evaluation with several samples, or remove the bounds",
        )


def read_order_file(path: Path) -> list[OrderEntry]:
    """Read an order file.

    Raises: DataError if it cannot be read, a line is malformed, or an id occurs twice.
    """
    try:
        # Not `splitlines`: a text of JSON may hold other line ends, such as U+2028.
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(
            f"order file {path} cannot be read ({error})",
            allowed="a JSONL file with one example_id a line, or a text with one id or row number a line",
            next_step="correct task.order_file",
        ) from error
    first = next((line.strip() for line in lines if line.strip()), "")
    if first and first[0] not in "{[":
        return [OrderEntry(example_id=line, solved_frac=None) for line in _read_plain(path, lines)]
    entries: dict[str, OrderEntry] = {}
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        entry = _read_line(path, number, line)
        if entry is None:
            continue
        if entry.example_id in entries:
            raise _malformed(path, number, f"example {entry.example_id} a second time")
        entries[entry.example_id] = entry
    if not entries:
        raise _malformed(path, len(lines), "the end of the file and no example before it")
    return list(entries.values())


def _read_plain(path: Path, lines: Sequence[str]) -> list[str]:
    """Return the ids or row numbers of a plain order file, in order.

    Raises: DataError if a line holds more than one, or one occurs twice.
    """
    line_of: dict[str, int] = {}
    for number, line in enumerate(lines, start=1):
        word = line.strip().strip('"')
        if not word:
            continue
        if word in line_of or len(word.split()) > 1 or word[0] in "{[":
            repeated = f"{word!r} a second time, after line {line_of.get(word)}"
            raise DataError(
                f"line {number} of order file {path} is {repeated if word in line_of else repr(word[:80])}",
                allowed="one id or one row number a line, each once",
                next_step="mend or remove the line",
            )
        line_of[word] = number
    return list(line_of)


def _read_line(path: Path, number: int, line: str) -> OrderEntry | None:
    """Return a line's entry, or None for the header."""
    try:
        values: Any = json.loads(line)
    except ValueError as error:
        raise _malformed(path, number, f"no JSON ({error})") from error
    if not isinstance(values, dict):
        raise _malformed(path, number, f"a {type(values).__name__}")
    if number == 1 and "example_id" not in values and "task" in values:
        return None
    example_id, solved_frac = values.get("example_id"), values.get("solved_frac")
    # True is a number to Python.
    is_share = (
        isinstance(solved_frac, int | float)
        and not isinstance(solved_frac, bool)
        and 0.0 <= solved_frac <= 1.0
    )
    if not isinstance(example_id, str) or not (solved_frac is None or is_share):
        raise _malformed(path, number, f"{values}")
    return OrderEntry(example_id=example_id, solved_frac=None if solved_frac is None else float(solved_frac))


def _malformed(path: Path, number: int, content: str) -> DataError:
    return DataError(
        f"line {number} of order file {path} is {content}",
        allowed="an object with an example_id that stands nowhere else, and a solved_frac from 0 to 1",
        next_step="mend or remove the line",
    )


def _refuse_unmatched(spec: TaskSpec, entries: Sequence[OrderEntry], by_id: dict[str, Example]) -> None:
    unmatched = [entry.example_id for entry in entries if entry.example_id not in by_id]
    if not unmatched:
        return
    shown = []
    for example_id in unmatched[:_MAX_SHOWN]:
        near = get_close_matches(example_id, by_id, n=1)
        shown.append(f"{example_id} (nearest: {near[0]})" if near else example_id)
    raise DataError(
        f"{len(unmatched)} of {len(entries)} ids in {spec.order_file} are no training examples of the"
        f" task: {', '.join(shown)}",
        allowed="ids of this task's training examples",
        next_step="make the file anew with this task's settings and data",
    )
