"""The benchmark of programs: what a share of it counts."""

from __future__ import annotations

from benchmarks import code_judge
from tests.fixtures.sandboxed import best_level


def test_a_share_counts_right_and_wrong_programs_and_the_time_of_their_processes() -> None:
    share = code_judge.judge_for(0.3, best_level())
    assert share.num_judged >= 1
    assert share.wall_s >= 0.3
    # Each judgement forks at least five processes, which no machine does in a tenth of a millisecond.
    assert share.cpu_s / share.num_judged > 1e-4
