"""Time in which something is under way, counted once however much overlaps."""

from __future__ import annotations

import pytest

from strop.hardware.busy_clock import BusyClock


def test_overlapping_work_counts_once() -> None:
    now = 0.0
    clock = BusyClock(lambda: now)
    first, second = clock.running(), clock.running()
    first.__enter__()
    now = 2.0
    second.__enter__()
    now = 3.0
    first.__exit__(None, None, None)
    # One still runs, so nothing has ended.
    assert clock.take_s() == 0.0
    now = 5.0
    second.__exit__(None, None, None)
    now = 9.0
    with clock.running():
        now = 10.0
    # From 0 to 5 and from 9 to 10.
    assert clock.take_s() == 6.0
    assert clock.take_s() == 0.0


def test_work_that_fails_was_work() -> None:
    now = 1.0
    clock = BusyClock(lambda: now)

    def fail() -> None:
        nonlocal now
        with clock.running():
            now = 4.0
            raise ValueError("x")

    with pytest.raises(ValueError, match="x"):
        fail()
    assert clock.take_s() == 3.0
