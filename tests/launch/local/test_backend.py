"""Jobs of this machine, without any that runs: a sweep by what its supervisor wrote, and a refused start."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from strop.errors import CheckRefused, ConfigError
from strop.launch.attempts import write_verdict
from strop.launch.build_request import make_plan
from strop.launch.contract import JobRef, JobState
from strop.launch.job_dir import job_path_of, write_plan
from strop.launch.launcher import Launcher
from strop.launch.local.backend import LocalBackend
from strop.launch.local.supervisor_files import confirm_end, read_orders, write_identity
from tests.fixtures.jobs import is_running, make_request, project, role, saver, wait_for
from tests.fixtures.own_code import OWN_TASK, write_own_code

__all__ = ["project"]


@pytest.fixture
def ref(project: Path) -> JobRef:
    """A sweep of two trials under a supervisor, which is this process: the first one has succeeded."""
    plan = make_plan(make_request(project, [saver()], sweep=("optimizer.lr=1e-5,2e-5",)), LocalBackend())
    job_path = job_path_of(plan.home)
    job_path.mkdir(parents=True)
    write_plan(plan)
    write_identity(job_path, "local-1")
    for number, code, told in ((0, 0, ""), (1, 75, "SIGTERM")):
        write_verdict(
            Path(plan.trials[number].path) / "attempts" / "local-1-0",
            number=0,
            exit_code=code,
            signal=told,
            started_at=time.time(),
            ended_at=time.time(),
            nodes=("here",),
        )
    return JobRef(
        name=plan.name,
        site=plan.site,
        backend="local",
        home=plan.home,
        job_id="local-1",
        plan_hash=plan.plan_hash,
        submitted_at=plan.submitted_at,
    )


def test_a_cancelled_sweep_keeps_the_successes_of_trials_that_had_ended(ref: JobRef) -> None:
    """Incident: the first of two trials had succeeded, the job was cancelled, and both were `cancelled`."""
    write_identity(job_path_of(ref.home), "local-1", cancelled_by="SIGTERM")
    states = [one.state for one in Launcher(LocalBackend()).status([ref])]
    assert states == [JobState.SUCCEEDED, JobState.CANCELLED]


def test_the_order_to_end_one_trial_reaches_the_supervisor_and_no_other_trial(ref: JobRef) -> None:
    """Incident: `strop cancel JOB/members/1` ended the whole sweep, without a word."""
    LocalBackend().stop(ref, 1, grace_s=1.0)
    assert read_orders(job_path_of(ref.home)) == [(1, signal.SIGTERM)]
    confirm_end(job_path_of(ref.home), 1)
    states = [one.state for one in Launcher(LocalBackend()).status([ref])]
    assert states == [JobState.SUCCEEDED, JobState.CANCELLED]


def test_a_supervisor_that_says_nothing_is_refused_and_ended(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Incident: a start that took too long was refused and went on: two jobs ran after another one."""
    monkeypatch.setattr("strop.launch.local.backend.START_LIMIT_S", 0.3)
    python = project / "python"
    python.write_text(f"#!{sys.executable} -S\nimport time\ntime.sleep(600)\n")
    python.chmod(0o755)
    (project / "strop-sites.toml").write_text(f'[sites.desk]\nbackend = "local"\npython = "{python}"\n')
    with pytest.raises(CheckRefused, match="did not start: it printed nothing"):
        Launcher(LocalBackend()).submit(make_request(project, [saver()], site="desk"))
    wait_for(lambda: not is_running(str(python)))


# Code and rows of the user's travel with a job: what was submitted is what runs.


READER = """
import asyncio, sys, time
from pathlib import Path

from strop.rollout import Split
from strop.spec import load_spec
from strop.tasks import build_task

job, run = map(Path, sys.argv[1:])
while not (run / "go").exists():
    time.sleep(0.02)
task = build_task(load_spec(job / "spec.toml").spec.task)
example = task.examples(Split.TRAIN)[0]
reward = asyncio.run(task.verify(example, chr(4))).reward
(run / "found").write_text(f"{example.fields['by']} {reward}")
"""


def write(project: Path, by: str, value: float) -> None:
    write_own_code(project, by, value)
    (project / "run.toml").write_text(f'name = "job"\n{OWN_TASK}')


@pytest.mark.slow
def test_lau_5_what_was_submitted_is_what_runs(project: Path) -> None:
    write(project, "submitted", 1)
    launcher = Launcher(LocalBackend())
    reader = role("train", READER, "{job}", "{run}")
    ref = launcher.submit(make_request(project, [reader], "train.prompts_per_step=1")).ref
    write(project, "edited", 0.5)
    (Path(ref.home) / "go").touch()
    wait_for(lambda: launcher.status([ref])[0].state.is_terminal, limit_s=180.0)
    assert launcher.status([ref])[0].state is JobState.SUCCEEDED
    assert (Path(ref.home) / "found").read_text() == "submitted 1.0"


def test_code_outside_of_the_project_is_refused_by_name(project: Path) -> None:
    write(project, "submitted", 1)
    (project.parent / "near.py").write_text("VALUE = 1\n")
    (project / "reward.py").rename(project.parent / "reward.py")
    reward = f"task.reward={project.parent / 'reward.py'}:score"
    with pytest.raises(ConfigError, match=r"/near\.py, which reward\.py:score needs.*it lies outside of"):
        make_request(project, [], "train.prompts_per_step=1", reward)


def test_code_that_git_ignores_is_refused_by_name(project: Path) -> None:
    write(project, "submitted", 1)
    (project / ".gitignore").write_text("near.py\n")
    subprocess.run(["git", "init", "-q", str(project)], check=True)
    with pytest.raises(ConfigError, match=r"near\.py, which reward\.py:score needs.*git ignores it"):
        make_request(project, [], "train.prompts_per_step=1")
