"""Positions, ticks and words of charts, by hand."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strop.view.charts import (
    LARGE,
    MAX_POINTS,
    TOP,
    Chart,
    Estimate,
    Series,
    build_chart,
    choose_ticks,
    label_number,
    label_share,
    smooth,
    thin,
)


def chart_of(points: list[tuple[float, float | None]], *, is_share: bool = False) -> Chart:
    chart = build_chart("k", "T", [Series(label="a", style="main", points=points)], is_share=is_share)
    assert chart is not None
    return chart


@pytest.mark.parametrize(
    ("low", "high", "ticks"),
    [
        (0.0, 1.0, [0.0, 0.2, 0.4, 0.6, 0.8, 1.0]),
        (0.0, 40.0, [0.0, 10.0, 20.0, 30.0, 40.0]),
        (-0.3, 0.9, [-0.5, 0.0, 0.5, 1.0]),
        (5.0, 5.0, [2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0]),
        (0.0, 0.0, [-1.0, -0.5, 0.0, 0.5, 1.0]),
    ],
)
def test_ticks_by_hand(low: float, high: float, ticks: list[float]) -> None:
    assert choose_ticks(low, high) == pytest.approx(ticks)


@given(st.floats(-1e9, 1e9), st.floats(1e-6, 1e9))
def test_ticks_span_the_data_and_stay_few(low: float, span: float) -> None:
    high = low + span
    ticks = choose_ticks(low, high)
    slack = 1e-6 * max(abs(low), abs(high), span)
    assert ticks[0] <= low + slack
    assert ticks[-1] >= high - slack
    assert 2 <= len(ticks) <= 8


@pytest.mark.parametrize(
    ("value", "step", "text"),
    [
        (0.002, 0.001, "0.002"),
        (10.0, 5.0, "10"),
        (1500.0, 500.0, "1,500"),
        (2e-6, 1e-6, "2.0e-06"),
        (0, 1e-6, "0"),
    ],
)
def test_number_labels_by_hand(value: float, step: float, text: str) -> None:
    assert label_number(value, step) == text


def test_share_labels_by_hand() -> None:
    assert label_share(0.25, 0.25) == "25%"
    assert label_share(0.305, 0.001) == "30.5%"


def test_a_line_goes_through_its_corners() -> None:
    chart = chart_of([(0, 0.0), (10, 1.0)], is_share=True)
    # Step 0, value 0 is the lower left corner of the plot; step 10, value 1 the upper right one.
    assert chart.lines[0].path == f"M{chart.left:g} {chart.bottom:g} L{chart.right:g} {TOP:g}"
    assert chart.right < LARGE.width
    assert [tick.label for tick in chart.y_ticks] == ["0%", "25%", "50%", "75%", "100%"]


def test_an_absent_number_is_a_gap_and_a_lonely_one_a_dot() -> None:
    line = chart_of([(1, 0.1), (2, 0.2), (3, None), (4, 0.4), (5, None), (6, 0.6), (7, 0.7)]).lines[0]
    assert line.path.count("M") == 2
    assert len(line.dots) == 1


def test_the_axis_holds_0_so_noise_is_no_trend() -> None:
    chart = chart_of([(1, 4.9), (2, 5.1)])
    assert chart.y_ticks[0].label == "0"


def test_without_a_number_there_is_no_chart() -> None:
    assert build_chart("k", "T", []) is None
    assert build_chart("k", "T", [Series(label="a", style="main", points=[(1, None)])]) is None


def test_an_estimate_is_drawn_with_its_interval() -> None:
    estimate = Estimate(step=0, value=0.5, low=0.25, high=0.75, label="held-out")
    chart = build_chart("k", "T", [], estimates=[estimate], is_share=True)
    assert chart is not None
    (whisker,) = chart.whiskers
    # Screen y grows downwards, and the value is in the middle of its interval.
    assert whisker.y_high < whisker.y < whisker.y_low
    assert whisker.y == pytest.approx((whisker.y_low + whisker.y_high) / 2)
    assert "held-out" in chart.description


def test_a_chart_says_in_words_where_its_line_starts_and_ends() -> None:
    assert chart_of([(1, 0.3), (9, 0.8)], is_share=True).description == "a: 30.0% at step 1, 80.0% at step 9."


def test_thinning_keeps_means_and_gaps() -> None:
    points: list[tuple[float, float | None]] = [(float(i), float(i % 2)) for i in range(4 * MAX_POINTS)]
    thinned = thin(points)
    # Buckets of four: values 0, 1, 0, 1 have mean 1/2; steps 0..3 have mean 1.5.
    assert len(thinned) == MAX_POINTS
    assert thinned[0] == (1.5, 0.5)
    assert thin([(1.0, None)]) == [(1.0, None)]


def test_smoothing_by_hand() -> None:
    # Windows of two: 1; (1+3)/2; absent stays absent; then only 8 is known; (8+2)/2.
    points: list[tuple[float, float | None]] = [(1, 1.0), (2, 3.0), (3, None), (4, 8.0), (5, 2.0)]
    assert smooth(points, 2) == [(1, 1.0), (2, 2.0), (3, None), (4, 8.0), (5, 5.0)]


@given(st.lists(st.tuples(st.integers(0, 10**7), st.none() | st.floats(-1e12, 1e12)), max_size=50))
def test_every_position_is_finite(points: list[tuple[int, float | None]]) -> None:
    chart = build_chart(
        "k", "T", [Series(label="a", style="main", points=sorted(points, key=lambda p: p[0]))]
    )
    if chart is None:
        return
    numbers = [float(part) for part in chart.lines[0].path.replace("M", " ").replace("L", " ").split()]
    assert all(math.isfinite(number) for number in numbers)


def test_the_last_label_is_not_cut_at_the_edge() -> None:
    points = [(float(step), 0.5) for step in (1, 1_000_000)]
    chart = build_chart("a", "A", [Series(label="a", style="main", points=points)])
    assert chart is not None
    last = chart.x_ticks[-1]
    assert last.label == "1,000,000"
    # A digit of 13 px is some 8 px wide.
    assert last.position + 8 * len(last.label) / 2 <= chart.size.width
