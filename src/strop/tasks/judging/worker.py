"""One worker process as its pool sees it: a connection, a priority, and what it has used.

Not here: who starts and ends it (`nursery`), and how long a call may take (`pool`).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from typing import Any

from strop.errors import CorruptRecord
from strop.hardware.priority import step_back
from strop.sandbox.frames import pack, unpack

_NICENESS_STEP = 10
_MAX_CALLS = 1000
_MAX_PEAK_BYTES = 1 << 30


class Worker(asyncio.Protocol):
    """A worker process behind our end of its connection. It has one call at a time."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.is_gone = False
        self.is_low = False
        """Whether it has a low priority, which cannot be raised again."""
        self._num_calls = 0
        self._peak_bytes = 0
        self._cpu_s = 0.0
        self._asked_at = 0.0
        self._received = bytearray()
        self._answer: asyncio.Future[dict[str, Any]] | None = None
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep what is written to."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        """Hand out an answer once it is whole."""
        self._received += data
        try:
            for answer, _ in unpack(self._received):
                if self._answer is not None and not self._answer.done():
                    self._answer.set_result(answer)
        except CorruptRecord as error:
            self._fail(error)

    def connection_lost(self, exc: Exception | None) -> None:
        """Tell whoever waits that nothing will come."""
        self.is_gone = True
        self._fail(exc or ConnectionResetError("its connection was closed"))

    def ask(self, call: Any) -> asyncio.Future[dict[str, Any]]:
        """Send a call; its answer comes, or CorruptRecord or OSError does.

        Raises: CorruptRecord if the call is too large.
        """
        self._num_calls += 1
        self._asked_at = time.monotonic()
        self._answer = asyncio.get_running_loop().create_future()
        assert self._transport is not None
        self._transport.write(pack(call))
        if self.is_gone:
            self._fail(ConnectionResetError("it ended before it was asked"))
        return self._answer

    def note_use(self, answer: Mapping[str, Any]) -> None:
        """Note what an answer says of the process that gave it."""
        self._peak_bytes, self._cpu_s = answer["peak_bytes"], answer["cpu_s"]

    def close(self) -> None:
        """Close our end."""
        if self._transport is not None:
            self._transport.abort()

    def step_back(self) -> None:
        """Let everyone else go first from now on. Only for one that has worked: it is in its own session."""
        # Where Linux wants to be asked less often: the next time.
        self.is_low = step_back(self.pid, by=_NICENESS_STEP)

    @property
    def call_cpu_s(self) -> float:
        """CPU time (seconds) of the call that it has; the wall time where the system does not tell."""
        try:
            # Linux's number for the clock that clock_getcpuclockid(3) returns.
            return time.clock_gettime((~self.pid << 3) | 2) - self._cpu_s
        except OSError:
            return time.monotonic() - self._asked_at

    @property
    def is_spent(self) -> bool:
        """Whether it is time for a fresh one, before leaks add up, or because it cannot be hurried."""
        return (
            self.is_gone or self.is_low or self._num_calls >= _MAX_CALLS or self._peak_bytes > _MAX_PEAK_BYTES
        )

    def _fail(self, error: Exception) -> None:
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(error)
