"""The 500 problems of MATH-500, for evaluation only: `problem`, `solution`, `answer`, `subject`, `level`.

They are test problems of MATH: a model trained on the training split of task math has not seen them.
"""

from __future__ import annotations

from strop.rollout import Example, make_example
from strop.spec.task import Math500Spec
from strop.tasks.mathematics.boxed_math import BoxedMath, problem_text, require_readable
from strop.tasks.rows.layout import DataLayout, Row
from strop.tasks.rows.reading import RowReading, require_texts

_MAX_REPLY_TOKENS = 2048


class Math500(BoxedMath):
    """A quick look at MATH."""

    def __init__(self, spec: Math500Spec) -> None:
        super().__init__(spec, _READING, max_reply_tokens=_MAX_REPLY_TOKENS)


def _to_example(row: Row) -> Example:
    problem, solution, answer = require_texts(row, "problem", "solution", "answer")
    fields = {"problem": problem, "solution": solution, "level": row.values.get("level")}
    return make_example("math500", fields, require_readable(row, answer))


_READING = RowReading(
    layout=DataLayout(train=(), held_out=("test.jsonl",)), to_example=_to_example, question=problem_text
)
