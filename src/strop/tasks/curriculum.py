"""Training examples in the order, or of the difficulty, that an order file sets.

A line of an order file is an id, a row number from 0, or a JSON object with an `example_id`, and with
`solved_frac` where it was measured; the first one may name the `task` that the file was made for. Ids are
hashes of content, so a file made with other settings or data does not match, and is refused instead of
silently shrunk (DAT-1).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, Field
from typing_extensions import override

from strop.errors import DataError
from strop.rollout import Example, Split
from strop.spec.task import TaskSpec
from strop.store.data_files import locate_named
from strop.tasks.task import Task, TaskWrapper

_MAX_SHOWN = 3


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

    @override
    def examples(self, split: Split) -> Sequence[Example]:
        return self._choice[0] if split is Split.TRAIN else self._task.examples(split)

    @property
    @override
    def counts(self) -> Mapping[str, int]:
        return {**self._task.counts, **self._choice[1]}

    @override
    def epoch_order(self, seed: int, epoch: int) -> Sequence[int]:
        return range(len(self._choice[0]))

    @cached_property
    def _choice(self) -> tuple[tuple[Example, ...], dict[str, int]]:
        """The training examples, and the number of lines left out by reason."""
        spec, path = self._spec, locate_named(self._spec.order_file or "")
        low, high = spec.min_solved_frac, spec.max_solved_frac
        lines = _read_lines(path)
        by_id = {example.example_id: example for example in self._task.examples(Split.TRAIN)}
        num_lines = len(lines)
        if all(name.isdecimal() and name not in by_id for name in lines):
            # Rows with the same question became one example, which is trained on once per epoch.
            keys = self._task.row_keys()
            lines = {keys.get(str(int(name))) or f"row {int(name)}": frac for name, frac in lines.items()}
        if unmatched := [name for name in lines if name not in by_id]:
            fault = f"names {len(unmatched)} ids of {len(lines)} that are no training examples of the task:"
            shown = ", ".join(unmatched[:_MAX_SHOWN])
            raise _refuse(path, f"{fault} {shown}", "make it anew with this task's settings and data")
        if (low, high) != (0.0, 1.0) and (unknown := [name for name, frac in lines.items() if frac is None]):
            raise _refuse(
                path,
                f"has no solved_frac for example {unknown[0]}, and the run bounds it",
                "make it from an evaluation with several samples, or remove the bounds",
            )
        kept = [name for name, frac in lines.items() if frac is None or low <= frac <= high]
        if not kept:
            raise _refuse(
                path,
                f"has {len(lines)} examples, none with a solved_frac from {low:g} to {high:g}",
                "widen task.min_solved_frac and task.max_solved_frac",
            )
        left_out = {
            "of the order file, outside the bounds": len(lines) - len(kept),
            "of the order file, rows that ask what another row asks": num_lines - len(lines),
        }
        return tuple(by_id[name] for name in kept), left_out


def _read_lines(path: Path) -> dict[str, float | None]:
    """Return ids or row numbers in order, with the share of attempts that solved each.

    Raises: DataError if the file cannot be read or is empty, a line is malformed, or an id occurs twice.
    """
    try:
        # Not `splitlines`: a text of JSON may hold other line ends, such as U+2028.
        lines = [line.strip() for line in path.read_text(encoding="utf-8").split("\n")]
    except (OSError, UnicodeDecodeError) as error:
        raise _refuse(path, f"cannot be read ({error})", "correct task.order_file") from error
    found: dict[str, float | None] = {}
    for number, line in enumerate(lines, start=1):
        try:
            values = json.loads(line) if line.startswith(("{", "[")) else {"example_id": line.strip('"')}
            if not line or (number == 1 and "task" in values and "example_id" not in values):
                continue
            read = _Line.model_validate(values)
        except ValueError as error:
            raise _refuse(path, f"says in line {number} {line[:80]}", "mend or remove the line") from error
        if read.example_id in found:
            raise _refuse(path, f"says in line {number} {read.example_id} a second time", "remove the line")
        found[read.example_id] = read.solved_frac
    if not found:
        raise _refuse(path, "names no example", "write one a line")
    return found


def _refuse(path: Path, fault: str, next_step: str) -> DataError:
    allowed = (
        "one id, one row number, or one object with an example_id and perhaps a solved_frac, a line; none"
        " twice, all of training examples, some within the bounds"
    )
    return DataError(f"order file {path} {fault}", allowed=allowed, next_step=next_step)
