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
from strop.tasks.answers import judged_text
from strop.tasks.contract import TaskLimits, right_or_wrong
from strop.tasks.mathematics.answers import AnswerForm, find_answer, last_formula
from strop.tasks.mathematics.boxed_math import problem_text
from strop.tasks.mathematics.normal_form import normal_form, without_name
from strop.tasks.registry import built_in
from strop.tasks.rows.layout import DataLayout, Row, bad_row
from strop.tasks.rows.row_task import RowReading, RowTask, gold_of, require_texts

_PROMPT = (
    "{problem}\n\nReason step by step, and give the final answer, a whole number from 0 to 999, in"
    " \\boxed{{}}."
)
_BASE_PROMPT = "Question: {problem}\nAnswer:"
"""The form of lm-eval 0.4.13's aime24 and aime25."""
_VERIFIER = "integer-2"
_MAX_REPLY_TOKENS = 32768
_MARKERS = ("Question:",)
_STOP_STRINGS = (*_MARKERS, "</s>", "<|im_end|>", "<|eot_id|>")
_MAX_ANSWER = 999
_INTEGER = re.compile(r"(?<![\w.,])-?[0-9]{1,30}(?![\w]|[.,][0-9])")
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

    The number is in the last box, else in the last formula, else the last whole number. `format_ok`: it is
    in [0, 999]. With 30 problems one is worth 3.3 points: sample many times.
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
        gold = gold_of(example)
        judged = judged_text(text, _MARKERS)
        extracted = None if judged is None else _find(judged)
        value = None if extracted is None else _to_integer(extracted)
        is_correct = value is not None and str(value) == gold
        return right_or_wrong(
            is_correct,
            format_ok=value is not None and 0 <= value <= _MAX_ANSWER,
            extracted=extracted,
        )

    def gold_replies(self, example: Example) -> tuple[str, ...]:
        """Return the answer in a box, with three digits, in a formula, and alone."""
        answer = example.answer or ""
        return f"\\boxed{{{answer}}}", f"\\boxed{{{answer:0>3}}}", f"It is ${answer}$.", f"So it is {answer}."


def _find(text: str) -> str | None:
    answer = find_answer(text)
    if answer is not None and answer.form is AnswerForm.BOX:
        return answer.text
    if "\\boxed" in text:
        # An empty or unfinished box: nothing else is meant as the answer.
        return None
    formula = last_formula(text)
    if formula is not None and _to_integer(formula) is not None:
        return formula
    integers: list[str] = _INTEGER.findall(text)
    return integers[-1] if integers else None


def _to_integer(answer: str) -> int | None:
    if len(answer) > 100:
        return None
    form = normal_form(answer)
    form = without_name(form) or form
    return int(form) if re.fullmatch(r"-?[0-9]{1,30}", form) else None


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
