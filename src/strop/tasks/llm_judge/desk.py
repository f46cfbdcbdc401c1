"""How often a judge is asked: calls at once, calls per second, calls in all, over all worker processes.

The count lives in a file without a name that forked workers share. Places are locks on its bytes, which
the kernel gives back when their holder is killed: no dead worker keeps a place.
"""

from __future__ import annotations

import fcntl
import os
import struct
import tempfile
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

_STATE = struct.Struct("=Qd")
"""Calls begun, and when the next one may begin (seconds of the machine's monotonic clock)."""
_FIRST_PLACE = _STATE.size
_POLL_S = 0.01


@dataclass(frozen=True, kw_only=True, slots=True)
class DeskRules:
    """What a judge's calls may use."""

    num_at_once: int
    calls_per_s: float | None
    max_calls: int


class CallDesk:
    """Hands out permission to call. Build it before workers are forked; they share it."""

    def __init__(self, rules: DeskRules) -> None:
        self._rules = rules
        self._file = _open_nameless()
        weakref.finalize(self, os.close, self._file)
        os.pwrite(self._file, _STATE.pack(0, 0.0), 0)

    @property
    def num_calls(self) -> int:
        """Calls begun so far, in all processes."""
        with _locked(self._file, 0):
            return self._read()[0]

    @contextmanager
    def place(self, wait_limit_s: float) -> Iterator[bool]:
        """Hold one of the places while the block runs. False: none was free in time."""
        deadline = time.monotonic() + wait_limit_s
        while (held := self._try_places()) is None and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        try:
            yield held is not None
        finally:
            if held is not None:
                fcntl.lockf(self._file, fcntl.LOCK_UN, 1, held)

    def begin_call(self, wait_limit_s: float) -> str | None:
        """Count a call, and wait until the rate allows it. Returns a kind of failure, or None."""
        with _locked(self._file, 0):
            num_calls, next_at = self._read()
            if num_calls >= self._rules.max_calls:
                return "judge_budget"
            now = time.monotonic()
            begin_at = max(now, next_at)
            if begin_at - now > wait_limit_s:
                return "judge_busy"
            gap_s = 0.0 if self._rules.calls_per_s is None else 1.0 / self._rules.calls_per_s
            os.pwrite(self._file, _STATE.pack(num_calls + 1, begin_at + gap_s), 0)
        time.sleep(max(0.0, begin_at - time.monotonic()))
        return None

    def _try_places(self) -> int | None:
        for place in range(_FIRST_PLACE, _FIRST_PLACE + self._rules.num_at_once):
            try:
                fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, place)
            except OSError:
                continue
            return place
        return None

    def _read(self) -> tuple[int, float]:
        num_calls, next_at = _STATE.unpack(os.pread(self._file, _STATE.size, 0))
        return int(num_calls), float(next_at)


@contextmanager
def _locked(file: int, place: int) -> Iterator[None]:
    fcntl.lockf(file, fcntl.LOCK_EX, 1, place)
    try:
        yield
    finally:
        fcntl.lockf(file, fcntl.LOCK_UN, 1, place)


def _open_nameless() -> int:
    """Return a file that no folder names, in memory where the system can."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("strop-judge")
    file, path = tempfile.mkstemp()
    os.unlink(path)
    return file
