"""`strop envs`: environments are listed, audited, and played by a person."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from tests.environments.test_worlds import COUNTING
from tests.fixtures.commands import Run


def test_environments_are_listed_apart_from_tasks(run: Run) -> None:
    listed = run("envs", "ls", "--json")
    assert listed.code == 0
    assert '"guess-number"' in listed.out
    assert '"gsm8k"' not in listed.out
    assert "A class of your own" in run("envs", "ls").out


def test_a_game_is_played_by_piped_lines(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("".join(f"{guess}\n" for guess in (2, 1, 3))))
    ended = run("envs", "run", "guess-number", "max_value=3", "seed=1")
    assert ended.code == 0, ended.err
    lines = ended.out.splitlines()
    assert lines[2].startswith("user: Right. I think of a number from 1 to 3.")
    assert lines[-1].startswith("score: 1, right")


def test_what_ends_before_the_game_is_scored_as_it_stands(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    ended = run("envs", "run", "guess-number")
    assert ended.code == 0
    assert ended.out.splitlines()[-1] == "score: 0, not right"


def test_tools_are_called_by_words_by_json_and_by_blocks(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own.py").write_text(COUNTING)
    block = '```tool\n{"name": "add", "arguments": {"number": 1}}\n```'
    said = ["/add number=1", '/add {"number": 1}', block, "/go x=", ""]
    monkeypatch.setattr("sys.stdin", io.StringIO("\n".join(said)))
    ended = run("envs", "run", f"{tmp_path}/own.py:Counting")
    assert ended.code == 0, ended.err
    lines = ended.out.splitlines()
    assert lines[0] == "user: Count to 3."
    assert "tool: /add number= times=  Add a number, perhaps several times." in lines
    assert [line for line in lines if line.startswith("add: ")] == [
        f"add: The total is {n}." for n in (1, 2, 3)
    ]
    assert lines[-1].startswith("score: 1, right, num_tool_calls 4, num_format_errors 1")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("run", "no-such-thing"), "no-such-thing"),
        (("run", "guess-number", "agent=python agent.py"), "a program conducts the attempts"),
        (("audit", "guess-number", "num=0"), "'num=0' is no number of examples"),
    ],
)
def test_what_cannot_be_played_is_refused(run: Run, words: tuple[str, ...], said: str) -> None:
    ended = run("envs", *words)
    assert ended.code == 2
    assert said in ended.err
