"""A run as lines of JSON, for programs: `strop train --json`.

    {"type":"start","run":PATH,"first_step":0,"num_steps":40}
    {"type":"step","step":1,"metrics":{NAME:NUMBER}}
    {"type":"event","kind":..,"step":..,"cause":..,"detail":..,"example_ids":[..],"num_examples":..}
    {"type":"eval","step":..,"num_examples":..,"accuracy":..,"low":..,"high":..,"sampled":..,"invalid":..}
    {"type":"end","cause":"done","exit_code":0,"message":"","run":PATH,"report":PATH}

There is exactly one `end`, and it is always the last line.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from threading import Lock
from typing import Any, TextIO

from strop.errors import EXIT_DONE, EXIT_FAILED, StropError
from strop.record import Event
from strop.train import EvalSummary, Observer


class JsonObserver:
    """Writes a run's lines to a stream, and forwards every call to another observer. An `Observer`."""

    def __init__(self, stream: TextIO, beside: Observer) -> None:
        self._stream: TextIO | None = stream
        self._beside = beside
        self._lock = Lock()
        self.facts: dict[str, Any] = {}
        """Further fields of the last line."""

    def on_start(self, *, run: str, first_step: int, num_steps: int) -> None:
        """Write the run's directory and progress."""
        self._beside.on_start(run=run, first_step=first_step, num_steps=num_steps)
        self._write("start", run=run, first_step=first_step, num_steps=num_steps)

    def on_step(self, metrics: Mapping[str, float]) -> None:
        """Write a step's metrics, as metrics.jsonl has them."""
        self._beside.on_step(metrics)
        values = {name: value for name, value in metrics.items() if name != "step"}
        self._write("step", step=int(metrics["step"]), metrics=values)

    def on_event(self, event: Event) -> None:
        """Write an event of any kind."""
        self._beside.on_event(event)
        num_examples = len(event.example_ids) if event.num_examples is None else event.num_examples
        self._write(
            "event",
            kind=event.kind.value,
            step=event.step,
            cause=event.cause,
            detail=event.detail,
            example_ids=list(event.example_ids),
            num_examples=num_examples,
        )

    def on_eval(self, summary: EvalSummary) -> None:
        """Write greedy held-out accuracy with its 95% interval, and the accuracy of sampled replies."""
        self._beside.on_eval(summary)
        self._write(
            "eval",
            step=summary.step,
            num_examples=summary.num_examples,
            accuracy=summary.greedy_accuracy,
            low=summary.greedy_low,
            high=summary.greedy_high,
            sampled=summary.sampled_accuracy,
            invalid=summary.invalid_cause,
        )

    def on_end(self, *, cause: str) -> None:
        """Write nothing: the command is not done yet, and the last line has the cause."""
        self._beside.on_end(cause=cause)

    def close(self, error: BaseException | None) -> None:
        """Write the last line: done, or the error that ended the command."""
        code = error.exit_code if isinstance(error, StropError) else EXIT_FAILED
        self._write(
            "end",
            cause="done" if error is None else type(error).__name__,
            exit_code=EXIT_DONE if error is None else code,
            message="" if error is None else str(error),
            **self.facts,
        )

    def _write(self, type_: str, /, **content: Any) -> None:
        if self._stream is None:
            return
        line = json.dumps({"type": type_, **content}, allow_nan=False, separators=(",", ":"))
        try:
            # A watchdog calls this from another thread.
            with self._lock:
                self._stream.write(line + "\n")
                self._stream.flush()
        except BrokenPipeError:
            # The reader has gone; the run is worth more than its lines.
            self._stream = None


@contextmanager
def json_lines(beside: Observer) -> Iterator[JsonObserver]:
    """Reserve standard output for a run's lines during the block, and always write the last one.

    Other output meanwhile, by a task's code or a library, goes to standard error.
    """
    lines = sys.stdout
    is_real = lines is sys.__stdout__
    if is_real:
        sys.stdout.flush()
        # Programs that the run starts inherit descriptor 1, now standard error; this copy is closed below.
        lines = os.fdopen(os.dup(1), "w", encoding="utf-8")
        os.dup2(2, 1)
    observer = JsonObserver(lines, beside)
    before, sys.stdout = sys.stdout, sys.stderr
    error: BaseException | None = None
    try:
        yield observer
    except BaseException as raised:
        error = raised
        raise
    finally:
        observer.close(error)
        sys.stdout = before
        if is_real:
            os.dup2(lines.fileno(), 1)
            # Closing flushes lines that a vanished reader did not take.
            with suppress(BrokenPipeError):
                lines.close()
