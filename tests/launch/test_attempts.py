"""Attempts as their records show them, and exit codes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strop.launch.attempts import (
    combine,
    combine_exit_files,
    from_wait,
    read_attempts,
    write_verdict,
)
from strop.launch.contract import AttemptRecord, JobState, SchedulerStatus, StatusSource
from strop.launch.status import decide_state, find_split_brain
from strop.record.files import DirectoryRecord


def write(path: Path, content: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content if isinstance(content, str) else json.dumps(content))


def begin(run: Path, name: str, number: int, *, num_nodes: int = 1, at: float = 10.0) -> Path:
    path = run / "attempts" / name
    for node in range(num_nodes):
        facts = {"number": number, "num_nodes": num_nodes, "host": f"n{node}", "started_at": at + node}
        write(path / f"agent-{node}.json", facts)
    return path


def end(path: Path, node: int, code: int, *, cause: str = "", at: float = 20.0, signal: str = "") -> None:
    facts = {"exit_code": code, "cause": cause, "signal": signal, "ended_at": at}
    write(path / f"end-{node}.json", facts)


def test_an_attempt_runs_until_its_verdict(tmp_path: Path) -> None:
    path = begin(tmp_path, "17-0", 0, num_nodes=2)
    (found,) = read_attempts(DirectoryRecord(tmp_path))
    assert (found.name, found.number, found.started_at, found.exit_code) == ("17-0", 0, 10.0, None)
    assert found.nodes == ("n0", "n1")
    write_verdict(
        path, number=0, exit_code=75, signal="SIGTERM", started_at=9.0, ended_at=30.0, nodes=("n0",)
    )
    (found,) = read_attempts(DirectoryRecord(tmp_path))
    assert (found.exit_code, found.signal, found.ended_at) == (75, "SIGTERM", 30.0)


def test_without_a_verdict_the_nodes_codes_are_combined_once_all_are_there(tmp_path: Path) -> None:
    path = begin(tmp_path, "17-0", 0, num_nodes=2)
    end(path, 0, 75, at=20.0)
    assert read_attempts(DirectoryRecord(tmp_path))[0].exit_code is None
    end(path, 1, 1, cause="train ended with 1", at=19.0)
    (found,) = read_attempts(DirectoryRecord(tmp_path))
    assert (found.exit_code, found.cause, found.ended_at) == (1, "train ended with 1", 20.0)
    # The first cause is the cause.
    end(path, 0, 143, cause="its partner ended", at=21.0)
    assert read_attempts(DirectoryRecord(tmp_path))[0].cause == "train ended with 1"


def test_attempts_come_by_number_and_the_tenth_after_the_ninth(tmp_path: Path) -> None:
    for number in (10, 9, 2):
        # All at the same second: the clock decides nothing.
        begin(tmp_path, f"17-{number}", number)
    found = read_attempts(DirectoryRecord(tmp_path))
    assert [one.number for one in found] == [2, 9, 10]


def test_a_verdict_alone_is_an_attempt(tmp_path: Path) -> None:
    # Of other files none is an attempt.
    write(tmp_path / "attempts" / "fence-3.json", {"number": 3})
    write(tmp_path / "attempts" / "17-0" / "0" / "train.log", "hello")
    write(tmp_path / "attempts" / "17-0" / "deeper" / "verdict.json", {"exit_code": 0})
    # Killed before any agent could write: the batch shell's trap says so, without a code.
    write(tmp_path / "attempts" / "17-1" / "verdict.json", {"number": 1, "exit_code": None, "nodes": ["n4"]})
    (found,) = read_attempts(DirectoryRecord(tmp_path))
    assert (found.number, found.exit_code, found.started_at, found.nodes) == (1, None, None, ("n4",))


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{",
        "[]",
        "null",
        "7",
        '{"number": null}',
        '{"number": "one", "exit_code": "0", "ended_at": "now", "nodes": 3, "signal": null}',
        '{"exit_code": true}',
        '{"number": [], "nodes": {"a": 1}}',
    ],
)
def test_a_damaged_file_says_nothing_and_stops_nothing(tmp_path: Path, content: str) -> None:
    path = begin(tmp_path, "17-0", 0)
    write(path / "verdict.json", content)
    write(path / "end-0.json", content)
    write(path / "agent-1.json", content)
    (found,) = read_attempts(DirectoryRecord(tmp_path))
    assert (found.number, found.exit_code, found.started_at) == (0, None, 10.0)


@pytest.mark.parametrize(
    ("files", "code"),
    [({"0": "0", "1": "0"}, 0), ({"0": "0"}, 1), ({"0": "75", "1": "76\n"}, 76), ({"0": "0", "1": "x"}, 1)],
)
def test_exit_files_of_two_nodes(tmp_path: Path, files: dict[str, str], code: int) -> None:
    for name, text in files.items():
        write(tmp_path / "exit" / name, text)
    assert combine_exit_files(tmp_path, 2) == code


MILD = (0, 75, 76)
codes = st.one_of(st.sampled_from(MILD), st.integers(0, 255), st.none())


@pytest.mark.parametrize(
    ("given_codes", "one"),
    [
        # srun would return 75 and hide the failure.
        ([75, 1], 1),
        # A node that was killed because another one had failed is no cause.
        ([137, 3, 143], 3),
        ([143, 0], 143),
        # No code is a failure, and no nodes are none that succeeded.
        ([None, 0], 1),
        ([None, 75], 1),
        ([], 1),
    ],
)
def test_many_codes_as_one_by_hand(given_codes: list[int | None], one: int) -> None:
    assert combine(given_codes) == one
    # A death by a signal is said as a shell says it.
    assert [from_wait(-15), from_wait(75)] == [143, 75]


@given(st.lists(codes, min_size=1))
def test_any_failure_beats_the_mild_codes(some: list[int | None]) -> None:
    failures = {1 if code is None else code for code in some} - set(MILD)
    one = combine(some)
    if failures:
        assert one in failures
    else:
        assert one == max((code for code in some if code is not None), key=MILD.index)


# The state of a trial: every row of the contract's tables (slurm.md, 1.2 to 1.4).


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


Row = tuple[list[AttemptRecord], SchedulerStatus | None, JobState, str, str]
"""Attempts, answer, state, source, a piece of the reason."""
TOLD = record(3, code=75, signal="SIGTERM")
RECORD, SCHEDULER, NOTHING = "record", "scheduler", "nothing"
PRESENT: list[Row] = [
    ([record(code=0)], None, S.SUCCEEDED, RECORD, ""),
    ([], says(S.RUNNING), S.STARTING, SCHEDULER, ""),
    ([record()], says(S.RUNNING), S.RUNNING, SCHEDULER, ""),
    # A start record of node 1 only.
    ([record(started_at=None)], says(S.RUNNING), S.STARTING, SCHEDULER, ""),
    ([record()], says(S.STARTING), S.RUNNING, SCHEDULER, ""),
    # Forgotten, without a record and without a verdict.
    ([], None, S.UNKNOWN, NOTHING, ""),
    ([record()], None, S.UNKNOWN, NOTHING, ""),
    ([record(code=75)], says(S.QUEUED), S.PREEMPTED, RECORD, ""),
    ([record(code=75)], says(S.QUEUED, reason="Priority"), S.PREEMPTED, RECORD, "Priority"),
    ([record(code=75)], says(S.CANCELLED), S.CANCELLED, SCHEDULER, ""),
    ([record(code=0)], says(S.CANCELLED), S.CANCELLED, SCHEDULER, ""),
    # Attempt 3 has ended, and attempt 4 runs, waits or has begun.
    ([record(3, code=75)], says(S.RUNNING, restarts=4), S.STARTING, SCHEDULER, ""),
    ([record(3, code=1)], says(S.QUEUED, restarts=4), S.PREEMPTED, SCHEDULER, ""),
    ([record(3, code=75), record(4)], says(S.RUNNING, restarts=4), S.RUNNING, SCHEDULER, ""),
    ([], says(S.QUEUED, reason="Resources"), S.QUEUED, SCHEDULER, "Resources"),
    ([], says(S.QUEUED, restarts=1), S.PREEMPTED, SCHEDULER, ""),
    ([record()], says(S.PREEMPTED), S.PREEMPTED, SCHEDULER, ""),
    ([record(code=0)], says(S.SUCCEEDED), S.SUCCEEDED, RECORD, ""),
    # Completed without a record: at an unknown time, long ago, and just now.
    ([], says(S.SUCCEEDED, "COMPLETED"), S.FAILED, SCHEDULER, "record"),
    ([], says(S.SUCCEEDED, age=600.0), S.FAILED, SCHEDULER, "record"),
    ([], says(S.SUCCEEDED, age=5.0), S.RUNNING, SCHEDULER, "record"),
]
ENDS: list[Row] = [
    ([], says(S.FAILED, "NODE_FAIL", reason="node n3"), S.FAILED, SCHEDULER, "node n3"),
    ([], says(S.FAILED, "FAILED"), S.FAILED, SCHEDULER, "FAILED"),
    ([record()], says(S.TIMEOUT), S.TIMEOUT, SCHEDULER, ""),
    ([record(code=75, signal="SIGTERM")], says(S.TIMEOUT), S.TIMEOUT, SCHEDULER, ""),
    ([], says(S.UNKNOWN, "RESIZING"), S.UNKNOWN, SCHEDULER, "RESIZING"),
    ([record(code=1)], None, S.FAILED, RECORD, "exit code 1"),
    ([record(code=1, cause="train ended: OOM")], None, S.FAILED, RECORD, "train ended: OOM"),
    ([record(code=1)], says(S.SUCCEEDED), S.FAILED, RECORD, ""),
    ([record(code=1)], says(S.RUNNING), S.FAILED, RECORD, ""),
    ([record(code=76, cause="GPU 3")], says(S.FAILED), S.FAILED, RECORD, "preflight: GPU 3"),
    ([record(code=2)], says(S.FAILED), S.FAILED, RECORD, "usage"),
    ([record(code=143)], says(S.FAILED), S.FAILED, RECORD, "SIGTERM"),
    ([record(signal="SIGTERM")], says(S.TIMEOUT), S.TIMEOUT, SCHEDULER, ""),
    # The budget is spent, and is not.
    ([record(3, code=75)], says(S.FAILED, restarts=3), S.FAILED, RECORD, "requeue budget"),
    ([record(3, code=75)], None, S.FAILED, RECORD, "requeue budget"),
    ([record(2, code=75)], None, S.UNKNOWN, RECORD, "saved"),
    ([TOLD], None, S.UNKNOWN, RECORD, "SIGTERM"),
    ([TOLD], says(S.FAILED), S.FAILED, SCHEDULER, ""),
    # However a scheduler reads 75: what was stopped is no success.
    ([record(code=75)], says(S.SUCCEEDED, "Completed"), S.FAILED, RECORD, "Completed"),
]


@pytest.mark.parametrize(("attempts", "answer", "state", "source", "words"), [*PRESENT, *ENDS])
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
