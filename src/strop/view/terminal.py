"""A run on the terminal: tables, progress lines, and model text made safe to print."""

from __future__ import annotations

import os
import re
import sys
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from rich.console import Console

from strop.record import Event, EventKind, MetricsLog
from strop.train import EvalSummary

if TYPE_CHECKING:
    from strop.view.display import RichProgress

# Model text can hold terminal escape codes that move the cursor, rename the window or hide lines, and
# direction marks that make a line read other than it is. Each such character becomes a visible one.
#
# Covered: C0 and C1 control characters, direction marks, invisible separators, lone surrogates.
# Not covered: letters that look alike, and meaning.

# Line feed and tab stay. U+2028 and U+2029 end a line in some programs and not in others.
_HARMFUL = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ud800-\udfff]"
)
_FIRST_CONTROL_PICTURE = 0x2400
_DELETE_PICTURE = "\u2421"


def make_harmless(text: str) -> str:
    """Replace characters that control a terminal or are invisible by visible ones.

    Control characters become their pictures in Unicode (escape becomes U+241B), the others their code point
    in angle brackets. Line feeds and tabs stay; a carriage return before a line feed is removed.
    """
    return _HARMFUL.sub(lambda match: _show(match[0]), text.replace("\r\n", "\n"))


def _show(character: str) -> str:
    code = ord(character)
    if code < 0x20:
        return chr(_FIRST_CONTROL_PICTURE + code)
    if code == 0x7F:
        return _DELETE_PICTURE
    return f"<U+{code:04X}>"


ALARM_KINDS = frozenset({EventKind.TRIPWIRE, EventKind.ROLLOUT_LOST})
"""Kinds that mean trouble; the report lists the same ones as alarms."""
# `on_eval` and `on_end` show the first two in better words; checkpoints are routine and stay in the log.
_QUIET_KINDS = frozenset({EventKind.EVALUATION, EventKind.STOP, EventKind.CHECKPOINT})


class TerminalObserver:
    """Shows a run on one display or several. An `Observer` of `strop.train`."""

    def __init__(self, *progresses: PlainProgress | RichProgress) -> None:
        self._progresses = progresses
        self._num_steps = 0

    def on_start(
        self, *, run: str, first_step: int, num_steps: int, earlier: Sequence[Mapping[str, float]] = ()
    ) -> None:
        """Show the run's name and progress; `earlier`: the metrics of the steps before.

        Without them, those of a resumed run are read from its directory.
        """
        self._num_steps = num_steps
        if first_step and not earlier:
            earlier = MetricsLog(Path(run) / "metrics.jsonl").read()
        for progress in self._progresses:
            progress.begin(Path(run).name, num_steps=num_steps, first_step=first_step, earlier=earlier)
            # The weights before the first step are evaluated first.
            progress.stage(f"before step {first_step + 1}")

    def on_step(self, metrics: Mapping[str, float]) -> None:
        """Show the line of a step; `metrics` names it under 'step'."""
        step = int(metrics["step"])
        for progress in self._progresses:
            progress.step(step, metrics)
            progress.stage(f"step {step + 1}" if step < self._num_steps else "evaluation")

    def on_event(self, event: Event) -> None:
        """Show an alarm or a notice as a line, unless other lines show the event already."""
        if not self.is_shown(event):
            return
        text = f"step {event.step}: {event.cause}" + (f": {event.detail}" if event.detail else "")
        for progress in self._progresses:
            progress.note(text, is_alarm=event.kind in ALARM_KINDS, trace=event.trace)

    @staticmethod
    def is_shown(event: Event) -> bool:
        """Whether an event is shown as a line."""
        return event.kind not in _QUIET_KINDS

    def note(self, text: str) -> None:
        """Show a note that is no event of the run."""
        for progress in self._progresses:
            progress.note(text)

    def on_eval(self, summary: EvalSummary) -> None:
        """Show held-out accuracy with its interval."""
        sampled = summary.sampled_accuracy
        text = (
            f"step {summary.step}: held-out accuracy {summary.greedy_accuracy:.1%} greedy (95% interval "
            f"{summary.greedy_low:.1%} to {summary.greedy_high:.1%}, {summary.num_examples} examples)"
            + (f", {sampled:.1%} sampled" if sampled is not None else "")
            + (f", {summary.invalid_cause}" if summary.invalid_cause is not None else "")
        )
        self.note(text)
        if summary.step < self._num_steps:
            for progress in self._progresses:
                progress.stage(f"step {summary.step + 1}")

    def on_end(self, *, cause: str) -> None:
        """Show the cause of the run's end."""
        for progress in self._progresses:
            progress.end(f"ended: {cause}")


STEPS_FOR_ESTIMATE = 10
"""The time left is estimated from the last steps only, because the length of replies changes."""
ABSENT = "-"
MAX_NOTE_CHARACTERS = 2000
"""Longest note that is shown; the run's events keep twice as much."""


def describe_usd(amount: float) -> str:
    """Format a price: with cents, or with two digits below a dollar."""
    return f"{amount:,.2f} USD" if amount >= 1.0 else f"{amount:.2g} USD"


def describe_duration(seconds: float) -> str:
    """Format a duration: '12 ms', '8.4 s', '3 min 05 s', '2 h 10 min'."""
    if 0.0 < seconds < 0.05:
        return f"{seconds * 1e3:.2g} ms"
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    minutes, rest_s = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest_s:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"


class StepLines:
    """Formats the columns of each step, aligned over steps, and estimates the time left."""

    def __init__(self, num_steps: int) -> None:
        self._num_steps = num_steps
        self._last_seconds: deque[float] = deque(maxlen=STEPS_FOR_ESTIMATE)

    def columns(self, step: int, metrics: Mapping[str, float]) -> list[tuple[str, str]]:
        """Return label and value of each column; call it once per step, in order."""
        seconds = metrics.get("seconds_step")
        if seconds is not None:
            self._last_seconds.append(seconds)
        # Without samples there is no reward, and the loss shows progress; a policy's loss does not.
        learning = [("loss", _shown(metrics.get("loss"), "{:7.4f}"))]
        if "num_pairs" in metrics:
            learning.append(("pairs right", _shown(metrics.get("pair_accuracy"), "{:4.0%}")))
        elif "num_sft_tokens" not in metrics or "reward_mean" in metrics:
            learning = [
                ("reward", _shown(metrics.get("reward_mean"), "{:6.3f}")),
                ("accuracy", _shown(metrics.get("accuracy"), "{:6.1%}")),
                ("zero-variance", _shown(metrics.get("zero_variance_frac"), "{:4.0%}")),
            ]
        width = len(str(self._num_steps))
        return [
            ("step", f"{step:{width}d}/{self._num_steps}"),
            *learning,
            ("tokens/s", _shown(metrics.get("scored_tokens_per_s"), "{:6,.0f}")),
            ("took", _shown(seconds, "{:5.1f} s")),
            ("left", self._describe_left(self._num_steps - step)),
        ]

    def explain_left(self, num_steps_left: int) -> list[str]:
        """Return the time left, without evaluations, and the basis of the estimate; empty without one."""
        if not self._last_seconds or num_steps_left <= 0:
            return []
        seconds = len(self._last_seconds)
        mean = describe_duration(self._mean_s())
        of_last = f"mean of the last {seconds}" if seconds > 1 else "as the last"
        return [
            f"left {self._describe_left(num_steps_left)}",
            f"({num_steps_left} step{'s' if num_steps_left != 1 else ''} of {mean}, {of_last})",
        ]

    def _describe_left(self, num_steps_left: int) -> str:
        if not self._last_seconds:
            return ABSENT
        return describe_duration(self._mean_s() * max(num_steps_left, 0))

    def _mean_s(self) -> float:
        return sum(self._last_seconds) / len(self._last_seconds)


def _shown(value: float | None, form: str) -> str:
    """Format a value; a missing one is as wide, so that columns stay aligned."""
    shown = form.format(0.0 if value is None else value)
    return shown if value is not None else ABSENT.rjust(len(shown))


def describe_begin(name: str, num_steps: int, first_step: int) -> str:
    """Return the first line of a starting or resumed run."""
    where = f"continues after step {first_step} of {num_steps}" if first_step else f"{num_steps} steps"
    return f"{make_harmless(name)}: {where}"


class PlainProgress:
    """A run as plain lines, for logs and pipes. All calls come from one thread."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._lines = StepLines(0)

    def begin(
        self, name: str, *, num_steps: int, first_step: int = 0, earlier: Sequence[Mapping[str, float]] = ()
    ) -> None:
        """Print that a run starts, or resumes after `first_step` steps; `earlier`: their metrics."""
        self._lines = StepLines(num_steps)
        for metrics in earlier:
            self._lines.columns(int(metrics["step"]), metrics)
        self._print(describe_begin(name, num_steps, first_step))

    def stage(self, text: str) -> None:
        """Print nothing: a log would hold thousands of these."""

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Print the line of a completed step, counted from 1; a missing metric is '-'."""
        self._print("  ".join(f"{label} {value}" for label, value in self._lines.columns(step, metrics)))

    def note(self, text: str, *, is_alarm: bool = False, trace: str = "") -> None:
        """Print the note on one line, and a traceback below it."""
        self._print(("alarm: " if is_alarm else "") + to_one_line(text))
        if trace:
            self._print(make_harmless(trace))

    def end(self, text: str) -> None:
        """Print the run's end. May come without `begin`."""
        self._print(make_harmless(text))

    def _print(self, line: str) -> None:
        # Flushed at once, so that a followed log shows a finished step. A log that takes no more, by a full
        # disk or a reader that is gone, does not end the run.
        with suppress(OSError):
            print(line, file=self._stream, flush=True)


def to_one_line(text: str) -> str:
    """Convert a text to one harmless line: a reply quoted in an event may be long and have line feeds."""
    more = len(text) - MAX_NOTE_CHARACTERS
    shown = " ".join(make_harmless(text[:MAX_NOTE_CHARACTERS]).split())
    return f"{shown} ... {more} characters more" if more > 0 else shown


def open_progress(stream: TextIO | None = None) -> PlainProgress | RichProgress:
    """Return the display for a stream; standard error by default.

    Standard output is for results, so that `strop ... --json` can be piped. Only a terminal is redrawn: not a
    file that is to have colours (FORCE_COLOR), and not a notebook's cell, which has a terminal of its own.
    """
    console = Console(file=stream or sys.stderr, highlight=False)
    # Curves are drawn with characters that only Unicode has.
    is_screen = console.file.isatty() and "JPY_PARENT_PID" not in os.environ and "utf" in console.encoding
    if is_screen and console.is_terminal and not console.is_dumb_terminal:
        # Imported here: a log and a pipe do not need it.
        from strop.view.display import RichProgress

        return RichProgress(console)
    return PlainProgress(stream or sys.stderr)
