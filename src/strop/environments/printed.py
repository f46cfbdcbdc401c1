"""The log of environments' printed output, written attempt by attempt for people; the model never sees it.

A run names the file (`keep_prints`). In the rollout process `capturing` separates the output of concurrent
attempts, by a context variable; the output of a sandbox or of a guest's process is logged by the code that
reads it (`log_output`). Child processes and C libraries bypass all this and write to the run's own log.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import IO, Any

from strop.sandbox.contract import KIB, MIB

END_BYTES = 8 * KIB
"""Bytes of the beginning, and of the end, of each stream that are kept for an attempt."""
STREAMS = ("stdout", "stderr")
_MAX_LOG_BYTES = 8 * MIB
_printed = logging.getLogger("strop.environments.printed")


class CapturedOutput:
    """The printed output of one attempt: beginning and end of each stream."""

    def __init__(self, about: str) -> None:
        """`about` names the attempt in the log."""
        self._about = about
        self._heads = dict.fromkeys(STREAMS, b"")
        self._tails = dict.fromkeys(STREAMS, b"")
        self._omitted = dict.fromkeys(STREAMS, 0)

    def add(self, stream: str, data: bytes) -> None:
        """Add output of a stream."""
        room = END_BYTES - len(self._heads[stream])
        self._heads[stream] += data[:room]
        tail = self._tails[stream] + data[room:]
        self._tails[stream] = tail[-END_BYTES:]
        self._omitted[stream] += len(tail) - len(self._tails[stream])

    def log(self) -> None:
        """Write the kept output to the log."""
        for stream in STREAMS:
            data = self._heads[stream] + self._tails[stream]
            log_output(self._about, stream, data, self._omitted[stream])


def log_output(about: str, stream: str, data: bytes, num_omitted: int = 0) -> None:
    """Write the output of a stream to the log; `num_omitted` bytes of its middle were left out."""
    if data:
        note = f" ({num_omitted} bytes left out in the middle)" if num_omitted else ""
        _printed.info("%s %s%s:\n%s", about, stream, note, data.decode(errors="replace").rstrip())


_current: ContextVar[CapturedOutput | None] = ContextVar("captured_output", default=None)


@contextmanager
def capturing(captured: CapturedOutput | None) -> Iterator[None]:
    """Capture the output of a block, and of the tasks and threads that it starts and waits for."""
    token = _current.set(captured)
    try:
        yield
    finally:
        _current.reset(token)


class _Stream:
    """A stream of this process; within `capturing`, its output goes to that attempt."""

    def __init__(self, name: str, behind: IO[str]) -> None:
        self.name = name
        self.behind = behind

    def write(self, text: str) -> int:
        """Write a text."""
        captured = _current.get()
        if captured is None:
            return self.behind.write(text)
        captured.add(self.name, text.encode(errors="replace"))
        return len(text)

    def writelines(self, lines: Any) -> None:
        """Write texts."""
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.behind, name)


def keep_prints(where: Path | IO[str]) -> None:
    """Log the printed output of each attempt at its end, from now on.

    A file holds `_MAX_LOG_BYTES` at most; the previous one is kept as a backup.
    """
    forget_prints()
    handler: logging.Handler
    if isinstance(where, Path):
        handler = RotatingFileHandler(
            where, maxBytes=_MAX_LOG_BYTES, backupCount=1, delay=True, encoding="utf-8"
        )
        handler.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
    else:
        handler = logging.StreamHandler(where)
    _printed.addHandler(handler)
    _printed.setLevel(logging.INFO)
    _printed.propagate = False
    for name in STREAMS:
        setattr(sys, name, _Stream(name, getattr(sys, name)))


def forget_prints() -> None:
    """Undo `keep_prints`."""
    for handler in _printed.handlers[:]:
        _printed.removeHandler(handler)
        handler.close()
    for name in STREAMS:
        stream = getattr(sys, name)
        if isinstance(stream, _Stream):
            setattr(sys, name, stream.behind)


def are_prints_kept() -> bool:
    """Whether `keep_prints` is in force."""
    return bool(_printed.handlers)
