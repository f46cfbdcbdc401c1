"""`strop train`: from a file or options, as JSON lines, stopped and resumed."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

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


LOUD = """import os

os.system("echo LOUD")


def score(reply, answer):
    print("LOUD")
    os.system("echo LOUD")
    return float(reply.strip() == answer)
"""


def read_lines(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


def test_a_run_is_told_in_lines_from_start_to_end(folder: Path, run: Run) -> None:
    ended = run("train", "run.toml", "--json")
    lines = read_lines(ended.out)
    (path,) = (found.parent for found in (folder / "runs").glob("*/run.json"))
    assert ended.code == 0
    told = [line for line in lines if line["type"] != "event"]
    assert [line["type"] for line in told] == ["start", "eval", "step", "step", "eval", "end"]
    start, before, first, second, after, end = told
    assert start == {"type": "start", "run": str(path), "first_step": 0, "num_steps": 2}
    assert (before["step"], after["step"], before["num_examples"]) == (0, 2, 4)
    assert before["low"] <= before["accuracy"] <= before["high"]
    # The numbers are those of the record, all of them.
    recorded = RunDir.open(path).metrics.read()
    assert [{"step": line["step"], **line["metrics"]} for line in (first, second)] == recorded
    assert end == {
        "type": "end",
        "cause": "done",
        "exit_code": 0,
        "message": "",
        "run": str(path),
        "report": str(path / "report.html"),
    }
    events = [line for line in lines if line["type"] == "event"]
    stored = RunDir.open(path).events.read()
    assert [(one["kind"], one["cause"]) for one in events] == [(one.kind.value, one.cause) for one in stored]
    # What people read is where people look.
    assert "before held-out accuracy" in ended.err
    assert "step 2/2" in (path / "latest" / "train.log").read_text()


@pytest.mark.parametrize(
    ("words", "code", "cause", "said"),
    [
        (("train.accept=none",), 76, "CheckRefused", "the weights look random"),
        (("train.stepz=1",), 2, "ConfigError", "train.stepz"),
        (("model.uri=absent",), None, None, "absent"),
    ],
)
def test_a_refused_run_ends_with_its_cause(
    folder: Path, run: Run, words: tuple[str, ...], code: int | None, cause: str | None, said: str
) -> None:
    ended = run("train", "run.toml", "--json", *words)
    lines = read_lines(ended.out)
    assert [line["type"] for line in lines[:-1]] == ["event"] * (len(lines) - 1)
    assert lines[-1]["type"] == "end"
    assert lines[-1]["exit_code"] == ended.code == (code or ended.code) != 0
    assert lines[-1]["cause"] == (cause or lines[-1]["cause"])
    assert said in lines[-1]["message"]
    assert ("run" in lines[-1]) == bool(list((folder / "runs").glob("*/run.json")))
    assert said in ended.err


@pytest.mark.slow
def test_an_interrupted_run_ends_with_75_and_nothing_else_is_printed(folder: Path) -> None:
    (folder / "rows.jsonl").write_text("".join(f'{{"q": "{n}?", "a": "{n}"}}\n' for n in range(40)))
    (folder / "loud.py").write_text(LOUD)
    task = ("task.name=rows", "task.source=rows.jsonl", "task.prompt=q", "task.answer=a")
    words = ("train.steps=2000", "train.checkpoint_every=1000", "output.dir=here", "eval.num_samples=none")
    command = [sys.executable, "-m", "strop.cli", "train", "run.toml", "--json", *words]
    accept = "train.accept=weights: random; audit: it is a test"
    with (
        (folder / "told").open("w") as told,
        subprocess.Popen(
            [*command, *task, "task.reward=loud.py:score", "task.max_reply_tokens=8", accept],
            cwd=folder,
            env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"},
            stdout=subprocess.PIPE,
            stderr=told,
            text=True,
        ) as process,
    ):
        assert process.stdout is not None
        lines = []
        for line in process.stdout:
            lines.append(json.loads(line))
            if lines[-1]["type"] == "step":
                process.send_signal(signal.SIGINT)
                break
        lines += read_lines(process.stdout.read())
    said = (folder / "told").read_text()
    assert process.returncode == 75, said
    assert [line["type"] for line in lines if line["type"] != "event"][-1] == lines[-1]["type"] == "end"
    assert (lines[-1]["cause"], lines[-1]["exit_code"]) == ("Interrupted", 75)
    assert "give the same command again" in lines[-1]["message"]
