"""A run on a terminal: a few live lines at the bottom, with notes above them.

The lines are cut to the terminal's width at each drawing, so that none ever wraps. No information is shown by
colour alone.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from itertools import chain, repeat

from rich.cells import cell_len, set_cell_size
from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.text import Text

from strop.view.terminal import (
    StepLines,
    describe_begin,
    describe_duration,
    make_harmless,
    to_one_line,
)

BLOCKS = "▁▂▃▄▅▆▇█"
_MOST_STEPS = 240
"""Steps that a curve keeps; no terminal is wider."""
_BAR_CELLS = 24
_SCALE_CELLS = 36
"""Room for a curve's scale behind it, where the curve keeps 20 cells."""
_CURVES = (
    ("accuracy", "accuracy", "{:.1%}"),
    ("reward_mean", "reward", "{:.3f}"),
    ("pair_accuracy", "pairs right", "{:.0%}"),
    ("loss", "loss", "{:.4f}"),
)
"""Metric, label and format; the first metric that a run has is drawn."""
_GAP = "  "


def draw_curve(values: Sequence[float | None]) -> str:
    """Return a character for each value, scaled from the lowest to the highest; a space for None."""
    numbers = [value for value in values if value is not None]
    low, high = min(numbers, default=0.0), max(numbers, default=0.0)
    top = len(BLOCKS) - 1

    def draw(value: float | None) -> str:
        if value is None:
            return " "
        return BLOCKS[round((value - low) / (high - low) * top) if high > low else top // 2]

    return "".join(map(draw, values))


def fit(parts: Sequence[str], width: int) -> str:
    """Join as many parts as fit into `width` cells; the first is cut if it does not fit alone."""
    line = cut(parts[0], width) if parts else ""
    for part in filter(None, parts[1:]):
        if cell_len(line) + len(_GAP) + cell_len(part) > width:
            break
        line += _GAP + part
    return line


def cut(text: str, width: int) -> str:
    """Cut a text to `width` cells; a cut text ends in dots."""
    if cell_len(text) <= width:
        return text
    return set_cell_size(text, max(width - 3, 0)).rstrip() + "..."[:width]


class Frame:
    """The live lines at the bottom, drawn from the current state at each refresh."""

    def __init__(self, name: str, *, num_steps: int, step: int, now: Callable[[], float]) -> None:
        self._name = name
        self._num_steps = num_steps
        self._step = step
        self._now = now
        self._lines = StepLines(num_steps)
        self._curves: dict[str, deque[float | None]] = {
            metric: deque(maxlen=_MOST_STEPS) for metric, _, _ in _CURVES
        }
        self._columns: list[tuple[str, str]] = []
        self._stage, self._stage_at = "starting", now()
        self._is_over = False
        self._num_alarms, self._alarm = 0, ""

    def set_stage(self, text: str) -> None:
        """Set the current activity."""
        self._stage, self._stage_at = text, self._now()

    def add_step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Add a completed step."""
        self._step = step
        for metric, curve in self._curves.items():
            curve.append(metrics.get(metric))
        self._columns = [(label, value.strip()) for label, value in self._lines.columns(step, metrics)]

    def add_alarm(self, text: str) -> None:
        """Add an alarm; the last one stays visible."""
        self._num_alarms, self._alarm = self._num_alarms + 1, text

    def finish(self) -> None:
        """Hide the current activity and the time left: the run has ended."""
        self._is_over = True

    def describe(self, width: int) -> list[str]:
        """Return the lines, none wider than `width` cells."""
        lines, hidden = [self._describe_progress(width)], {"step", "left"}
        for metric, label, form in _CURVES:
            if any(value is not None for value in self._curves[metric]):
                lines.append(_describe_curve(list(self._curves[metric]), label, form, width))
                hidden.add(label)
                break
        shown = [f"{label} {value}" for label, value in self._columns if label not in hidden]
        if shown:
            lines.append(fit(shown, width))
        if not self._is_over:
            activity = f"{self._stage} for {describe_duration(self._now() - self._stage_at)}"
            left = self._lines.explain_left(self._num_steps - self._step)
            lines.append(fit([*left[:1], activity, *left[1:]], width))
        if self._num_alarms:
            several = f"alarm {self._num_alarms}" if self._num_alarms > 1 else "alarm"
            lines.append(cut(f"! {several}: {self._alarm}", width))
        return lines

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Draw the lines."""
        # A full last column makes some terminals wrap.
        lines = self.describe(max(options.max_width - 1, 1))[: max(options.size.height - 1, 1)]
        for line, style in zip(lines, chain(["bold"], repeat("")), strict=False):
            yield Text(line, style="bold red" if line.startswith("! ") else style, no_wrap=True)

    def _describe_progress(self, width: int) -> str:
        share = self._step / self._num_steps if self._num_steps else 1.0
        cells = min(_BAR_CELLS, width // 3)
        full = min(int(share * cells), cells)
        count = f"step {self._step}/{self._num_steps}"
        line = fit([count, "█" * full + "░" * (cells - full), f"{share:.0%}"], width)
        room = width - cell_len(line) - len(_GAP)
        return line + _GAP + cut(self._name, room) if room >= 12 else line


def _describe_curve(values: list[float | None], label: str, form: str, width: int) -> str:
    """Return the last value, the curve of as many values as there is room for, and their scale."""
    last = next(value for value in reversed(values) if value is not None)
    lead = f"{label} {form.format(last)}"
    room = width - cell_len(lead) - len(_GAP)
    has_scale = room >= 20 + _SCALE_CELLS
    shown = values[-max(room - _SCALE_CELLS * has_scale, 1) :]
    numbers = [value for value in shown if value is not None] or [last]
    scale = f"{form.format(min(numbers))} to {form.format(max(numbers))} in {len(shown)} steps"
    return fit([lead, draw_curve(shown), scale if has_scale else ""], width)


class RichProgress:
    """A run on a terminal, as `PlainProgress`: notes as lines, with the live lines below them."""

    def __init__(self, console: Console, *, now: Callable[[], float] = time.monotonic) -> None:
        self._console = console
        self._now = now
        self._frame: Frame | None = None
        self._live: Live | None = None

    def begin(
        self, name: str, *, num_steps: int, first_step: int = 0, earlier: Sequence[Mapping[str, float]] = ()
    ) -> None:
        """Print the first line, and show new live lines."""
        self._stop()
        self._print(describe_begin(name, num_steps, first_step), "bold")
        self._frame = Frame(to_one_line(name), num_steps=num_steps, step=first_step, now=self._now)
        for metrics in earlier:
            self._frame.add_step(int(metrics["step"]), metrics)
        # Once a second, for the clock of the current activity.
        self._live = Live(self._frame, console=self._console, refresh_per_second=1.0)
        self._live.start(refresh=True)

    def stage(self, text: str) -> None:
        """Show the current activity and its duration."""
        if self._frame is not None:
            self._frame.set_stage(to_one_line(text))

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Show a completed step in the live lines; a missing metric is shown as '-'."""
        if self._frame is not None:
            self._frame.add_step(step, metrics)
            self.refresh()

    def refresh(self) -> None:
        """Draw the live lines anew."""
        if self._live is not None:
            self._live.refresh()

    def note(self, text: str, *, is_alarm: bool = False, trace: str = "") -> None:
        """Print the note above the live lines; an alarm stays visible in them."""
        line = to_one_line(text)
        if is_alarm and self._frame is not None:
            self._frame.add_alarm(line)
        self._print(f"! {line}" if is_alarm else f"  {line}", "bold red" if is_alarm else "")

    def end(self, text: str) -> None:
        """Freeze the live lines, and print the run's end."""
        if self._frame is not None:
            self._frame.finish()
        self._stop()
        self._print(make_harmless(text), "bold")

    def _stop(self) -> None:
        if self._live is not None:
            self._live.stop()
        self._live = self._frame = None

    def _print(self, line: str, style: str) -> None:
        self._console.print(Text(line, style=style), soft_wrap=True)
