"""The metrics and the events of a run, one JSON line each.

Sizes of events are bounded, because logs have filled disks: long details are cut, many example ids are
counted, and a cause that repeats is written 100 times and then at each power of two.
"""

from __future__ import annotations

import errno
import json
import math
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from strop.errors import CorruptRecord, UnfitRecord
from strop.io.atomic import explain_write_failure, write_bytes_atomically

MAX_DETAIL_CHARACTERS = 4096
MAX_EXAMPLE_IDS = 64
NUM_WRITTEN_IN_FULL = 100
ACCEPTED = "accepted although it failed: "
"""Prefix of the detail of a gate's check that failed and was accepted."""


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
    """How often this kind and cause have happened in this process; repeats are thinned out."""
    at: float = 0.0
    """Unix seconds; set when it is written."""


class JsonLines:
    """An append-only file of JSON lines, each with an integer `step`; one writer at a time.

    An append is one write, so a kill tears at most the last line, and the next opening removes it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._descriptor: int | None = None

    def append_line(self, content: dict[str, Any]) -> None:
        """Write one line; the operating system has it when this returns.

        Raises: StoreError if the disk is full or not writable; ValueError for a value that JSON lacks.
        """
        line = json.dumps(content, allow_nan=False, separators=(",", ":")).encode() + b"\n"
        descriptor = self._open()
        end = os.fstat(descriptor).st_size
        try:
            if os.write(descriptor, line) != len(line):
                # A short write is how a disk that fills up in the middle of a line shows itself.
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            os.ftruncate(descriptor, end)
            raise explain_write_failure(error, self.path) from error

    def read_lines(self) -> list[dict[str, Any]]:
        """Return all complete lines; a torn last one is left out.

        Raises: CorruptRecord if a line before the last is not a JSON object with a step.
        """
        return [content for _, content in self._scan()]

    def truncate_after(self, step: int) -> int:
        """Drop the lines of later steps and a torn end; return how many complete lines were dropped.

        Raises: CorruptRecord if a line before the last is not a JSON object with a step.
        """
        lines = list(self._scan())
        kept = [line for line, content in lines if content["step"] <= step]
        data = b"".join(kept)
        if not self.path.exists() or len(data) == self.path.stat().st_size:
            return 0
        self.close()
        write_bytes_atomically(self.path, data)
        return len(lines) - len(kept)

    def sync(self) -> None:
        """Make everything appended durable against power loss."""
        if self._descriptor is not None:
            os.fsync(self._descriptor)

    def close(self) -> None:
        """Close the file; the next append opens it again."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _open(self) -> int:
        if self._descriptor is None:
            try:
                self._descriptor = os.open(
                    self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644
                )
            except OSError as error:
                raise explain_write_failure(error, self.path) from error
            # Drop a line that a kill tore.
            size = os.fstat(self._descriptor).st_size
            if size and os.pread(self._descriptor, 1, size - 1) != b"\n":
                os.ftruncate(self._descriptor, self.path.read_bytes().rfind(b"\n") + 1)
        return self._descriptor

    def _scan(self) -> Iterator[tuple[bytes, dict[str, Any]]]:
        data = self.path.read_bytes() if self.path.exists() else b""
        # After the last line end there is nothing, or a line that a kill tore.
        for index, line in enumerate(data.split(b"\n")[:-1]):
            yield line + b"\n", parse_line(line, f"{self.path}, line {index + 1}")


def parse_line(line: bytes, place: str) -> dict[str, Any]:
    """Parse a line of a log. Raises: CorruptRecord if it is not a JSON object with a step."""
    try:
        content = json.loads(line)
        if isinstance(content, dict) and isinstance(content.get("step"), int):
            return content
    except ValueError:
        pass
    raise CorruptRecord(
        f"{place}, is not a record: {line[:60]!r}",
        allowed="one JSON object with an integer step per line",
        next_step="mend that line, or restore the file from a copy; the rest of it is intact",
    )


class EventLog(JsonLines):
    """The events file of one run."""

    def __init__(self, path: Path, *, clock: Callable[[], float] = time.time) -> None:
        super().__init__(path)
        self._clock = clock
        self._num_seen: Counter[tuple[EventKind, str]] = Counter()

    def append(self, event: Event) -> bool:
        """Write one event; return False if a frequent cause was only counted.

        Raises: StoreError if the disk fails.
        """
        self._num_seen[event.kind, event.cause] += 1
        occurrence = self._num_seen[event.kind, event.cause]
        is_power_of_two = occurrence & (occurrence - 1) == 0
        if occurrence > NUM_WRITTEN_IN_FULL and not is_power_of_two:
            return False
        num_examples = len(event.example_ids) if event.num_examples is None else event.num_examples
        self.append_line(
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
        return [to_event(content, self.path) for content in self.read_lines()]


def to_event(content: Mapping[str, Any], place: Path | str) -> Event:
    """Parse an event; `place` names its file. Raises: CorruptRecord if it is not an event."""
    try:
        values = dict(content)
        kind, ids = EventKind(str(values.pop("kind"))), values.pop("example_ids")
        assert isinstance(ids, list)
        return Event(kind=kind, example_ids=tuple(ids), **values)
    except (KeyError, TypeError, ValueError, AssertionError) as error:
        raise CorruptRecord(
            f"{place} holds a line that is not an event ({error})",
            allowed="the fields of an event, with kind one of " + ", ".join(EventKind),
            next_step="delete that line; the rest of the file is intact",
        ) from error


def _cut(detail: str) -> str:
    if len(detail) <= MAX_DETAIL_CHARACTERS:
        return detail
    num_cut = len(detail) - MAX_DETAIL_CHARACTERS
    return f"{detail[:MAX_DETAIL_CHARACTERS]} ... {num_cut} characters cut"


class MetricsLog(JsonLines):
    """The metrics file of one run, one line per step: `{"step":12,"reward/mean":0.5}`.

    A number that was not computed is absent: a reader must be able to tell a loss of 0 from no loss.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path)
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
            self._last_step = max((content["step"] for content in self.read_lines()), default=-1)
        if step <= self._last_step:
            raise UnfitRecord(
                f"metrics of step {step} come after those of step {self._last_step}",
                allowed="one line per step, in order",
                next_step="truncate the log to the checkpoint before training goes on",
            )
        self.append_line(line)
        self._last_step = step

    read = JsonLines.read_lines

    def truncate_after(self, step: int) -> int:
        """Drop the lines of later steps, for a resume at `step`; return how many were dropped."""
        self._last_step = None
        return super().truncate_after(step)
