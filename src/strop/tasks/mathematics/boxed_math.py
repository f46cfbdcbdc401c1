r"""Competition problems whose final answer stands in `\boxed{}`: MATH, MATH-500, DeepScaleR and AIME.

They share the prompt, the verdict and the gold replies. `answers` finds the answer in a reply, `equivalence`
compares it. An unreadable answer is wrong; an unreadable gold answer is refused when the data is read.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import partial
from types import MappingProxyType
from typing import Any, Literal

from pydantic import Field, model_validator

from strop.rollout import Example, Outcome, Split, make_example
from strop.spec.base import Section, SpecConflict, Unhashed, expert
from strop.spec.task import SOURCE_HELP, EvaluationRows, FewShot, TrainingRows
from strop.tasks.answers import judged_text
from strop.tasks.mathematics import symbolic
from strop.tasks.mathematics.answers import FoundAnswer, find_answer, find_boxes, is_marked, marked_answer
from strop.tasks.mathematics.equivalence import Strictness, answer_forms, answers_equal, parse_exact
from strop.tasks.mathematics.normal_form import normal_form
from strop.tasks.rows.layout import DataLayout, Row, bad_row
from strop.tasks.rows.row_task import RowReading, RowTask, gold_of, require_texts
from strop.tasks.task import TaskLimits, right_or_wrong

_PROMPT = "{problem}\n\nReason step by step, and give the final answer in \\boxed{{}}."
_BASE_PROMPT = "Problem:\n{problem}\n\nSolution:"
_AIME_PROMPT = _PROMPT.replace("answer", "answer, a whole number from 0 to 999,")
_AIME_BASE_PROMPT = "Question: {problem}\nAnswer:"
"""The forms of lm-eval 0.4.13's minerva_math, and of its aime24 and aime25."""
_VERIFIER = "math-equivalence-5"
_STOP_STRINGS = ("Problem:", "\n\n\n")
_AIME_STOP_STRINGS = ("Question:", "</s>", "<|im_end|>", "<|eot_id|>")
_VERIFY_LIMIT_S = 2.0
_LEVEL = re.compile(r"Level ([1-5?])")
_MAX_AIME = 999
_MAX_AIME_CHARS = 100
_INTEGER = re.compile(r"(?<![\w.,])-?[0-9]{1,30}(?![\w]|[.,][0-9])")
_MAX_REPLY_TOKENS = MappingProxyType({"math": 2048, "math500": 2048, "deepscaler": 4096, "aime": 32768})
_AIME_DATA: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "2024": ("Maxwell-Jia/AIME_2024", "aime_2024_problems.parquet"),
        "2025": ("math-ai/aime25", "test.jsonl"),
        "2022-2024": ("AI-MO/aimo-validation-aime", "data/train-00000-of-00001.parquet"),
    }
)
"""By year: the hub's data set and its file."""


_SUBJECTS = (
    *("algebra", "counting_and_probability", "geometry", "intermediate_algebra", "number_theory"),
    *("prealgebra", "precalculus"),
)


class MathAnswer(Section):
    """How formulas are compared."""

    strictness: Literal["strict", "standard", "symbolic"] = Field(
        default="symbolic",
        description="When an answer is right. 'strict': it stands in the one box of the reply and is spelled"
        " like the gold answer, but for spacing, units and the like. 'standard': also if both are the same"
        " number. 'symbolic': also if sympy finds both formulas equal.",
        json_schema_extra=expert("published scores differ by how far an answer is read"),
    )


_level = partial(Field, ge=1, le=5, json_schema_extra=expert("the problems of MATH have levels"))


class MathSpec(MathAnswer, FewShot, TrainingRows):
    """Competition problems with worked solutions, in the columns of MATH."""

    name: Literal["math"]
    source: Unhashed[str] = Field(
        default="EleutherAI/hendrycks_math",
        min_length=1,
        description=SOURCE_HELP.format("EleutherAI/hendrycks_math"),
    )
    min_level: int = _level(default=1, description="Easiest level used, included.")
    max_level: int = _level(default=5, description="Hardest level used, included.")

    @model_validator(mode="after")
    def _check_levels(self) -> MathSpec:
        if self.min_level > self.max_level:
            raise SpecConflict(
                {"task.min_level": self.min_level, "task.max_level": self.max_level},
                "no level is left",
                allowed="an easiest level that is at most the hardest one",
                next_step="swap the two values",
            )
        return self


class Math500Spec(MathAnswer, EvaluationRows):
    """Five hundred test problems of MATH, for evaluation only."""

    name: Literal["math500"]
    source: Unhashed[str] = Field(
        default="HuggingFaceH4/MATH-500",
        min_length=1,
        description=SOURCE_HELP.format("HuggingFaceH4/MATH-500"),
    )


class DeepscalerSpec(MathAnswer, TrainingRows):
    """Forty thousand competition problems; some are held out, chosen by content."""

    name: Literal["deepscaler"]
    source: Unhashed[str] = Field(
        default="agentica-org/DeepScaleR-Preview-Dataset",
        min_length=1,
        description=SOURCE_HELP.format("agentica-org/DeepScaleR-Preview-Dataset"),
    )


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


class BoxedMath(RowTask):
    """Right if the reply's final answer equals the gold answer, as strictly as `task.strictness` says.

    `format_ok`: exactly one box, or, without boxes, exactly one final-answer sentence, behind the last closed
    thinking block. `extracted` is the answer as written in the reply. Of aime, numbers are compared, without
    a mark the last whole one answers, and `format_ok` is a whole number from 0 to 999.
    """

    def __init__(self, spec: MathSpec | Math500Spec | DeepscalerSpec | AimeSpec) -> None:
        self._is_aime = isinstance(spec, AimeSpec)
        self._strictness = Strictness.STANDARD if isinstance(spec, AimeSpec) else Strictness(spec.strictness)
        # The time of spelling and numbers is bounded by the text; that of sympy is not.
        is_symbolic = self._strictness is Strictness.SYMBOLIC
        limits = TaskLimits(
            max_reply_tokens=_MAX_REPLY_TOKENS[spec.name],
            base_stop_strings=_AIME_STOP_STRINGS if self._is_aime else _STOP_STRINGS,
            verify_limit_s=_VERIFY_LIMIT_S if is_symbolic else None,
        )
        super().__init__(
            spec,
            _reading(spec),
            limits,
            source=spec.source or _AIME_DATA[getattr(spec, "year", "2025")][0],
            prompt=_AIME_PROMPT if self._is_aime else _PROMPT,
            base_prompt=_AIME_BASE_PROMPT if self._is_aime else _BASE_PROMPT,
            verifier=_VERIFIER,
        )

    def warm_up(self) -> None:
        """Load the comparison of formulas, if the settings use it."""
        if self._strictness is Strictness.SYMBOLIC:
            symbolic.warm_up()

    async def verify(self, example: Example, text: str) -> Outcome:
        """Compare the final answer with the gold answer.

        Raises: ConfigError if math-verify is needed and not installed; any exception of math-verify about
            the gold answer.
        """
        gold = gold_of(example)
        judged = judged_text(text, is_marked, str(example.fields.get("problem", "")))
        answer = None if judged is None else find_answer(judged)
        is_formed = answer is not None and answer.num_marks == 1
        may_count = answer is not None and (
            (answer.is_boxed and is_formed) or self._strictness is not Strictness.STRICT
        )
        if self._is_aime and judged is not None:
            is_short = answer is not None and len(answer.text) <= _MAX_AIME_CHARS
            read = parse_exact(answer_forms(gold, answer.text)[1]) if answer and is_short else None
            number = None if read is None or read.value.denominator != 1 else int(read.value)
            if number is None and marked_answer(judged) is None and (last := _INTEGER.findall(judged)):
                answer = FoundAnswer(last[-1], is_boxed=False, num_marks=0)
                number = int(last[-1])
            may_count, is_formed = number is not None, number is not None and 0 <= number <= _MAX_AIME
        return right_or_wrong(
            may_count and answer is not None and answers_equal(gold, answer.text, self._strictness),
            format_ok=is_formed,
            extracted=None if answer is None else answer.text,
        )

    def gold_replies(self, example: Example) -> tuple[str, ...]:
        """Return the gold answer in a box, in a sentence and in a formula, and the worked solution.

        Only boxes if strictness requires them; the solution only if its last box is the gold answer.
        """
        answer = example.answer or ""
        boxed = (f"\\boxed{{{answer}}}", f"So it is $\\boxed{{ {answer} }}$.")
        if self._strictness is Strictness.STRICT:
            return boxed
        solution = example.fields.get("solution") or ""
        solved = (solution,) if find_boxes(solution)[-1:] == [answer] else ()
        return (*boxed, f"The final answer is ${answer}$.", *solved)


def require_readable(row: Row, answer: str) -> str:
    """Return the gold answer of a column, stripped.

    Raises: DataError naming the row, if its normal form is empty.
    """
    if not normal_form(answer):
        allowed = "a number, a formula or a word; of a worked solution, in \\boxed{...}"
        raise bad_row(f"the answer in {row.place} is {answer!r}", allowed=allowed)
    return answer.strip()


def problem_text(example: Example) -> str:
    """Return the text of the problem."""
    return str(example.fields["problem"])


def _reading(spec: MathSpec | Math500Spec | DeepscalerSpec | AimeSpec) -> RowReading:
    """Return how the data set of a task is read.

    MATH has a folder with a train and a test file for each subject; rows of another level are left out and
    counted. DeepScaleR has one split, of which some is held out, chosen by content; it has problems up to
    2023, so evaluate on later ones. MATH-500 and AIME are for evaluation only.
    """
    reading = partial(RowReading, question=problem_text)
    if isinstance(spec, MathSpec):
        names = [f"{subject}/{{}}-00000-of-00001.parquet" for subject in _SUBJECTS]
        train, test = (tuple(name.format(split) for name in names) for split in ("train", "test"))
        return reading(
            layout=DataLayout(train=train, held_out=test, saved_as="math"),
            to_example=_read_math,
            why_left_out=partial(_why_left_out, spec),
            drops_shared=True,
        )
    if isinstance(spec, AimeSpec):
        layout = DataLayout(train=(), held_out=(_AIME_DATA[spec.year][1],))
        return reading(layout=layout, to_example=_read_aime)
    to_example = partial(_read_answered, spec.name)
    if isinstance(spec, Math500Spec):
        return reading(layout=DataLayout(train=(), held_out=("test.jsonl",)), to_example=to_example)
    return reading(
        layout=DataLayout(train=("deepscaler.json",), held_out=()),
        to_example=to_example,
        why_left_out=lambda row, split: "no answer" if row.values.get("answer") in (None, "") else None,
        drops_shared=True,
    )


def _why_left_out(spec: MathSpec, row: Row, split: Split) -> str | None:
    match = _LEVEL.fullmatch(str(row.values.get("level")))
    if match is None:
        raise bad_row(
            f"{row.place} has level {row.values.get('level')!r}",
            allowed="'Level 1' to 'Level 5', or 'Level ?'",
        )
    is_used = match.group(1) != "?" and spec.min_level <= int(match.group(1)) <= spec.max_level
    return None if is_used else match.group()


def _read_math(row: Row) -> Example:
    problem, level, subject, solution = require_texts(row, "problem", "level", "type", "solution")
    fields = {"problem": problem, "level": level, "subject": subject, "solution": solution}
    return make_example("math", fields, require_readable(row, "".join(find_boxes(solution)[-1:])))


def _read_answered(name: str, row: Row) -> Example:
    problem, answer = require_texts(row, "problem", "answer")
    solution = row.values.get("solution")
    fields: dict[str, Any] = {"problem": problem, "solution": solution if isinstance(solution, str) else ""}
    if name == "math500":
        fields["level"] = row.values.get("level")
    return make_example(name, fields, require_readable(row, answer))


def _read_aime(row: Row) -> Example:
    # The published sets differ in the case of their columns and in the type of the answer.
    values = {column.lower(): value for column, value in row.values.items()}
    if type(values.get("answer")) is int:
        values["answer"] = str(values["answer"])
    problem, answer = require_texts(Row(values=values, place=row.place), "problem", "answer")
    if not re.fullmatch(r"[0-9]{1,3}", answer.strip()):
        raise bad_row(
            f"the answer in {row.place} is {answer!r}", allowed=f"a whole number from 0 to {_MAX_AIME}"
        )
    return make_example("aime", {"problem": problem}, str(int(answer)))
