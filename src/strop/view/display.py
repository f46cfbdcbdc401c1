"""A run on a terminal: a few live lines at the bottom, with notes above them.

The lines are cut to the terminal's width at each drawing, so that none ever wraps. A terminal that becomes
narrower wraps the lines drawn before; the next drawing erases all the resulting rows.
No information is shown by colour alone.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from itertools import chain, repeat

from rich.cells import cell_len, set_cell_size
from rich.console import Console, ConsoleOptions, ConsoleRenderable, RenderResult
from rich.control import Control
from rich.live import Live
from rich.segment import ControlType
from rich.text import Text

from strop.view.terminal import (
    StepLines,
    describe_begin,
    describe_duration,
    make_harmless,
    to_one_line,
)

BLOCKS = "▁▂▃▄▅▆▇█"
ASCII_LEVELS = "_.-=+*%#"
"""Levels for a terminal whose encoding has no blocks, from the lowest to the highest."""
_MOST_STEPS = 240
"""Steps that a curve keeps; no terminal is wider."""
_BAR_CELLS = 24
_CURVES = (
    ("accuracy", "accuracy", "{:.1%}"),
    ("reward_mean", "reward", "{:.3f}"),
    ("pair_accuracy", "pairs right", "{:.0%}"),
    ("loss", "loss", "{:.4f}"),
)
"""Metric, label and format; the first metric that a run has is drawn."""
_GAP = "  "


def draw_curve(values: Sequence[float | None], *, levels: str = BLOCKS) -> str:
    """Return a character for each value, scaled from the lowest to the highest; a space for None."""
    numbers = [value for value in values if value is not None]
    low, high = min(numbers, default=0.0), max(numbers, default=0.0)
    top = len(levels) - 1

    def draw(value: float | None) -> str:
        if value is None:
            return " "
        return levels[round((value - low) / (high - low) * top) if high > low else top // 2]

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
        self.drawn: tuple[int, ...] = ()
        """Width in cells of each line at the last drawing."""

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

    def describe(self, width: int, *, has_blocks: bool) -> list[str]:
        """Return the lines, none wider than `width` cells."""
        lines, hidden = [self._describe_progress(width, has_blocks=has_blocks)], {"step", "left"}
        for metric, label, form in _CURVES:
            if any(value is not None for value in self._curves[metric]):
                levels = BLOCKS if has_blocks else ASCII_LEVELS
                lines.append(self._draw(metric, label, form, width=width, levels=levels))
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
        lines = self.describe(max(options.max_width - 1, 1), has_blocks=_has_blocks(console.encoding))
        lines = lines[: max(options.size.height - 1, 1)]
        self.drawn = tuple(map(cell_len, lines))
        styles = chain(["bold"], repeat(""))
        for line, style in zip(lines, styles, strict=False):
            yield Text(line, style="bold red" if line.startswith("! ") else style, no_wrap=True)

    def _describe_progress(self, width: int, *, has_blocks: bool) -> str:
        share = self._step / self._num_steps if self._num_steps else 1.0
        cells = min(_BAR_CELLS, width // 3)
        full = min(int(share * cells), cells)
        done, left = ("█", "░") if has_blocks else ("#", "-")
        count = f"step {self._step}/{self._num_steps}"
        line = fit([count, done * full + left * (cells - full), f"{share:.0%}"], width)
        room = width - cell_len(line) - len(_GAP)
        return line + _GAP + cut(self._name, room) if room >= 12 else line

    def _draw(self, metric: str, label: str, form: str, *, width: int, levels: str) -> str:
        values = list(self._curves[metric])
        numbers = [value for value in values if value is not None]
        lead = f"{label} {form.format(numbers[-1])}"
        scale = f"{form.format(min(numbers))} to {form.format(max(numbers))} in {len(values)} steps"
        # Without the scale if both do not fit: a very short curve would be useless.
        room = width - cell_len(lead) - len(_GAP)
        if room - cell_len(scale) - len(_GAP) >= min(len(values), 20):
            room -= cell_len(scale) + len(_GAP)
        else:
            scale = ""
        shown = values[-room:] if room > 0 else []
        if scale and len(shown) < len(values):
            numbers = [value for value in shown if value is not None] or numbers
            scale = f"{form.format(min(numbers))} to {form.format(max(numbers))} in {len(shown)} steps"
        return fit([lead, draw_curve(shown, levels=levels), scale], width)


class _Region(Live):
    """`rich.live.Live` that erases the rows of lines wrapped by a narrower terminal."""

    def __init__(self, frame: Frame, console: Console) -> None:
        # Once a second, for the clock of the current activity.
        super().__init__(frame, console=console, refresh_per_second=1.0, vertical_overflow="crop")
        self.frame = frame

    def process_renderables(self, renderables: list[ConsoleRenderable]) -> list[ConsoleRenderable]:
        """Put the printed output above the lines, and draw them again below it."""
        drawn = self.frame.drawn
        placed = super().process_renderables(renderables)
        if drawn and self.console.is_interactive:
            width = max(self.console.width, 1)
            rows = sum(max(-(-cells // width), 1) for cells in drawn)
            up = ((ControlType.CURSOR_UP, 1), (ControlType.ERASE_IN_LINE, 2))
            placed[0] = Control(ControlType.CARRIAGE_RETURN, (ControlType.ERASE_IN_LINE, 2), *up * (rows - 1))
        return placed


class RichProgress:
    """`Progress` on a terminal: notes as lines, with the live lines below them."""

    def __init__(self, console: Console, *, now: Callable[[], float] = time.monotonic) -> None:
        self._console = console
        self._now = now
        self._region: _Region | None = None

    def begin(
        self, name: str, *, num_steps: int, first_step: int = 0, earlier: Sequence[Mapping[str, float]] = ()
    ) -> None:
        """Print the first line, and show new live lines."""
        self._stop()
        self._print(describe_begin(name, num_steps, first_step), "bold")
        frame = Frame(to_one_line(name), num_steps=num_steps, step=first_step, now=self._now)
        for metrics in earlier:
            frame.add_step(int(metrics["step"]), metrics)
        self._region = _Region(frame, self._console)
        self._region.start(refresh=True)

    def stage(self, text: str) -> None:
        """Show the current activity and its duration."""
        if self._region is not None:
            self._region.frame.set_stage(to_one_line(text))

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Show a completed step in the live lines."""
        if self._region is not None:
            self._region.frame.add_step(step, metrics)
            self._region.refresh()

    def note(self, text: str, *, is_alarm: bool = False, trace: str = "") -> None:
        """Print the note above the live lines; an alarm stays visible in them."""
        line = to_one_line(text)
        if is_alarm and self._region is not None:
            self._region.frame.add_alarm(line)
        self._print(f"! {line}" if is_alarm else f"  {line}", "bold red" if is_alarm else "")

    def end(self, text: str) -> None:
        """Freeze the live lines, and print the run's end."""
        if self._region is not None:
            self._region.frame.finish()
        self._stop()
        self._print(make_harmless(text), "bold")

    def _stop(self) -> None:
        if self._region is not None:
            self._region.stop()
            self._region = None

    def _print(self, line: str, style: str) -> None:
        self._console.print(Text(line, style=style), soft_wrap=True)


def _has_blocks(encoding: str) -> bool:
    try:
        (BLOCKS + "░").encode(encoding)
    except (UnicodeEncodeError, LookupError):
        return False
    return True
