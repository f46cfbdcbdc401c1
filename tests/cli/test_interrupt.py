"""A training that is stopped from the keyboard or by a scheduler, and goes on with the same command."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from strop.record import RunDir

PROGRAM = [
    sys.executable,
    "-c",
    "import sys; from strop.cli import main; sys.exit(main())",
    "train",
    "run.toml",
]
QUICK = ["output.dir=here", "eval.num_examples=1", "eval.num_samples=none", "train.checkpoint_every=1000"]


def stop_at_first_step(number: int) -> tuple[int, list[str]]:
    """Train until the first step is told, send a signal, and return the exit code and what was told."""
    words = [*PROGRAM, *QUICK, "train.steps=2000"]
    told: list[str] = []
    with subprocess.Popen(words, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True) as process:
        assert process.stderr is not None
        is_sent = False
        for line in process.stderr:
            told.append(line)
            if not is_sent and line.startswith("step ") and "/2000" in line:
                process.send_signal(number)
                is_sent = True
        return process.wait(timeout=60), told


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_checkpoints_says_75_and_the_same_command_continues(number: int, folder: Path) -> None:
    code, told = stop_at_first_step(number)
    assert code == 75, told
    assert "give the same command again" in told[-1]
    assert (folder / "here" / "latest" / "train.log").read_text().splitlines()[-1] == told[-1].rstrip()
    stopped_at = RunDir.open(folder / "here").checkpoint_steps()[-1]
    assert 1 <= stopped_at < 2000
    code, told = stop_at_first_step(number)
    assert code == 75
    assert any(f"continues after step {stopped_at} of 2000" in line for line in told)
    attempt = json.loads((folder / "here" / "attempts" / "2" / "attempt.json").read_text())
    assert (attempt["cause"], attempt["exit_code"]) == ("Interrupted", 75)
