"""Sending no faster than allowed, so that others have the rest of a connection."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable


class Pace:
    """Spreads what is sent over time. Safe for several threads."""

    def __init__(
        self,
        max_bytes_per_s: float | None,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._max_bytes_per_s = max_bytes_per_s
        self._clock = clock
        self._sleep = sleep
        self._lock = threading.Lock()
        self._free_at = 0.0

    def wait_for(self, num_bytes: int) -> None:
        """Wait until so many bytes may be sent: when all that was let through before had its time."""
        if self._max_bytes_per_s is None:
            return
        with self._lock:
            now = self._clock()
            wait_s = max(self._free_at - now, 0.0)
            self._free_at = now + wait_s + num_bytes / self._max_bytes_per_s
        if wait_s:
            self._sleep(wait_s)
