"""SIGTERM and Ctrl-C: a checkpoint of the step under way, exit code 75, the same command goes on."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from strop.record import RunDir, list_runs
from strop.train.signals import StopFlag
from tests.fixtures.tiny_run import Curve, read_curve

PROGRAM = Path(__file__).parents[1] / "fixtures" / "train_here.py"
NUM_STEPS = 8
RUN_FILE = """
name = "stopped"
[model]
uri = "{model}"
dtype = "float32"
[task]
name = "reverse-text"
num_train = 20
num_held_out = 2
max_words = 1
max_reply_tokens = 40
[train]
steps = {steps}
prompts_per_step = 4
rollouts_per_prompt = 4
checkpoint_every = 100
accept = "weights: a random model for a test"
[eval]
num_samples = "none"
[placement]
threads = 1
"""


def start(folder: Path, log: str, *overrides: str) -> subprocess.Popen[bytes]:
    given = [str(folder / "run.toml"), f"output.root={folder / 'runs'}", *overrides]
    with (folder / log).open("wb") as file:
        return subprocess.Popen(
            [sys.executable, str(PROGRAM), *given],
            stdout=file,
            stderr=subprocess.STDOUT,
        )


def wait_for(process: subprocess.Popen[bytes], condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert process.poll() is None, "the process ended too early"
        assert time.monotonic() < deadline
        time.sleep(0.002)


def steps_of(folder: Path) -> list[int]:
    runs = list_runs(folder / "runs") if (folder / "runs").exists() else []
    return [int(line["step"]) for run in runs for line in run.metrics.read()]


def prepare(folder: Path, model_dir: Path) -> Path:
    (folder / "run.toml").write_text(RUN_FILE.format(model=model_dir, steps=NUM_STEPS))
    return folder


@pytest.fixture
def folder(tmp_path: Path, tiny_model_dir: Path) -> Path:
    return prepare(tmp_path, tiny_model_dir)


@pytest.fixture(scope="module")
def whole(tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Curve:
    """Return the curve of a run that nobody disturbed."""
    folder = prepare(tmp_path_factory.mktemp("whole"), tiny_model_dir)
    assert start(folder, "log").wait(120) == 0, (folder / "log").read_text()
    (run,) = list_runs(folder / "runs")
    return read_curve(run.path)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_run_with_a_checkpoint_and_the_same_command_goes_on(
    folder: Path, whole: Curve, number: signal.Signals
) -> None:
    process = start(folder, "first.log")
    wait_for(process, lambda: len(steps_of(folder)) >= 2)
    process.send_signal(number)
    assert process.wait(60) == 75, (folder / "first.log").read_text()
    (run,) = list_runs(folder / "runs")
    done = steps_of(folder)
    assert 2 <= len(done) < NUM_STEPS
    # No checkpoint was due: this one is the signal's, and of the last step on record.
    assert run.checkpoint_steps() == [done[-1]]
    message = (folder / "first.log").read_text()
    assert f"stopped by {number.name.lower()} after step {done[-1]}. Allowed: " in message
    assert f"checkpoint step-{done[-1]:06d}. Next: give the same command again." in message
    attempt = json.loads((run.path / "attempts" / "1" / "attempt.json").read_text())
    assert (attempt["cause"], attempt["exit_code"], attempt["step"]) == ("Interrupted", 75, done[-1])
    again = start(folder, "second.log")
    assert again.wait(120) == 0, (folder / "second.log").read_text()
    assert steps_of(folder) == list(range(1, NUM_STEPS + 1))
    assert read_curve(run.path) == whole


@pytest.mark.slow
def test_a_second_ctrl_c_ends_at_once_without_a_checkpoint(folder: Path) -> None:
    # Steps of a second and more, so that both signals fall into the second one.
    process = start(folder, "first.log", "train.rollouts_per_prompt=128")
    wait_for(process, lambda: len(steps_of(folder)) >= 1)
    time.sleep(0.25)
    process.send_signal(signal.SIGINT)
    time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    assert process.wait(60) in {1, -signal.SIGINT}, (folder / "first.log").read_text()
    (run,) = list_runs(folder / "runs")
    attempt = json.loads((run.path / "attempts" / "1" / "attempt.json").read_text())
    assert (attempt["cause"], attempt["exit_code"]) == ("KeyboardInterrupt", 1)
    assert run.checkpoint_steps() == []
    # The lock is free and the run can be taken up.
    with RunDir.open(run.path) as taken:
        assert taken.is_locked_here


def test_the_flag_is_set_while_code_runs_and_the_handlers_come_back() -> None:
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    with StopFlag() as flag:
        causes = [flag.cause]
        # No event loop runs here, as none does during an optimizer step.
        signal.raise_signal(signal.SIGTERM)
        causes.append(flag.cause)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        assert [*causes, flag.cause] == [None, "sigterm", "sigterm"]
    assert {number: signal.getsignal(number) for number in before} == before
