"""`strop watch`: show a run that trains elsewhere as if it trained here, from the new lines of its record.

A run that resumes from a checkpoint has its record cut back; its display then restarts at that step.
If the place does not answer, it is asked again: only the run's end ends the watching.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from strop.errors import EXIT_DONE, EXIT_FAILED, StoreError
from strop.evaluate.result import EvalResult
from strop.io import FileLock
from strop.record.events import to_event
from strop.record.files import LineFollower, RecordFiles
from strop.record.run_dir import LOCK_NAME
from strop.run.runs import RunPhase, find_phase
from strop.train import EvalSummary
from strop.view.live import EVENTS, METRICS, LiveRun
from strop.view.terminal import TerminalObserver

EARLIER_SHOWN = 5
"""Largest number of earlier events that are shown; the record has the others."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunEnd:
    """The end of a run, or of its job."""

    cause: str
    exit_code: int


def find_end(run: LiveRun) -> RunEnd | None:
    """Return the end of a run without a job; None while it goes on, or if its end cannot be seen from here.

    Raises: StoreError if the place does not answer, or holds no run; CorruptRecord if run.json is damaged.
    """
    state = run.read_state()
    if state.finished_at is not None:
        return RunEnd(cause="done", exit_code=EXIT_DONE)
    attempt = _read_attempt(run.record, state.num_attempts)
    if run.path is not None:
        if find_phase(run.path) is RunPhase.RUNNING:
            return None
        holder = FileLock(run.path / LOCK_NAME).holder()
        if attempt is None and holder is not None and holder.host == socket.gethostname():
            return RunEnd(cause="no process works in it any more", exit_code=EXIT_FAILED)
    return attempt


def _read_attempt(record: RecordFiles, number: int) -> RunEnd | None:
    """Return the recorded end of an attempt; None if there is none."""
    try:
        content = json.loads(record.read(f"attempts/{number}/attempt.json") or b"{}")
        return RunEnd(cause=str(content["cause"]), exit_code=int(content["exit_code"]))
    except (ValueError, KeyError, TypeError):
        return None


class Watcher:
    """Passes the new lines of a run's record to an observer."""

    def __init__(self, run: LiveRun, observer: TerminalObserver) -> None:
        self._run, self._observer = run, observer
        self._metrics, self._events = (LineFollower(run.record, name) for name in (METRICS, EVENTS))
        self._shown_events: set[str] = set()
        self._evals: set[tuple[str, int]] = set()
        self._num_steps = 0

    def look(self) -> None:
        """Show the news.

        Raises: StoreError if the place does not answer; CorruptRecord for a damaged log.
        """
        is_first = not self._num_steps
        if is_first:
            spec = self._run.read_spec()
            if not spec:
                return
            self._num_steps = int(spec["train"]["steps"])
        is_restarted, lines = self._metrics.read_records()
        if is_first or is_restarted:
            # As for a resumed run: the earlier steps are in its curve. Evaluations behind them are repeated.
            step = int(lines[-1]["step"]) if lines else 0
            self._evals = {key for key in self._evals if key[1] <= step}
            self._observer.on_start(
                run=self._run.key, first_step=step, num_steps=self._num_steps, earlier=lines
            )
            lines = []
        for line in lines:
            self._observer.on_step(line)
        self._take_events(self._events.read_records()[1], is_first=is_first)
        self._take_evals(is_first=is_first)

    def _take_events(self, lines: Sequence[dict[str, Any]], *, is_first: bool) -> None:
        new = [line for line in lines if json.dumps(line) not in self._shown_events]
        self._shown_events.update(map(json.dumps, new))
        events = [to_event(line, EVENTS) for line in new]
        if is_first:
            events = [event for event in events if self._observer.is_shown(event)]
            more = len(events) - EARLIER_SHOWN
            if more > 0:
                self._observer.note(f"{more} earlier events are in {self._run.record.describe(EVENTS)}")
            events = events[-EARLIER_SHOWN:]
        for event in events:
            self._observer.on_event(event)

    def _take_evals(self, *, is_first: bool) -> None:
        results = [
            result for result in self._run.read_results() if (result.task, result.step) not in self._evals
        ]
        self._evals.update((result.task, result.step) for result in results)
        # Of the earlier ones only the first and the last.
        for result in results[:1] + results[1:][-1:] if is_first else results:
            if result.greedy.accuracy is not None:
                self._observer.on_eval(summarize(result, result.greedy.accuracy))


def watch(
    watcher: Watcher,
    observer: TerminalObserver,
    find_end: Callable[[], RunEnd | None],
    *,
    pause: Callable[[], None],
) -> RunEnd:
    """Show a run until it ends; return its end."""
    silence = ""
    while True:
        end = None
        try:
            # Read before the record, so that the last lines before the end are still shown.
            end = find_end()
            watcher.look()
            silence = ""
        except StoreError as error:
            if str(error) != silence:
                observer.note(f"notice: {error}")
            silence = str(error)
        if end is not None and not silence:
            observer.on_end(cause=end.cause)
            return end
        pause()


def summarize(result: EvalResult, accuracy: float) -> EvalSummary:
    """Convert a result for an observer."""
    return EvalSummary(
        step=result.step,
        num_examples=result.num_examples,
        greedy_accuracy=accuracy,
        greedy_low=result.greedy.low,
        greedy_high=result.greedy.high,
        sampled_accuracy=None if result.sampled is None else result.sampled.accuracy,
        invalid_cause=None if result.is_valid else result.verdict,
    )
