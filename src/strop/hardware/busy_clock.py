"""The time in which something is under way, however much of it at once."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class BusyClock:
    """Adds up the time between the first that begins and the last that ends.

    Work that overlaps and waits for its turn has durations that add up to anything.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._num_running = 0
        self._since = 0.0
        self._busy_s = 0.0

    @contextmanager
    def running(self) -> Iterator[None]:
        """Count the time inside."""
        if self._num_running == 0:
            self._since = self._clock()
        self._num_running += 1
        try:
            yield
        finally:
            self._num_running -= 1
            if self._num_running == 0:
                self._busy_s += self._clock() - self._since

    def take_s(self) -> float:
        """Return the time (seconds) that has ended since this was last asked for, and start anew."""
        busy_s, self._busy_s = self._busy_s, 0.0
        return busy_s
