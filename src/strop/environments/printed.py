"""What environments print: one file for people, written an attempt at a time; the model never sees it.

A run says where (`keep_prints`). In the process of the rollouts `hearing` separates the output of concurrent
attempts, by a context variable; what a sandbox or a guest's process prints is written by the code that reads
it (`tell`). Child processes and libraries in C bypass all this and write to the run's own log.
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
"""Kept of the beginning, and of the end, of what an attempt writes into each stream."""
STREAMS = ("stdout", "stderr")
_MAX_LOG_BYTES = 8 * MIB
_printed = logging.getLogger("strop.environments.printed")


class Heard:
    """What one attempt has printed: beginning and end of each stream."""

    def __init__(self, about: str) -> None:
        """`about` says which attempt it is, in the log."""
        self._about = about
        self._heads = dict.fromkeys(STREAMS, b"")
        self._tails = dict.fromkeys(STREAMS, b"")
        self._omitted = dict.fromkeys(STREAMS, 0)

    def add(self, stream: str, data: bytes) -> None:
        """Add output; its beginning and its end are kept."""
        room = END_BYTES - len(self._heads[stream])
        self._heads[stream] += data[:room]
        tail = self._tails[stream] + data[room:]
        self._tails[stream] = tail[-END_BYTES:]
        self._omitted[stream] += len(tail) - len(self._tails[stream])

    def tell(self) -> None:
        """Write to the log what was kept."""
        for stream in STREAMS:
            tell(self._about, stream, self._heads[stream] + self._tails[stream], self._omitted[stream])


def tell(about: str, stream: str, data: bytes, num_omitted: int = 0) -> None:
    """Write the output of a stream to the log; `num_omitted` bytes of its middle were left out."""
    if data:
        note = f" ({num_omitted} bytes left out in the middle)" if num_omitted else ""
        _printed.info("%s %s%s:\n%s", about, stream, note, data.decode(errors="replace").rstrip())


_hearing: ContextVar[Heard | None] = ContextVar("hearing", default=None)


@contextmanager
def hearing(heard: Heard | None) -> Iterator[None]:
    """Collect what is printed in a block, and in the tasks and threads that it starts and waits for."""
    token = _hearing.set(heard)
    try:
        yield
    finally:
        _hearing.reset(token)


class _Stream:
    """A stream of this process; within `hearing`, its output goes to that attempt."""

    def __init__(self, name: str, behind: IO[str]) -> None:
        self.name = name
        self.behind = behind

    def write(self, text: str) -> int:
        """Write a text."""
        heard = _hearing.get()
        if heard is None:
            return self.behind.write(text)
        heard.add(self.name, text.encode(errors="replace"))
        return len(text)

    def writelines(self, lines: Any) -> None:
        """Write texts."""
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.behind, name)


def keep_prints(where: Path | IO[str]) -> None:
    """Keep what code of environments prints, from now on, of each attempt at its end.

    A file holds `_MAX_LOG_BYTES` at most; the one before it is kept beside.
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
