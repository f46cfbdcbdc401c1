"""A real training of a small model on the cluster, preempted with the cluster's own signal."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from strop.cli import main
from strop.cli.jobs import open_job
from strop.evaluate import EvalResult
from strop.launch.contract import JobState
from strop.launch.job_dir import job_path_of, read_ref
from tests.fixtures.commands import Run, folder, run
from tests.fixtures.drill import drill, preempt
from tests.fixtures.evaluation_jobs import (
    WHOLE_TABLE,
    alone,
    find_shards,
    hold,
    results,
    table,
    write_evaluation,
)
from tests.fixtures.jobs import find_process, hold_until_told, wait_for
from tests.fixtures.own_code import own_settings, write_own_code
from tests.launch.slurm.plans import ALL_ENDS, LoginNode, slurm_log, verdict

__all__ = ["alone", "folder", "run"]
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
    settings = ("train.steps=24", "train.checkpoint_every=10", "name=drilled", *own_settings(place))
    assert run("train", "run.toml", *settings, "output.dir=runs/undisturbed").code == 0
    sent = run("submit", "run.toml", *settings, "--on", "slurm", "job.time_limit=5m", "job.cpus=1")
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
    assert any(line.startswith("step 24/24") for line in told)
    assert told[-1] == "ended: succeeded"
    wait_for(lambda: state_of(run, "drilled") == "succeeded", limit_s=400)
    found, expected = (
        [(line["step"], line["reward_mean"]) for line in map(json.loads, path.read_text().splitlines())]
        for path in (metrics, Path("runs/undisturbed/metrics.jsonl"))
    )
    assert [step for step, _ in found] == list(range(1, 25))
    assert found == expected
    fetched = run("fetch", "drilled", "--to", "copy", "--only", "latest")
    assert fetched.code == 0, fetched.err
    assert (Path("copy") / "checkpoints" / "step-000024" / "model" / "config.json").is_file()


# An evaluation: shared by two nodes, preempted, gone on with, and fetched.


def test_a_preempted_evaluation_on_two_nodes_ends_as_one_that_was_left_alone(
    login: LoginNode,
    tiny_model_dir: Path,
    alone: dict[str, EvalResult],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(login.root / "state"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.chdir(login.root)
    site = f'[sites.cluster]\nbackend = "slurm"\npython = "{login.python}"\ncpus_per_gpu = 1\n'
    (login.root / "strop-sites.toml").write_text(site)
    write_evaluation(login.root, tiny_model_dir)
    words = ["submit", "EVAL.toml", "--on", "cluster", "--no-snapshot", "job.gpus=0", "job.nodes=2"]
    assert main([*words, "job.time_limit=15m"]) == 0, capsys.readouterr().err
    (home,) = (path for path in (login.root / "runs").iterdir() if path.is_dir())
    ref = read_ref(job_path_of(home))
    hold("--part 0/2", str(home))
    login.wait_until(lambda: find_shards(home))
    preempt(login.backend, ref)
    status = login.wait_for(ref, *ALL_ENDS, attempt=1)
    assert status.state is JobState.SUCCEEDED, slurm_log(ref)
    ends = [verdict(login, ref, number) for number in (0, 1)]
    assert [(end["exit_code"], end["nodes"]) for end in ends] == [(75, ["n1", "n2"]), (0, ["n1", "n2"])]
    capsys.readouterr()
    assert main(["logs", str(home), "--role", "eval"]) == 0
    said = capsys.readouterr().out
    for number in (0, 1):
        assert f"shares {number} to {number} of 2 are asked here" in said
    assert "are kept from before" in said
    assert main(["fetch", str(home), "--to", str(tmp_path / "fetched")]) == 0
    assert results(tmp_path / "fetched") == alone
    assert table(tmp_path / "fetched") == WHOLE_TABLE
