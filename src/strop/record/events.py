"""The metrics and the events of a run, one JSON line each.

Sizes of events are bounded, because logs have filled disks: long details are cut, many example ids are
counted, and a cause that repeats is written 100 times and then at each power of two.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from strop.errors import CorruptRecord, UnfitRecord
from strop.io.json_lines import JsonLines

MAX_DETAIL_CHARACTERS = 4096
MAX_EXAMPLE_IDS = 64
NUM_WRITTEN_IN_FULL = 100


class EventKind(StrEnum):
    """Which part of a run an event belongs to."""

    GATE = "gate"
    """A check before the first step, passed or not."""
    RESUME = "resume"
    """Training went on from a checkpoint."""
    CHECKPOINT = "checkpoint"
    """A checkpoint or export was written, refused or removed."""
    TRIPWIRE = "tripwire"
    """A measured value left its bounds."""
    ROLLOUT_LOST = "rollout_lost"
    """Rollouts could not be scored and were left out."""
    EVALUATION = "evaluation"
    """Held-out examples were judged."""
    NOTICE = "notice"
    """Something the user must know, for example a substituted model."""
    STOP = "stop"
    """The run ended: done, by a signal, a tripwire or an error."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Event:
    """One thing that happened."""

    kind: EventKind
    step: int
    """Steps completed when it happened."""
    cause: str
    """A short fixed word for counting and searching: 'zero_variance', 'sigterm'."""
    detail: str = ""
    """The sentence for a person."""
    trace: str = ""
    """The traceback behind it, for logs; a terminal does not show it."""
    example_ids: tuple[str, ...] = ()
    """The examples concerned, the first 64 at most."""
    num_examples: int | None = None
    """How many examples are concerned; None means as many as `example_ids`."""
    occurrence: int = 1
    """How often kind and cause have now happened in this process; repeats are thinned out."""
    at: float = 0.0
    """Unix seconds; set when it is written."""


class EventLog:
    """The events file of one run; one writer at a time."""

    def __init__(self, path: Path, *, clock: Callable[[], float] = time.time) -> None:
        self._lines = JsonLines(path)
        self._clock = clock
        self._num_seen: Counter[tuple[EventKind, str]] = Counter()

    def append(self, event: Event) -> bool:
        """Write one event; return False where a frequent cause was only counted.

        Raises: StoreError if the disk fails.
        """
        self._num_seen[event.kind, event.cause] += 1
        occurrence = self._num_seen[event.kind, event.cause]
        is_power_of_two = occurrence & (occurrence - 1) == 0
        if occurrence > NUM_WRITTEN_IN_FULL and not is_power_of_two:
            return False
        num_examples = len(event.example_ids) if event.num_examples is None else event.num_examples
        self._lines.append(
            {
                "kind": event.kind.value,
                "step": event.step,
                "cause": event.cause,
                "detail": _cut(event.detail),
                "trace": _cut(event.trace),
                "example_ids": list(event.example_ids[:MAX_EXAMPLE_IDS]),
                "num_examples": num_examples,
                "occurrence": occurrence,
                "at": self._clock(),
            }
        )
        return True

    def read(self) -> list[Event]:
        """Return the events in order; a torn last line is left out.

        Raises: CorruptRecord if a line is not an event.
        """
        return [self._to_event(content) for content in self._lines.read()]

    def read_until(self, step: int) -> bytes:
        """Return the events of steps up to `step` as they stand in the file."""
        return self._lines.read_until(step)

    def truncate_after(self, step: int) -> int:
        """Drop the events of later steps, for a resume at `step`; return how many went."""
        return self._lines.truncate_after(step)

    def sync(self) -> None:
        """Make what was appended durable; a checkpoint calls this first."""
        self._lines.sync()

    def close(self) -> None:
        """Close the file."""
        self._lines.close()

    def _to_event(self, content: dict[str, object]) -> Event:
        try:
            values = dict(content)
            kind, ids = EventKind(str(values.pop("kind"))), values.pop("example_ids")
            assert isinstance(ids, list)
            return Event(kind=kind, example_ids=tuple(ids), **values)  # type: ignore[arg-type]
        except (KeyError, TypeError, ValueError, AssertionError) as error:
            raise CorruptRecord(
                f"{self._lines.path} holds a line that is not an event ({error})",
                allowed="the fields of an event, with kind one of " + ", ".join(EventKind),
                next_step="delete that line; the rest of the file is intact",
            ) from error


def _cut(detail: str) -> str:
    if len(detail) <= MAX_DETAIL_CHARACTERS:
        return detail
    num_cut = len(detail) - MAX_DETAIL_CHARACTERS
    return f"{detail[:MAX_DETAIL_CHARACTERS]} ... {num_cut} characters cut"


class MetricsLog:
    """The metrics file of one run, one line per step: `{"step":12,"reward/mean":0.5}`. One writer at a time.

    A number that was not computed is absent: a reader must be able to tell a loss of 0 from no loss.
    """

    def __init__(self, path: Path) -> None:
        self._lines = JsonLines(path)
        self._last_step: int | None = None

    def append(self, step: int, values: Mapping[str, float]) -> None:
        """Write the line of one step.

        Raises: UnfitRecord if a value is not a finite number, a name is `step`, or the step is not
        later than the last one written; StoreError if the disk fails.
        """
        line: dict[str, Any] = {"step": step}
        for name, value in values.items():
            if name == "step" or isinstance(value, bool) or not math.isfinite(value):
                raise UnfitRecord(
                    f"metric {name}={value!r} at step {step}",
                    allowed="finite numbers under names other than 'step'; uncomputed ones are left out",
                    next_step="report the cause as an event and leave the metric out",
                )
            line[name] = value
        if self._last_step is None:
            self._last_step = max((content["step"] for content in self._lines.read()), default=-1)
        if step <= self._last_step:
            raise UnfitRecord(
                f"metrics of step {step} come after those of step {self._last_step}",
                allowed="one line per step, in order",
                next_step="truncate the log to the checkpoint before training goes on",
            )
        self._lines.append(line)
        self._last_step = step

    def read(self) -> list[dict[str, float]]:
        """Return the lines in order, each with its `step`; a torn last line is left out.

        Raises: CorruptRecord if an earlier line is damaged.
        """
        return self._lines.read()

    def read_until(self, step: int) -> bytes:
        """Return the lines of steps up to `step` as they stand in the file."""
        return self._lines.read_until(step)

    def truncate_after(self, step: int) -> int:
        """Drop the lines of later steps, for a resume at `step`; return how many went."""
        self._last_step = None
        return self._lines.truncate_after(step)

    def sync(self) -> None:
        """Make what was appended durable; a checkpoint calls this first."""
        self._lines.sync()

    def close(self) -> None:
        """Close the file."""
        self._lines.close()
