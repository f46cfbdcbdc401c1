"""A role that the job waits for and does not fail with: the evaluator, as far as the agent knows it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from strop.hardware.allocation import GpuRequest
from strop.launch.attempts import read_attempts
from strop.launch.contract import JobState, RolePlan
from strop.launch.node.environment import request_devices
from strop.launch.status import decide_state
from strop.record import RunDir
from strop.record.files import DirectoryRecord
from tests.fixtures.jobs import is_running, project, role, saver, wait_for
from tests.launch.node.test_agent import LIMIT_S, Node, a_node, running

__all__ = ["project", "running"]


def evaluator(text: str, *arguments: object) -> RolePlan:
    return role("evaluator", text, *arguments, must_succeed=False, is_awaited=True)


def lender(text: str) -> RolePlan:
    """A role that a run does without, like a node's Ray."""
    return role("ray", text, must_succeed=False, may_be_lost=True)


TRAINS_UNTIL_TOLD = """
import sys, time
from pathlib import Path

log, words = Path(sys.argv[1]) / "attempts/a-0/0/agent.log", sys.argv[2]
while words not in log.read_text():
    time.sleep(0.02)
print("trained")
"""


def trainer(words: str) -> RolePlan:
    """A role that has done its work once the agent has said something, and not before."""
    return role("train", TRAINS_UNTIL_TOLD, "{run}", words)


def a_job(project: Path, *roles: RolePlan) -> Node:
    return a_node(project, roles)


def test_the_job_is_done_when_training_and_evaluation_are(project: Path) -> None:
    # The trainer ends with step 3; the evaluator waits for that, and has something to do after it.
    text = (
        "import sys, time\nfrom pathlib import Path\nstate = Path(sys.argv[1]) / 'state'\n"
        "while not state.exists(): time.sleep(0.02)\ntime.sleep(0.5); print('last evaluated')"
    )
    node = a_job(project, saver(3), evaluator(text, "{run}"))
    assert node.run() == 0
    assert node.log("evaluator") == "last evaluated\n"
    assert node.end()["cause"] == ""


def test_a_trainer_that_fails_does_not_wait_for_the_evaluator(project: Path) -> None:
    marker = f"waiting-{os.getpid()}"
    node = a_job(
        project, role("train", "raise SystemExit(3)"), evaluator("import time; time.sleep(600)", marker)
    )
    assert node.run() == 3
    assert not is_running(marker)


def test_a_failing_evaluator_is_announced_and_training_decides(project: Path) -> None:
    failing = evaluator("print('out of memory'); raise SystemExit(1)")
    node = a_job(project, trainer("the run goes on without it"), failing)
    assert node.run() == 0
    assert node.log("train") == "trained\n"
    said = node.log("agent")
    assert "role evaluator ended with exit code 1" in said
    assert "out of memory\nthe run goes on without it" in said
    assert said.count("the run goes on without it") == 1
    # It stays in the record of a job that succeeded.
    assert "out of memory" in node.end()["cause"]
    (node.home / "attempts" / "a-0" / "verdict.json").write_text(
        json.dumps({"exit_code": 0, "number": 0, "nodes": ["n"], "started_at": 1.0, "ended_at": 2.0})
    )
    found = decide_state(read_attempts(DirectoryRecord(node.home)), None, max_requeue=3, num_past=0)
    assert found.state is JobState.SUCCEEDED
    assert "role evaluator ended with exit code 1" in found.reason


def test_a_node_that_loses_what_it_lent_waits_for_the_others(
    project: Path, running: list[subprocess.Popen[str]]
) -> None:
    node = a_job(project, lender("print('the raylet ended'); raise SystemExit(1)"))
    agent = node.start("--grace", 2)
    running.append(agent)
    wait_for(lambda: "the raylet ended\nthe run goes on without it" in node.log("agent"))
    assert agent.poll() is None
    agent.send_signal(signal.SIGUSR2)
    assert agent.wait(LIMIT_S) == 0


@pytest.mark.parametrize("code", [0, 1])
def test_training_decides_after_the_loss_of_what_was_lent(project: Path, code: int) -> None:
    node = a_job(project, trainer("the run goes on without it"), lender(f"raise SystemExit({code})"))
    assert node.run() == 0
    assert node.log("train") == "trained\n"


@pytest.mark.parametrize("code", [2, 76])
def test_a_lender_that_refuses_ends_the_job(project: Path, code: int) -> None:
    node = a_job(project, saver(10_000), lender(f"raise SystemExit({code})"))
    assert node.run() == code
    assert node.end()["role"] == "ray"


@pytest.mark.parametrize("code", [2, 76])
def test_an_evaluator_that_refuses_ends_the_job_before_the_night_is_lost(project: Path, code: int) -> None:
    node = a_job(project, saver(10_000), evaluator(f"print('another model'); raise SystemExit({code})"))
    assert node.run() == code
    assert node.end()["role"] == "evaluator"
    assert "another model" in node.end()["cause"]


def test_a_preemption_ends_the_evaluator_at_once_and_training_saves(
    project: Path, running: list[subprocess.Popen[str]]
) -> None:
    marker = f"evaluates-{os.getpid()}"
    slow_saver = role(
        "train",
        "import signal, sys, time\nfrom pathlib import Path\n"
        "told = []\nsignal.signal(signal.SIGTERM, lambda *_: told.append(1))\n"
        "print('begun', flush=True)\nwhile not told: time.sleep(0.02)\n"
        "print('saving', flush=True)\nsaved = Path(sys.argv[1]) / 'saved'\n"
        "while not saved.exists(): time.sleep(0.02)\nraise SystemExit(75)",
        "{run}",
    )
    node = a_job(project, slow_saver, evaluator("import time; time.sleep(600)", marker))
    agent = node.start("--grace", 300)
    running.append(agent)
    wait_for(lambda: "begun" in node.log("train") and is_running(marker))
    agent.send_signal(signal.SIGUSR2)
    # The grace is far from over, and training is at its saving as long as it takes.
    wait_for(lambda: not is_running(marker) and "saving" in node.log("train"))
    assert agent.poll() is None
    (node.home / "saved").touch()
    assert agent.wait(LIMIT_S) == 75
    assert "goes on without" not in node.log("agent")


def test_stopped_between_the_end_of_training_and_the_last_result(
    project: Path, running: list[subprocess.Popen[str]]
) -> None:
    marker = f"trains-{os.getpid()}"
    text = "import time; print('begun', flush=True); time.sleep(600)"
    node = a_job(project, role("train", "print('trained', flush=True)", marker), evaluator(text))
    agent = node.start("--grace", 30)
    running.append(agent)
    wait_for(lambda: "begun" in node.log("evaluator") and "trained" in node.log("train"))
    wait_for(lambda: not is_running(marker))
    agent.send_signal(signal.SIGUSR2)
    assert agent.wait(LIMIT_S) == 75


def test_an_attempt_after_the_end_of_training_starts_no_trainer(project: Path) -> None:
    node = a_job(project, role("train", "raise SystemExit(9)"), evaluator("print('last evaluated')"))
    run = RunDir.adopt(node.home, "job", "", "digest", {})
    run.mark_finished()
    run.release()
    assert node.run() == 0
    assert node.log("evaluator") == "last evaluated\n"
    assert node.log("train") == ""


def request_of(project: Path, roles: Sequence[RolePlan], backend: str, **environ: str) -> GpuRequest:
    node = a_node(project, roles)
    return request_devices(replace(node.plan, backend=backend), roles, environ)


def test_gpus_are_handed_out_to_training_first(project: Path) -> None:
    roles: list[Any] = [
        replace(saver(1), gpus={"train": 4, "infer": 2}),
        replace(evaluator("pass"), gpus={"eval": 2}),
    ]
    asked = request_of(project, roles, "slurm", CUDA_VISIBLE_DEVICES="0,1,2,3,4,5,6,7")
    assert list(asked.wanted.items()) == [("train/infer", 2), ("train/train", 4), ("evaluator/eval", 2)]
    # What a scheduler must name, and an instance that is the job's altogether.
    assert asked.is_granted
    assert not request_of(project, roles, "sagemaker").is_granted
