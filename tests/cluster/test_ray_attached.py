"""A run on a Ray cluster that is already running, which goes on afterwards as it was."""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import pytest

from strop.cluster.contract import build_placement
from strop.cluster.ray.placement import require_gpus
from strop.cluster.ray.runtime import attach, disconnect
from strop.errors import CheckRefused
from strop.hardware.ports import LOOPBACK
from strop.hardware.process import spawn, terminate
from strop.rollout import Split
from strop.spec.layout import settle_layout
from strop.store import ModelHandle
from strop.tasks import build_task
from tests.fixtures.builders import plan_for
from tests.fixtures.ray_traces import needs_ray
from tests.fixtures.row_files import write_rows
from tests.fixtures.sockets import free_port
from tests.fixtures.tiny_run import tiny_spec

# Asked in a process of its own: one process is connected to one cluster at a time.
STATE = """
import json, ray, sys
ray.init(address=sys.argv[1], log_to_driver=False, configure_logging=False)
print(json.dumps({
    "free": {k: v for k, v in ray.available_resources().items() if k in ("CPU", "GPU")},
    "nodes": sum(node["Alive"] for node in ray.nodes()),
    "actors": len([1 for one in ray._private.state.actors().values() if one["State"] != "DEAD"]),
}))
"""
LOOPBACK_ALONE = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0", "RAY_AUTH_MODE": "disabled"}
"""Loopback is an address to Ray only so. A token in the user's home would change the mode."""


@pytest.fixture(autouse=True)
def _loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in LOOPBACK_ALONE.items():
        monkeypatch.setenv(name, value)


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A cluster of one node that believes it has three GPUs."""
    folder = tmp_path_factory.mktemp("r")
    # Its own, and short: paths of sockets end at 107 bytes, and other tests look at Ray's usual one.
    ray_dir = tempfile.TemporaryDirectory(prefix="r-", ignore_cleanup_errors=True)
    port = free_port()
    words = [sys.executable, "-P", "-m", "ray.scripts.scripts", "start", "--head", "--block"]
    words += [f"--port={port}", f"--node-ip-address={LOOPBACK}", "--num-gpus=3", "--num-cpus=4"]
    words += [
        f"--temp-dir={ray_dir.name}",
        *("--include-dashboard=false", "--include-log-monitor=false", "--no-monitor"),
        "--disable-usage-stats",
        "--object-store-memory=100000000",
        # The port above may lie among Ray's usual ones of workers.
        *("--min-worker-port=0", "--max-worker-port=0"),
    ]
    # Each program that connects would have four workers started before it asks.
    quiet = {"RAY_enable_worker_prestart": "0", "RAY_prestart_worker_first_driver": "0"}
    # Behind whatever else this machine does, an engine would not listen in time.
    quiet["RAY_worker_niceness"] = "0"
    child = spawn(words, folder / "ray.log", {**os.environ, **LOOPBACK_ALONE, **quiet})
    found = f"{LOOPBACK}:{port}"
    try:
        while "Ray runtime started" not in child.tail(200):
            assert child.poll() is None, child.tail()
            time.sleep(0.2)
        yield found
        # It lives until it is ended here.
        assert child.poll() is None
    finally:
        terminate(child, 2.0)
        ray_dir.cleanup()


def _ask(address: str) -> dict[str, Any] | None:
    words = [sys.executable, "-c", STATE, address]
    environment = {**os.environ, **LOOPBACK_ALONE}
    done = subprocess.run(words, capture_output=True, text=True, check=False, env=environment, timeout=60)
    return json.loads(done.stdout.splitlines()[-1]) if done.returncode == 0 else None


T = TypeVar("T")


def apart(work: Callable[..., T], *arguments: object) -> T:
    """Run a function in a process of its own: what Ray read once would keep this one from other clusters."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(work, *arguments).result()


# What a rollout worker judges by: a reward function and a task class of the user's.
CODE = """
import near

def score(reply, n):
    return near.worth(n)

class Own:
    def examples(self, split):
        return [{"n": n + 100 * (split == "train")} for n in range(4)]

    def render(self, example):
        return f"What is {example.fields['n']}?"

    def verify(self, example, text):
        return near.worth(example.fields["n"])
"""


def attach_and_attempt(
    address: str, model_dir: Path, folder: Path, asked: list[tuple[str, int, int]]
) -> tuple[list[str], dict[str, Any] | None, list[tuple[str, int, float | None]]]:
    """Start a run's roles there, and attempt an example of either kind of the user's own.

    Before that, ask other clusters or for other nodes. Return why these are refused, the cluster's state
    meanwhile, and task, number and reward of each rollout.
    """
    refused = refusals(asked)
    (folder / "near.py").write_text("def worth(n):\n    return n / 1000\n")
    (folder / "own.py").write_text(CODE)
    rows = write_rows(folder / "rows.jsonl", [{"q": f"{n}?", "n": n} for n in range(8)])
    reward = f"{folder / 'own.py'}:score"
    parts = {
        "rows": {"name": "rows", "source": str(rows), "prompt": "q", "reward": reward},
        "own": {"name": f"{folder / 'own.py'}:Own"},
    }
    sections = {"ray": {"address": address}, "task": {"name": "mixture", "parts": parts}}
    job = {"train_gpus": 1, "infer_gpus": 1, "env_gpus": 1}
    spec = settle_layout(tiny_spec(**sections, job=job, engine={"max_num_seqs": 4}))
    assert spec.placement.kind == "ray"
    examples = build_task(spec.task).examples(Split.TRAIN)
    chosen = [next(one for one in examples if one.task == name) for name in ("rows", "Own")]

    async def act() -> tuple[list[str], dict[str, Any] | None, list[tuple[str, int, float | None]]]:
        placement = build_placement(spec, ModelHandle(path=model_dir, digest="d"), folder / "roles")
        try:
            roles = await placement.start()
            meanwhile = await asyncio.to_thread(_ask, address)
            assert roles.run_group is not None
            groups = [
                await roles.run_group(
                    [plan_for(example, max_reply_tokens=4, sample_index=index) for index in range(2)]
                )
                for example in chosen
            ]
            # Engine and judge worked elsewhere; when, is known here.
            assert roles.busy.keys() == {"engine-0", "verifier"}
            assert roles.busy["engine-0"].take_intervals(9)
            found = [(one.example, one.outcome) for group in groups for one in group.rollouts]
            return (
                refused,
                meanwhile,
                [(example.task, example.fields["n"], told.reward) for example, told in found],
            )
        finally:
            await placement.stop()

    return asyncio.run(act())


def refusals(asked: list[tuple[str, int, int]]) -> list[str]:
    """Attach to each address for so many nodes and GPUs, and leave again; return why not."""

    async def act(address: str, num_nodes: int, gpus: int) -> None:
        try:
            nodes = await attach(address, num_nodes)
            require_gpus(tiny_spec(job={"gpus": gpus}).layout.slots, nodes)
        finally:
            disconnect()

    found = []
    for one in asked:
        with pytest.raises(CheckRefused) as refused:
            asyncio.run(act(*one))
        found.append(str(refused.value))
    return found


@pytest.mark.slow
@needs_ray
def test_a_run_attaches_where_it_finds_what_it_asks_for_and_leaves_the_cluster_as_it_was(
    address: str, tiny_model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The cluster was started without it: roles are given it.
    monkeypatch.setenv("STROP_JOB_NAMES", "PROMISED")
    monkeypatch.setenv("PROMISED", "a,b 'c'")
    monkeypatch.setenv("RAY_py_gcs_connect_timeout_s", "10")
    asked = [(address, 2, 1), (address, 1, 4), (f"{LOOPBACK}:1", 1, 1)]
    refused, meanwhile, judged = apart(attach_and_attempt, address, tiny_model_dir, tmp_path, asked)
    nodes, gpus, nobody = refused
    assert "has 1 nodes, and job.nodes is 2" in nodes
    assert "127.0.0.1 has 3 of 4" in gpus
    assert "ray.address=127.0.0.1:1" in nobody
    assert [task for task, _, _ in judged] == ["rows", "rows", "Own", "Own"]
    assert all(reward == n / 1000 for _, n, reward in judged)
    assert meanwhile is not None
    # Learner, engine and rollout worker hold a GPU each of those that Ray knows.
    assert (meanwhile["free"].get("GPU", 0.0), meanwhile["actors"]) == (0.0, 3)
    assert _ask(address) == {"free": {"CPU": 4.0, "GPU": 3.0}, "nodes": 1, "actors": 0}
    shown = [path.read_text() for path in sorted((tmp_path / "roles").rglob("*.log"))]
    assert sum("on node 0" in text for text in shown) == 3


def test_a_running_cluster_has_settings_of_its_own() -> None:
    with pytest.raises(ValueError, match="has settings of its own"):
        tiny_spec(ray={"address": "auto", "temp_dir": "/tmp/ray"})
