"""The benchmark of programs: what a share of it counts."""

from __future__ import annotations

import os
from collections.abc import Sequence

import pytest

from benchmarks import code_judge
from tests.fixtures.sandboxed import best_level


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
