"""Incidents of the group on rewards that the math verifiers can meet, by id."""

from __future__ import annotations

import asyncio
from functools import partial

import pytest

from strop.rollout import Example, FailureOwner, Outcome, make_example
from strop.tasks import build_task, build_warm_task
from strop.tasks.judging import WorkerJudge
from strop.tasks.mathematics.aime import AimeSpec
from strop.tasks.mathematics.answers import find_boxes
from strop.tasks.mathematics.boxed_math import HendrycksMath, MathSpec
from tests.fixtures.judging import run_self_test

SYMBOLIC = MathSpec(name="math", source="unused.jsonl")
STANDARD = MathSpec(name="math", source="unused.jsonl", strictness="standard")
HUNG = r"\boxed{(a+b+c+d+e)^{60}=1}"


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


def test_rew_3_an_invented_follow_up_problem_is_not_judged() -> None:
    """Incident: extraction took the last answer of the text, and most replies ran on."""
    task = build_task(STANDARD)
    assert task.verify(problem("7"), "\\boxed{7}\n\nProblem:\n2+3? \\boxed{5}").is_correct
    assert not task.verify(problem("5"), "\\boxed{7}\n\nProblem:\n2+3? \\boxed{5}").is_correct


@pytest.mark.parametrize("text", ["a", "1", "5", "the", ".", "\\", "{}", "$", "0", "x", "-"])
def test_rew_4_a_part_of_the_answer_earns_nothing(text: str) -> None:
    """Incident: a substring match in both directions accepted one letter."""
    for answer in (r"\text{the parabola}", r"\frac{15}{2x}", "150", "-15.05"):
        assert not build_task(STANDARD).verify(problem(answer), f"\\boxed{{{text}}}").is_correct
    assert build_task(AimeSpec(name="aime")).verify(problem("150"), text).is_correct is False


def test_rew_7_being_right_and_keeping_the_form_are_told_apart() -> None:
    """Incident: strict-format match fell from 58 % to 1.2 % while accuracy rose."""
    task = build_task(STANDARD)
    kept = task.verify(problem("7"), "So \\boxed{7}.")
    drifted = task.verify(problem("7"), "So x = 7")
    twice = task.verify(problem("7"), "\\boxed{6}, no, \\boxed{7}")
    assert [outcome.is_correct for outcome in (kept, drifted, twice)] == [True, True, True]
    assert [outcome.format_ok for outcome in (kept, drifted, twice)] == [True, False, False]
    assert find_boxes("So x = 7") == []


@pytest.mark.slow
def test_rew_8_a_formula_on_which_sympy_hangs_costs_its_own_rollout() -> None:
    """Incident: pool time-outs abandoned the wait and not the process: 30 to 90 s a step."""
    pytest.importorskip("math_verify", reason="the extra 'tasks' is not installed")
    limit_s = 3.0

    async def run() -> tuple[list[Outcome], bool, Outcome, dict[str, int]]:
        judge = WorkerJudge(partial(build_warm_task, SYMBOLIC), limit_s=limit_s, num_workers=2)
        try:
            await judge.judge(problem("7"), "\\boxed{7}")
            hung = asyncio.ensure_future(judge.judge(problem("y=x+1"), HUNG))
            others = await asyncio.gather(*(judge.judge(problem("7"), "\\boxed{7.0}") for _ in range(50)))
            return list(others), hung.done(), await hung, dict(judge.pool.counts)
        finally:
            await judge.close()

    others, is_awaited, hung, counts = asyncio.run(run())
    assert [outcome.is_correct for outcome in others] == [True] * 50
    # One limit and the second try's four are 15 s; the others do not wait for them.
    assert not is_awaited
    assert hung.reward is None
    assert hung.failure is not None
    assert (hung.failure.owner, hung.failure.kind) == (FailureOwner.TASK, "verifier_timeout")
    assert counts["timeout"] == 2
