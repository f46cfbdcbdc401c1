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
    describe_exit,
    from_wait,
    read_attempts,
    write_verdict,
)
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


def test_the_first_cause_is_the_cause(tmp_path: Path) -> None:
    path = begin(tmp_path, "17-0", 0, num_nodes=2)
    end(path, 0, 143, cause="its partner ended", at=21.0)
    end(path, 1, 1, cause="out of memory", at=20.0)
    assert read_attempts(DirectoryRecord(tmp_path))[0].cause == "out of memory"


def test_attempts_come_by_number_and_the_tenth_after_the_ninth(tmp_path: Path) -> None:
    for number in (10, 9, 2):
        # All at the same second: the clock decides nothing.
        begin(tmp_path, f"17-{number}", number)
    found = read_attempts(DirectoryRecord(tmp_path))
    assert [one.number for one in found] == [2, 9, 10]


def test_a_verdict_alone_is_an_attempt(tmp_path: Path) -> None:
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


def test_other_files_are_no_attempts(tmp_path: Path) -> None:
    write(tmp_path / "attempts" / "fence-3.json", {"number": 3})
    write(tmp_path / "attempts" / "17-0" / "0" / "train.log", "hello")
    write(tmp_path / "attempts" / "17-0" / "deeper" / "verdict.json", {"exit_code": 0})
    assert read_attempts(DirectoryRecord(tmp_path)) == []


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
        ([0], 0),
        ([0, 0], 0),
        ([0, 75], 75),
        ([75, 76, 0], 76),
        # srun would return 75 and hide the failure.
        ([75, 1], 1),
        ([76, 2], 2),
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


@given(st.lists(codes, min_size=1))
def test_any_failure_beats_the_mild_codes(some: list[int | None]) -> None:
    failures = {1 if code is None else code for code in some} - set(MILD)
    one = combine(some)
    if failures:
        assert one in failures
    else:
        assert one == max((code for code in some if code is not None), key=MILD.index)


def test_a_death_by_a_signal_is_said_as_a_shell_says_it() -> None:
    assert [from_wait(-15), from_wait(-9), from_wait(0), from_wait(75)] == [143, 137, 0, 75]


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (0, "exit code 0: done"),
        (2, "exit code 2: wrong usage or settings"),
        (75, "exit code 75: interrupted, its state saved"),
        (76, "exit code 76: refused by a check before it began"),
        (143, "killed by SIGTERM"),
        (255, "exit code 255"),
        (9, "exit code 9"),
    ],
)
def test_what_a_code_means(code: int, words: str) -> None:
    assert describe_exit(code) == words
