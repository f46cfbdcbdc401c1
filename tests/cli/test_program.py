"""The program as a whole: streams, codes, failures that nobody foresaw, what is loaded."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from strop.cli.output import Output
from strop.cli.program import app
from strop.errors import EngineError, Interrupted
from strop.launch.backends import BACKENDS
from tests.fixtures.commands import Run
from tests.fixtures.scripted_backend import FakeSite
from tests.fixtures.scripted_jobs import World, enter_world

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


def commands(command: Any, words: str) -> Iterator[tuple[str, int]]:
    """Yield each command and the number of its parameters, without --help."""
    params = command.get_params(typer.Context(command))
    yield words, sum(param.name != "help" for param in params)
    for name, inner in getattr(command, "commands", {}).items():
        yield from commands(inner, f"{words} {name}")


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    """A project with a site of a backend that only the table of backends knows."""
    world = enter_world(tmp_path, monkeypatch)
    monkeypatch.setitem(BACKENDS, "fake", FakeSite)
    world.sites(f'[sites.lanes]\nbackend = "fake"\nfolder = "{tmp_path / "scheduler"}"\nlane = "slow"\n')
    return world


def test_a_backend_of_the_table_has_its_options_everywhere(here: World, run: Run) -> None:
    explained = run("explain", "sites.fake.lane").out
    assert "Lane to wait in. Override for one job: `strop submit site.lane=VALUE`." in explained
    told = run("explain", "sites.fake.bid").out
    assert "Set per job, not in a profile: `strop submit site.bid=VALUE`." in told
    words = ("submit", "run.toml", "--on", "lanes", "--dry-run", "--json")
    assert "--lane=slow" in json.loads(run(*words).out)["argv"]
    assert "--lane=fast" in json.loads(run(*words, "site.lane=fast").out)["argv"]
    assert run("submit", "run.toml", "--on", "lanes", "site.bid=3").code == 0
    ended = run("status", "run", "--json")
    assert json.loads(ended.out)[0]["state"] == "queued"


def test_an_option_of_one_job_is_no_key_of_a_profile(here: World, run: Run) -> None:
    with (here.project / "strop-sites.toml").open("a") as file:
        file.write("bid = 3\n")
    ended = run("submit", "run.toml", "--on", "lanes")
    assert ended.code == 2
    assert "sites.lanes.bid" in ended.err
    assert "is set per job, not in a profile" in ended.err
    assert "give site.bid=VALUE to `strop submit`" in ended.err
