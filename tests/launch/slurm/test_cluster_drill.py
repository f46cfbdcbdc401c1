"""A real training of a small model on the cluster, preempted with the cluster's own signal."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from strop.cli.jobs import open_job
from tests.fixtures.commands import Run, folder, run
from tests.fixtures.drill import drill
from tests.fixtures.jobs import find_process, hold_until_told, wait_for
from tests.fixtures.own_code import own_settings, write_own_code
from tests.launch.slurm.plans import LoginNode

__all__ = ["folder", "run"]
pytestmark = pytest.mark.slow


def state_of(run: Run, name: str) -> str:
    (found,) = json.loads(run("status", name, "--json").out)
    return str(found["state"])


@pytest.fixture
def place(folder: Path, login: LoginNode, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder of a login node, with a list of jobs and leases of this test alone."""
    monkeypatch.setenv("XDG_STATE_HOME", str(folder.parent / "state"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(folder.parent / "config"))
    monkeypatch.setenv("STROP_RUNTIME_DIR", str(folder.parent / "runtime"))
    return folder


def test_a_drill_proves_that_a_training_survives_the_clusters_preemption(place: Path, run: Run) -> None:
    """Incident LAU-2: USR2 through SLURM, a newer checkpoint, exit 75, and an undisturbed curve.

    The task is the user's own: what was submitted judges in both lives, whatever is edited meanwhile.
    """
    write_own_code(place, "submitted")
    settings = ("train.steps=80", "train.checkpoint_every=30", "name=drilled", *own_settings(place))
    assert run("train", "run.toml", *settings, "output.dir=runs/undisturbed").code == 0
    sent = run("submit", "run.toml", *settings, "--on", "slurm", "--time", "5m", "job.cpus=1")
    assert sent.code == 0, sent.err
    write_own_code(place, "edited", 0.5)
    (home,) = Path("runs").glob("drilled-*")
    metrics = home / "metrics.jsonl"
    wait_for(lambda: metrics.exists() and len(metrics.read_text().splitlines()) > 3, limit_s=300)
    # It does not come to its end before the drill has begun.
    trainer = find_process("strop.cli train", str(home.resolve()))
    assert trainer is not None
    hold_until_told(trainer)
    watch = [sys.executable, "-m", "strop.cli", "watch", "drilled"]
    with subprocess.Popen(watch, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as watching:
        launcher, ref, _ = open_job("drilled")
        drill(launcher, ref, num_steps=3, limit_s=240)
        assert watching.stdout is not None
        # Whoever watches sees it go on, and ends with it.
        told = watching.stdout.read().splitlines()
    assert watching.returncode == 0, told
    assert any("checkpoint" in line for line in told)
    assert any(line.startswith("step 80/80") for line in told)
    assert told[-1] == "ended: succeeded"
    wait_for(lambda: state_of(run, "drilled") == "succeeded", limit_s=400)
    found, expected = (
        [(line["step"], line["reward_mean"]) for line in map(json.loads, path.read_text().splitlines())]
        for path in (metrics, Path("runs/undisturbed/metrics.jsonl"))
    )
    assert [step for step, _ in found] == list(range(1, 81))
    assert found == expected
