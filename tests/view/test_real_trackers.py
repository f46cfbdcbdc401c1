"""A real run with three real trackers at once, killed and resumed."""

from __future__ import annotations

import json
import os
import re
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from strop.record import RunDir
from strop.spec.output import TRACKERS as NAMES
from strop.view.tracking import read_sent, sent_path
from tests.conftest import require_system_part
from tests.fixtures.commands import RUN_TEXT
from tests.fixtures.real_trackers import TRACKERS, make_python, read_trackers

# Where it is is asked before a test has a home of its own.
IS_READY = TRACKERS.is_ready()
KEY = "f00dfeed" * 5
Start = Callable[[], subprocess.Popen[bytes]]
STEPS, CHECKPOINT_EVERY = 40, 10
TEXT = f"""
[trackers]
use = {json.dumps(NAMES)}
project = "study"
offline = true
rollouts_every = 10
finish_limit_s = 600
"""


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    require_system_part("the environment of trackers (make trackers-deps)", IS_READY)
    return make_python(tmp_path_factory.mktemp("python") / "venv")


@pytest.fixture
def command(tmp_path: Path, tiny_model_dir: Path, python: Path) -> Iterator[Start]:
    """Start `strop train` on one run, with keys in its environment; what it says is in said.log."""
    text = RUN_TEXT.format(model=tiny_model_dir).replace("steps = 2", f"steps = {STEPS}")
    text = text.replace("checkpoint_every = 1", f"checkpoint_every = {CHECKPOINT_EVERY}")
    text = text.replace("[eval]", f"[eval]\nevery = {CHECKPOINT_EVERY}")
    (tmp_path / "run.toml").write_text(text + TEXT)
    keys = dict.fromkeys(("WANDB_API_KEY", "MLFLOW_TRACKING_PASSWORD"), KEY)
    # An address that an offline run must not ask.
    addresses = {"MLFLOW_TRACKING_URI": "http://127.0.0.1:9"}
    started: list[subprocess.Popen[bytes]] = []

    def start() -> subprocess.Popen[bytes]:
        with (tmp_path / "said.log").open("ab") as log:
            started.append(
                subprocess.Popen(
                    [python, "-m", "strop.cli", "train", "run.toml", "output.dir=run"],
                    cwd=tmp_path,
                    env={**os.environ, **keys, **addresses, "STROP_CACHE": str(tmp_path / "cache")},
                    stdout=log,
                    stderr=subprocess.STDOUT,
                )
            )
        return started[-1]

    yield start
    for one in started:
        one.kill()
        one.wait()


@pytest.mark.slow
def test_all_have_each_step_once_after_a_kill(tmp_path: Path, python: Path, command: Start) -> None:
    run_path, said = tmp_path / "run", tmp_path / "said.log"
    process = command()
    sents = [sent_path(run_path, name) for name in NAMES]
    # Between two checkpoints, when all have heard of steps behind the first.
    while not all(read_sent(path).step > CHECKPOINT_EVERY for path in sents):
        assert process.poll() is None, said.read_text()
        time.sleep(0.02)
    ids = [read_sent(path).id for path in sents]
    process.kill()
    process.wait()
    assert command().wait(600) == 0, said.read_text()
    assert [read_sent(path).id for path in sents] == ids
    assert RunDir.open(run_path).is_finished

    found = read_trackers(python, run_path / "trackers")
    every, tens = list(range(1, STEPS + 1)), list(range(10, STEPS + 1, 10))
    for name in ("tensorboard", "mlflow"):
        assert found[name]["train/reward_mean"] == every, name
        assert found[name]["eval/accuracy"] == [0, *tens], name
    assert found["tensorboard"]["rollouts"] == [1, *tens]
    assert found["mlflow"]["rollouts"] == [f"rollouts/step-{step:06d}.json" for step in (1, *tens)]
    assert "What is" in found["tensorboard"]["text"]
    assert found["mlflow"]["status"] == "FINISHED"
    assert found["mlflow"]["params"]["train.steps"] == str(STEPS)
    # One file of each attempt, under one id: `wandb sync` makes a run of them.
    files = list((run_path / "trackers" / "wandb").rglob("*.wandb"))
    assert {re.sub(r"run-(\w+)\.wandb", r"\1", file.name) for file in files} == {ids[NAMES.index("wandb")]}
    assert len(files) == 2

    # No key is anywhere, and nothing was said that a person must know.
    held = [path for path in (*run_path.rglob("*"), said) if path.is_file()]
    assert not [path for path in held if KEY.encode() in path.read_bytes()]
    assert "tracker_" not in said.read_text()
