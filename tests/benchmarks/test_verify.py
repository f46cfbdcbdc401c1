"""The benchmarks of verifiers and of the judge of programs."""

from __future__ import annotations

import os
from collections.abc import Sequence

import pytest

from benchmarks import code_judge
from benchmarks.verify import GSM8K, MATH, number_calls, symbol_calls
from strop.spec.task import TaskSpec
from strop.tasks import build_task
from strop.tasks.traits import quick_verifier_of
from tests.fixtures.sandboxed import best_level


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


def test_a_share_counts_right_and_wrong_programs_and_the_time_of_their_processes() -> None:
    share = code_judge.judge_for(0.3, best_level())
    assert share.num_judged >= 1
    assert share.wall_s >= 0.3
    # Each judgement forks at least five processes, which no machine does in a tenth of a millisecond.
    assert share.cpu_s / share.num_judged > 1e-4


def test_a_process_that_ends_while_times_are_read_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    # No process has a number above 2**22: see proc(5), pid_max.
    found: list[Sequence[int]] = [[1 << 23, os.getpid()], [os.getpid()]]
    monkeypatch.setattr(code_judge, "find_descendants", lambda pid: found.pop(0))
    assert code_judge._cpu_s() >= 0.0
    assert found == []
