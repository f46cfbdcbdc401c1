"""What is known of published graders, built anew in a few lines each, must be found by the audit."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from typing import ClassVar

import pytest

from strop.audit import AuditReport, AuditSettings, ProbeStatus, Verdict, run_audit
from strop.errors import DataError
from strop.rollout import Example, Message, Outcome, Split, make_example
from strop.tasks.contract import TaskLimits


class Known:
    """A task of numbers; each grader below judges it in its own way."""

    name = "known"
    version = "1"
    limits = TaskLimits(max_reply_tokens=16)

    def examples(self, split: Split) -> Sequence[Example]:
        first = 0 if split is Split.TRAIN else 40
        return [self.example(number) for number in range(first, first + 40)]

    def example(self, number: int) -> Example:
        left, right = 400 + 13 * number, 11 + 37 * (number % 17)
        fields = {"question": f"What is {left} less {right}?", "left": left, "right": right}
        return make_example(self.name, fields, str(left - right))

    def render(self, example: Example) -> tuple[Message, ...]:
        return (Message(role="user", content=str(example.fields["question"])),)

    def gold_replies(self, example: Example) -> tuple[str, ...]:
        return (f"The answer is {example.answer}.",)

    def verify(self, example: Example, text: str) -> Outcome:
        if "left" not in example.fields:
            raise DataError("no numbers. Allowed: two. Next: mend the row.")
        return self.outcome(self.is_right(example, text))

    def is_right(self, example: Example, text: str) -> bool:
        found = re.search(r"The answer is (-?\d+)\.", text)
        return found is not None and found.group(1) == self.wanted(example)

    def wanted(self, example: Example) -> str:
        return str(example.fields["left"] - example.fields["right"])

    def outcome(self, is_right: bool) -> Outcome:
        return Outcome(parts={"correct": float(is_right)}, is_correct=is_right)


class DropsTheSign(Known):
    """A normaliser of a public MATH harness deleted minus signs: -5 passed for 5."""

    def is_right(self, example: Example, text: str) -> bool:
        return super().is_right(example, text.replace("-", ""))


class LosesADigit(Known):
    """The strict pattern of GSM8K took the last character for a period: 7 of 72 was judged."""

    def gold_replies(self, example: Example) -> tuple[str, ...]:
        return f"The answer is {example.answer}.", f"The answer is {example.answer}"

    def is_right(self, example: Example, text: str) -> bool:
        found = re.search(r"The answer is (-?[0-9.]+)", text)
        return found is not None and found.group(1)[:-1] == self.wanted(example)


class ChecksOptions(Known):
    """A checker of instructions looked for the reply in the options, and not the other way round."""

    options: ClassVar = ("My answer is yes.", "My answer is no.", "My answer is maybe.")

    def example(self, number: int) -> Example:
        question = f"Is {number} fine? Say one of: {' '.join(self.options)}"
        return make_example(self.name, {"question": question, "left": 0}, None)

    def gold_replies(self, example: Example) -> tuple[str, ...]:
        return self.options

    def is_right(self, example: Example, text: str) -> bool:
        return bool(text.strip()) and any(text.strip() in option for option in self.options)


class WantsNoCommas(ChecksOptions):
    """An empty reply has no commas."""

    def is_right(self, example: Example, text: str) -> bool:
        return "," not in text


class BelievesItsColumn(Known):
    """The column with the metric was written by the one who is judged."""

    def gold_replies(self, example: Example) -> tuple[str, ...]:
        return ("score=1",)

    def is_right(self, example: Example, text: str) -> bool:
        return text.rpartition("score=")[2] == "1"

    def example(self, number: int) -> Example:
        question = f"Label picture {number}, and write a table with the column score."
        return make_example(self.name, {"question": question, "left": number}, "1")


class ForgotItsAnswers(Known):
    """An environment whose end was never told paid no one."""

    def is_right(self, example: Example, text: str) -> bool:
        return False


def audit(task: Known) -> AuditReport:
    return asyncio.run(run_audit(task, AuditSettings()))


@pytest.mark.parametrize(
    ("grader", "probes", "verdict"),
    [
        (Known, set(), Verdict.GREEN),
        # Of a negative right answer the sign is dropped from both sides: then the gold fails too.
        (DropsTheSign, {"near_miss"}, Verdict.RED),
        (LosesADigit, {"gold"}, Verdict.RED),
        (ChecksOptions, {"garbage"}, Verdict.RED),
        (WantsNoCommas, {"noop", "empty", "garbage"}, Verdict.RED),
        # A constant is right everywhere: of degree, for a person to look at, not for the audit to refuse.
        (BelievesItsColumn, {"constant"}, Verdict.AMBER),
        (ForgotItsAnswers, {"gold"}, Verdict.RED),
    ],
)
def test_rew_4_known_graders_are_found(grader: type[Known], probes: set[str], verdict: Verdict) -> None:
    report = audit(grader())
    failed = {result.probe for result in report.probes if result.status is ProbeStatus.FAIL}
    assert probes <= failed
    assert (report.verdict, bool(failed)) == (verdict, bool(probes))
