"""One fixed question repeated: a setup that cannot learn its answer cannot learn anything."""

from __future__ import annotations

from collections.abc import Sequence
from decimal import Decimal
from typing import Literal

from pydantic import Field

from strop.errors import DataError
from strop.rollout import Example, Message, Outcome, Split, make_example
from strop.spec.task import TaskSection
from strop.tasks.answers import ends_with_number, judged_text, last_number
from strop.tasks.contract import TaskLimits, right_or_wrong
from strop.tasks.prompt import pose
from strop.tasks.version import fit_limits, hash_version

_MAX_REPLY_TOKENS = 64
# 7/12 + 5/18 = 21/36 + 10/36 = 31/36.
_QUESTION = "((7/12) + (5/18)) / (31/36)"
_PROMPT = "What is {question}?"
_BASE_PROMPT = f"{_PROMPT}\nA:"
_ANSWER = "1"
_BASE_STOP_STRINGS = ("\n",)
_VERIFIER = "last-number-2"


class DummySpec(TaskSection):
    """One fixed question, over and over, to see that a run learns at all."""

    name: Literal["dummy"]
    num_train: int = Field(default=64, ge=1, le=10**7, description="Copies to train on.")
    num_held_out: int = Field(default=4, ge=1, le=10**7, description="Copies to evaluate on.")


class Dummy:
    """Right if the last number of the reply is 1. Examples differ only in their number.

    A constant answer is right, as the audit reports; a run that accepts this finding shows that learning
    works. `format_ok`: the reply ends with a number.
    """

    name = "dummy"

    def __init__(self, spec: DummySpec) -> None:
        self._spec = spec
        limits = TaskLimits(max_reply_tokens=_MAX_REPLY_TOKENS, base_stop_strings=_BASE_STOP_STRINGS)
        self.limits = fit_limits(limits, spec)
        self.version = hash_version(self.name, _BASE_PROMPT + _QUESTION, _VERIFIER, self.limits, spec)

    def examples(self, split: Split) -> Sequence[Example]:
        """Return numbered copies of the question; held-out numbers come first."""
        num_held_out = self._spec.num_held_out
        numbers = range(num_held_out)
        if split is Split.TRAIN:
            numbers = range(num_held_out, num_held_out + self._spec.num_train)
        return tuple(
            make_example(self.name, {"number": number, "question": _QUESTION}, _ANSWER) for number in numbers
        )

    def problem_of(self, example: Example) -> str:
        """Return one name for all: held-out and training problems are the same, which the gate reports."""
        return self.name

    def render(self, example: Example) -> tuple[Message, ...]:
        """Ask the question."""
        question = example.fields["question"]
        return pose(
            _PROMPT.format(question=question),
            base=_BASE_PROMPT.format(question=question),
            thinking=self._spec.thinking,
        )

    def verify(self, example: Example, text: str) -> Outcome:
        """Compare the last number of the reply with 1.

        Raises: DataError if the example is not of this task.
        """
        if example.fields.get("question") != _QUESTION:
            raise DataError(f"example {example.example_id} of task {example.task} is not one of task dummy")
        judged = judged_text(text) or ""
        is_correct = last_number(judged) == Decimal(_ANSWER)
        return right_or_wrong(is_correct, format_ok=ends_with_number(judged))

    def gold_replies(self, example: Example) -> tuple[str, ...]:
        """Return the answer alone and in a sentence."""
        return _ANSWER, f"So it is {_ANSWER}."
