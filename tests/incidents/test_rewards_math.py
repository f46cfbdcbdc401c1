"""Incidents of the group on rewards that the math verifiers can meet, by id."""

from __future__ import annotations

import pytest

from strop.rollout import Example, Outcome, make_example
from strop.tasks import build_task
from strop.tasks.mathematics.aime import AimeSpec
from strop.tasks.mathematics.boxed_math import HendrycksMath, MathSpec
from tests.fixtures.judging import run_self_test

STANDARD = MathSpec(name="math", source="unused.jsonl", strictness="standard")


def problem(answer: str) -> Example:
    solution = f"Some work gives $\\boxed{{{answer}}}$."
    return make_example("math", {"problem": f"Find {len(answer)}.", "solution": solution}, answer)


PROBLEMS = [problem("-5"), problem("5"), problem(r"-\frac{2}{3}"), problem("0.25")]


class DropsSigns(HendrycksMath):
    """Mutation: the normaliser deletes minus signs."""

    def verify(self, example: Example, text: str) -> Outcome:
        unsigned = Example(
            task="math", example_id="0", fields={}, answer=(example.answer or "").replace("-", "")
        )
        return super().verify(unsigned, text.replace("-", ""))


class DropsSignsOfReplies(HendrycksMath):
    """Mutation: -5 passes for 5 and fails for -5."""

    def verify(self, example: Example, text: str) -> Outcome:
        return super().verify(example, text.replace("-", ""))


class ComparesWithSolution(HendrycksMath):
    """Mutation: the whole worked solution is taken for the answer."""

    def verify(self, example: Example, text: str) -> Outcome:
        whole = Example(task="math", example_id="0", fields={}, answer=example.fields["solution"])
        return super().verify(whole, text)


class WantsOneSpelling(HendrycksMath):
    """Mutation: an answer counts only where it is spelled like the gold answer, in a sentence."""

    def verify(self, example: Example, text: str) -> Outcome:
        is_correct = text == f"The final answer is ${example.answer}$."
        return Outcome(parts={"correct": float(is_correct)}, is_correct=is_correct)


@pytest.mark.parametrize(
    ("mutated", "probe"),
    [
        (DropsSigns, "sign"),
        (DropsSignsOfReplies, "gold"),
        (ComparesWithSolution, "gold"),
        (WantsOneSpelling, "gold"),
    ],
)
def test_rew_2_mutated_math_verifiers_fail_the_self_test(mutated: type[HendrycksMath], probe: str) -> None:
    """Incident: signs were deleted, and the answer was compared with the whole solution."""
    assert run_self_test(build_task(STANDARD), PROBLEMS) == []
    assert probe in {finding.probe for finding in run_self_test(mutated(STANDARD), PROBLEMS)}


@pytest.mark.parametrize("strictness", ["strict", "standard", "symbolic"])
def test_rew_2_a_sign_decides(strictness: str) -> None:
    """Incident: -5 passed for 5, and failed for -5."""
    task = build_task(
        MathSpec.model_validate({"name": "math", "source": "u.jsonl", "strictness": strictness})
    )
    verdicts = {
        (gold, reply): task.verify(problem(gold), f"\\boxed{{{reply}}}").is_correct
        for gold in ("5", "-5")
        for reply in ("5", "-5", "\u22125")
    }
    assert verdicts == {
        ("5", "5"): True,
        ("5", "-5"): False,
        ("5", "\u22125"): False,
        ("-5", "5"): False,
        ("-5", "-5"): True,
        ("-5", "\u22125"): True,
    }


@pytest.mark.parametrize("text", ["a", "1", "5", "the", ".", "\\", "{}", "$", "0", "x", "-"])
def test_rew_4_a_part_of_the_answer_earns_nothing(text: str) -> None:
    """Incident: a substring match in both directions accepted one letter."""
    for answer in (r"\text{the parabola}", r"\frac{15}{2x}", "150", "-15.05"):
        assert not build_task(STANDARD).verify(problem(answer), f"\\boxed{{{text}}}").is_correct
    assert build_task(AimeSpec(name="aime")).verify(problem("150"), text).is_correct is False
