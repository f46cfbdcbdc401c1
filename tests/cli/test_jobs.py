"""Jobs as a person types them: real trainings of a small model on this machine."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from strop.cli.jobs import open_job
from strop.io.atomic import verify_directory
from tests.fixtures.commands import Run
from tests.fixtures.drill import compare_metrics, drill
from tests.fixtures.jobs import find_process, hold_until_told, wait_for

ROOT = Path(__file__).parents[2]
README_COMMANDS = ("strop submit recipes/arithmetic.toml --on local", "strop logs -f arithmetic")
# The demo's recipe with a small random model, so that it takes seconds.
SMALL = ("task.max_reply_tokens=12", "train.steps=3", "eval.num_examples=4", "model.dtype=float32")


@pytest.fixture
def place(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with jobs, leases and the list of jobs of this test alone."""
    monkeypatch.setenv("XDG_STATE_HOME", str(folder.parent / "state"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(folder.parent / "config"))
    monkeypatch.setenv("STROP_RUNTIME_DIR", str(folder.parent / "runtime"))
    return folder


def read_metrics(path: Path) -> dict[int, dict[str, float]]:
    lines = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    return {int(line["step"]): line for line in lines}


def state_of(run: Run, name: str) -> str:
    (found,) = json.loads(run("status", name, "--json").out)
    return str(found["state"])


@pytest.mark.slow
def test_the_readmes_commands_submit_and_follow_a_run(place: Path, run: Run, tiny_model_dir: Path) -> None:
    (place / "recipes").mkdir()
    text = (ROOT / "recipes" / "arithmetic.toml").read_text()
    (place / "recipes" / "arithmetic.toml").write_text(text)
    submit, follow = (shlex.split(command)[1:] for command in README_COMMANDS)
    settings = (f"model.uri={tiny_model_dir}", "train.accept=weights: a random model", *SMALL)
    sent = run(*submit, *settings)
    assert sent.code == 0, sent.err
    assert "submitted to local as job local-" in sent.out
    # It says what works now, and nothing else.
    assert "strop logs -f" in sent.out
    # The followed log ends with the run.
    followed = subprocess.run(
        [sys.executable, "-m", "strop.cli", *follow], capture_output=True, text=True, timeout=400, check=False
    )
    assert followed.returncode == 0, followed.stderr
    assert "0 train] step 3/3" in followed.stdout
    assert state_of(run, "arithmetic") == "succeeded"
    listed = run("ls").out
    assert "succeeded" in listed
    assert "local local-" in listed


@pytest.mark.slow
def test_a_drill_proves_that_a_preempted_training_comes_back_to_the_same_curve(place: Path, run: Run) -> None:
    settings = ("train.steps=150", "train.checkpoint_every=40", "name=drilled")
    assert run("train", "run.toml", *settings, "output.dir=runs/undisturbed").code == 0
    assert run("submit", "run.toml", *settings, "--on", "local").code == 0
    wait_for(lambda: state_of(run, "drilled") == "running", limit_s=240)
    (home,) = Path("runs").glob("drilled-*")
    wait_for(lambda: (home / "metrics.jsonl").exists() and len(read_metrics(home)) > 3, limit_s=240)
    # It does not come to its end before the drill has begun.
    trainer = find_process("strop.cli train", str(home.resolve()))
    assert trainer is not None
    hold_until_told(trainer)
    launcher, ref, _ = open_job("drilled")
    drill(launcher, ref, num_steps=3, limit_s=600)
    wait_for(lambda: state_of(run, "drilled") == "succeeded", limit_s=400)
    mine, theirs = read_metrics(home), read_metrics(Path("runs/undisturbed"))
    assert mine.keys() == theirs.keys()
    assert compare_metrics(mine, theirs) is None
    fetched = run("fetch", "drilled", "--to", "copy", "--only", "latest")
    assert fetched.code == 0, fetched.err
    assert (Path("copy") / "checkpoints" / "step-000150" / "model" / "config.json").is_file()


@pytest.mark.slow
def test_a_job_is_fetched_while_it_runs(place: Path, run: Run) -> None:
    settings = ("train.steps=6", "train.checkpoint_every=2", "train.keep_checkpoints=1", "name=followed")
    assert run("submit", "run.toml", *settings, "--on", "local").code == 0
    words = [sys.executable, "-m", "strop.cli", "fetch", "followed", "--to", "copy", "--follow"]
    followed = subprocess.run(words, capture_output=True, text=True, timeout=400, check=False)
    assert followed.returncode == 0, followed.stderr
    (home,) = Path("runs").glob("followed-*")
    assert read_metrics(Path("copy")) == read_metrics(home)
    assert "copy/checkpoints/step-000006: " in followed.stderr
    assert verify_directory(Path("copy/checkpoints/step-000006")) == verify_directory(
        home / "checkpoints" / "step-000006"
    )
    assert run("fetch", "followed", "--to", "copy", "--follow").code == 1
    assert run("fetch", "followed", "--to", "other", "--follow", "--only", 2).code == 2
