"""Training examples in the order, or of the difficulty, that an order file sets.

A line of an order file is an id, a row number from 0, or a JSON object with an `example_id`, and with
`solved_frac` where it was measured; the first one may name the `task` that the file was made for. Ids are
hashes of content, so a file made with other settings or data does not match, and is refused instead of
silently shrunk (DAT-1).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from functools import cached_property
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, Field, ValidationError

from strop.errors import DataError
from strop.rollout import Example, Split
from strop.spec.task import TaskSpec
from strop.store.data_files import locate_named
from strop.tasks.task import Task, TaskWrapper

_MAX_SHOWN = 3
_ALLOWED = (
    "one id, one row number, or one object with an example_id and perhaps a solved_frac, a line; none twice"
)


class _Line(BaseModel):
    example_id: str = Field(pattern=r"^\S+$")
    solved_frac: Annotated[float, Field(strict=True, ge=0.0, le=1.0)] | None = None
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
        lines = read_order_file(locate_named(spec.order_file or ""))
        by_id = {example.example_id: example for example in self._task.examples(Split.TRAIN)}
        num_lines = len(lines)
        if all(name.isdecimal() and name not in by_id for name in lines):
            # Rows with the same question became one example, which is trained on once per epoch.
            keys = self._task.row_keys()
            lines = {keys.get(str(int(name))) or f"row {int(name)}": frac for name, frac in lines.items()}
        self._refuse_unmatched(lines, by_id)
        kept = [name for name, frac in lines.items() if self._is_within(name, frac)]
        if not kept:
            raise DataError(
                f"none of {len(lines)} examples in {spec.order_file} has a solved_frac from"
                f" {spec.min_solved_frac:g} to {spec.max_solved_frac:g}",
                allowed="bounds that leave at least one example",
                next_step="widen task.min_solved_frac and task.max_solved_frac",
            )
        left_out = {
            "of the order file, outside the bounds": len(lines) - len(kept),
            "of the order file, rows that ask what another row asks": num_lines - len(lines),
        }
        return tuple(by_id[name] for name in kept), left_out

    def _is_within(self, name: str, solved_frac: float | None) -> bool:
        low, high = self._spec.min_solved_frac, self._spec.max_solved_frac
        if solved_frac is None and (low, high) != (0.0, 1.0):
            raise DataError(
                f"{self._spec.order_file} has no solved_frac for example {name}, and the run bounds it",
                allowed="a file with the solved share of every example, or no bounds",
                next_step="make the file from an evaluation with several samples, or remove the bounds",
            )
        return solved_frac is None or low <= solved_frac <= high

    def _refuse_unmatched(self, lines: Mapping[str, float | None], by_id: Mapping[str, Example]) -> None:
        unmatched = [name for name in lines if name not in by_id]
        if not unmatched:
            return
        near = {name: get_close_matches(name, by_id, n=1) for name in unmatched[:_MAX_SHOWN]}
        shown = [f"{name} (nearest: {found[0]})" if found else name for name, found in near.items()]
        raise DataError(
            f"{len(unmatched)} of {len(lines)} ids in {self._spec.order_file} are no training examples of the"
            f" task: {', '.join(shown)}",
            allowed="ids of this task's training examples",
            next_step="make the file anew with this task's settings and data",
        )


def read_order_file(path: Path) -> dict[str, float | None]:
    """Return the ids or row numbers of an order file, in order, with the share of attempts that solved each.

    Raises: DataError if the file cannot be read or is empty, a line is malformed, or an id occurs twice.
    """
    try:
        # Not `splitlines`: a text of JSON may hold other line ends, such as U+2028.
        lines = [line.strip() for line in path.read_text(encoding="utf-8").split("\n")]
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(
            f"order file {path} cannot be read ({error})",
            allowed=_ALLOWED,
            next_step="correct task.order_file",
        ) from error
    found: dict[str, float | None] = {}
    for number, line in enumerate(lines, start=1):
        if not line:
            continue
        try:
            values = json.loads(line) if line[0] in "{[" else {"example_id": line.strip('"')}
            if number == 1 and "task" in values and "example_id" not in values:
                continue
            read = _Line.model_validate(values)
        except (ValidationError, ValueError, TypeError) as error:
            raise _malformed(path, number, line[:80]) from error
        if read.example_id in found:
            raise _malformed(path, number, f"{read.example_id} a second time")
        found[read.example_id] = read.solved_frac
    if not found:
        raise _malformed(path, len(lines), "the end of the file, and no example before it")
    return found


def _malformed(path: Path, number: int, content: str) -> DataError:
    return DataError(
        f"line {number} of order file {path} is {content}",
        allowed=_ALLOWED,
        next_step="mend or remove the line",
    )
