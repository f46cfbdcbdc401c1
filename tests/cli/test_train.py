from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path

import pytest

from strop.record import RunDir
from tests.fixtures.commands import Run


def test_a_run_is_trained_told_and_reported(folder: Path, run: Run) -> None:
    ended = run("train", "run.toml")
    assert ended.code == 0
    (path,) = (found.parent for found in (folder / "runs").glob("*/run.json"))
    lines = ended.out.splitlines()
    assert [line.split()[0] for line in lines[:7]] == [
        *("before", "after", "change", "gained", "pace", "report", "next")
    ]
    assert lines[0].startswith("before held-out accuracy ")
    assert lines[0].endswith("4 examples)")
    assert "95% interval" in lines[0]
    assert lines[5] == f"report {path / 'report.html'}"
    commands = [shlex.split(line) for line in lines[7::2]]
    assert [command[0] for command in commands] == [sys.executable] * 2
    assert [command[3:] for command in commands] == [["view", str(path)], ["train", "run.toml", "seed=1"]]
    assert (path / "report.html").is_file()
    # Progress is no result: it is on standard error.
    assert ended.err.splitlines()[0] == f"run {path}"
    assert "step 2/2" in ended.err
    assert RunDir.open(path).is_finished
    # Not a terminal here, so the same plain lines go to both, from the first to the last.
    log = (path / "latest" / "train.log").read_text().splitlines()
    assert log == ended.err.splitlines() + lines
    assert (path / "latest").resolve() == path / "attempts" / "1"


def test_the_same_command_continues_and_logs_anew(folder: Path, run: Run) -> None:
    # Every reply of the random model is cut, so each attempt ends at its first step.
    stop = ("tripwires.on_alarm=stop", "tripwires.max_truncated_frac=0.0")
    stopped, again = (run("train", "run.toml", "output.dir=here", *stop) for _ in range(2))
    assert (stopped.code, again.code) == (1, 1)
    assert "truncation" in stopped.err.splitlines()[-1]
    logs = sorted((folder / "here" / "attempts").glob("*/train.log"))
    assert [log.parent.name for log in logs] == ["1", "2"]
    assert stopped.err.splitlines()[-1] == logs[0].read_text().splitlines()[-1]
    attempt = json.loads((folder / "here" / "attempts" / "2" / "attempt.json").read_text())
    assert (attempt["cause"], attempt["exit_code"]) == ("RunStopped", 1)


def test_a_corrupt_run_directory_is_named(finished_run: Path, run: Run) -> None:
    (finished_run / "run.json").write_text("{")
    for words in (("train", "run.toml", f"output.dir={finished_run}"), ("report", finished_run)):
        ended = run(*words)
        assert ended.code == 1
        assert "run.json is damaged" in ended.err
        assert ended.out == ""


def test_a_tracker_that_is_not_installed_is_refused_before_anything(
    folder: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("strop.view.trackers.find_spec", lambda name: None)
    ended = run("train", "run.toml", "trackers.use=['mlflow']")
    assert ended.code == 76
    assert "pip install 'strop[mlflow]'" in ended.err
    assert not (folder / "runs").exists()
