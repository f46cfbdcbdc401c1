"""Turning SIGTERM and Ctrl-C into a flag that the loop reads between steps."""

from __future__ import annotations

import asyncio
import signal
from types import TracebackType

_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class StopFlag:
    """Set by the first signal. A second Ctrl-C interrupts at once, without a checkpoint."""

    def __init__(self) -> None:
        self.cause: str | None = None
        """Name of the signal in lower case, for example 'sigterm'; None while there was none."""
        self._loop: asyncio.AbstractEventLoop | None = None

    def __enter__(self) -> StopFlag:
        """Install the handlers on the running event loop."""
        self._loop = asyncio.get_running_loop()
        for number in _SIGNALS:
            self._loop.add_signal_handler(number, self._on_signal, number)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Give the signals back to their defaults."""
        self._remove_handlers()

    def _on_signal(self, number: signal.Signals) -> None:
        self.cause = signal.Signals(number).name.lower()
        self._remove_handlers()

    def _remove_handlers(self) -> None:
        if self._loop is not None:
            for number in _SIGNALS:
                self._loop.remove_signal_handler(number)
            self._loop = None
