"""Grade-school word problems in the schema of gsm8k: `question`, and `answer` ending in '#### N'."""

from __future__ import annotations

from strop.errors import DataError, explain_refusal
from strop.rollout import Example, Outcome, make_example
from strop.spec.task import Gsm8kSpec
from strop.tasks.answers import parse_number
from strop.tasks.contract import TaskLimits
from strop.tasks.mathematics.gsm8k_answers import (
    MARKED,
    find_number_text,
    harness_answer,
    harness_clean,
    harness_gold,
)
from strop.tasks.rows.layout import DataLayout, Row
from strop.tasks.rows.reading import RowReading, SplitExamples, require_texts
from strop.tasks.rows.row_task import RowTask, gold_of
from strop.tasks.thinking import judged_text

_MAX_REPLY_TOKENS = 1024
_PROMPT = (
    "{question}\n\nSolve this step by step. Then write '####', a space and the final number on the last line."
)
_BASE_PROMPT = "Q: {question}\nA:"
_BASE_PROMPT_HASH = "Question: {question}\nAnswer:"
"""The forms of lm-eval 0.4.13's gsm8k_cot and gsm8k. Shots are of the second, whose answers the data has."""
_VERIFIER = "gsm8k-number-3"
# What base models write when they go on to a problem of their own making.
_MARKERS = ("Question:", "[Question]", "Q:", "\n\n\n")
_HARNESS_STOP_STRINGS = ("</s>", "<|im_end|>")
"""Of lm-eval's tasks, beside the word that begins their prompts."""


class Gsm8k(RowTask):
    """Right if the reply's number equals the gold number; which one that is says `task.mode`.

    Judged is the text behind the last closed thinking block and before the first stop string, whoever
    generated it; the modes of lm-eval judge all of it. `format_ok`: a number stands behind '####', or,
    in a mode of lm-eval, where that mode looks; it is told apart from being right, because only one of
    the two may grow. A question that stands twice in one split is kept once.
    """

    _spec: Gsm8kSpec

    def __init__(self, spec: Gsm8kSpec) -> None:
        is_hash = spec.mode == "hash" or spec.num_few_shot > 0
        super().__init__(
            spec,
            _READING,
            TaskLimits(
                max_reply_tokens=_MAX_REPLY_TOKENS, base_stop_strings=_base_stops(spec.mode, is_hash=is_hash)
            ),
            source=spec.source,
            prompt=_PROMPT,
            base_prompt=_BASE_PROMPT_HASH if is_hash else _BASE_PROMPT,
            verifier=_VERIFIER,
        )

    def verify(self, example: Example, text: str) -> Outcome:
        """Compare the number that answers with the gold number."""
        mode = self._spec.mode
        if mode != "auto":
            found = harness_answer(mode, text)
            gold = harness_gold(mode, example.fields["solution"])
            is_correct = found is not None and harness_clean(found) == gold
            return _outcome(is_correct, found is not None, found)
        gold_number = parse_number(gold_of(example))
        judged = judged_text(text, _MARKERS) or ""
        found = find_number_text(judged)
        is_correct = found is not None and parse_number(found) == gold_number
        return _outcome(is_correct, MARKED.search(judged) is not None, found)

    def gold_replies(self, example: Example) -> tuple[str, ...]:
        """Return the worked solution, the marked number and the number in a sentence, as the mode reads."""
        answer = example.answer or ""
        if self._spec.mode == "strict":
            return (f"The answer is {answer}.",)
        marked = (example.fields["solution"], f"#### {answer}")
        return marked if self._spec.mode == "hash" else (*marked, f"The answer is {answer}.")

    def _read_splits(self) -> SplitExamples:
        return super()._read_splits().with_shots(self._num_few_shot)


def _base_stops(mode: str, *, is_hash: bool) -> tuple[str, ...]:
    if mode == "auto":
        return (*_MARKERS, *_HARNESS_STOP_STRINGS)
    return ("Question:" if is_hash else "Q:", *_HARNESS_STOP_STRINGS)


def _outcome(is_correct: bool, format_ok: bool, extracted: str | None) -> Outcome:
    return Outcome(
        parts={"correct": float(is_correct)}, is_correct=is_correct, format_ok=format_ok, extracted=extracted
    )


def _to_example(row: Row) -> Example:
    question, solution = require_texts(row, "question", "answer")
    _, mark, tail = solution.rpartition("####")
    gold = parse_number(tail)
    if not mark or gold is None:
        raise DataError(
            explain_refusal(
                f"the answer in {row.place} ends in {solution[-40:]!r}",
                allowed="an answer whose last line is '#### ' and a number",
                next_step="mend or remove the row",
            )
        )
    return make_example(
        "gsm8k", {"question": question, "solution": solution}, tail.strip().replace(",", "").lstrip("$")
    )


_READING = RowReading(
    layout=DataLayout(
        train=("main/train-00000-of-00001.parquet",), held_out=("main/test-00000-of-00001.parquet",)
    ),
    to_example=_to_example,
    question=lambda example: str(example.fields["question"]),
)
