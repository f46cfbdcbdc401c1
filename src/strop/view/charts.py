"""The geometry of line charts: positions, ticks and paths, which a template draws as SVG.

Colours and HTML are in the template. A missing number is a gap of its series, and a long series is thinned to
bucket means, so that a run of a million steps still gives a small page.

Units: data units in, SVG user units out; the origin is at the top left, y grows downwards.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby

RIGHT, TOP, BOTTOM = 16.0, 12.0, 30.0
LEFT_BASE, LEFT_PER_CHARACTER = 14.0, 8.0
"""Width left of the plot, for its labels at a font size of 13 units."""
MAX_POINTS = 400
NUM_TICKS = 6

Point = tuple[float, float]
_Label = Callable[[float, float], str]


@dataclass(frozen=True, kw_only=True, slots=True)
class Series:
    """One line of numbers over steps."""

    label: str
    style: str
    """Class of the line in the style sheet: 'main', 'faint', 'second'."""
    points: Sequence[tuple[float, float | None]]
    """Step and value, in order; None is a gap."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Estimate:
    """A measured value with its interval, at one step."""

    step: float
    value: float
    low: float
    high: float
    label: str
    """Tooltip of the point."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Tick:
    """A labelled position on an axis."""

    position: float
    label: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Line:
    """The drawing of a series."""

    label: str
    style: str
    path: str
    """SVG path data; one subpath per stretch without gaps."""
    dots: tuple[Point, ...]
    """Points without a neighbour, which a path would not show."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Whisker:
    """The drawing of an estimate."""

    x: float
    y: float
    y_low: float
    y_high: float
    label: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Size:
    """Outer size of a chart. Small charts have their own layout, so that letters stay legible."""

    width: float
    height: float


LARGE = Size(width=560, height=260)
SMALL = Size(width=340, height=170)


@dataclass(frozen=True, kw_only=True, slots=True)
class Chart:
    """One chart, for a template."""

    key: str
    """Unique on the page; ids of title and description contain it."""
    title: str
    description: str
    """The chart in words, for readers who cannot see it."""
    lines: tuple[Line, ...]
    whiskers: tuple[Whisker, ...]
    x_ticks: tuple[Tick, ...]
    y_ticks: tuple[Tick, ...]
    size: Size
    left: float
    right: float
    bottom: float
    """Edges of the plot; its top is the highest tick."""


def choose_ticks(low: float, high: float) -> list[float]:
    """Return round numbers that span [low, high]: steps of 1, 2 or 5 times a power of ten.

    The first is at or below `low`, the last at or above `high`. An empty span is widened around its
    value, so there are always at least two ticks.
    """
    # For a narrower span, ticks would be equal as floating-point numbers.
    if high - low <= 1e-12 * max(abs(low), abs(high), 1e-200):
        margin = abs(low) * 0.5 or 1.0
        low, high = low - margin, high + margin
    rough = (high - low) / (NUM_TICKS - 1)
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1.0, 2.0, 5.0, 10.0) if factor * power >= rough * (1 - 1e-9))
    first = math.floor(low / step + 1e-9)
    last = math.ceil(high / step - 1e-9)
    return [index * step for index in range(first, last + 1)]


def label_number(value: float, step: float) -> str:
    """Format a tick with as many digits as its step needs."""
    if value == 0:
        return "0"
    if not 1e-4 <= max(abs(value), step) < 1e6:
        return f"{value:.1e}"
    digits = max(0, -math.floor(math.log10(step) + 1e-9))
    return f"{value:,.{digits}f}"


def label_share(value: float, step: float) -> str:
    """Format a share in [0, 1] as percent."""
    digits = max(0, -math.floor(math.log10(step * 100) + 1e-9))
    return f"{value * 100:.{digits}f}%"


def thin(points: Sequence[tuple[float, float | None]]) -> list[tuple[float, float | None]]:
    """Reduce a long series to at most MAX_POINTS bucket means; a bucket without numbers is a gap."""
    size = math.ceil(len(points) / MAX_POINTS) or 1
    if size == 1:
        return list(points)
    buckets = [points[start : start + size] for start in range(0, len(points), size)]
    thinned: list[tuple[float, float | None]] = []
    for bucket in buckets:
        values = [value for _, value in bucket if value is not None]
        middle = math.fsum(step for step, _ in bucket) / len(bucket)
        thinned.append((middle, math.fsum(values) / len(values) if values else None))
    return thinned


def smooth(points: Sequence[tuple[float, float | None]], window: int) -> list[tuple[float, float | None]]:
    """Return the mean over each point and its `window` - 1 predecessors, without missing numbers."""
    smoothed: list[tuple[float, float | None]] = []
    for index, (step, value) in enumerate(points):
        recent = [v for _, v in points[max(0, index - window + 1) : index + 1] if v is not None]
        smoothed.append((step, math.fsum(recent) / len(recent) if value is not None else None))
    return smoothed


@dataclass(frozen=True, kw_only=True, slots=True)
class _Scale:
    """Maps data units to positions along one axis."""

    low: float
    high: float
    start: float
    end: float

    def at(self, value: float) -> float:
        share = (value - self.low) / (self.high - self.low)
        return round(self.start + share * (self.end - self.start), 2)


def build_chart(
    key: str,
    title: str,
    series: Sequence[Series],
    *,
    estimates: Sequence[Estimate] = (),
    is_share: bool = False,
    size: Size = LARGE,
) -> Chart | None:
    """Lay out lines and estimates over steps, from step 0; None if there is no number.

    The vertical axis always contains 0, so that noise does not look like a trend; shares have a fixed axis
    from 0 to 100 percent, so that charts of two runs are comparable.
    """
    values = [value for line in series for _, value in line.points if value is not None]
    values += [bound for estimate in estimates for bound in (estimate.low, estimate.high)]
    if not values:
        return None
    steps = [step for line in series for step, _ in line.points] + [estimate.step for estimate in estimates]
    last_step = max(*steps, 1.0)
    y_values = [0.0, 0.25, 0.5, 0.75, 1.0] if is_share else choose_ticks(min(*values, 0.0), max(*values, 0.0))
    label: _Label = label_share if is_share else label_number
    labels = [label(value, y_values[1] - y_values[0]) for value in y_values]
    left = LEFT_BASE + LEFT_PER_CHARACTER * max(map(len, labels))
    # The last label is centred below its step.
    right = max(RIGHT, LEFT_PER_CHARACTER * len(f"{last_step:,.0f}") / 2 + 2)
    x = _Scale(low=0.0, high=last_step, start=left, end=size.width - right)
    y = _Scale(low=y_values[0], high=y_values[-1], start=size.height - BOTTOM, end=TOP)
    x_values = [tick for tick in choose_ticks(0.0, last_step) if tick <= last_step and tick == int(tick)]
    return Chart(
        key=key,
        title=title,
        description=_describe(series, estimates, label),
        lines=tuple(_draw_line(line, x, y) for line in series),
        whiskers=tuple(
            Whisker(
                x=x.at(estimate.step),
                y=y.at(estimate.value),
                y_low=y.at(estimate.low),
                y_high=y.at(estimate.high),
                label=estimate.label,
            )
            for estimate in estimates
        ),
        x_ticks=tuple(Tick(position=x.at(value), label=f"{value:,.0f}") for value in x_values),
        y_ticks=tuple(
            Tick(position=y.at(value), label=text) for value, text in zip(y_values, labels, strict=True)
        ),
        size=size,
        left=x.start,
        right=x.end,
        bottom=y.start,
    )


def _draw_line(series: Series, x: _Scale, y: _Scale) -> Line:
    stretches = groupby(thin(series.points), key=lambda point: point[1] is None)
    placed = [
        [(x.at(step), y.at(value)) for step, value in stretch if value is not None]
        for _, stretch in stretches
    ]
    paths = [
        "M" + " L".join(f"{px:g} {py:g}" for px, py in stretch) for stretch in placed if len(stretch) > 1
    ]
    dots = tuple(stretch[0] for stretch in placed if len(stretch) == 1)
    return Line(label=series.label, style=series.style, path=" ".join(paths), dots=dots)


def _describe(series: Sequence[Series], estimates: Sequence[Estimate], label: _Label) -> str:
    parts = []
    for line in series:
        numbers = [(step, value) for step, value in line.points if value is not None]
        if numbers:
            (first_step, first), (last_step, last) = numbers[0], numbers[-1]
            parts.append(
                f"{line.label}: {label(first, 0.001)} at step {first_step:g}, "
                f"{label(last, 0.001)} at step {last_step:g}."
            )
    parts += [f"{estimate.label}." for estimate in estimates]
    return " ".join(parts)
