"""A thread that ends the process when nothing has moved for too long.

A hung wait is worse than a crash: it costs the night. The watchdog says which stage stalled and
since when, prints the stacks of all threads into the run's log, and ends the process at once, so
that the children, which die with it, go too.
"""

from __future__ import annotations

import faulthandler
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from strop.errors import EXIT_FAILED
from strop.hardware.orphans import show_stacks_of_children

TELL_LIMIT_S = 10.0
"""How long telling of a stall may take: longer than children have."""
CHILDREN_LIMIT_S = 3.0
"""How long children may take to write their stacks."""


class Watchdog:
    """Watches that `progress` is called often enough."""

    def __init__(
        self,
        max_stall_s: float | None,
        on_stall: Callable[[str, float], None],
        *,
        log_path: Path | None = None,
    ) -> None:
        self._log_path = log_path
        self._max_stall_s = max_stall_s
        self._on_stall = on_stall
        self._stage = "start"
        self._moved_at = time.monotonic()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def __enter__(self) -> Watchdog:
        """Begin to watch, unless no bound is set."""
        self.progress("start")
        if self._max_stall_s is not None:
            self._thread.start()
        return self

    def __exit__(self, *details: object) -> None:
        """Stop watching."""
        self._stopped.set()
        if self._thread.is_alive():
            self._thread.join()

    def progress(self, stage: str) -> None:
        """Say that work goes on, and which stage begins."""
        self._stage = stage
        self._moved_at = time.monotonic()

    def _watch(self) -> None:
        assert self._max_stall_s is not None
        while not self._stopped.wait(min(1.0, self._max_stall_s / 4)):
            stalled_s = time.monotonic() - self._moved_at
            if stalled_s > self._max_stall_s:
                faulthandler.dump_traceback(file=sys.__stderr__ or sys.stderr, all_threads=True)
                # Whoever is told may hang or fail too, on the very disk that everything waits for.
                telling = threading.Thread(target=self._tell, args=(self._stage, stalled_s), daemon=True)
                telling.start()
                telling.join(TELL_LIMIT_S)
                # Not sys.exit: the main thread is the one that hangs.
                os._exit(EXIT_FAILED)

    def _tell(self, stage: str, stalled_s: float) -> None:
        try:
            self._on_stall(stage, stalled_s)
        finally:
            self._dump_stacks()

    def _dump_stacks(self) -> None:
        """Write the stacks of all threads to the run's log, and let children write theirs."""
        if self._log_path is not None and self._log_path.parent.is_dir():
            with self._log_path.open("a") as log:
                faulthandler.dump_traceback(file=log, all_threads=True)
        # The wait may be for one of them: an engine, a judge.
        show_stacks_of_children(CHILDREN_LIMIT_S)
