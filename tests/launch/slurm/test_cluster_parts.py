"""Sweeps as job arrays and heterogeneous jobs, on a real cluster."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from strop.launch.contract import JobEnvironment, JobState, Need
from strop.launch.job_dir import job_path_of
from strop.launch.launcher import Launcher
from tests.fixtures.drill import preempt
from tests.launch.slurm.plans import ALL_ENDS, LoginNode, a_role, gpus, seen, slurm_log
from tools.slurm_cluster import Cluster

pytestmark = pytest.mark.slow
RATES = tuple((f"optimizer.lr={rate}",) for rate in ("1e-5", "2e-5", "3e-5", "4e-5"))


def test_a_sweep_is_an_array_whose_trials_live_apart(login: LoginNode, cluster: Cluster) -> None:
    """Two at a time. The last task's own id is the array's: requeueing by that would start all again."""
    role = a_role("--held", "--special", "3=75,0")
    ref = login.submit(role, sweep=RATES, options={"array": 2})
    for trial in (0, 1):
        login.wait_for_step(ref, trial=f"members/{trial}")
    states = [status.state for status in login.launcher.status([ref])]
    assert states == [JobState.RUNNING] * 2 + [JobState.QUEUED] * 2
    assert len(cluster.run("squeue", "-h", "-t", "RUNNING").splitlines()) <= 2
    # One is cancelled, one is told, and one is left alone.
    outcome = login.launcher.cancel(ref, trial=0, grace_s=60.0)
    assert [status.state for status in outcome.statuses] == [JobState.CANCELLED]
    login.let_go(ref, "members/2")
    assert login.wait_for(ref, *ALL_ENDS, trial=2).state is JobState.SUCCEEDED, slurm_log(ref)
    preempt(login.backend, ref, 1)
    login.wait_for_step(ref, trial="members/1", attempt=1)
    login.let_go(ref, "members/1")
    assert login.wait_for(ref, *ALL_ENDS, trial=1, attempt=1).state is JobState.SUCCEEDED, slurm_log(ref)
    login.let_go(ref, "members/3")
    login.wait_for(ref, JobState.SUCCEEDED, trial=3, attempt=1)
    assert [len(login.attempts(ref, trial)) for trial in range(4)] == [1, 2, 1, 2]
    login.wait_until(lambda: cluster.run("squeue", "-h") == "")


def test_the_last_trial_of_a_sweep_takes_the_secrets_along(
    login: LoginNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("API_KEY", "k3y")
    launcher = Launcher(login.backend, environ={**login.launcher.environ, "API_KEY": "k3y"})
    environment = JobEnvironment(secrets=("API_KEY",))
    # The second trial lives twice: what the first one took along would be missing then.
    role = a_role("--steps", "5", "--special", "1=75,0")
    ref = launcher.submit(login.request(role, environment=environment, sweep=RATES[:2])).ref
    for trial in (0, 1):
        login.wait_for(ref, JobState.SUCCEEDED, trial=trial, attempt=trial)
    login.wait_until(lambda: not (job_path_of(ref.home) / "secrets.json").exists())


def test_a_sidecar_lives_on_a_cpu_node_as_long_as_the_run_and_both_are_told_and_live_again(
    login: LoginNode, cluster: Cluster
) -> None:
    sidecar = a_role("--steps", "5000", name="sidecar", nodes="cpu", need=Need.PRESENCE)
    ref = login.submit(a_role("--held", gpus=2), sidecar, resources=gpus(2, num_cpu_nodes=1))
    login.wait_for_step(ref)
    preempt(login.backend, ref)

    def lives_again() -> bool:
        # Only the backfill scheduler starts such jobs; 22.05 looks again only once something happens.
        cluster.run("sbatch", "--output=/dev/null", "--wrap", "true")
        time.sleep(1.0)
        return (Path(ref.home) / f"seen-{ref.job_id}-1-0.json").exists()

    login.wait_until(lives_again)
    login.let_go(ref)
    status = login.wait_for(ref, *ALL_ENDS, attempt=1)
    assert status.state is JobState.SUCCEEDED, slurm_log(ref)
    attempt = f"{ref.job_id}-1"
    assert seen(ref, attempt)["begin"] > 0
    assert [seen(ref, attempt, node)["CUDA_VISIBLE_DEVICES"] for node in (0, 1)] == ["0,1", ""]
    folder = Path(ref.home) / "attempts" / attempt
    assert [(folder / "exit" / str(node)).read_text() for node in (0, 1)] == ["0", "0"]
    agent = json.loads((folder / "agent-1.json").read_text())
    assert (agent["host"], agent["part"]) == ("c1", "cpu")
