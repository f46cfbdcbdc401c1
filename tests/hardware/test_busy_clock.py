"""Time in which something is under way, counted once however much overlaps."""

from __future__ import annotations

from contextlib import suppress

from strop.hardware.busy_clock import MAX_INTERVALS, BusyClock, join_intervals


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
    # Work that fails was work.
    with suppress(ValueError), clock.running():
        now = 10.0
        raise ValueError
    # From 0 to 5 and from 9 to 10.
    assert clock.take_s() == 6.0
    assert clock.take_s() == 0.0


def test_intervals_are_told_once_and_up_to_now() -> None:
    now = 0.0
    clock = BusyClock(lambda: now)
    with clock.running(), clock.running():
        now = 1.0
    now = 5.0
    with clock.running():
        now = 6.0
        assert clock.take_intervals(9) == [(0.0, 1.0), (5.0, 6.0)]
        now = 8.0
    clock.add((7.0, 9.0))
    # What goes on is told in parts; the time that ended is told whole.
    assert clock.take_intervals(9) == [(6.0, 9.0)]
    assert clock.take_intervals(9) == []
    assert clock.take_s() == 4.0


def test_the_smallest_pauses_are_joined() -> None:
    intervals = [(0.0, 1.0), (1.5, 2.0), (9.0, 10.0), (4.0, 5.0), (4.5, 6.0)]
    assert join_intervals(intervals, 9) == [(0.0, 1.0), (1.5, 2.0), (4.0, 6.0), (9.0, 10.0)]
    assert join_intervals(intervals, 3) == [(0.0, 2.0), (4.0, 6.0), (9.0, 10.0)]
    assert join_intervals(intervals, 1) == [(0.0, 10.0)]
    assert join_intervals([], 1) == []


def test_intervals_that_nobody_takes_do_not_fill_the_memory() -> None:
    clock = BusyClock()
    for number in range(3 * MAX_INTERVALS):
        clock.add((number, number + 0.5))
    intervals = clock.take_intervals(MAX_INTERVALS)
    assert len(intervals) < MAX_INTERVALS
    assert (intervals[0][0], intervals[-1][1]) == (0.0, 3 * MAX_INTERVALS - 0.5)
