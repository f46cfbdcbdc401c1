"""The numbers by hand."""

from __future__ import annotations

import pytest

from benchmarks.ratio import summarize_ratios
from benchmarks.verifier import forced_rewards, last_number_reward, signal_tokens, zero_variance_frac


def test_equal_ratios_have_an_interval_of_no_width() -> None:
    summary = summarize_ratios([8.0] * 6)
    assert (summary.median, summary.low, summary.high, summary.num_pairs) == (8.0, 8.0, 8.0, 6)


def test_the_interval_holds_the_median_and_stays_within_the_pairs() -> None:
    # Sorted: 5, 7, 8, 9, 10, 40. Median (8 + 9) / 2; one outlier does not move it.
    summary = summarize_ratios([8.0, 40.0, 7.0, 9.0, 5.0, 10.0])
    assert summary.median == 8.5
    assert 5.0 <= summary.low < 8.5 < summary.high <= 40.0


def test_no_pairs_are_refused() -> None:
    with pytest.raises(ValueError, match="no pairs were measured"):
        summarize_ratios([])


@pytest.mark.parametrize(
    ("text", "reward"),
    [("2 + 3 = 5", 1.0), ("5, no: 6", 0.0), ("", 0.0), ("none", 0.0), ("It is 5.", 1.0), ("-5", 0.0)],
)
def test_the_last_number_decides(text: str, reward: float) -> None:
    assert last_number_reward(text, "5") == reward


def test_forced_rewards_give_every_group_variance_and_differ_by_step() -> None:
    rewards = forced_rewards(8, 8, seed=3)
    assert zero_variance_frac(rewards, 8) == 0.0
    assert sum(rewards) == 32.0
    assert rewards != forced_rewards(8, 8, seed=4)


def test_only_tokens_of_groups_with_variance_count_as_signal() -> None:
    # Group 0: all 1, no signal. Group 1: 1, 0 with mean 1/2: both rows, 3 + 4 tokens.
    # Group 2 of rewards 0, 0: no signal. So 7 tokens and 2 of 3 groups without variance.
    rewards = [1.0, 1.0, 1.0, 0.0, 0.0, 0.0]
    assert signal_tokens(rewards, [1, 2, 3, 4, 5, 6], 2) == 7
    assert zero_variance_frac(rewards, 2) == pytest.approx(2 / 3)
