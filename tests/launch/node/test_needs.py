"""A role that its job does without, as the agent knows it; and the GPUs that roles get."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from strop.hardware.allocation import GpuRequest
from strop.launch.contract import Need, RolePlan
from strop.launch.node.environment import NodeTask, request_devices
from strop.launch.node.roles import PeerWatch
from tests.fixtures.jobs import project, role, saver, wait_for
from tests.launch.node.test_agent import LIMIT_S, Node, a_node, running

__all__ = ["project", "running"]


def lender(text: str) -> RolePlan:
    """A role that a run does without, like a node's Ray."""
    return role("ray", text, need=Need.NOTHING)


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


@pytest.mark.parametrize("code", [0, 1])
def test_a_node_ends_without_fault_with_all_that_it_lent(project: Path, code: int) -> None:
    """With the head of Ray, or by itself: whether the run goes on is the run's to say."""
    node = a_job(project, lender(f"raise SystemExit({code})"), lender("import time; time.sleep(1)"))
    assert node.run() == 0
    assert ("the run goes on without it" in node.log("agent")) == (code == 1)


def test_a_node_that_is_told_to_stop_lends_until_its_deadline(
    project: Path, running: list[subprocess.Popen[str]]
) -> None:
    """Ranks of the run are there, and it saves."""
    node = a_job(project, lender("import time; print('here', flush=True); time.sleep(600)"))
    agent = node.start("--grace", 2)
    running.append(agent)
    wait_for(lambda: "here" in node.log("ray"))
    agent.send_signal(signal.SIGUSR2)
    assert agent.wait(LIMIT_S) == 0


def test_training_decides_after_the_loss_of_what_was_lent(project: Path) -> None:
    node = a_job(project, trainer("the run goes on without it"), lender("raise SystemExit(1)"))
    assert node.run() == 0
    assert node.log("train") == "trained\n"


@pytest.mark.parametrize("code", [2, 76])
def test_a_lender_that_refuses_ends_the_job(project: Path, code: int) -> None:
    node = a_job(project, saver(10_000), lender(f"raise SystemExit({code})"))
    assert node.run() == code
    assert node.end()["role"] == "ray"


def request_of(project: Path, roles: Sequence[RolePlan], backend: str, **environ: str) -> GpuRequest:
    node = a_node(project, roles)
    return request_devices(replace(node.plan, backend=backend), roles, environ)


def test_gpus_are_handed_out_to_training_first(project: Path) -> None:
    roles: list[Any] = [
        replace(lender("pass"), gpus={"judge": 2}),
        replace(saver(1), gpus={"train": 4, "infer": 2}),
    ]
    asked = request_of(project, roles, "slurm", CUDA_VISIBLE_DEVICES="0,1,2,3,4,5,6,7")
    assert list(asked.wanted.items()) == [("train/infer", 2), ("train/train", 4), ("ray/judge", 2)]
    # What a scheduler must name, and an instance that is the job's altogether.
    assert asked.is_granted
    assert not request_of(project, roles, "sagemaker").is_granted


# How an agent sees the other nodes of its attempt, by their files alone.


def task(folder: Path, node: int) -> NodeTask:
    return NodeTask(
        job_path=folder / "job", trial_path=folder, attempt="7-0", number=0, node=node, num_nodes=2
    )


def test_a_first_node_that_never_gives_a_sign_is_not_waited_for_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Incident: node 0 was lost before its first sign of life, and the others kept their GPUs for days."""
    assert PeerWatch(task(tmp_path, 1), is_sidecar=False).check() is None
    monkeypatch.setattr("strop.launch.node.roles.FIRST_HEARTBEAT_LIMIT_S", 0.0)
    order = PeerWatch(task(tmp_path, 1), is_sidecar=False).check()
    assert order is not None
    assert (order.exit_code, order.cause) == (1, "node 0 has sent no heartbeat for 0 s")
    # It gives the signs itself, and waits for none.
    assert PeerWatch(task(tmp_path, 0), is_sidecar=False).check() is None


def test_a_first_node_that_falls_silent_is_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("strop.launch.node.roles.MAX_SILENCE_S", 0.0)
    monkeypatch.setattr("strop.launch.node.roles._LOOK_EVERY_S", 0.0)
    watch = PeerWatch(task(tmp_path, 1), is_sidecar=False)
    assert watch.check() is None
    sign = tmp_path / "attempts" / "7-0" / "alive"
    sign.parent.mkdir(parents=True)
    sign.write_text("1")
    # The first look at a sign is when it was given, whatever its clock says.
    assert watch.check() is None
    order = watch.check()
    assert order is not None
    assert order.cause.startswith("node 0 has sent no heartbeat")
