"""The watch over the event loop: lateness is measured, and a blocking call is named while it blocks."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
import weakref

from strop.train.loop_lag import LoopLagWatch, full_collections_by_hand

MORE_S = 0.5


def hold_the_loop(told: list[tuple[float, str]]) -> None:
    """Block until that is told, and then for a while more: for so long it could be told again."""
    until = time.monotonic() + 60.0
    while not about_the_call(told) and time.monotonic() < until:
        time.sleep(0.02)
    time.sleep(MORE_S)


def about_the_call(told: list[tuple[float, str]]) -> list[tuple[float, str]]:
    """Return what is told of the blocking call; a machine that pauses keeps the loop too."""
    return [(lag_s, stack) for lag_s, stack in told if "hold_the_loop(told)" in stack]


def test_a_blocking_call_is_measured_and_its_stack_told_once() -> None:
    told: list[tuple[float, str]] = []

    async def act() -> tuple[float, float]:
        with LoopLagWatch(lambda lag_s, stack: told.append((lag_s, stack)), limit_s=0.2) as watch:
            await asyncio.sleep(0.2)
            watch.take()
            hold_the_loop(told)
            late = {"loop_lag_s": 0.0}
            async with asyncio.timeout(60.0):
                # The thread hears the answer to its question.
                while late["loop_lag_s"] < MORE_S:
                    await asyncio.sleep(0.1)
                    late = watch.take()
            return late["loop_lag_s"], late["loop_late_frac"]

    max_s, late_frac = asyncio.run(act())
    ((lag_s, stack),) = about_the_call(told)
    assert 0.2 <= lag_s < max_s < 120.0
    # What it is told within, and what comes after.
    assert max_s >= lag_s + 0.9 * MORE_S
    assert "time.sleep(0.02)" in stack
    # 0.7 of 0.85 s at least, were the machine idle.
    assert 0.3 < late_frac <= 1.0


def test_a_loop_that_keeps_up_raises_no_alarm() -> None:
    told: list[tuple[float, str]] = []

    async def act() -> float:
        with LoopLagWatch(lambda lag_s, stack: told.append((lag_s, stack)), limit_s=60.0) as watch:
            for _ in range(30):
                await asyncio.sleep(0.01)
            return watch.take()["loop_lag_s"]

    assert asyncio.run(act()) < 60.0
    assert told == []


def test_full_collections_are_left_to_the_caller_inside_and_as_before_outside() -> None:
    class Node:
        pass

    def churn() -> None:
        # More than enough for a full collection, were it not put off.
        kept: list[list[int]] = [[] for _ in range(400_000)]
        assert kept

    before = gc.get_threshold()
    with full_collections_by_hand():
        assert gc.get_freeze_count() > 1000
        node = Node()
        node.self = node  # type: ignore[attr-defined]
        died = weakref.ref(node)
        # It has become old.
        gc.collect(1)
        del node
        churn()
        assert died() is not None
        gc.collect()
        assert died() is None
        young = Node()
        young.self = young  # type: ignore[attr-defined]
        died = weakref.ref(young)
        del young
        churn()
        assert died() is None
    assert gc.get_threshold() == before
    assert gc.get_freeze_count() == 0


class LateStop(threading.Event):
    """Set right after somebody has seen that it is not."""

    def wait(self, timeout: float | None = None) -> bool:
        was_set = self.is_set()
        super().wait(None)
        return was_set


def test_a_watch_that_is_stopped_between_two_looks_ends() -> None:
    """Incident: its thread asked a loop that waited for its end, and a run hung after its last step."""

    async def act() -> None:
        watch = LoopLagWatch(lambda lag_s, stack: None, limit_s=0.1)
        watch._stopped = LateStop()
        watch.__enter__()
        watch._stopped.set()
        watch._answered.set()
        watch._thread.join(60.0)
        assert not watch._thread.is_alive()

    asyncio.run(act())
