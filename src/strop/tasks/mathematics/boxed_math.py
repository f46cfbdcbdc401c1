r"""What the tasks with competition problems share: the prompt, the verdict, and the gold replies.

The problem is asked with one sentence that wants the final answer in `\boxed{}`. How the answer is
found in a reply is `answers`, and when it is right `equivalence`. An answer that nobody can
read is wrong; a gold answer that nobody can read is refused when the data is read.
"""

from __future__ import annotations

from strop.errors import DataError, explain_refusal
from strop.rollout import Example, Outcome
from strop.spec.task import BoxedMathSpec
from strop.tasks.contract import TaskLimits
from strop.tasks.mathematics.answers import AnswerForm, FoundAnswer, find_answer, find_boxes
from strop.tasks.mathematics.equivalence import Strictness, answers_equal, equal_at_once
from strop.tasks.mathematics.normal_form import normal_form
from strop.tasks.rows.layout import Row
from strop.tasks.rows.reading import RowReading
from strop.tasks.rows.row_task import RowTask, gold_of
from strop.tasks.thinking import judged_text

_PROMPT = "{problem}\n\nReason step by step, and give the final answer in \\boxed{{}}."
_BASE_PROMPT = "Problem:\n{problem}\n\nSolution:"
"""The form of lm-eval 0.4.13's minerva_math."""
_VERIFIER = "math-equivalence-2"
_STOP_STRINGS = ("Problem:", "\n\n\n")
_VERIFY_LIMIT_S = 2.0
_MAX_QUICK_CHARS = 1 << 15
_MAX_QUICK_ANSWER_CHARS = 300
"""What is longer is judged where judging may take long. The worst replies within these bounds take 25 ms
to find the answer in and 3 ms to compare it, where most take 0.1 ms."""


class BoxedMath(RowTask):
    """Right if the reply's final answer equals the gold answer, as strictly as `task.strictness` says.

    `format_ok`: exactly one box, or where there is no box exactly one final-answer sentence, behind the
    last closed thinking block. `extracted` is the answer as the reply wrote it.
    """

    def __init__(self, spec: BoxedMathSpec, reading: RowReading, *, max_reply_tokens: int) -> None:
        self._strictness = Strictness(spec.strictness)
        # Spelling and numbers are bounded by the text; sympy is not.
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

    def verify(self, example: Example, text: str) -> Outcome:
        """Compare the final answer with the gold answer.

        Raises: ConfigError if math-verify is needed and not installed; whatever it raises on the gold
            answer.
        """
        gold, found = gold_of(example), _find(text)
        is_correct = (
            found is not None and self._may_count(found) and answers_equal(gold, found.text, self._strictness)
        )
        return _outcome(found, is_correct=is_correct)

    def verify_quick(self, example: Example, text: str) -> Outcome | None:
        """Compare spellings and numbers; None where only symbols can tell, or the reply is very long."""
        if len(text) > _MAX_QUICK_CHARS:
            return None
        gold, found = gold_of(example), _find(text)
        if found is None or not self._may_count(found):
            return _outcome(found, is_correct=False)
        is_short = len(found.text) <= _MAX_QUICK_ANSWER_CHARS
        is_correct = equal_at_once(gold, found.text, self._strictness) if is_short else None
        return None if is_correct is None else _outcome(found, is_correct=is_correct)

    def gold_replies(self, example: Example) -> tuple[str, ...]:
        """Return the gold answer in a box, in a sentence and in a formula, and the worked solution.

        Only boxes where strictness asks for them; only a solution whose last box is the gold answer.
        """
        answer = example.answer or ""
        boxed = (f"\\boxed{{{answer}}}", f"So it is $\\boxed{{ {answer} }}$.")
        if self._strictness is Strictness.STRICT:
            return boxed
        solution = example.fields.get("solution") or ""
        solved = (solution,) if find_boxes(solution)[-1:] == [answer] else ()
        return (*boxed, f"The final answer is ${answer}$.", *solved)

    def _may_count(self, found: FoundAnswer) -> bool:
        is_boxed_once = found.form is AnswerForm.BOX and found.is_marked_once
        return is_boxed_once or self._strictness is not Strictness.STRICT


def _find(text: str) -> FoundAnswer | None:
    judged = judged_text(text, _STOP_STRINGS)
    return None if judged is None else find_answer(judged)


def _outcome(found: FoundAnswer | None, *, is_correct: bool) -> Outcome:
    return Outcome(
        parts={"correct": float(is_correct)},
        is_correct=is_correct,
        format_ok=found is not None and found.is_marked_once,
        extracted=None if found is None else found.text,
    )


def boxed_answer(row: Row, solution: str) -> str:
    """Return what the last box of a worked solution holds.

    Raises: DataError naming the row, if there is none or it is empty.
    """
    boxes = find_boxes(solution)
    if not boxes or not normal_form(boxes[-1]):
        raise DataError(
            explain_refusal(
                f"the solution in {row.place} ends in {solution[-40:]!r}",
                allowed="a solution with its answer in \\boxed{...}",
                next_step="mend or remove the row",
            )
        )
    return boxes[-1].strip()


def require_readable(row: Row, answer: str) -> str:
    """Return a gold answer that stands in a column of its own.

    Raises: DataError naming the row, if nothing is left of it that could be compared.
    """
    if not normal_form(answer):
        raise DataError(
            explain_refusal(
                f"the answer in {row.place} is {answer!r}",
                allowed="a number, a formula or a word",
                next_step="mend or remove the row",
            )
        )
    return answer.strip()


def problem_text(example: Example) -> str:
    """Return what is asked."""
    return str(example.fields["problem"])
