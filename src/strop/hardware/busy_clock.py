"""The total time during which at least one operation runs."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

Interval = tuple[float, float]
"""Begin and end on a clock, in seconds."""
MAX_INTERVALS = 4096
"""Limit of stored intervals; beyond it those with the smallest pauses between them are joined."""


class BusyClock:
    """Measure the time during which at least one operation runs.

    The durations of overlapping and queued operations cannot be added up.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._num_running = 0
        self._since = 0.0
        self._busy_s = 0.0
        self._ended: list[Interval] = []
        self._taken_at = 0.0

    @contextmanager
    def running(self) -> Iterator[None]:
        """Count the time inside."""
        if self._num_running == 0:
            self._since = self._taken_at = self._clock()
        self._num_running += 1
        try:
            yield
        finally:
            self._num_running -= 1
            if self._num_running == 0:
                now = self._clock()
                self._busy_s += now - self._since
                self.add((self._taken_at, now))

    def add(self, interval: Interval) -> None:
        """Add the interval of an operation elsewhere, for `take_intervals` only."""
        self._ended.append(interval)
        if len(self._ended) >= MAX_INTERVALS:
            self._ended = join_intervals(self._ended, MAX_INTERVALS // 2)

    def take_s(self) -> float:
        """Return the busy seconds completed since the last call, and reset."""
        busy_s, self._busy_s = self._busy_s, 0.0
        return busy_s

    def take_intervals(self, most: int) -> list[Interval]:
        """Return the busy intervals since the last call, up to now, and reset.

        If there are more than `most`, those with the smallest pauses between them are joined.
        """
        intervals, self._ended = self._ended, []
        if self._num_running:
            now = self._clock()
            intervals.append((self._taken_at, now))
            self._taken_at = now
        return join_intervals(intervals, most)


def join_intervals(intervals: Iterable[Interval], most: int) -> list[Interval]:
    """Return the union of intervals, in order, as at most `most` intervals."""
    joined: list[Interval] = []
    for begin, end in sorted(intervals):
        if joined and begin <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(end, joined[-1][1]))
        else:
            joined.append((begin, end))
    if len(joined) <= most:
        return joined
    pauses = sorted(range(1, len(joined)), key=lambda index: joined[index][0] - joined[index - 1][1])
    kept = sorted(pauses[len(joined) - most :])
    edges = [0, *kept, len(joined)]
    return [(joined[start][0], joined[stop - 1][1]) for start, stop in itertools.pairwise(edges)]
