"""Numbers of a run, one JSON line per step: `{"step":12,"reward/mean":0.5,...}`.

A number that was not computed is absent. Absent is not zero: a reader must be able to tell a loss of
0 from a step without one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from strop.errors import UnfitRecord, explain_refusal
from strop.io.json_lines import JsonLines


class MetricsLog:
    """The metrics file of one run; one writer at a time."""

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
                    explain_refusal(
                        f"metric {name}={value!r} at step {step}",
                        allowed="finite numbers under names other than 'step'; uncomputed ones are left out",
                        next_step="report the cause as an event and leave the metric out",
                    )
                )
            line[name] = value
        if self._last_step is None:
            self._last_step = max((content["step"] for content in self._lines.read()), default=-1)
        if step <= self._last_step:
            raise UnfitRecord(
                explain_refusal(
                    f"metrics of step {step} come after those of step {self._last_step}",
                    allowed="one line per step, in order",
                    next_step="truncate the log to the checkpoint before training goes on",
                )
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
