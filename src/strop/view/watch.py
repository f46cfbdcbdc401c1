"""A run on the terminal: what the loop tells its observer, put into lines."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from strop.record import Event, EventKind
from strop.train import EvalSummary
from strop.view.terminal import Progress

ALARM_KINDS = frozenset({EventKind.TRIPWIRE, EventKind.ROLLOUT_LOST})
"""Kinds that mean trouble; the report lists the same ones as alarms."""
# Shown by `on_eval` and `on_end` in better words; checkpoints are routine and stay in the log.
_QUIET_KINDS = frozenset({EventKind.EVALUATION, EventKind.STOP, EventKind.CHECKPOINT})


class TerminalObserver:
    """Watches a run and shows it as `Progress`. Keeps the contract of `strop.train.Observer`."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress

    def on_start(self, *, run: str, first_step: int, num_steps: int) -> None:
        """Show where the run is written and how far it is."""
        self._progress.begin(Path(run).name, num_steps=num_steps, first_step=first_step)
        self._progress.stage("first step")

    def on_step(self, metrics: Mapping[str, float]) -> None:
        """Show the line of a step; `metrics` names it under 'step'."""
        step = int(metrics["step"])
        self._progress.step(step, metrics)
        self._progress.stage(f"step {step + 1}")

    def on_event(self, event: Event) -> None:
        """Show an alarm or a notice as a line; what other lines say already is left out."""
        if event.kind in _QUIET_KINDS:
            return
        text = f"step {event.step}: {event.cause}" + (f": {event.detail}" if event.detail else "")
        self._progress.note(text, is_alarm=event.kind in ALARM_KINDS, trace=event.trace)

    def on_eval(self, summary: EvalSummary) -> None:
        """Show held-out accuracy with its interval."""
        sampled = summary.sampled_accuracy
        self._progress.note(
            f"step {summary.step}: held-out accuracy {summary.greedy_accuracy:.1%} greedy (95% interval "
            f"{summary.greedy_low:.1%} to {summary.greedy_high:.1%}, {summary.num_examples} examples)"
            + (f", {sampled:.1%} sampled" if sampled is not None else "")
            + (f", {summary.invalid_cause}" if summary.invalid_cause is not None else "")
        )

    def on_end(self, *, cause: str) -> None:
        """Show how the run ended."""
        self._progress.end(f"ended: {cause}")
