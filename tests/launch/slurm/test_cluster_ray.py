"""Ray across the nodes of a real allocation: joined, trained on, a lost node named, nothing left."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

import pytest

from strop.launch.contract import JobEnvironment, Need, RolePlan
from tests.fixtures.ray_traces import is_alive, needs_ray, read_command, read_variables
from tests.launch.slurm.plans import ALL_ENDS, LoginNode, gpus, slurm_log

pytestmark = [pytest.mark.slow, needs_ray]

TRAINER = Path(__file__).with_name("ray_role.py")
VALUE = "a,b 'c' \"d\"\nnew\\n$HOME"


def test_two_nodes_train_on_ray_and_go_on_until_the_last_engine_is_lost(login: LoginNode) -> None:
    train = RolePlan(name="train", argv=(sys.executable, str(TRAINER), "{run}"))
    join = (sys.executable, "-m", "strop.cluster.ray.node", "{logs}")
    ray = RolePlan(name="ray", argv=join, nodes="others", need=Need.NOTHING)
    # Every role on both nodes proves to the run that it has these bytes.
    environment = JobEnvironment(variables={"TRICKY": VALUE, "OMP_NUM_THREADS": "1"})
    ref = login.submit(train, ray, resources=gpus(0, nodes=2), environment=environment, max_requeue=0)
    trained, survived, lost = (Path(ref.home) / f"{name}.json" for name in ("trained", "survived", "lost"))
    login.wait_until(lambda: trained.exists() or login.status(ref).state in ALL_ENDS, limit_s=400.0)
    assert trained.exists(), describe(ref.home) + slurm_log(ref)
    found = json.loads(trained.read_text())
    assert sorted(name.partition("@")[0] for name in found["nodes"]) == ["0", "1"]
    assert found["version"] == 1
    assert (len(set(found["places"])), found["said"]) == (2, ["here\n"] * 2)
    mine = find_processes(ref.job_id, "strop.cluster.ray") | set(found["roles"].values())
    assert node_of(found["roles"]["engine-1"]) == "1"
    assert node_of(found["roles"]["engine-0"]) == node_of(found["roles"]["learner-0"]) == "0"
    os.kill(find_raylet(login, ref.job_id, "1"), signal.SIGKILL)
    login.wait_until(lambda: survived.exists() or login.status(ref).state in ALL_ENDS)
    assert survived.exists(), describe(ref.home) + slurm_log(ref)
    (event,) = json.loads(survived.read_text())["events"]
    assert event["replica"] == "engine-1"
    assert "node 1" in event["detail"], event
    os.kill(found["roles"]["engine-0"], signal.SIGKILL)
    login.wait_until(lambda: login.status(ref).state in ALL_ENDS)
    assert lost.exists(), describe(ref.home) + slurm_log(ref)
    cause = json.loads(lost.read_text())["cause"]
    assert "engine-0 on node 0" in cause, cause
    assert "the run goes on without it" in describe(ref.home)
    everything = mine | find_processes(ref.job_id, "")
    login.wait_until(lambda: not [pid for pid in everything if is_alive(pid)])


def find_processes(job_id: str, words: str) -> set[int]:
    """Return the processes of a job whose command line has these words."""
    found = set()
    for entry in filter(str.isdigit, os.listdir("/proc")):
        attempt = read_variables(int(entry)).get("STROP_ATTEMPT", "")
        if attempt.startswith(f"{job_id}-") and words in read_command(int(entry)):
            found.add(int(entry))
    return found


def find_raylet(login: LoginNode, job_id: str, node: str) -> int:
    """Return the raylet of a node. What it starts looks like a second one until it is another program."""
    found: set[int] = set()

    def is_one() -> bool:
        nonlocal found
        found = {pid for pid in find_processes(job_id, "raylet/raylet") if node_of(pid) == node}
        return len(found) == 1

    login.wait_until(is_one)
    return found.pop()


def node_of(pid: int) -> str:
    return read_variables(pid).get("STROP_NODE", "")


def describe(home: str) -> str:
    """Return what all processes of a job said."""
    logs = sorted(Path(home).rglob("*.log"))
    return "".join(f"\n== {path}\n{path.read_text()[-3000:]}" for path in logs if path.stat().st_size)
