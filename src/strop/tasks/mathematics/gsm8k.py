"""Grade-school word problems in the schema of gsm8k: `question`, and `answer` ending in '#### N'."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

from strop.errors import DataError, explain_refusal
from strop.rollout import Example, Message, Outcome, Split, make_example
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
from strop.tasks.prompt import join_shots, pose
from strop.tasks.rows.layout import DataLayout, Row
from strop.tasks.rows.reading import RowReading, SplitExamples, read_examples, require_texts
from strop.tasks.thinking import judged_text
from strop.tasks.version import fit_limits, hash_version

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


class Gsm8k:
    """Right if the reply's number equals the gold number; which one that is says `task.mode`.

    Judged is the text behind the last closed thinking block and before the first stop string, whoever
    generated it; the modes of lm-eval judge all of it. `format_ok`: a number stands behind '####', or,
    in a mode of lm-eval, where that mode looks; it is told apart from being right, because only one of
    the two may grow. A question that stands twice in one split is kept once.
    """

    name = "gsm8k"

    def __init__(self, spec: Gsm8kSpec) -> None:
        self._spec = spec
        limits = TaskLimits(max_reply_tokens=_MAX_REPLY_TOKENS, base_stop_strings=self._base_stops)
        self.limits = fit_limits(limits, spec)

    @cached_property
    def version(self) -> str:
        """Hash over settings, prompt, limits and the ids of all examples; reads the data."""
        return hash_version(
            self.name,
            "".join((_PROMPT, self._base_prompt)),
            _VERIFIER,
            self.limits,
            self._spec,
            self._splits.digest,
        )

    def examples(self, split: Split) -> Sequence[Example]:
        """Return the problems of a split, in the order of the data.

        Raises: DataError if the data is missing, empty or malformed, or a question is in both splits.
        """
        return self._splits.of(split)

    def render(self, example: Example) -> tuple[Message, ...]:
        """Give the question and say how the answer is to be marked."""
        question = example.fields["question"]
        return pose(
            _PROMPT.format(question=question),
            base=self._shots + self._base_prompt.format(question=question),
            thinking=self._spec.thinking,
        )

    def verify(self, example: Example, text: str) -> Outcome:
        """Compare the number that answers with the gold number."""
        mode = self._spec.mode
        if mode != "auto":
            found = harness_answer(mode, text)
            gold = harness_gold(mode, example.fields["solution"])
            is_correct = found is not None and harness_clean(found) == gold
            return _outcome(is_correct, found is not None, found)
        judged = judged_text(text, _MARKERS) or ""
        found = find_number_text(judged)
        is_correct = found is not None and parse_number(found) == parse_number(example.answer or "")
        return _outcome(is_correct, MARKED.search(judged) is not None, found)

    def gold_replies(self, example: Example) -> tuple[str, ...]:
        """Return the worked solution, the marked number and the number in a sentence, as the mode reads."""
        answer = example.answer or ""
        if self._spec.mode == "strict":
            return (f"The answer is {answer}.",)
        marked = (example.fields["solution"], f"#### {answer}")
        return marked if self._spec.mode == "hash" else (*marked, f"The answer is {answer}.")

    @property
    def _base_stops(self) -> tuple[str, ...]:
        if self._spec.mode == "auto":
            return (*_MARKERS, *_HARNESS_STOP_STRINGS)
        opening = "Question:" if self._base_prompt == _BASE_PROMPT_HASH else "Q:"
        return (opening, *_HARNESS_STOP_STRINGS)

    @property
    def _base_prompt(self) -> str:
        is_hash = self._spec.mode == "hash" or self._spec.num_few_shot > 0
        return _BASE_PROMPT_HASH if is_hash else _BASE_PROMPT

    @cached_property
    def _shots(self) -> str:
        if not self._spec.num_few_shot:
            return ""
        shots = [
            (self._base_prompt.format(**e.fields), f" {e.fields['solution']}") for e in self._splits.shots
        ]
        return join_shots(shots)

    @cached_property
    def _splits(self) -> SplitExamples:
        spec = self._spec
        splits = read_examples(
            _READING, spec.source, num_train=spec.num_train, num_held_out=spec.num_held_out
        )
        return splits.with_shots(spec.num_few_shot)


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
