"""A training that is stopped from the keyboard or by a scheduler, and goes on with the same command."""

from __future__ import annotations

import json
import os
import re
import signal
from pathlib import Path

import pytest

from strop.record import RunDir
from tests.fixtures.attempts import start_command, wait_for_end, wait_until

FIRST_STEP = re.compile(r"^step .*/2000", re.MULTILINE)

WORDS = (
    *("train", "run.toml", "train.steps=2000", "train.checkpoint_every=1000", "output.dir=here"),
    *("eval.num_examples=1", "eval.num_samples=none"),
)


def stop_at_first_step(number: int, log_path: Path) -> tuple[int, list[str]]:
    """Train until the first step is told, send a signal, and return the exit code and what was told."""
    process = start_command(WORDS, log_path)
    assert process.pid is not None
    wait_until(lambda: FIRST_STEP.search(log_path.read_text()) is not None, process, log_path)
    os.kill(process.pid, number)
    return wait_for_end(process), log_path.read_text().splitlines()


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_checkpoints_says_75_and_the_same_command_continues(number: int, folder: Path) -> None:
    code, told = stop_at_first_step(number, folder / "first.log")
    assert code == 75, told
    assert "give the same command again" in told[-1]
    assert (folder / "here" / "latest" / "train.log").read_text().splitlines()[-1] == told[-1]
    stopped_at = RunDir.open(folder / "here").checkpoint_steps()[-1]
    assert 1 <= stopped_at < 2000
    code, told = stop_at_first_step(number, folder / "second.log")
    assert code == 75
    assert any(f"continues after step {stopped_at} of 2000" in line for line in told)
    attempt = json.loads((folder / "here" / "attempts" / "2" / "attempt.json").read_text())
    assert (attempt["cause"], attempt["exit_code"]) == ("Interrupted", 75)
