"""Containers that are shown this machine's environment: real runs and evaluations, and sandboxes inside."""

from __future__ import annotations

import json
import os
import subprocess
import time
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.machine import limits
from strop.cli import main
from strop.evaluate import EvalResult
from strop.launch.backends import open_backend
from strop.launch.build_request import SubmitOptions, read_request
from strop.launch.container.image import BuiltImage
from strop.launch.contract import JobRef, JobState
from strop.launch.job_dir import job_path_of, read_ref
from strop.launch.launcher import Launcher
from strop.launch.logs import LogFilter
from strop.run.training import train_here
from strop.spec import load_spec
from strop.train import SilentObserver
from tests.fixtures.containers import list_names, write_sites
from tests.fixtures.drill import drill
from tests.fixtures.evaluation_jobs import (
    NUM_SHARDS,
    WHOLE_TABLE,
    alone,
    find_shards,
    hold,
    results,
    table,
    write_evaluation,
)
from tests.fixtures.jobs import (
    find_process,
    hold_until_told,
    make_request,
    project,
    read_verdicts,
    role,
    wait_for,
)
from tests.fixtures.own_code import ACCEPTED, OWN_TASK, write_own_code

__all__ = ["alone", "project"]
pytestmark = pytest.mark.slow
NUM_STEPS = 30
RUN_FILE = """
name = "inside"
[model]
uri = "{model}"
dtype = "float32"
{task}[train]
steps = {num_steps}
prompts_per_step = 2
group_size = 3
checkpoint_every = 1
[eval]
num_examples = 2
num_samples = 2
[placement]
threads = 1
"""


def wait_for_end(launcher: Launcher, ref: JobRef) -> None:
    wait_for(lambda: launcher.status([ref])[0].state.is_terminal, limit_s=180.0)
    wait_for(lambda: ref.job_id not in list_names(), limit_s=180.0)


def test_a_drill_of_a_real_training_proves_the_same_curve_as_without_a_container(
    project: Path, base_image: BuiltImage, tiny_model_dir: Path
) -> None:
    """The task is the user's own: its code travels into the container."""
    write_own_code(project, "submitted")
    (project / "run.toml").write_text(
        RUN_FILE.format(model=tiny_model_dir, task=OWN_TASK, num_steps=NUM_STEPS)
    )
    # Undisturbed, on this machine, without a container.
    spec = load_spec(project / "run.toml", [f"output.root={project.parent / 'alone'}", ACCEPTED])
    alone = train_here(spec, SilentObserver(), on_run=lambda _run_dir: None)
    shown = json.dumps([f"{tiny_model_dir}:{tiny_model_dir}:ro"])
    write_sites(project, base_image.name, 'environment = "mounted"', f"mounts = {shown}")
    # Inside too, or the two would round differently.
    asked = SubmitOptions(
        site="box",
        project_path=project,
        overrides=(f"output.root={project.parent / 'runs'}", ACCEPTED),
        variables=tuple(limits()),
    )
    request = read_request(str(project / "run.toml"), asked, environ=os.environ, now=time.time())
    launcher = Launcher(open_backend(request.site))
    ref = launcher.submit(request).ref
    write_own_code(project, "edited", 0.5)
    home = Path(ref.home)
    wait_for(lambda: list(home.glob("checkpoints/step-*/COMPLETE")), limit_s=180.0)
    # It does not come to its end before the drill has begun.
    trainer = find_process("strop.cli train", str(home))
    assert trainer is not None
    hold_until_told(trainer)
    report = drill(launcher, ref, against=alone.run_path)
    assert report.has_passed, report.first_missing
    assert report.signal == "SIGUSR2"
    assert {proof.name: proof.is_given for proof in report.proofs}["equal curve"] is True
    wait_for_end(launcher, ref)
    (status,) = launcher.status([ref])
    assert status.state is JobState.SUCCEEDED, status.reason
    assert [(one["exit_code"], one["signal"]) for one in read_verdicts(home)] == [(75, "SIGUSR2"), (0, "")]
    steps = [json.loads(line)["step"] for line in (home / "metrics.jsonl").read_text().splitlines()]
    # No step is missing and none is there twice, over both lives.
    assert [step for step in steps if step > 0] == list(range(1, NUM_STEPS + 1))


def test_the_environment_is_shown_read_only_and_sandboxes_are_made_where_allowed(
    project: Path, base_image: BuiltImage
) -> None:
    code = (
        "import pathlib, strop, subprocess, torch\n"
        "print(int(torch.ones(3).sum()))\n"
        "try:\n    pathlib.Path(strop.__file__).with_name('new').touch()\n"
        "except OSError as error:\n    print(error.strerror)\n"
        "words = 'bwrap --unshare-all --ro-bind / / --proc /proc --dev /dev true'.split()\n"
        "print(subprocess.run(words).returncode)\n"
    )
    found = []
    for allowed in ("true", "false"):
        write_sites(project, base_image.name, 'environment = "mounted"', f"sandboxes = {allowed}")
        request = replace(
            make_request(project, [role("train", code)], site="box"), home=str(project.parent / allowed)
        )
        launcher = Launcher(open_backend(request.site))
        ref = launcher.submit(request, is_new=True).ref
        wait_for_end(launcher, ref)
        lines = launcher.logs(ref, 0, LogFilter(role="train"), is_followed=False)
        found.append([line.text for line in lines if not line.text.startswith("bwrap:")])
    assert found == [["3", "Read-only file system", "0"], ["3", "Read-only file system", "1"]]


def test_a_killed_evaluation_is_resumed_in_a_new_container_and_ends_as_if_left_alone(
    project: Path,
    base_image: BuiltImage,
    tiny_model_dir: Path,
    alone: dict[str, EvalResult],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(project)
    shown = json.dumps([f"{tiny_model_dir}:{tiny_model_dir}:ro"])
    write_sites(project, base_image.name, 'environment = "mounted"', f"mounts = {shown}")
    write_evaluation(project, tiny_model_dir)
    words = ["submit", "EVAL.toml", "--on", "box", "--gpus", "0", *(f"--env={name}" for name in limits())]
    assert main(words) == 0, capsys.readouterr().err
    (home,) = (path for path in (project / "runs").iterdir() if path.is_dir())
    ref = read_ref(job_path_of(home))
    wait_for(lambda: find_shards(home), limit_s=180.0)
    hold(str(home))
    subprocess.run(["podman", "kill", "--signal", "KILL", ref.job_id], check=True, capture_output=True)
    assert len(find_shards(home)) < NUM_SHARDS
    assert main([*words, "--resume", home.name, "--wait"]) == 0, capsys.readouterr().err
    wait_for(lambda: [one["number"] for one in read_verdicts(home)] == [0, 1], limit_s=180.0)
    capsys.readouterr()
    assert main(["logs", home.name, "--role", "eval"]) == 0
    assert "are kept from before" in capsys.readouterr().out
    assert main(["fetch", home.name, "--to", str(project / "fetched")]) == 0
    assert results(project / "fetched") == alone
    assert table(project / "fetched") == WHOLE_TABLE
