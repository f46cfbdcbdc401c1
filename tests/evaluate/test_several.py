"""Several comparisons and several seeds, by hand and against simulation."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from strop.evaluate import correct_by_holm, difference_over_seeds
from strop.evaluate.comparison import student_quantile


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
    assert student_quantile(0.975, freedom) == pytest.approx(quantile, abs=5e-4)


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


def test_an_interval_over_seeds_covers_the_truth() -> None:
    stream = np.random.default_rng(11)
    for num_before, num_after in ((2, 2), (3, 5), (5, 5)):
        hits = 0
        for _ in range(400):
            before = stream.normal(0.5, 0.02, num_before).tolist()
            after = stream.normal(0.6, 0.05, num_after).tolist()
            found = difference_over_seeds(before, after)
            assert found is not None
            hits += found.low <= 0.1 <= found.high
        assert hits / 400 > 0.92
