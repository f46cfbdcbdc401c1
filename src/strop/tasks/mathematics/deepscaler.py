"""Competition problems in the schema of DeepScaleR: `problem`, `answer`, and a `solution` that may be empty.

The published set has one split; some of it is held out, chosen by content. It holds competition
problems up to 2023, so evaluate on later ones (task aime). Rows without an answer are left out and
counted.
"""

from __future__ import annotations

from strop.rollout import Example, Split, make_example
from strop.spec.task import DeepscalerSpec
from strop.tasks.mathematics.boxed_math import BoxedMath, problem_text, require_readable
from strop.tasks.rows.layout import DataLayout, Row
from strop.tasks.rows.reading import RowReading, require_texts

_MAX_REPLY_TOKENS = 4096


class Deepscaler(BoxedMath):
    """Forty thousand problems of several competitions."""

    def __init__(self, spec: DeepscalerSpec) -> None:
        super().__init__(spec, _READING, max_reply_tokens=_MAX_REPLY_TOKENS)


def _why_left_out(row: Row, split: Split) -> str | None:
    answer = row.values.get("answer")
    return "no answer" if answer is None or answer == "" else None


def _to_example(row: Row) -> Example:
    problem, answer = require_texts(row, "problem", "answer")
    solution = row.values.get("solution")
    fields = {"problem": problem, "solution": solution if isinstance(solution, str) else ""}
    return make_example("deepscaler", fields, require_readable(row, answer))


_READING = RowReading(
    layout=DataLayout(train=("deepscaler.json",), held_out=()),
    to_example=_to_example,
    question=problem_text,
    why_left_out=_why_left_out,
    drops_shared=True,
)
