"""The benchmark of verifiers: what it asks, and how it holds a figure against its goal."""

from __future__ import annotations

import pytest

from benchmarks.verify import GSM8K, MATH, Figure, number_calls, symbol_calls
from strop.spec.task import TaskSpec
from strop.tasks import build_task
from strop.tasks.traits import QuickVerifier


@pytest.mark.parametrize(("name", "spec"), [("gsm8k", GSM8K), ("math", MATH)])
def test_half_of_the_numbers_are_right_and_no_reply_comes_twice(name: str, spec: TaskSpec) -> None:
    calls = number_calls(name, 100)
    verdicts = [build_task(spec).verify(*call).is_correct for call in calls]
    assert verdicts.count(True) == 50
    assert len({(example.answer, text) for example, text in calls}) == 100


def test_no_formula_is_judged_without_symbols() -> None:
    task = build_task(MATH)
    assert isinstance(task, QuickVerifier)
    calls = symbol_calls(96)
    assert [task.verify_quick(*call) for call in calls] == [None] * 96
    assert len({(example.answer, text) for example, text in calls}) == 96


@pytest.mark.parametrize(
    ("at_least", "at_most", "is_reached"),
    [(5.0, None, True), (5.1, None, False), (None, 5.0, True), (None, 4.9, False), (None, None, True)],
)
def test_a_goal_is_reached_at_its_bound(
    at_least: float | None, at_most: float | None, is_reached: bool
) -> None:
    figure = Figure(name="f", unit="s", value=5.0, measured=(5.0,), at_least=at_least, at_most=at_most)
    assert figure.is_reached is is_reached
    assert ("FAIL" in figure.describe()) is not is_reached
