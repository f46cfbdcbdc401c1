r"""Competition problems whose final answer stands in `\boxed{}`: MATH, MATH-500 and DeepScaleR.

They share the prompt, the verdict and the gold replies. `answers` finds the answer in a reply, `equivalence`
compares it. An unreadable answer is wrong; an unreadable gold answer is refused when the data is read.
"""

from __future__ import annotations

import re
from typing import Literal, TypeGuard

from pydantic import Field, model_validator

from strop.rollout import Example, Outcome, Split, make_example
from strop.spec.base import Section, SpecConflict, Unhashed, expert
from strop.spec.task import SOURCE_HELP, EvaluationRows, FewShot, TrainingRows
from strop.tasks.answers import judged_text
from strop.tasks.contract import TaskLimits, right_or_wrong
from strop.tasks.mathematics import symbolic
from strop.tasks.mathematics.answers import AnswerForm, FoundAnswer, find_answer, find_boxes, is_marked
from strop.tasks.mathematics.equivalence import Strictness, answers_equal
from strop.tasks.mathematics.normal_form import normal_form
from strop.tasks.registry import built_in
from strop.tasks.rows.layout import DataLayout, Row, bad_row
from strop.tasks.rows.row_task import RowReading, RowTask, SplitExamples, gold_of, require_texts

_PROMPT = "{problem}\n\nReason step by step, and give the final answer in \\boxed{{}}."
_BASE_PROMPT = "Problem:\n{problem}\n\nSolution:"
"""The form of lm-eval 0.4.13's minerva_math."""
_VERIFIER = "math-equivalence-4"
_STOP_STRINGS = ("Problem:", "\n\n\n")
_VERIFY_LIMIT_S = 2.0
_LEVEL = re.compile(r"Level ([1-5?])")


class BoxedMath(RowTask):
    """Right if the reply's final answer equals the gold answer, as strictly as `task.strictness` says.

    `format_ok`: exactly one box, or, without boxes, exactly one final-answer sentence, behind the last closed
    thinking block. `extracted` is the answer as written in the reply.
    """

    def __init__(
        self, spec: MathSpec | Math500Spec | DeepscalerSpec, reading: RowReading, *, max_reply_tokens: int
    ) -> None:
        self._strictness = Strictness(spec.strictness)
        # The time of spelling and numbers is bounded by the text; that of sympy is not.
        is_symbolic = self._strictness is Strictness.SYMBOLIC
        limits = TaskLimits(
            max_reply_tokens=max_reply_tokens,
            base_stop_strings=_STOP_STRINGS,
            verify_limit_s=_VERIFY_LIMIT_S if is_symbolic else None,
        )
        super().__init__(
            spec,
            reading,
            limits,
            source=spec.source,
            prompt=_PROMPT,
            base_prompt=_BASE_PROMPT,
            verifier=_VERIFIER,
        )

    def warm_up(self) -> None:
        """Load the comparison of formulas, if the settings use it."""
        if self._strictness is Strictness.SYMBOLIC:
            symbolic.warm_up()

    def verify(self, example: Example, text: str) -> Outcome:
        """Compare the final answer with the gold answer.

        Raises: ConfigError if math-verify is needed and not installed; any exception of math-verify about
            the gold answer.
        """
        gold, answer = gold_of(example), find_own(example, text)
        is_correct = self._may_count(answer) and answers_equal(gold, answer.text, self._strictness)
        return _outcome(answer, is_correct=is_correct)

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

    def _may_count(self, answer: FoundAnswer | None) -> TypeGuard[FoundAnswer]:
        """Whether there is an answer, in one box if strictness requires that."""
        if answer is None:
            return False
        is_boxed_once = answer.form is AnswerForm.BOX and answer.is_marked_once
        return is_boxed_once or self._strictness is not Strictness.STRICT


def find_own(example: Example, text: str) -> FoundAnswer | None:
    """Return the final answer of a reply to an example's problem, or None."""
    judged = judged_text(text, is_marked, str(example.fields.get("problem", "")))
    return None if judged is None else find_answer(judged)


def _outcome(answer: FoundAnswer | None, *, is_correct: bool) -> Outcome:
    return right_or_wrong(
        is_correct,
        format_ok=answer is not None and answer.is_marked_once,
        extracted=None if answer is None else answer.text,
    )


def boxed_answer(row: Row, solution: str) -> str:
    """Return the content of the last box of a worked solution.

    Raises: DataError naming the row, if there is no box or it is empty.
    """
    boxes = find_boxes(solution)
    if not boxes or not normal_form(boxes[-1]):
        raise bad_row(
            f"the solution in {row.place} ends in {solution[-40:]!r}",
            allowed="a solution with its answer in \\boxed{...}",
        )
    return boxes[-1].strip()


def require_readable(row: Row, answer: str) -> str:
    """Return the gold answer of a column, stripped.

    Raises: DataError naming the row, if its normal form is empty.
    """
    if not normal_form(answer):
        raise bad_row(f"the answer in {row.place} is {answer!r}", allowed="a number, a formula or a word")
    return answer.strip()


def problem_text(example: Example) -> str:
    """Return the text of the problem."""
    return str(example.fields["problem"])


_SUBJECTS = (
    "algebra",
    "counting_and_probability",
    "geometry",
    "intermediate_algebra",
    "number_theory",
    "prealgebra",
    "precalculus",
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


class MathSpec(MathAnswer, FewShot, TrainingRows):
    """Competition problems with worked solutions, in the columns of MATH."""

    name: Literal["math"]
    source: Unhashed[str] = Field(
        default="EleutherAI/hendrycks_math",
        min_length=1,
        description=SOURCE_HELP.format("EleutherAI/hendrycks_math"),
    )
    min_level: int = Field(
        default=1,
        ge=1,
        le=5,
        description="Easiest level used, included.",
        json_schema_extra=expert("the problems of MATH have levels"),
    )
    max_level: int = Field(
        default=5,
        ge=1,
        le=5,
        description="Hardest level used, included.",
        json_schema_extra=expert("the problems of MATH have levels"),
    )

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


@built_in(
    "math",
    MathSpec,
    "Competition problems of MATH by level; formulas compared by sympy (extra: tasks).",
    rank=60,
)
class HendrycksMath(BoxedMath):
    """The 12,500 problems of MATH, or those of some levels: `problem`, `level`, `type`, `solution`.

    Each of the seven subjects is a folder of the hub's data set with a train and a test file. Rows with
    'Level ?' are left out and counted.
    """

    def __init__(self, spec: MathSpec) -> None:
        def why_left_out(row: Row, split: Split) -> str | None:
            match = _LEVEL.fullmatch(str(row.values.get("level")))
            if match is None:
                raise bad_row(
                    f"{row.place} has level {row.values.get('level')!r}",
                    allowed="'Level 1' to 'Level 5', or 'Level ?'",
                )
            if match.group(1) == "?":
                return "Level ?"
            level = int(match.group(1))
            return None if spec.min_level <= level <= spec.max_level else f"Level {level}"

        reading = RowReading(
            layout=DataLayout(
                train=tuple(f"{subject}/train-00000-of-00001.parquet" for subject in _SUBJECTS),
                held_out=tuple(f"{subject}/test-00000-of-00001.parquet" for subject in _SUBJECTS),
                saved_as="math",
            ),
            to_example=_read_math,
            question=problem_text,
            why_left_out=why_left_out,
            drops_shared=True,
        )
        super().__init__(spec, reading, max_reply_tokens=2048)

    def _read_splits(self) -> SplitExamples:
        return super()._read_splits().with_shots(self._num_few_shot)


def _read_math(row: Row) -> Example:
    problem, level, subject, solution = require_texts(row, "problem", "level", "type", "solution")
    fields = {"problem": problem, "level": level, "subject": subject, "solution": solution}
    return make_example("math", fields, boxed_answer(row, solution))


class Math500Spec(MathAnswer, EvaluationRows):
    """Five hundred test problems of MATH, for evaluation only."""

    name: Literal["math500"]
    source: Unhashed[str] = Field(
        default="HuggingFaceH4/MATH-500",
        min_length=1,
        description=SOURCE_HELP.format("HuggingFaceH4/MATH-500"),
    )


@built_in("math500", Math500Spec, "500 test problems of MATH, for evaluation (extra: tasks).", rank=70)
class Math500(BoxedMath):
    """The 500 problems of MATH-500, for evaluation: `problem`, `solution`, `answer`, `subject`, `level`.

    They are test problems of MATH: a model trained on the training split of task math has not seen them.
    """

    def __init__(self, spec: Math500Spec) -> None:
        layout = DataLayout(train=(), held_out=("test.jsonl",))
        reading = RowReading(layout=layout, to_example=_read_math500, question=problem_text)
        super().__init__(spec, reading, max_reply_tokens=2048)


def _read_math500(row: Row) -> Example:
    problem, solution, answer = require_texts(row, "problem", "solution", "answer")
    fields = {"problem": problem, "solution": solution, "level": row.values.get("level")}
    return make_example("math500", fields, require_readable(row, answer))


class DeepscalerSpec(MathAnswer, TrainingRows):
    """Forty thousand competition problems; some are held out, chosen by content."""

    name: Literal["deepscaler"]
    source: Unhashed[str] = Field(
        default="agentica-org/DeepScaleR-Preview-Dataset",
        min_length=1,
        description=SOURCE_HELP.format("agentica-org/DeepScaleR-Preview-Dataset"),
    )


@built_in("deepscaler", DeepscalerSpec, "40,000 competition problems to train on (extra: tasks).", rank=80)
class Deepscaler(BoxedMath):
    """40,000 problems of several competitions: `problem`, `answer`, and a `solution` that may be empty.

    The published set has one split; some of it is held out, chosen by content. It holds competition problems
    up to 2023, so evaluate on later ones (task aime). Rows without an answer are left out and counted.
    """

    def __init__(self, spec: DeepscalerSpec) -> None:
        reading = RowReading(
            layout=DataLayout(train=("deepscaler.json",), held_out=()),
            to_example=_read_deepscaler,
            question=problem_text,
            why_left_out=lambda row, split: "no answer" if row.values.get("answer") in (None, "") else None,
            drops_shared=True,
        )
        super().__init__(spec, reading, max_reply_tokens=4096)


def _read_deepscaler(row: Row) -> Example:
    problem, answer = require_texts(row, "problem", "answer")
    solution = row.values.get("solution")
    fields = {"problem": problem, "solution": solution if isinstance(solution, str) else ""}
    return make_example("deepscaler", fields, require_readable(row, answer))
