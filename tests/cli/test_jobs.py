"""Jobs as a person types them and watches them: real trainings of a small model on this machine."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.fixtures.commands import Run
from tests.fixtures.jobs import find_process, hold_until_told, wait_for


def test_a_finished_run_is_shown_and_ends_with_its_exit_code(finished_run: Path, run: Run) -> None:
    for reference in (finished_run, finished_run.name):
        ended = run("watch", reference)
        assert (ended.code, ended.err) == (0, "")
        lines = ended.out.splitlines()
        assert lines[0] == f"{finished_run.name}: continues after step 2 of 2"
        assert [line.split(":")[0] for line in lines if "held-out accuracy" in line] == ["step 0", "step 2"]
        assert lines[-1] == "ended: done"


def test_a_stopped_run_gives_the_code_of_its_attempt(folder: Path, run: Run) -> None:
    stop = ("tripwires.on_alarm=stop", "tripwires.max_truncated_frac=0.0")
    assert run("train", "run.toml", "output.dir=here", *stop).code == 1
    # The process that trained is this one, which lives: it let go of the lock, and says so.
    lock = folder / "here" / "lock"
    lock.write_text(lock.read_text().replace(str(os.getpid()), "999999999"))
    ended = run("watch", "here")
    assert ended.code == 1
    assert "alarm: step 1: truncation" in ended.out
    assert ended.out.splitlines()[-1] == "ended: RunStopped"


@pytest.fixture
def far_run(folder: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A job called far that trains for as long as the test lasts; the run's directory."""
    for variable in ("XDG_STATE_HOME", "XDG_CONFIG_HOME", "STROP_RUNTIME_DIR"):
        monkeypatch.setenv(variable, str(folder.parent / variable.lower()))
    settings = ("train.steps=50000", "train.checkpoint_every=50000", "name=far", "eval.num_samples=none")
    assert run("submit", "run.toml", *settings, "--on", "local").code == 0
    (home,) = (folder / "runs").glob("far-*")
    yield home
    run("cancel", "far")


@contextmanager
def watching_far() -> Iterator[subprocess.Popen[str]]:
    """Watch it from a process of its own."""
    command = [sys.executable, "-m", "strop.cli", "watch", "far"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as watching:
        try:
            yield watching
        finally:
            watching.kill()


@pytest.mark.slow
def test_a_job_is_watched_left_and_watched_to_its_end(far_run: Path, run: Run) -> None:
    with watching_far() as watching:
        assert watching.stdout is not None
        for line in watching.stdout:
            if "step " in line and "/50000" in line:
                watching.send_signal(signal.SIGINT)
                break
        told, _ = watching.communicate(timeout=120)
    assert watching.returncode == 1
    assert "no longer watched; the run goes on" in told

    def num_steps() -> int:
        return len((far_run / "metrics.jsonl").read_text().splitlines())

    before = num_steps()
    wait_for(lambda: num_steps() > before, limit_s=240)
    # It trains no further while somebody comes to look.
    trainer = find_process("strop.cli train", str(far_run.resolve()))
    assert trainer is not None
    hold_until_told(trainer)
    with watching_far() as watching:
        assert run("cancel", "far").code == 0
        told, _ = watching.communicate(timeout=240)
    (status,) = json.loads(run("status", "far", "--json").out)
    assert status["state"] == "cancelled"
    assert watching.returncode not in (0, None)
    assert "ended: cancelled" in told.splitlines()[-1]
    # Whoever comes later hears the same.
    late = run("watch", "far")
    assert (late.code, late.out.splitlines()[-1]) == (watching.returncode, told.splitlines()[-1])
