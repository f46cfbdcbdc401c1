"""The record of a step is timed by what a run left, and by steps that are invented."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.recording import measure_invented, share_of_steps
from strop.record import Event, EventKind, RunDir


def test_steps_that_are_invented_are_recorded_and_read() -> None:
    figures = {figure.name: figure for figure in measure_invented(200, is_quick=True)}
    assert figures["64 x 200 tokens: share of a step"].at_most == 0.01
    assert figures["64 x 200 tokens: all rows listed"].at_most == 15.0
    assert all(figure.value > 0.0 for figure in figures.values())


def test_a_share_is_what_the_run_noted_and_what_its_logs_take(tmp_path: Path) -> None:
    with RunDir.create(tmp_path, "tiny", "", "digest", {}) as run:
        for step in (1, 2):
            run.timeline.add("learner", "record", 0.0, 10.0 * step)
            run.timeline.write(step)
            run.events.append(Event(kind=EventKind.NOTICE, step=step, cause="told"))
            run.metrics.append(step, {"seconds_step": 1000.0})
    # Of a thousand seconds each, logs take next to nothing.
    assert share_of_steps(run.path) == pytest.approx([0.01, 0.02], rel=0.5)
    assert [path.name for path in tmp_path.iterdir()] == [run.path.name]
