"""Advantages against cases by hand. Spread of [1, 0, 0, 0]: sqrt(0.75 / 3) = 0.5 over n - 1."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from strop.algorithm.advantages import (
    ADVANTAGES,
    center,
    compare_members,
    find_scored,
    leave_one_out,
    standardize,
    whiten,
)
from strop.errors import DataError

RELATIVE = {name: one.compare for name, one in ADVANTAGES.items() if one.is_relative}
"""Those of which a group without difference has none."""


@pytest.mark.parametrize(
    ("name", "expected_G"),
    [
        # 0.75 / (0.5 + 0.0001) and -0.25 / 0.5001
        ("grpo", [1.499700, -0.499900, -0.499900, -0.499900]),
        # population spread sqrt(0.75 / 4) = 0.433013
        ("grpo_pop", [1.732051, -0.577350, -0.577350, -0.577350]),
        ("centered", [0.75, -0.25, -0.25, -0.25]),
        # the others of the winner average 0, those of a loser 1/3
        ("rloo", [1.0, -1 / 3, -1 / 3, -1 / 3]),
        # 0.75 / 0.25 and -0.25 / 0.25
        ("max_rl", [3.0, -1.0, -1.0, -1.0]),
    ],
)
def test_one_winner_of_four(name: str, expected_G: list[float]) -> None:
    assert compare_members(ADVANTAGES[name].compare, [1, 0, 0, 0]) == pytest.approx(expected_G, abs=1e-6)


@pytest.mark.parametrize("missing", [None, float("nan"), float("inf")])
def test_a_member_without_score_takes_no_part(missing: float | None) -> None:
    # Mean of the three others: 1/3. Counting the missing one as 0 would give 1/4.
    rewards_G = [1, missing, 0, 0]
    assert compare_members(center, rewards_G) == pytest.approx([2 / 3, 0, -1 / 3, -1 / 3])
    assert find_scored(rewards_G).tolist() == [True, False, True, True]


@pytest.mark.parametrize("rewards_G", [[], [1.0], [None], [None, 1.0], [None, None]])
def test_a_group_with_nothing_to_compare_gets_zeros(rewards_G: list[float | None]) -> None:
    assert compare_members(leave_one_out, rewards_G).tolist() == [0.0] * len(rewards_G)


@settings(deadline=None)
@given(reward=st.floats(-1e6, 1e6), num_members=st.integers(2, 40))
# It has no exact binary form, so eight of them need not average to it.
@example(reward=0.9, num_members=8)
def test_equal_rewards_are_literal_zero_for_every_estimator(reward: float, num_members: int) -> None:
    for advantage in RELATIVE.values():
        assert not compare_members(advantage, [reward] * num_members).any()


@settings(deadline=None)
@given(st.lists(st.integers(0, 100), min_size=2, max_size=16))
def test_leave_one_out_is_a_multiple_of_centered(rewards_G: list[int]) -> None:
    num_members = len(rewards_G)
    centered_G = compare_members(center, rewards_G)
    slow_G = [r - (sum(rewards_G) - r) / (num_members - 1) for r in rewards_G]
    assert compare_members(leave_one_out, rewards_G) == pytest.approx(slow_G, abs=1e-9)
    assert slow_G == pytest.approx(list(centered_G * num_members / (num_members - 1)), abs=1e-9)


@settings(deadline=None)
@given(st.lists(st.integers(0, 100), min_size=2, max_size=16), st.integers(-50, 50))
def test_a_shift_of_all_rewards_changes_nothing(rewards_G: list[int], shift: int) -> None:
    shifted_G = [reward + shift for reward in rewards_G]
    for advantage in (standardize, center, leave_one_out):
        expected_G = compare_members(advantage, rewards_G)
        assert compare_members(advantage, shifted_G) == pytest.approx(expected_G, abs=1e-9)


def test_max_rl_refuses_a_negative_reward() -> None:
    with pytest.raises(DataError, match=r"reward -1\.0 under the advantage max_rl\. Allowed: .* Next: "):
        compare_members(ADVANTAGES["max_rl"].compare, [1, -1])


@settings(deadline=None)
@given(st.lists(st.tuples(st.floats(-10, 10), st.integers(1, 9)), min_size=2, max_size=20))
def test_whitened_tokens_have_mean_0_and_spread_1(rows: list[tuple[float, int]]) -> None:
    values_N, counts_N = np.array([value for value, _ in rows]), np.array([count for _, count in rows])
    tokens = np.repeat(whiten(values_N, counts_N), counts_N)
    if np.std(np.repeat(values_N, counts_N)) < 1e-4:
        # Divided by the floor: differences that are as good as none are not blown up.
        assert np.abs(tokens).max() <= 1.0 + 1e-9 or np.ptp(values_N) > 1e-4
        return
    assert tokens.mean() == pytest.approx(0.0, abs=1e-9)
    assert tokens.std() == pytest.approx(1.0, abs=1e-9)


def test_equal_values_are_whitened_to_literal_zeros() -> None:
    assert whiten(np.full(7, 0.9), np.arange(7)).tolist() == [0.0] * 7
    # What stands nowhere has no say.
    assert whiten(np.array([0.9, 0.9, 5.0]), np.array([1, 2, 0])).tolist() == [0.0] * 3
    assert whiten(np.zeros(0)).tolist() == []
