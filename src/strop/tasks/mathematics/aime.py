"""Problems of the American Invitational Mathematics Examination, for evaluation only.

Every answer is a whole number from 0 to 999, written with three digits in the examination: 025 is 25.
The published sets differ in the case of their columns and in the type of the answer; both are read.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal

from pydantic import Field

from strop.rollout import Example, Outcome, make_example
from strop.spec.base import Unhashed, expert
from strop.spec.task import SOURCE_HELP, EvaluationRows
from strop.tasks.contract import TaskLimits, right_or_wrong
from strop.tasks.mathematics.boxed_math import find_own, problem_text
from strop.tasks.mathematics.equivalence import answer_forms, parse_exact
from strop.tasks.registry import built_in
from strop.tasks.rows.layout import DataLayout, Row, bad_row
from strop.tasks.rows.row_task import RowReading, RowTask, gold_of, require_texts

_PROMPT = (
    "{problem}\n\nReason step by step, and give the final answer, a whole number from 0 to 999, in"
    " \\boxed{{}}."
)
_BASE_PROMPT = "Question: {problem}\nAnswer:"
"""The form of lm-eval 0.4.13's aime24 and aime25."""
_VERIFIER = "integer-3"
_MAX_REPLY_TOKENS = 32768
_STOP_STRINGS = ("Question:", "</s>", "<|im_end|>", "<|eot_id|>")
_MAX_ANSWER = 999
_MAX_CHARS = 100
_DATA: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "2024": ("Maxwell-Jia/AIME_2024", "aime_2024_problems.parquet"),
        "2025": ("math-ai/aime25", "test.jsonl"),
        "2022-2024": ("AI-MO/aimo-validation-aime", "data/train-00000-of-00001.parquet"),
    }
)
"""By year: the hub's data set and its file."""


class AimeSpec(EvaluationRows):
    """Problems of the AIME, whose answers are whole numbers; for evaluation only."""

    name: Literal["aime"]
    year: Literal["2024", "2025", "2022-2024"] = Field(
        default="2025",
        description="Which examinations: 30 problems a year, or the 90 of 2022 to 2024.",
        json_schema_extra=expert("the AIME is another one in each year"),
    )
    source: Unhashed[str | None] = Field(
        default=None,
        min_length=1,
        description=SOURCE_HELP.format("math-ai/aime25") + " none = the hub's data set of the year.",
    )


@built_in("aime", AimeSpec, "AIME of 2024, 2025, or 2022 to 2024, for evaluation; whole numbers.", rank=90)
class Aime(RowTask):
    """Right if the reply's whole number is the answer.

    The answer is found as in task math, and may be written as any number. `format_ok`: it is whole and in
    [0, 999]. With 30 problems one is worth 3.3 points: sample many times.
    """

    def __init__(self, spec: AimeSpec) -> None:
        source, file = _DATA[spec.year]
        reading = RowReading(
            layout=DataLayout(train=(), held_out=(file,)),
            to_example=_to_example,
            question=problem_text,
        )
        limits = TaskLimits(max_reply_tokens=_MAX_REPLY_TOKENS, base_stop_strings=_STOP_STRINGS)
        super().__init__(
            spec,
            reading,
            limits,
            source=spec.source or source,
            prompt=_PROMPT,
            base_prompt=_BASE_PROMPT,
            verifier=_VERIFIER,
        )

    def verify(self, example: Example, text: str) -> Outcome:
        """Compare whole numbers."""
        gold, answer = gold_of(example), find_own(example, text)
        is_short = answer is not None and len(answer.text) <= _MAX_CHARS
        number = parse_exact(answer_forms(gold, answer.text)[1]) if answer and is_short else None
        value = None if number is None else number.value
        return right_or_wrong(
            value == int(gold),
            format_ok=value is not None and value.denominator == 1 and 0 <= value <= _MAX_ANSWER,
            extracted=None if answer is None else answer.text,
        )

    def gold_replies(self, example: Example) -> tuple[str, ...]:
        """Return the answer in a box, with three digits, in a formula, and alone."""
        answer = example.answer or ""
        return f"\\boxed{{{answer}}}", f"\\boxed{{{answer:0>3}}}", f"It is ${answer}$.", f"So it is {answer}."


def _to_example(row: Row) -> Example:
    values = {column.lower(): value for column, value in row.values.items()}
    if type(values.get("answer")) is int:
        values["answer"] = str(values["answer"])
    problem, answer = require_texts(Row(values=values, place=row.place), "problem", "answer")
    if not re.fullmatch(r"[0-9]{1,3}", answer.strip()):
        raise bad_row(
            f"the answer in {row.place} is {answer!r}", allowed=f"a whole number from 0 to {_MAX_ANSWER}"
        )
    return make_example("aime", {"problem": problem}, str(int(answer)))
