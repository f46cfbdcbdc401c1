"""Intervals and estimators by hand, then against simulation and plain counting."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strop.evaluate.comparison import (
    Interval,
    clustered_interval,
    correct_by_holm,
    difference_over_seeds,
    paired_difference,
    pass_at_k,
    pass_at_k_interval,
    sign_test,
    student_quantile,
)


def once(num_solved: int, num_examples: int) -> Interval:
    """The interval of examples that were tried once each."""
    return clustered_interval([[place < num_solved] for place in range(num_examples)])


def test_a_share_by_hand() -> None:
    # 5 of 10, with 1.5 at either end: 13. Middle 6.5 / 13, variance 0.25, half 1.959964 x sqrt(0.25 / 12).
    interval = once(5, 10)
    assert interval.estimate == 0.5
    assert (interval.low, interval.high) == pytest.approx((0.217103, 0.782897), abs=1e-6)


def test_none_and_all_by_hand() -> None:
    # 0 of 100: middle 1.5 / 103 = 0.014563, variance 0.014351, half 1.959964 x sqrt(0.014351 / 102).
    assert (once(0, 100).estimate, once(0, 100).low) == (0.0, 0.0)
    assert once(0, 100).high == pytest.approx(0.037811, abs=1e-6)
    assert once(100, 100).high == 1.0
    assert once(100, 100).low == pytest.approx(1 - 0.037811, abs=1e-6)


def test_no_trials_say_nothing() -> None:
    for interval in (clustered_interval([]), clustered_interval([[], []], ["a", "b"])):
        assert math.isnan(interval.estimate)
        assert (interval.low, interval.high) == (0.0, 1.0)


@given(st.integers(0, 200), st.integers(1, 200))
def test_a_share_is_in_its_interval(num_solved: int, num_examples: int) -> None:
    interval = once(min(num_solved, num_examples), num_examples)
    assert 0.0 <= interval.low <= interval.estimate <= interval.high <= 1.0
    assert interval.low < interval.high


def test_independent_rollouts_add_certainty_but_not_all_of_it() -> None:
    # All examples have share 1/2, as if nothing varied: 13 problems, of which 3 are at the ends. Variance
    # 3 / 13 x 0.25, half 1.959964 x sqrt(0.057692 / 12).
    halves = clustered_interval([[True, False]] * 10)
    assert (halves.low, halves.high) == pytest.approx((0.364101, 0.635899), abs=1e-6)
    assert clustered_interval([[True, False, True, True]]).low > 0.0


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
    # Two of four examples solved by every rollout: pass@2 is 1, 1, 0, 0, as of four tried once.
    interval = pass_at_k_interval([[True] * 4] * 2 + [[False] * 4] * 2, 2)
    assert interval == once(2, 4)


def test_an_interval_of_pass_at_k_leaves_out_examples_with_too_few_rollouts() -> None:
    full, short = [[True, False]], [[True]]
    assert pass_at_k_interval(full + short, 2) == pass_at_k_interval(full, 2)
    assert math.isnan(pass_at_k_interval(short, 2).estimate)


def test_the_sign_test_by_hand() -> None:
    # 1 of 6 down: (C(6,0) + C(6,1)) / 2^6 = 7/64, twice.
    assert sign_test(5, 1) == sign_test(1, 5) == 14 / 64
    assert sign_test(0, 0) == sign_test(3, 3) == 1.0
    # All of ten up: 1/1024, twice.
    assert sign_test(10, 0) == 2 / 1024
    assert sign_test(20_000, 0) == 0.0


def test_paired_difference_by_hand() -> None:
    # 20 examples, 2 turned right, with 1.5 pseudo examples at either end: 23. Middle 2 / 23 = 0.086957,
    # variance (2 + 3) / 23 - 0.086957^2 = 0.209830, half 1.959964 x sqrt(0.209830 / 22) = 0.191413.
    before_P = [1.0] * 8 + [0.0] * 12
    after_P = [1.0] * 10 + [0.0] * 10
    change = paired_difference(before_P, after_P)
    assert change.estimate == pytest.approx(0.1)
    assert (change.low, change.high) == pytest.approx((-0.104456, 0.278370), abs=1e-6)
    # Two separate intervals would be 0.41 wide each.
    assert change.high - change.low < 0.5 * 2 * 0.41
    assert paired_difference(before_P, after_P) == change
    scaled = paired_difference([4 * x for x in before_P], [4 * x for x in after_P], full_scale=4.0)
    assert (scaled.estimate, scaled.low, scaled.high) == pytest.approx(
        tuple(4 * value for value in (change.estimate, change.low, change.high))
    )


@pytest.mark.parametrize("change", [0.0, 0.25, 1.0, -1.0])
@pytest.mark.parametrize("num_examples", [1, 2, 100, 10_000])
def test_a_constant_change_has_width(change: float, num_examples: int) -> None:
    """Incident: a bootstrap of examples that all changed alike said "+0.0 % to +0.0 %"."""
    found = paired_difference([max(-change, 0.0)] * num_examples, [max(change, 0.0)] * num_examples)
    assert found.estimate == change
    assert found.low <= change <= found.high
    # As for Wilson's interval of none of n: of the order of 4 / n.
    assert found.high - found.low > min(1.0, 3.0 / num_examples)


UNIT = st.floats(0.0, 1.0)


@given(st.lists(st.tuples(UNIT, UNIT, st.sampled_from("abcdef")), min_size=1, max_size=40))
def test_a_paired_difference_holds_its_estimate(found: list[tuple[float, float, str]]) -> None:
    before_P, after_P, problems_P = zip(*found, strict=True)
    for interval in (paired_difference(before_P, after_P), paired_difference(before_P, after_P, problems_P)):
        assert -1.0 <= interval.low <= interval.estimate <= interval.high <= 1.0
        assert interval.low < interval.high


def binomial(num_trials: int, chance: float) -> np.ndarray:
    return np.array(
        [
            math.comb(num_trials, k) * chance**k * (1 - chance) ** (num_trials - k)
            for k in range(num_trials + 1)
        ]
    )


def cover_share(num_examples: int, chances: Iterable[float]) -> float:
    """Return the smallest coverage of a share's interval over some chances, by enumeration."""
    intervals = [once(k, num_examples) for k in range(num_examples + 1)]
    low, high = (np.array([getattr(one, end) for one in intervals]) for end in ("low", "high"))
    covered = []
    for chance in chances:
        holds = (low - 1e-12 <= chance) & (chance <= high + 1e-12)
        covered.append(float(binomial(num_examples, chance)[holds].sum()))
    return min(covered)


def cover_difference(num_examples: int, chances: Iterable[tuple[float, float]]) -> float:
    """Return the smallest coverage of the paired interval over chances to rise and to fall."""
    outcomes = [(up, down) for up in range(num_examples + 1) for down in range(num_examples + 1 - up)]
    intervals = []
    ways = []
    for up, down in outcomes:
        still = num_examples - up - down
        intervals.append(
            paired_difference(
                [0.0] * up + [1.0] * down + [1.0] * still, [1.0] * up + [0.0] * down + [1.0] * still
            )
        )
        ways.append(math.comb(num_examples, up) * math.comb(num_examples - up, down))
    low, high = (np.array([getattr(one, end) for one in intervals]) for end in ("low", "high"))
    up, down = np.array(outcomes).T
    covered = []
    for rise, fall in chances:
        chance = np.array(ways, dtype=float) * rise**up * fall**down
        chance *= max(1.0 - rise - fall, 0.0) ** (num_examples - up - down)
        holds = (low - 1e-12 <= rise - fall) & (rise - fall <= high + 1e-12)
        covered.append(float(chance[holds].sum()))
    return min(covered)


EXTREMES = (0.0, 0.001, 0.01, 0.02, 0.05)
FEW_SHARES = (*EXTREMES, 0.1, 0.25, 0.5, 0.75, *(1.0 - share for share in EXTREMES))


@pytest.mark.parametrize("num_examples", [1, 5, 20, 100])
def test_a_share_is_covered_near_the_ends_too(num_examples: int) -> None:
    assert cover_share(num_examples, (*FEW_SHARES, 0.17 / num_examples)) > 0.92


def pairs_of(shares: Iterable[float]) -> list[tuple[float, float]]:
    listed = list(shares)
    return [(one, other) for one in listed for other in listed if one + other <= 1.0]


@pytest.mark.parametrize("num_examples", [2, 6, 15])
def test_a_paired_difference_covers_the_truth_also_where_all_change_alike(num_examples: int) -> None:
    assert cover_difference(num_examples, pairs_of(FEW_SHARES)) > 0.925


def test_a_paired_difference_allows_for_what_a_sample_may_not_hold() -> None:
    # One example in fifty falls by 0.84 where the others rise by 0.16: of a hundred samples of 50, some 36
    # hold none that falls and have no spread at all.
    stream = np.random.default_rng(5)
    num_hits = 0
    for _ in range(400):
        changes_P = np.where(stream.random(50) < 0.02, -0.84, 0.16)
        found = paired_difference([0.84] * 50, (0.84 + changes_P).tolist())
        num_hits += found.low <= 0.14 <= found.high
    assert num_hits / 400 > 0.98


@pytest.mark.parametrize("chance", [0.1, 0.5, 0.9])
def test_examples_of_one_problem_count_once(chance: float) -> None:
    # Pairs that are solved, or not solved, together. Taken for 100 problems: 0.83.
    stream = np.random.default_rng(6)
    problems_P = [str(number // 2) for number in range(100)]
    hits, naive_hits, hits_of_change = 0, 0, 0
    for _ in range(300):
        solved_P = np.repeat(stream.random(50) < chance, 2)
        found = clustered_interval([[bool(one)] for one in solved_P], problems_P)
        naive = clustered_interval([[bool(one)] for one in solved_P])
        change = paired_difference([0.0] * 100, solved_P.astype(float).tolist(), problems_P)
        hits += found.low <= chance <= found.high
        naive_hits += naive.low <= chance <= naive.high
        hits_of_change += change.low <= chance <= change.high
    assert naive_hits / 300 < 0.9
    assert min(hits, hits_of_change) / 300 > 0.92


def test_problems_of_one_example_each_change_nothing() -> None:
    solved_P_G = [[True, False], [True, True], [], [False, False], [True, False]]
    names = ["a", "b", "c", "d", "e"]
    assert clustered_interval(solved_P_G, names) == clustered_interval(solved_P_G)
    assert pass_at_k_interval(solved_P_G, 2, names) == pass_at_k_interval(solved_P_G, 2)
    assert paired_difference([0.5, 0.0], [1.0, 0.0], ["a", "b"]) == paired_difference([0.5, 0.0], [1.0, 0.0])


def test_an_estimate_is_over_examples_however_many_pose_a_problem() -> None:
    # Two of three solved; both are of one problem.
    found = clustered_interval([[True], [True], [False]], ["a", "a", "b"])
    assert found.estimate == pytest.approx(2 / 3)
    assert pass_at_k_interval([[True, False]] * 2 + [[False, False]], 1, ["a", "a", "b"]).estimate == (
        pytest.approx(1 / 3)
    )
    assert paired_difference([0.0] * 3, [1.0, 1.0, 0.0], ["a", "a", "b"]).estimate == pytest.approx(2 / 3)


def test_holm_by_hand() -> None:
    # Sorted: .005 x 4, .01 x 3, .03 x 2, .04 x 1; the last is raised to the one before it.
    assert correct_by_holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert correct_by_holm([0.7, 0.9]) == [1.0, 1.0]
    assert correct_by_holm([0.2]) == [0.2]
    assert correct_by_holm([]) == []


@given(st.lists(st.floats(0, 1), max_size=6))
def test_holm_never_lowers_and_keeps_the_order(p_values: list[float]) -> None:
    corrected = correct_by_holm(p_values)
    assert all(p <= after <= 1.0 for p, after in zip(p_values, corrected, strict=True))
    ranked = sorted(range(len(p_values)), key=lambda index: p_values[index])
    assert [corrected[index] for index in ranked] == sorted(corrected)


@pytest.mark.parametrize(
    ("freedom", "quantile"),
    # From the table of Student's distribution, two-sided 95 %.
    [(1, 12.706), (2, 4.303), (3, 3.182), (4, 2.776), (9, 2.262), (10, 2.228), (30, 2.042)],
)
def test_quantiles_of_student(freedom: int, quantile: float) -> None:
    assert student_quantile(freedom) == pytest.approx(quantile, abs=5e-4)


def test_a_difference_over_seeds_by_hand() -> None:
    # Variances .0002 and .0008 over two seeds each: error sqrt(.0001 + .0004) = .02236, and freedom
    # .0005^2 / (.0001^2 + .0004^2) = 1.47, so 1: half 12.706 x .02236.
    found = difference_over_seeds([0.50, 0.52], [0.60, 0.64])
    assert found is not None
    assert found.estimate == pytest.approx(0.11)
    assert (found.low, found.high) == pytest.approx((0.11 - 0.28412, 0.11 + 0.28412), abs=1e-5)


def test_a_difference_over_seeds_that_cannot_be_told_is_none() -> None:
    assert difference_over_seeds([0.5], [0.6, 0.7]) is None
    assert difference_over_seeds([0.5, 0.6], []) is None
    # Two equal scores do not say that a third would be equal too.
    assert difference_over_seeds([0.5, 0.5], [0.7, 0.7]) is None
