"""Code and rows of the user's travel with a job: what was submitted is what runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from strop.errors import ConfigError
from strop.launch.contract import JobState
from strop.launch.launcher import Launcher
from strop.launch.local.backend import LocalBackend
from tests.fixtures.jobs import make_request, project, role, wait_for
from tests.fixtures.own_code import OWN_TASK, write_own_code

__all__ = ["project"]

READER = """
import sys, time
from pathlib import Path

from strop.rollout import Split
from strop.spec import load_spec
from strop.tasks import build_task

job, run = map(Path, sys.argv[1:])
while not (run / "go").exists():
    time.sleep(0.02)
task = build_task(load_spec(job / "spec.toml").spec.task)
example = task.examples(Split.TRAIN)[0]
(run / "found").write_text(f"{example.fields['columns']['by']} {task.verify(example, chr(4)).reward}")
"""


def write(project: Path, by: str, value: float) -> None:
    write_own_code(project, by, value)
    (project / "run.toml").write_text(f'name = "job"\n{OWN_TASK}')


@pytest.mark.slow
def test_what_was_submitted_is_what_runs(project: Path) -> None:
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
    import subprocess

    write(project, "submitted", 1)
    (project / ".gitignore").write_text("near.py\n")
    subprocess.run(["git", "init", "-q", str(project)], check=True)
    with pytest.raises(ConfigError, match=r"near\.py, which reward\.py:score needs.*git ignores it"):
        make_request(project, [], "train.prompts_per_step=1")
