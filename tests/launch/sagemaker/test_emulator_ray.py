"""Ray over the hosts of a SageMaker job, each with a disk of its own: trained on, a lost host outlived."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from strop.launch.contract import Need, RolePlan
from strop.launch.sagemaker.engine import Engine
from strop.launch.sagemaker.local_mode import Emulator
from tests.fixtures.ray_traces import files_of_nodes, needs_ray, read_command, read_variables
from tests.fixtures.sockets import find_interface
from tests.fixtures.tiny_model import tiny_model
from tests.launch.sagemaker.rehearsal import Rehearsal

pytestmark = [pytest.mark.slow, needs_ray]

TRAINER = Path(__file__).parents[1] / "slurm" / "ray_role.py"
JOIN = (sys.executable, "-m", "strop.cluster.ray.node", "{logs}")
VALUE = "a,b 'c' \"d\" $HOME"
LIMIT_S = 600.0
"""Two hosts import torch and Ray, on a machine that may be busy."""
CREDENTIALS = "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI"


def test_two_hosts_train_on_ray_and_the_run_outlives_the_second(
    rehearsal: Rehearsal, engine: Engine, tmp_path: Path
) -> None:
    """Engines on both; weights are sent to the second; its Ray is killed; at the end nothing is left."""
    model = tiny_model(tmp_path / "model")
    train = RolePlan(name="train", argv=(sys.executable, str(TRAINER), "{run}", str(model)))
    ray = RolePlan(name="ray", argv=JOIN, nodes="others", need=Need.NOTHING)
    request = rehearsal.submit(
        instance_count=2, roles=(train, ray), variables={"TRICKY": VALUE, "OMP_NUM_THREADS": "1"}
    )
    # Ray takes no loopback for several hosts, which the emulator calls their network.
    interface = find_interface()
    assert interface is not None
    environment = {CREDENTIALS: "/v2/credentials/an-id", "GLOO_SOCKET_IFNAME": interface}
    emulator = rehearsal.start(
        request, engine=engine, rootfs=Path("/"), python=sys.executable, environment=environment
    )
    found = wait_for_word(emulator, "trained")
    assert sorted(name.partition("@")[0] for name in found["nodes"]) == ["0", "1"]
    assert found["version"] == 1
    # Both engines serve the step's weights; the second fetched the model to a disk of its own.
    assert found["served"] == [1, 1]
    there = [pid for pid in emulator.find_leftovers() if read_variables(pid).get("STROP_NODE") == "1"]
    engines = [pid for pid in there if "EngineActor" in read_command(pid)]
    assert len(engines) == 1
    assert {(read_variables(pid)[CREDENTIALS], read_variables(pid)["TRICKY"]) for pid in engines} == {
        ("/v2/credentials/an-id", VALUE)
    }
    (raylet,) = (pid for pid in there if "raylet/raylet" in read_command(pid))
    os.kill(raylet, signal.SIGKILL)
    (event,) = wait_for_word(emulator, "survived")["events"]
    assert event["replica"] == "engine-1"
    assert "node 1" in event["detail"], event
    assert emulator.wait(LIMIT_S) == 0, describe(emulator)
    assert "the run goes on without it" in emulator.log_of("algo-2")
    assert emulator.codes == {"algo-1": 0, "algo-2": 0}
    assert emulator.check_end() == []


HEAD = """
import asyncio, os, sys
from pathlib import Path
from strop.cluster.ray.runtime import RayHead

async def act():
    run = Path(sys.argv[1])
    head = RayHead(run / "roles", 2, run / "unused")
    await head.start()
    await head.await_nodes(300.0)
    print("both are here", flush=True)
    exec(sys.argv[2])
    await head.stop()

asyncio.run(act())
raise SystemExit(75)
"""


@pytest.mark.parametrize(("end", "code"), [("", 75), ("os.kill(os.getpid(), 9)", 128 + signal.SIGKILL)])
def test_the_first_host_decides_and_the_other_ends_with_its_ray(
    rehearsal: Rehearsal, end: str, code: int
) -> None:
    """Also after kill -9 of the run: nothing but Ray is between the hosts, and nothing of it is left."""
    interface = find_interface()
    assert interface is not None
    before = files_of_nodes()
    train = RolePlan(name="train", argv=(sys.executable, "-c", HEAD, "{run}", end))
    ray = RolePlan(name="ray", argv=JOIN, nodes="others", need=Need.NOTHING)
    request = rehearsal.submit(instance_count=2, roles=(train, ray))
    emulator = rehearsal.start(request, environment={"GLOO_SOCKET_IFNAME": interface})
    assert emulator.wait(LIMIT_S) == code, describe(emulator)
    assert "train| both are here" in emulator.log_of("127.0.1.1")
    assert emulator.codes == {"127.0.1.1": code, "127.0.1.2": 0}, describe(emulator)
    assert emulator.check_end() == []
    assert files_of_nodes() <= before
    verdict = rehearsal.read_record(request, "attempts/job-20261121-120000-0/verdict.json")
    assert verdict["exit_code"] == code


def wait_for_word(emulator: Emulator, word: str) -> dict[str, Any]:
    """Return what the trainer says after a word."""

    def find() -> list[str]:
        lines = emulator.log_of("algo-1").splitlines()
        return [line for line in lines if line.startswith(f"train| {word} ")]

    deadline = time.monotonic() + LIMIT_S
    while not find() and emulator.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)
    assert find(), describe(emulator)
    found: dict[str, Any] = json.loads(find()[0].removeprefix(f"train| {word} "))
    return found


def describe(emulator: Emulator) -> str:
    """Return what both hosts said."""
    return "".join(f"\n== {host}\n{emulator.log_of(host)[-6000:]}" for host in emulator.hosts)
