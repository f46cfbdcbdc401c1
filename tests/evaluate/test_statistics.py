"""Intervals and estimators by hand, then against simulation and plain counting."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strop.errors import ConfigError, DataError
from strop.evaluate.statistics import (
    clustered_interval,
    paired_difference,
    pass_at_k,
    pass_at_k_interval,
    sign_test,
    wilson_interval,
)


def test_wilson_by_hand() -> None:
    # z = 1.959964, z^2 = 3.841459. 5 of 10: middle (0.5 + 0.192073) / 1.384146 = 0.5,
    # half = 1.959964 x sqrt(0.025 + 0.00960365) / 1.384146 = 0.263404.
    interval = wilson_interval(5, 10)
    assert interval.estimate == 0.5
    assert (interval.low, interval.high) == pytest.approx((0.236596, 0.763404), abs=1e-5)


def test_wilson_at_the_ends_by_hand() -> None:
    # 0 of 10: upper end z^2 / (10 + z^2) = 3.841459 / 13.841459.
    assert wilson_interval(0, 10).low == 0.0
    assert wilson_interval(0, 10).high == pytest.approx(0.277533, abs=1e-6)
    assert wilson_interval(10, 10).high == 1.0
    assert wilson_interval(10, 10).low == pytest.approx(0.722467, abs=1e-6)


def test_no_trials_say_nothing() -> None:
    for interval in (wilson_interval(0, 0), clustered_interval([]), clustered_interval([[], []])):
        assert math.isnan(interval.estimate)
        assert (interval.low, interval.high) == (0.0, 1.0)


@given(st.integers(0, 200), st.integers(1, 200))
def test_wilson_contains_its_estimate(num_solved: int, num_trials: int) -> None:
    interval = wilson_interval(min(num_solved, num_trials), num_trials)
    assert 0.0 <= interval.low <= interval.estimate <= interval.high <= 1.0
    assert interval.low < interval.high


def test_rollouts_that_repeat_each_other_add_no_certainty() -> None:
    # Every example is all or nothing, so 4 rollouts each are worth one.
    one = wilson_interval(5, 10)
    four = clustered_interval([[True] * 4] * 5 + [[False] * 4] * 5)
    assert four.estimate == 0.5
    assert (four.low, four.high) == pytest.approx((one.low, one.high))


def test_equal_examples_are_not_taken_for_certainty() -> None:
    # All examples have share 1/2: their spread is 0, but ten examples remain ten trials.
    halves = clustered_interval([[True, False]] * 10)
    assert (halves.low, halves.high) == pytest.approx((0.236596, 0.763404), abs=1e-5)
    assert clustered_interval([[True, False, True, True]]).low > 0.0


def test_independent_rollouts_count_fully_by_hand() -> None:
    # Shares 1, 1/2, 1/2, 0: mean 1/2, variance (1/4 + 1/4) / 3 = 1/6, of the mean 1/24.
    # Effective trials 0.25 x 24 = 6, between 4 examples and 8 rollouts.
    mixed = clustered_interval([[True, True], [True, False], [False, True], [False, False]])
    six = wilson_interval(3, 6)
    assert (mixed.low, mixed.high) == pytest.approx((six.low, six.high))


def test_every_example_counts_the_same() -> None:
    # Shares 1 and 0; one of them was tried three times.
    assert clustered_interval([[True, True, True], [False]]).estimate == 0.5


def test_clustered_interval_covers_the_truth() -> None:
    # Examples differ: each has its own chance, uniform in [0, 1], so the true share is 1/2. Treating
    # the 160 rollouts as independent covers it in 0.83 of the cases only.
    stream = np.random.default_rng(3)
    num_hits = num_naive_hits = 0
    for _ in range(400):
        chances_P = stream.random((40, 1))
        solved_P_G = stream.random((40, 4)) < chances_P
        interval = clustered_interval(solved_P_G.tolist())
        naive = wilson_interval(int(solved_P_G.sum()), 160)
        num_hits += interval.low <= 0.5 <= interval.high
        num_naive_hits += naive.low <= 0.5 <= naive.high
    assert num_naive_hits / 400 < 0.88
    assert num_hits / 400 > 0.92


def test_pass_at_k_by_hand() -> None:
    # 4 rollouts, 1 solved: half of the 6 pairs hold it.
    assert pass_at_k(4, 1, 2) == 0.5
    assert pass_at_k(4, 1, 1) == 0.25
    assert pass_at_k(4, 0, 4) == 0.0
    assert pass_at_k(4, 3, 2) == 1.0


@settings(deadline=None)
@given(st.lists(st.booleans(), min_size=1, max_size=7), st.data())
def test_pass_at_k_counts_all_subsets(solved_G: list[bool], data: st.DataObject) -> None:
    k = data.draw(st.integers(1, len(solved_G)))
    subsets = list(itertools.combinations(solved_G, k))
    expected = Fraction(sum(any(subset) for subset in subsets), len(subsets))
    # Exactly: the float nearest to the fraction.
    assert pass_at_k(len(solved_G), sum(solved_G), k) == float(expected)


def test_pass_at_k_keeps_its_digits_where_it_is_tiny() -> None:
    # One of a million, drawn once: 1 - 999999/1000000 in floats would lose ten digits.
    assert pass_at_k(10**6, 1, 1) == 1e-6
    # One of 2000 among 1000 drawn: half of all subsets, whose numbers no float can hold.
    assert pass_at_k(2000, 1, 1000) == 0.5


def test_an_interval_of_pass_at_k_by_hand() -> None:
    # Two of four examples solved by every rollout: pass@2 is 1, 1, 0, 0. Examples all or nothing are
    # worth one trial each.
    interval = pass_at_k_interval([[True] * 4] * 2 + [[False] * 4] * 2, 2)
    four = wilson_interval(2, 4)
    assert (interval.estimate, interval.low, interval.high) == pytest.approx((0.5, four.low, four.high))


def test_an_interval_of_pass_at_k_leaves_out_examples_with_too_few_rollouts() -> None:
    full, short = [[True, False]], [[True]]
    assert pass_at_k_interval(full + short, 2) == pass_at_k_interval(full, 2)
    assert math.isnan(pass_at_k_interval(short, 2).estimate)


def test_an_interval_of_pass_at_k_covers_the_truth() -> None:
    # Chances uniform in [0, 1]: pass@4 is the mean of 1 - (1 - p)^4, which is 1 - 1/5.
    stream = np.random.default_rng(5)
    num_hits = 0
    for _ in range(400):
        solved_P_G = stream.random((40, 8)) < stream.random((40, 1))
        interval = pass_at_k_interval(solved_P_G.tolist(), 4)
        num_hits += interval.low <= 0.8 <= interval.high
    assert num_hits / 400 > 0.92


def test_the_sign_test_by_hand() -> None:
    # 1 of 6 down: (C(6,0) + C(6,1)) / 2^6 = 7/64, twice.
    assert sign_test(5, 1) == sign_test(1, 5) == 14 / 64
    assert sign_test(0, 0) == sign_test(3, 3) == 1.0
    # All of ten up: 1/1024, twice.
    assert sign_test(10, 0) == 2 / 1024
    assert sign_test(20_000, 0) == 0.0


@pytest.mark.parametrize("k", [0, 5])
def test_pass_at_k_refuses_more_than_there_is(k: int) -> None:
    with pytest.raises(ConfigError, match=rf"pass@{k} from 4 rollouts.*Allowed: k from 1 to 4\. Next: "):
        pass_at_k(4, 2, k)


def test_paired_difference_is_narrower_than_two_separate_intervals() -> None:
    # 20 examples, 2 of which turned from wrong to right: a change of 0.1.
    before_P = [1.0] * 8 + [0.0] * 12
    after_P = [1.0] * 10 + [0.0] * 10
    change = paired_difference(before_P, after_P)
    assert change.estimate == pytest.approx(0.1)
    assert 0.0 <= change.low < 0.1 < change.high < 0.3
    assert paired_difference(before_P, after_P) == change


def test_paired_difference_of_a_constant_change_has_no_width() -> None:
    change = paired_difference([0.0, 0.5], [0.25, 0.75], num_resamples=10)
    assert (change.estimate, change.low, change.high) == (0.25, 0.25, 0.25)


@pytest.mark.parametrize(("before_P", "after_P"), [([], []), ([1.0], [1.0, 0.0])])
def test_paired_difference_refuses_different_examples(before_P: list[float], after_P: list[float]) -> None:
    with pytest.raises(DataError, match=r"examples\. Allowed: the same examples on both sides.*Next: "):
        paired_difference(before_P, after_P)
