from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from strop.errors import StoreError
from strop.launch.container.watch import (
    END_NAME,
    ContainerEnd,
    answer_for,
    note_stop,
    read_container_file,
    read_end,
    settle,
    write_container_file,
)
from strop.launch.contract import JobState

# 2026-11-21T20:03:32Z is 1795291412 s after 1970-01-01T00:00:00Z.
MOMENT = 1795291412.0


def facts(status: str, **state: Any) -> dict[str, Any]:
    times = {"StartedAt": "2026-11-21T20:03:32.5Z", "FinishedAt": "0001-01-01T00:00:00Z"}
    return {"State": {"Status": status, **times, **state}}


@pytest.mark.parametrize(
    ("text", "moment"),
    [
        ("2026-11-21T20:03:32.204615304Z", MOMENT + 0.204615),
        ("2026-11-21T20:03:32Z", MOMENT),
        ("2026-11-21T22:03:32.5+02:00", MOMENT + 0.5),
        ("2026-11-21T22:03:32+02:00", MOMENT),
    ],
)
def test_times_of_engines_are_read(text: str, moment: float) -> None:
    assert read_end(facts("exited", ExitCode=0, FinishedAt=text)).ended_at == pytest.approx(moment)


def test_a_time_that_is_none_is_no_answer() -> None:
    with pytest.raises(StoreError, match="the engine's time 'yesterday' is not understood"):
        read_end(facts("exited", ExitCode=0, FinishedAt="yesterday"))


@pytest.mark.parametrize(
    ("status", "state"),
    [
        ("created", JobState.STARTING),
        ("initialized", JobState.STARTING),
        ("running", JobState.RUNNING),
        ("paused", JobState.RUNNING),
        ("stopping", JobState.RUNNING),
        # A new word of an engine never reads as an end.
        ("hibernating", JobState.UNKNOWN),
        ("removing", JobState.UNKNOWN),
    ],
)
def test_every_word_of_an_engine_has_a_state(tmp_path: Path, status: str, state: JobState) -> None:
    answer = answer_for(tmp_path, facts(status))
    assert answer is not None
    assert (answer.state, answer.raw, answer.since) == (state, status, MOMENT + 0.5)


def test_an_end_is_a_success_only_with_code_0(tmp_path: Path) -> None:
    for code, state in ((0, JobState.SUCCEEDED), (1, JobState.FAILED), (75, JobState.FAILED)):
        answer = answer_for(tmp_path, facts("exited", ExitCode=code))
        assert answer is not None
        assert answer.state is state
    killed = answer_for(tmp_path, facts("exited", ExitCode=137, OOMKilled=True))
    assert killed is not None
    assert killed.reason == "the container had more memory than it was allowed, and was killed"


def test_being_stopped_is_never_a_failure_or_a_success(tmp_path: Path) -> None:
    note_stop(tmp_path, JobState.TIMEOUT)
    # The first reason stays: the kill after the grace is its consequence.
    note_stop(tmp_path, JobState.CANCELLED)
    answer = answer_for(tmp_path, facts("exited", ExitCode=75))
    assert answer is not None
    assert (answer.state, answer.reason) == (JobState.TIMEOUT, "its time limit ended it")


def test_the_end_is_known_after_the_engine_forgot_it(tmp_path: Path) -> None:
    assert answer_for(tmp_path, None) is None
    end = ContainerEnd(exit_code=1, is_out_of_memory=False, started_at=1.0, ended_at=2.0)
    content = {name: getattr(end, name) for name in end.__slots__}
    write_container_file(tmp_path, END_NAME, content)
    answer = answer_for(tmp_path, None)
    assert answer is not None
    assert (answer.state, answer.raw, answer.since) == (JobState.FAILED, "gone", 2.0)
    assert answer.reason == "the container ended with exit code 1: failed"


def test_a_home_without_a_container_has_nothing_to_settle(tmp_path: Path) -> None:
    assert settle(tmp_path)
    (tmp_path / "container.json").write_text("{half")
    assert read_container_file(tmp_path, "container.json") is None
