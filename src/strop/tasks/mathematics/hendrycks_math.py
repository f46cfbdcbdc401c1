"""Competition problems in the schema of MATH: `problem`, `level`, `type`, and a boxed `solution`.

Seven subjects, each a folder of the hub's data set with its own train and test file. The level is a
text, 'Level 1' to 'Level 5'; the few rows with 'Level ?' are left out and counted.
"""

from __future__ import annotations

import re

from strop.errors import DataError, explain_refusal
from strop.rollout import Example, Split, make_example
from strop.spec.task import MathSpec
from strop.tasks.mathematics.boxed_math import BoxedMath, boxed_answer, problem_text
from strop.tasks.rows.layout import DataLayout, Row
from strop.tasks.rows.reading import RowReading, SplitExamples, require_texts

_MAX_REPLY_TOKENS = 2048
_SUBJECTS = (
    "algebra",
    "counting_and_probability",
    "geometry",
    "intermediate_algebra",
    "number_theory",
    "prealgebra",
    "precalculus",
)
_LEVEL = re.compile(r"Level ([1-5?])")


class HendrycksMath(BoxedMath):
    """The 12,500 problems of MATH, or those of some levels."""

    def __init__(self, spec: MathSpec) -> None:
        def why_left_out(row: Row, split: Split) -> str | None:
            level = _level(row)
            if level is None:
                return "Level ?"
            return None if spec.min_level <= level <= spec.max_level else f"Level {level}"

        reading = RowReading(
            layout=DataLayout(
                train=tuple(f"{subject}/train-00000-of-00001.parquet" for subject in _SUBJECTS),
                held_out=tuple(f"{subject}/test-00000-of-00001.parquet" for subject in _SUBJECTS),
            ),
            to_example=_to_example,
            question=problem_text,
            why_left_out=why_left_out,
            drops_shared=True,
        )
        super().__init__(spec, reading, max_reply_tokens=_MAX_REPLY_TOKENS)

    def _read_splits(self) -> SplitExamples:
        return super()._read_splits().with_shots(self._num_few_shot)


def _level(row: Row) -> int | None:
    """Return the level, or None where the data does not know it.

    Raises: DataError naming the row, if it is neither.
    """
    match = _LEVEL.fullmatch(str(row.values.get("level")))
    if match is None:
        raise DataError(
            explain_refusal(
                f"{row.place} has level {row.values.get('level')!r}",
                allowed="'Level 1' to 'Level 5', or 'Level ?'",
                next_step="mend or remove the row",
            )
        )
    return None if match.group(1) == "?" else int(match.group(1))


def _to_example(row: Row) -> Example:
    problem, level, subject, solution = require_texts(row, "problem", "level", "type", "solution")
    fields = {"problem": problem, "level": level, "subject": subject, "solution": solution}
    return make_example("math", fields, boxed_answer(row, solution))
