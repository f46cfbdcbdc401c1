"""The program as a whole: streams, codes, failures that nobody foresaw, and what is loaded."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer

from strop.cli.arguments import SplitName
from strop.cli.output import Output, RunLog
from strop.cli.program import app
from strop.errors import EngineError, Interrupted
from strop.rollout import Split
from strop.tasks import task_summaries
from tests.fixtures.commands import Run

PROGRAM = "import sys; from strop.cli import main; sys.exit(main())"


def run_fresh(*words: str, code: str = PROGRAM) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code, *words], capture_output=True, text=True, timeout=120, check=False
    )


def fail_unforeseen(context: typer.Context) -> None:
    raise KeyError("nobody thought of this")


def fail_in_a_run(context: typer.Context) -> None:
    output: Output = context.obj
    output.say("before the log")
    output.log.open_at(Path("attempts/1/train.log"))
    raise KeyError("nobody thought of this")


def be_refused_in_a_run(context: typer.Context) -> None:
    output: Output = context.obj
    output.log.open_at(Path("attempts/1/train.log"))
    raise EngineError("generation failed") from KeyError("nobody thought of this")


def be_interrupted(context: typer.Context) -> None:
    raise KeyboardInterrupt


def be_stopped(context: typer.Context) -> None:
    raise Interrupted("stopped by sigterm after step 3")


@pytest.fixture
def extra_commands() -> Iterator[None]:
    """Commands that end as real ones do only on bad days."""
    before = list(app.registered_commands)
    for command in (fail_unforeseen, fail_in_a_run, be_refused_in_a_run, be_interrupted, be_stopped):
        app.command(command.__name__)(command)
    yield
    app.registered_commands[:] = before


@pytest.mark.usefixtures("extra_commands")
def test_an_unforeseen_failure_is_told_with_its_traceback(run: Run, folder: Path) -> None:
    ended = run("fail_unforeseen")
    assert (ended.code, ended.out) == (1, "")
    assert "Traceback (most recent call last)" in ended.err
    last = ended.err.splitlines()[-1]
    assert last == "strop: unexpected KeyError: 'nobody thought of this'. The traceback is above."


@pytest.mark.usefixtures("extra_commands")
def test_inside_a_run_the_traceback_is_in_its_log(run: Run, folder: Path) -> None:
    ended = run("fail_in_a_run")
    assert ended.code == 1
    assert "Traceback" not in ended.err
    assert "attempts/1/train.log" in ended.err.splitlines()[-1]
    log = (folder / "attempts" / "1" / "train.log").read_text()
    assert log.startswith("before the log\nTraceback")
    assert log.splitlines()[-1] == ended.err.splitlines()[-1]


@pytest.mark.usefixtures("extra_commands")
def test_inside_a_run_the_log_has_what_led_to_an_error_of_strops_own(run: Run, folder: Path) -> None:
    ended = run("be_refused_in_a_run")
    assert (ended.code, ended.err) == (1, "strop: generation failed\n")
    log = (folder / "attempts" / "1" / "train.log").read_text()
    assert log.startswith("KeyError: 'nobody thought of this'\n")
    assert "EngineError: generation failed" in log
    assert log.endswith("\nstrop: generation failed\n")


@pytest.mark.usefixtures("extra_commands")
def test_ctrl_c_promises_nothing_and_a_stopped_run_says_75(run: Run, folder: Path) -> None:
    assert (run("be_interrupted").code, run("be_interrupted").err) == (1, "strop: interrupted\n")
    ended = run("be_stopped")
    assert (ended.code, ended.err) == (75, "strop: stopped by sigterm after step 3\n")


def test_a_log_keeps_what_came_before_its_file(tmp_path: Path) -> None:
    log = RunLog()
    print("first", file=log)
    log.open_at(tmp_path / "deep" / "train.log")
    print("second", file=log)
    # Without closing: what a kill would leave.
    assert (tmp_path / "deep" / "train.log").read_text() == "first\nsecond\n"
    log.close()


def test_help_names_every_command(run: Run) -> None:
    ended = run("--help")
    assert ended.code == 0
    listed = ended.out.partition("Commands:")[2].split("\n")
    assert [line.split()[0] for line in listed if line.strip()] == [
        "train", "eval", "sample", "plan", "stage", "submit", "policy", "status",
        "logs", "watch", "cancel", "fetch", "explain", "ls", "view", "query", "report", "compare",
        "audit", "doctor", "model", "tasks", "envs", "runtime",
    ]  # fmt: skip


def test_split_names_are_those_of_rollouts() -> None:
    assert {name.name: name.value for name in SplitName} == {split.name: split.value for split in Split}


def test_a_reader_that_leaves_early_is_no_error() -> None:
    program = f"""
import os, sys
read, write = os.pipe()
os.close(read)
os.dup2(write, 1)
{PROGRAM}
"""
    ended = run_fresh("explain", code=program)
    assert ended.returncode == 1
    assert ended.stderr == ""


def test_explain_says_meaning_value_and_origin(run: Run, folder: Path) -> None:
    ended = run("explain", "train.steps", "run.toml", "train.steps=7")
    assert ended.out.splitlines() == [
        "train.steps: Number of steps of the run, one batch each.",
        "  allowed  an integer from 1 to 10000000",
        "  default  40",
        "  value    7 (override)",
    ]
    assert "run.toml:8" in run("explain", "train.steps", "run.toml").out
    assert "task arithmetic has no such setting" in run("explain", "task.min_words", "run.toml").out


def test_explain_shows_expert_settings_on_demand_and_those_that_a_run_sets(run: Run, folder: Path) -> None:
    def listed(*words: str) -> list[str]:
        lines = [line.split() for line in run("explain", *words).out.splitlines()]
        return [line[0] for line in lines if line and line[0].startswith(("optimizer.", "tripwires."))]

    everyday = ["optimizer.lr", "optimizer.warmup_steps", "optimizer.schedule"]
    assert listed() == listed("optimizer") == everyday
    assert "4 expert settings more: strop explain optimizer --all" in run("explain", "optimizer").out
    assert len(listed("optimizer", "--all")) == 7
    assert set(listed("--all")) > {*everyday, "tripwires.on_alarm"}
    # What a run sets is never hidden, and a section of expert settings alone shows them.
    assert listed("optimizer", "run.toml", "optimizer.beta2=0.99") == [
        "optimizer.lr", "optimizer.beta2", "optimizer.warmup_steps", "optimizer.schedule",
    ]  # fmt: skip
    assert "tripwires.on_alarm" in listed("tripwires")
    reason = "it exists because published recipes set it: 0.95 and 0.99 are common"
    assert reason in run("explain", "optimizer.beta2").out
    assert "it exists because" not in run("explain", "optimizer.lr").out


def test_plan_fits_one_screen_and_shows_everything_on_demand(
    run: Run, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    ended = run("plan", "run.toml")
    lines = ended.out.splitlines()
    assert len(lines) + len(ended.err.splitlines()) <= 24
    assert all(len(line) <= 100 for line in lines)
    labels = ("run", "model", "task", "learns by", "prompts", "the first", "runs on", "time", "one step")
    assert [line[:10].strip() for line in lines] == [
        *labels,
        *("slowest", "memory", "disk", "cost", "warnings", "more"),
    ]
    text = "<|start|>user\\nWhat is 1 + 3?<|end|>\\n<|start|>assistant\\n"
    assert lines[5] == f"the first {text}"
    assert lines[3] == "learns by grpo, learning rate 1e-05; 2 steps of 2 prompts, 4 replies"
    everything = run("plan", "run.toml", "--all").out
    for name in ("optimizer.lr", "optimizer.beta2", "(assumed)", "task.max_reply_tokens"):
        assert name in everything
        assert name not in ended.out


def test_tasks_are_listed_for_people_and_programs(run: Run) -> None:
    listed = json.loads(run("tasks", "ls", "--json").out)
    assert list(listed) == [*task_summaries(), "FILE.py:CLASS"]
    assert all(name in run("tasks", "ls").out for name in listed)


@pytest.mark.parametrize(
    "words",
    [
        ("--help",),
        ("--version",),
        ("train", "--help"),
        ("explain", "optimizer.lr"),
        ("tasks", "ls"),
        ("plan", "run.toml"),
        ("plan", "run.toml", "--json"),
        ("plan", "run.toml", "--hardware", "h100"),
        ("ls", "."),
    ],
    ids=" ".join,
)
def test_a_light_command_loads_no_torch(words: tuple[str, ...], folder: Path) -> None:
    code = """
import sys
from strop.cli import main
code = main()
assert not {"torch", "transformers", "pyarrow"} & set(sys.modules), "loaded"
sys.exit(code)
"""
    ended = run_fresh(*words, code=code)
    assert ended.returncode == 0, ended.stderr


def test_help_loads_neither_pydantic_nor_numpy() -> None:
    code = """
import sys
from strop.cli import main
main(["--help"])
assert not {"pydantic", "numpy"} & set(sys.modules)
"""
    assert run_fresh(code=code).returncode == 0


def test_standard_output_of_json_is_json_alone(run: Run, folder: Path) -> None:
    for words in (("plan", "run.toml", "--json"), ("plan", "run.toml", "model.uri=org/absent", "--json")):
        ended = run(*words)
        assert ended.code == 0
        json.loads(ended.out)
    # What could not be known is said to the person, beside the JSON.
    assert "unknown: prompt, memory, disk and time: model org/absent is not on this machine" in ended.err
