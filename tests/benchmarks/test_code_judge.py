"""The goals of the code benchmark, and that it notices what is judged wrongly."""

from __future__ import annotations

import pytest

from benchmarks import code_judge
from benchmarks.code_judge import Goal
from tests.fixtures.sandboxed import best_level


@pytest.mark.parametrize(
    ("measured", "is_least", "is_reached"),
    [(25.0, True, True), (24.9, True, False), (25.0, False, True), (25.1, False, False)],
)
def test_a_goal_is_reached_at_its_bound(measured: float, is_least: bool, is_reached: bool) -> None:
    goal = Goal(name="a figure", needed=25.0, measured=measured, unit="/s", is_least=is_least)
    assert goal.is_reached is is_reached
    assert goal.line().split()[-1] == ("pass" if is_reached else "FAIL")


def test_a_share_counts_right_and_wrong_programs_and_the_time_of_their_processes() -> None:
    share = code_judge.judge_for(0.3, best_level())
    assert share.num_judged >= 1
    assert share.wall_s >= 0.3
    # Each judgement forks at least five processes, which no machine does in a tenth of a millisecond.
    assert share.cpu_s / share.num_judged > 1e-4
