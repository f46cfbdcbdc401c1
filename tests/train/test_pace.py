"""Which stage is slower than planned, by hand-made seconds."""

from __future__ import annotations

from dataclasses import replace

from strop.record import Event
from strop.train.pace import PaceWatch
from tests.record.test_prediction import PLANNED


def alarms(watch: PaceWatch, steps: list[dict[str, float]]) -> list[tuple[int, Event]]:
    return [
        (number, event)
        for number, metrics in enumerate(steps, start=1)
        for event in watch.find_slow(number, metrics)
    ]


def steps_of(learn_s: float, num_steps: int = 6, **more: float) -> list[dict[str, float]]:
    return [{"seconds_generate": 2.0, "seconds_learn": learn_s, "seconds_sync": 0.0, **more}] * num_steps


def test_the_slow_stage_is_named_from_the_fourth_step_on() -> None:
    # 4 s were planned, five times as long is 20 s. The first step warms up, then three make a median.
    assert alarms(PaceWatch(PLANNED, 5.0), steps_of(20.0)) == []
    found = alarms(PaceWatch(PLANNED, 5.0), steps_of(20.5))
    assert [number for number, _ in found] == [4, 5, 6]
    assert {event.cause for _, event in found} == {"slower_than_plan"}
    assert found[0][1].detail.startswith(
        "learn took 20.5 s in the last 3 steps, and 4 s were planned on abacus: more than"
        " tripwires.max_slowdown_ratio=5 times as long; look on which device the learner computes"
    )


def test_one_slow_step_is_no_sign() -> None:
    steps = steps_of(4.0)
    steps[3] = steps_of(400.0)[0]
    assert alarms(PaceWatch(PLANNED, 5.0), steps) == []


def test_speeds_that_were_assumed_count_twice() -> None:
    assumed = replace(PLANNED, is_measured=False, basis="assumed: 1 GFLOP/s")
    assert alarms(PaceWatch(assumed, 5.0), steps_of(39.0)) == []
    (first, *_) = alarms(PaceWatch(assumed, 5.0), steps_of(41.0))
    assert "(twice, because its speed is assumed: 1 GFLOP/s)" in first[1].detail


def test_more_work_may_take_longer_and_milliseconds_are_not_compared() -> None:
    # Twice the positions: 8 s are planned.
    assert alarms(PaceWatch(PLANNED, 5.0), steps_of(39.0, num_positions=1400.0)) == []
    assert alarms(PaceWatch(PLANNED, 5.0), steps_of(41.0, num_positions=1400.0)) != []
    quick = replace(PLANNED, seconds={"learn": 0.01})
    assert alarms(PaceWatch(quick, 5.0), steps_of(1.9)) == []
    assert alarms(PaceWatch(quick, 5.0), steps_of(2.1)) != []


def test_nobody_is_watched_who_did_not_ask() -> None:
    assert alarms(PaceWatch(None, 5.0), steps_of(1e6)) == []
    assert alarms(PaceWatch(PLANNED, None), steps_of(1e6)) == []
    # A run that only imitates has no such stage.
    assert alarms(PaceWatch(PLANNED, 5.0), [{"seconds_learn": 4.0}] * 6) == []
