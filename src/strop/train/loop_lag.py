"""Whether the event loop keeps up: how late it is, what keeps it, and pauses that it need not make.

A loop that is blocked answers nobody: engines wait, deadlines pass unseen, and what looks like a hang is
one long call. A thread asks the loop for a sign at short intervals. If none comes for `limit_s`, it reports
the stack of the loop's thread while the call is still under way, once for each time that the loop is kept.
"""

from __future__ import annotations

import asyncio
import gc
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager

ASK_S = 0.05
_NEVER = 1 << 30
LIMIT_S = 2.0
"""A loop that is later than that is an alarm."""


class LoopLagWatch:
    """Watches the event loop that it is entered in. `on_lag` is called in the watching thread."""

    def __init__(self, on_lag: Callable[[float, str], None], *, limit_s: float = LIMIT_S) -> None:
        """Take what to do with seconds of lag and the stack of the loop's thread, as text."""
        self._on_lag = on_lag
        self._limit_s = limit_s
        self._stopped = threading.Event()
        self._answered = threading.Event()
        self._lock = threading.Lock()
        self._max_s = 0.0
        self._late_s = 0.0
        self._taken_at = time.monotonic()

    def __enter__(self) -> LoopLagWatch:
        """Begin to watch the running loop, from its own thread."""
        self._loop = asyncio.get_running_loop()
        self._loop_thread = threading.get_ident()
        self._thread = threading.Thread(target=self._watch, name="loop-lag", daemon=True)
        self._taken_at = time.monotonic()
        self._thread.start()
        return self

    def __exit__(self, *details: object) -> None:
        """Stop watching."""
        self._stopped.set()
        self._answered.set()
        self._thread.join()

    def take(self) -> dict[str, float]:
        """Return the lag since the last call, as metrics of a step.

        `loop_lag_s` is the longest time that a sign took to come, `loop_late_frac` the share of the time in
        which signs took longer than `ASK_S`.
        """
        now = time.monotonic()
        with self._lock:
            # A call that began before the last look may have ended after it.
            late_frac = min(1.0, self._late_s / max(now - self._taken_at, 1e-9))
            lag = {"loop_lag_s": self._max_s, "loop_late_frac": late_frac}
            self._max_s = self._late_s = 0.0
            self._taken_at = now
        return lag

    def _watch(self) -> None:
        while True:
            # Before the look at the stop: who stops this answers as well, and nobody else may be left to.
            self._answered.clear()
            if self._stopped.wait(ASK_S):
                return
            asked_at = time.monotonic()
            try:
                self._loop.call_soon_threadsafe(self._answered.set)
            except RuntimeError:
                return  # The loop is closed.
            if not self._answered.wait(self._limit_s):
                self._on_lag(time.monotonic() - asked_at, self._describe_stack())
                self._answered.wait()
            waited_s = time.monotonic() - asked_at
            with self._lock:
                self._max_s = max(self._max_s, waited_s)
                self._late_s += waited_s if waited_s > ASK_S else 0.0

    def _describe_stack(self) -> str:
        frame = sys._current_frames().get(self._loop_thread)
        return "".join(traceback.format_stack(frame)) if frame is not None else ""


@contextmanager
def full_collections_by_hand() -> Iterator[None]:
    """Leave it to the caller when Python looks for cycles among old objects (`gc.collect`).

    By itself it walks through every rollout in flight, again and again: with 40,000 of them that was half of
    the orchestrator's processor time, in pauses of up to 1.7 s, and found nothing, because rollouts that end
    as they should leave no cycles. New objects are looked at once, as ever, so that a cycle that holds a
    tensor does not live for a whole step. What exists at the beginning is never walked through.
    """
    before = gc.get_threshold()
    gc.freeze()
    gc.set_threshold(before[0], _NEVER, _NEVER)
    try:
        yield
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()
