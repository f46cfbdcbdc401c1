"""An event loop whose clock jumps: simulated hours pass as fast as their events can be processed.

Whenever nothing is ready, the clock is set to the next timer instead of waiting for it. Coroutines run as
on any loop, so the real code can be driven by simulated parts, and the same inputs give the same order of
events. While an executor's thread runs, the clock stands still: real work takes no simulated time.

Left out: sockets and child processes. Their events arrive in real time.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import Executor
from typing import Any, TypeVar, TypeVarTuple

from strop.errors import RunStopped

Result = TypeVar("Result")
Arguments = TypeVarTuple("Arguments")


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """An event loop on simulated time, which begins at 0 s.

    Raises: RunStopped from `run_until_complete` if everything waits and no timer is set.
    """

    def __init__(self) -> None:
        self._now_s = 0.0
        self._num_working = 0
        super().__init__(_JumpingSelector(self._jump))

    def time(self) -> float:
        """Return the simulated time in seconds."""
        return self._now_s

    def run_in_executor(
        self, executor: Executor | None, func: Callable[[*Arguments], Result], *args: *Arguments
    ) -> asyncio.Future[Result]:
        """Run a function in a thread; the clock stands still until it has ended."""
        future = super().run_in_executor(executor, func, *args)
        self._num_working += 1
        future.add_done_callback(self._end_work)
        return future

    async def shutdown_default_executor(self, *args: Any) -> None:
        """Wait for the threads to end, while the clock stands still."""
        self._num_working += 1
        try:
            await super().shutdown_default_executor(*args)
        finally:
            self._num_working -= 1

    def _end_work(self, future: asyncio.Future[Any]) -> None:
        self._num_working -= 1

    def _jump(self, timeout_s: float | None) -> float | None:
        """Set the clock to the next timer; return how long to wait in real time."""
        if self._num_working:
            return None
        if timeout_s is None:
            raise RunStopped(
                f"a simulation stands still at {self._now_s:g} s: everything waits, and no timer is set",
                allowed="simulated parts that end, fail or have a deadline",
                next_step="look for a reply that never comes, or set a limit on it",
            )
        self._now_s += timeout_s
        return 0.0


class _JumpingSelector(selectors.BaseSelector):
    """Asks the loop's clock how long to wait."""

    def __init__(self, jump: Callable[[float | None], float | None]) -> None:
        self._selector = selectors.DefaultSelector()
        self._jump = jump

    def register(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        return self._selector.register(fileobj, events, data)

    def unregister(self, fileobj: Any) -> selectors.SelectorKey:
        return self._selector.unregister(fileobj)

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = self._selector.select(0)
        if ready or timeout == 0:
            return ready
        return self._selector.select(self._jump(timeout))

    def close(self) -> None:
        self._selector.close()

    def get_map(self) -> Mapping[Any, selectors.SelectorKey]:
        return self._selector.get_map()


def run_virtually(main: Coroutine[Any, Any, Result]) -> Result:
    """Run a coroutine to its end on simulated time. See `VirtualTimeLoop`."""
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        return runner.run(main)
