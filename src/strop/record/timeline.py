"""The timeline of a run: spans of learner, engines, environments and verifier, one JSON line a step.

    {"step":12,"spans":[{"lane":"learner","name":"learn","start":1764271234.1,"end":1764271236.4}, ...]}

Times are Unix seconds. Spans are measured on a monotonic clock, and the wall clock is read once per line, so
that setting the clock changes no duration. The evaluation and the checkpoint after a step have separate lines
with the same step.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from strop.record.events import JsonLines

LEARNER, ENGINE, ENVIRONMENTS, VERIFIER = "learner", "engine", "environments", "verifier"
"""Lanes. Each of several engines has a lane, such as `engine 3`."""
MAX_GROUP_SPANS = 512
"""Per line; of more groups the longest are kept, so that a line stays below 100 kB."""
_SHORTEST_S = 0.0005
"""Shorter spans are left out."""


class Timeline(JsonLines):
    """The timeline of one run."""

    def __init__(
        self,
        path: Path,
        *,
        clock: Callable[[], float] = time.perf_counter,
        wall: Callable[[], float] = time.time,
    ) -> None:
        super().__init__(path)
        self._clock = clock
        self._wall = wall
        self._spans: list[tuple[str, str, float, float, Mapping[str, Any] | None]] = []

    def add(
        self, lane: str, name: str, start: float, end: float, detail: Mapping[str, Any] | None = None
    ) -> None:
        """Keep a span for the next line. `start` and `end`: seconds of `time.perf_counter`."""
        if end - start >= _SHORTEST_S:
            self._spans.append((lane, name, start, end, detail))

    @contextmanager
    def span(self, lane: str, name: str) -> Iterator[None]:
        """Add the block's time as a span, even if it raises."""
        start = self._clock()
        try:
            yield
        finally:
            self.add(lane, name, start, self._clock())

    def write(self, step: int) -> None:
        """Write the spans since the last line, if any.

        Raises: StoreError if the disk fails.
        """
        spans, self._spans = self._spans, []
        groups = [span for span in spans if span[0] == ENVIRONMENTS]
        if len(groups) > MAX_GROUP_SPANS:
            groups.sort(key=lambda span: span[2] - span[3])
            left_out = {id(span) for span in groups[MAX_GROUP_SPANS:]}
            spans = [span for span in spans if id(span) not in left_out]
        if not spans:
            return
        begun_at = self._wall() - self._clock()
        self.append_line(
            {
                "step": step,
                "spans": [
                    {
                        "lane": lane,
                        "name": name,
                        "start": round(begun_at + start, 3),
                        "end": round(begun_at + end, 3),
                        **({} if detail is None else {"detail": dict(detail)}),
                    }
                    for lane, name, start, end, detail in spans
                ],
            }
        )
