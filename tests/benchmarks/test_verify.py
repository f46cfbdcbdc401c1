"""The benchmark of verifiers: what it asks."""

from __future__ import annotations

import pytest

from benchmarks.verify import GSM8K, MATH, number_calls, symbol_calls
from strop.spec.task import TaskSpec
from strop.tasks import build_task
from strop.tasks.traits import quick_verifier_of


@pytest.mark.parametrize(("name", "spec"), [("gsm8k", GSM8K), ("math", MATH)])
def test_half_of_the_numbers_are_right_and_no_reply_comes_twice(name: str, spec: TaskSpec) -> None:
    calls = number_calls(name, 100)
    verdicts = [build_task(spec).verify(*call).is_correct for call in calls]
    assert verdicts.count(True) == 50
    assert len({(example.answer, text) for example, text in calls}) == 100


def test_no_formula_is_judged_without_symbols() -> None:
    task = build_task(MATH)
    judge_quickly = quick_verifier_of(task)
    assert judge_quickly is not None
    calls = symbol_calls(96)
    assert [judge_quickly(*call) for call in calls] == [None] * 96
    assert len({(example.answer, text) for example, text in calls}) == 96
