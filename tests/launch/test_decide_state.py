"""The state of a trial: every row of the contract's tables (slurm.md, 1.2 to 1.4)."""

from __future__ import annotations

import pytest

from strop.launch.contract import AttemptRecord, JobState, SchedulerStatus, StatusSource
from strop.launch.status import decide_state, find_split_brain

NOW = 1_000_000.0
S = JobState


def record(
    number: int = 0,
    *,
    code: int | None = None,
    signal: str = "",
    cause: str = "",
    started_at: float | None = 1.0,
) -> AttemptRecord:
    return AttemptRecord(
        name=f"17-{number}", number=number, started_at=started_at, exit_code=code, signal=signal, cause=cause
    )


def says(
    state: JobState, raw: str = "RAW", *, restarts: int = 0, reason: str = "", age: float | None = None
) -> SchedulerStatus:
    since = None if age is None else NOW - age
    return SchedulerStatus(state=state, raw=raw, num_restarts=restarts, reason=reason, since=since)


Row = tuple[str, list[AttemptRecord], SchedulerStatus | None, JobState, str, str]
"""Situation, attempts, answer, state, source, a piece of the reason."""


def rows_of_the_present() -> list[Row]:
    return [
        ("rc 0, silence", [record(code=0)], None, S.SUCCEEDED, "record", ""),
        ("no record, running", [], says(S.RUNNING), S.STARTING, "scheduler", ""),
        ("start record, running", [record()], says(S.RUNNING), S.RUNNING, "scheduler", ""),
        (
            "start record of node 1 only",
            [record(started_at=None)],
            says(S.RUNNING),
            S.STARTING,
            "scheduler",
            "",
        ),
        ("start record, scheduler still starting", [record()], says(S.STARTING), S.RUNNING, "scheduler", ""),
        ("no record, forgotten", [], None, S.UNKNOWN, "nothing", "no source"),
        ("no verdict, forgotten", [record()], None, S.UNKNOWN, "nothing", "no source"),
        ("rc 75, waiting", [record(code=75)], says(S.QUEUED), S.PREEMPTED, "record", "waits"),
        (
            "rc 75, waiting, why",
            [record(code=75)],
            says(S.QUEUED, reason="Priority"),
            S.PREEMPTED,
            "record",
            "Priority",
        ),
        ("rc 75, cancelled", [record(code=75)], says(S.CANCELLED), S.CANCELLED, "scheduler", ""),
        ("rc 0, cancelled", [record(code=0)], says(S.CANCELLED), S.CANCELLED, "scheduler", ""),
        (
            "attempt 3 ended, 4 runs",
            [record(3, code=75)],
            says(S.RUNNING, restarts=4),
            S.STARTING,
            "scheduler",
            "",
        ),
        (
            "attempt 3 failed, 4 waits",
            [record(3, code=1)],
            says(S.QUEUED, restarts=4),
            S.PREEMPTED,
            "scheduler",
            "",
        ),
        (
            "attempt 4 has begun",
            [record(3, code=75), record(4)],
            says(S.RUNNING, restarts=4),
            S.RUNNING,
            "scheduler",
            "",
        ),
        ("queued", [], says(S.QUEUED, reason="Resources"), S.QUEUED, "scheduler", "Resources"),
        ("queued, restarts", [], says(S.QUEUED, restarts=1), S.PREEMPTED, "scheduler", ""),
        ("preempted", [record()], says(S.PREEMPTED), S.PREEMPTED, "scheduler", ""),
        ("completed with record", [record(code=0)], says(S.SUCCEEDED), S.SUCCEEDED, "record", ""),
        ("completed without record", [], says(S.SUCCEEDED, "COMPLETED"), S.FAILED, "scheduler", "no record"),
        ("completed long ago", [], says(S.SUCCEEDED, age=600.0), S.FAILED, "scheduler", "no record"),
        ("completed just now", [], says(S.SUCCEEDED, age=5.0), S.RUNNING, "scheduler", "not to be seen yet"),
    ]


def rows_of_ends() -> list[Row]:
    return [
        ("failed", [], says(S.FAILED, "NODE_FAIL", reason="node n3"), S.FAILED, "scheduler", "node n3"),
        ("failed without words", [], says(S.FAILED, "FAILED"), S.FAILED, "scheduler", "FAILED"),
        ("timeout", [record()], says(S.TIMEOUT), S.TIMEOUT, "scheduler", ""),
        (
            "timeout, state saved",
            [record(code=75, signal="SIGTERM")],
            says(S.TIMEOUT),
            S.TIMEOUT,
            "scheduler",
            "",
        ),
        ("unlisted word", [], says(S.UNKNOWN, "RESIZING"), S.UNKNOWN, "scheduler", "RESIZING"),
        ("rc 1", [record(code=1)], None, S.FAILED, "record", "exit code 1: failed"),
        (
            "rc 1, cause",
            [record(code=1, cause="train ended: OOM")],
            None,
            S.FAILED,
            "record",
            "train ended: OOM",
        ),
        ("rc 1, scheduler says completed", [record(code=1)], says(S.SUCCEEDED), S.FAILED, "record", ""),
        ("rc 1, scheduler still runs", [record(code=1)], says(S.RUNNING), S.FAILED, "record", ""),
        ("rc 76", [record(code=76, cause="GPU 3")], says(S.FAILED), S.FAILED, "record", "preflight: GPU 3"),
        ("rc 2", [record(code=2)], says(S.FAILED), S.FAILED, "record", "usage"),
        ("rc 143", [record(code=143)], says(S.FAILED), S.FAILED, "record", "killed by SIGTERM"),
        ("rc null, killed", [record(signal="SIGTERM")], says(S.TIMEOUT), S.TIMEOUT, "scheduler", ""),
        (
            "rc 75, budget spent",
            [record(3, code=75)],
            says(S.FAILED, restarts=3),
            S.FAILED,
            "record",
            "requeue budget",
        ),
        ("rc 75, budget spent, silence", [record(3, code=75)], None, S.FAILED, "record", "requeue budget"),
        (
            "rc 75, budget left, silence",
            [record(2, code=75)],
            None,
            S.UNKNOWN,
            "record",
            "its state is saved",
        ),
        (
            "rc 75, told, silence",
            [record(3, code=75, signal="SIGTERM")],
            None,
            S.UNKNOWN,
            "record",
            "SIGTERM",
        ),
        (
            "rc 75, told, failed",
            [record(3, code=75, signal="SIGTERM")],
            says(S.FAILED),
            S.FAILED,
            "scheduler",
            "",
        ),
        # However a scheduler reads 75: what was stopped is no success.
        (
            "rc 75, scheduler says completed",
            [record(code=75)],
            says(S.SUCCEEDED, "Completed"),
            S.FAILED,
            "record",
            "Completed",
        ),
    ]


ROWS = [*rows_of_the_present(), *rows_of_ends()]


@pytest.mark.parametrize(
    ("attempts", "answer", "state", "source", "words"), [row[1:] for row in ROWS], ids=[r[0] for r in ROWS]
)
def test_each_situation(
    attempts: list[AttemptRecord], answer: SchedulerStatus | None, state: JobState, source: str, words: str
) -> None:
    found = decide_state(attempts, answer, max_requeue=3, now=NOW)
    assert (found.state, found.source) == (state, StatusSource(source))
    assert words in found.reason


def test_attempts_of_an_earlier_job_in_the_same_directory_are_ignored() -> None:
    def resumed(attempts: list[AttemptRecord], answer: SchedulerStatus | None) -> JobState:
        return decide_state(attempts, answer, max_requeue=3, num_past=2, now=NOW).state

    # Two attempts of the first job, the last one failed; the second job waits, then begins as attempt 2.
    past = [record(0, code=75), record(1, code=1)]
    assert resumed(past, says(S.QUEUED)) is S.QUEUED
    assert resumed(past, says(S.RUNNING)) is S.STARTING
    assert resumed([*past, record(2)], says(S.RUNNING)) is S.RUNNING
    # Its restarts are counted from its own first attempt.
    over = [*past, record(2, code=75)]
    assert resumed(over, says(S.RUNNING, restarts=1)) is S.STARTING
    assert resumed([*past, record(4, code=75)], None) is S.UNKNOWN
    assert resumed([*past, record(5, code=75)], None) is S.FAILED


def life(number: int, began: float, ended: float | None, node: str) -> AttemptRecord:
    return AttemptRecord(name=f"17-{number}", number=number, started_at=began, ended_at=ended, nodes=(node,))


def test_two_attempts_at_once_are_named_with_their_nodes() -> None:
    told = find_split_brain([life(1, 1000.0, None, "n2"), life(0, 0.0, 1500.0, "n1")])
    assert told == "split_brain: attempt 17-0 on n1 went on for 500 s beside attempt 17-1 on n2"


@pytest.mark.parametrize(
    "attempts",
    [
        [],
        [life(0, 0.0, 1500.0, "n1")],
        [life(0, 0.0, 900.0, "n1"), life(1, 1000.0, None, "n2")],
        # A lost node never says when it ended.
        [life(0, 0.0, None, "n1"), life(1, 1000.0, None, "n2")],
        # Clocks of two nodes may differ.
        [life(0, 0.0, 1020.0, "n1"), life(1, 1000.0, None, "n2")],
    ],
)
def test_attempts_one_after_the_other_are_no_split(attempts: list[AttemptRecord]) -> None:
    assert find_split_brain(attempts) is None
