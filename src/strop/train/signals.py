"""Turning SIGTERM and Ctrl-C into a flag that the loop reads between steps."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any

from strop.record.fence import ATTEMPT_VARIABLE

_Handler = Callable[[int, FrameType | None], Any] | int | signal.Handlers | None

# What a second signal of the kind does: end the process at once, for a person at a terminal.
_SECOND: dict[signal.Signals, _Handler] = {
    signal.SIGTERM: signal.SIG_DFL,
    signal.SIGINT: signal.default_int_handler,
}


class StopFlag:
    """Set by the first signal. A second one ends the process at once, without a checkpoint.

    Except SIGTERM in a job: Slurm sends it to every process of a step, and more than once, and the node's
    agent passes it on. What takes too long in a job is killed.

    Not the event loop's own handlers: those run when the loop next looks, which is after the step
    that follows an optimizer step under way.
    """

    def __init__(self) -> None:
        self.cause: str | None = None
        """Name of the signal in lower case, for example 'sigterm'; None while there was none."""
        self._previous: dict[signal.Signals, _Handler] = {}

    def __enter__(self) -> StopFlag:
        """Install the handlers; only the main thread may."""
        self._previous = {number: signal.signal(number, self._on_signal) for number in _SECOND}
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Give the signals back."""
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous = {}

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.cause = signal.Signals(number).name.lower()
        for known, handler in _SECOND.items():
            is_repeated = known is signal.SIGTERM and ATTEMPT_VARIABLE in os.environ
            signal.signal(known, signal.SIG_IGN if is_repeated else handler)
