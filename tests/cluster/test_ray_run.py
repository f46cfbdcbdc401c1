"""A run on Ray reaches what the run in one process reaches, and names whatever of it is killed.

One runtime for all tests: two FSDP2 ranks, two engines, two rollout workers and a judge of the run's own, on
two nodes of a job on this machine, each told what its agent would tell it. Ray takes no loopback for them:
without another address it is one node. The last test kills one engine after the other under the same roles.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import load_file

from strop.cluster import Roles
from strop.cluster.contract import with_frozen
from strop.cluster.ray.placement import RayPlacement
from strop.cluster.ray.ranks import RayLearner
from strop.engine.pool import EnginePool, ReplicaCause, ReplicaEvent
from strop.errors import CorruptRecord, EngineError, EngineLost
from strop.hardware.ports import (
    NODE_VARIABLE,
    NUM_NODES_VARIABLE,
    find_host_address,
)
from strop.hardware.process import spawn, terminate
from strop.io.endpoints import ENDPOINTS_VARIABLE, write_secret
from strop.policy.learner import Learner
from strop.record import RunDir
from strop.record.fence import RAY_ADDRESS, RAY_TOKEN_PATH
from strop.rollout import Group, Split
from strop.spec import RunSpec
from strop.spec.layout import RAY_NODE_MODULE
from strop.store import ModelHandle
from strop.train.loop import TrainInput, TrainLoop
from tests.fixtures.builders import plan_for, request_for
from tests.fixtures.judged import JudgedSpell, judge_spec
from tests.fixtures.ray_traces import files_of_nodes, is_alive, needs_ray, wait_until
from tests.fixtures.sockets import find_interface, free_port
from tests.fixtures.spell import SpellTask
from tests.fixtures.tiny_model import tiny_model
from tests.fixtures.tiny_run import Composition, Notes, new_run, tiny_spec

pytestmark = [pytest.mark.slow, needs_ray]

NUM_STEPS = 2
TOLERANCE = 1e-4
"""Relative: sums over two ranks, and batches of other sizes in the engine, in float32."""


JUDGE, DIGEST = "org/judge", "0123456789abcdef"


def make_spec(num_nodes: int = 1, **placement: object) -> RunSpec:
    return tiny_spec(
        # Of three groups; two ranks take every mini-batch together.
        train={"steps": NUM_STEPS, "mini_batches": 3},
        placement=placement,
        job={"nodes": num_nodes},
        engine={"max_num_seqs": 7},
        reference={"kl_beta": 0.05},
    )


@dataclass
class Scene:
    """The run's parts, as long as they live."""

    num_nodes: int
    loop: asyncio.AbstractEventLoop
    placement: RayPlacement
    roles: Roles
    run_dir: RunDir
    notes: Notes


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model") / "model")


@pytest.fixture(scope="module")
def num_nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    """The nodes of the job; this process is on the first."""
    interface = find_interface()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(NODE_VARIABLE, "0")
        patch.delenv(ENDPOINTS_VARIABLE, raising=False)
        if interface is not None:
            patch.setenv(NUM_NODES_VARIABLE, "2")
            patch.setenv("GLOO_SOCKET_IFNAME", interface)
            token_path = tmp_path_factory.mktemp("job") / "ray.token"
            write_secret(token_path, "0" * 64)
            patch.setenv(RAY_TOKEN_PATH, str(token_path))
            patch.setenv(RAY_ADDRESS, f"{find_host_address(2, interface)}:{free_port()}")
        yield 1 if interface is None else 2


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory, model_dir: Path, num_nodes: int) -> Iterator[Scene]:
    """All roles, started and stopped once."""
    before = files_of_nodes()
    loop = asyncio.new_event_loop()
    spec = make_spec(num_nodes, kind="ray", learners=2, engines=2, rollout_workers=2)
    run_dir = new_run(tmp_path_factory.mktemp("runs"))
    run_dir.begin_attempt()
    roles_dir = run_dir.path / "roles"
    source = ModelHandle(path=model_dir, digest="unused")
    folder = tmp_path_factory.mktemp("judge")
    section = judge_spec(folder, "role", judge_model=JUDGE, judge_revision=DIGEST)
    # It reads a question of 835 tokens, and answers with 512.
    judge = ModelHandle(path=tiny_model(folder / "model", max_position_embeddings=1536), digest=DIGEST)
    placement = RayPlacement(
        spec.model_copy(update={"task": section}),
        source,
        roles_dir,
        make_task=partial(JudgedSpell, JUDGE, DIGEST),
        judges={JUDGE: judge},
    )
    join = [sys.executable, "-m", RAY_NODE_MODULE, str(run_dir.path / "attempts" / "1")]
    joining = [
        subprocess.Popen(join, env={**os.environ, NODE_VARIABLE: str(node)}) for node in range(1, num_nodes)
    ]
    try:
        started = loop.run_until_complete(placement.start())
        # Spread over both ranks, as the policy is.
        roles = loop.run_until_complete(with_frozen(started, spec, source, lambda uri: source))
        yield Scene(num_nodes, loop, placement=placement, roles=roles, run_dir=run_dir, notes=Notes())
    finally:
        pids = list(placement.role_pids.values())
        loop.run_until_complete(placement.stop())
        loop.run_until_complete(placement.stop())
        for node in joining:
            node.terminate()
        codes = [node.wait(300) for node in joining]
        run_dir.release()
        loop.close()
    assert codes == [0] * (num_nodes - 1)
    assert len(pids) == 7
    assert not [pid for pid in pids if is_alive(pid)]
    # Sockets, weights in shared memory, the token: all gone. Logs stay, of roles and of Ray.
    assert files_of_nodes() <= before
    assert not [path for path in roles_dir.rglob("*") if path.suffix in {".token", ".key"}]
    assert not [path for path in roles_dir.rglob("*.json") if "key" in json.loads(path.read_text())]
    logs = {path.name for path in (run_dir.path / "latest" / "roles").iterdir()}
    assert {"learner-0.log", "learner-1.log", "engine-0.log", "worker-0.log", "ray.log", "ray-0"} <= logs


def read_metrics(run_dir: RunDir) -> list[Mapping[str, float]]:
    return list(run_dir.metrics.read())


def test_a_run_on_ray_follows_the_run_in_one_process(scene: Scene, model_dir: Path, tmp_path: Path) -> None:
    here = Composition(make_spec(), model_dir, new_run(tmp_path))
    here.run()
    parts = TrainInput(
        spec=make_spec(scene.num_nodes, kind="ray", learners=2, engines=2, rollout_workers=2),
        task=SpellTask(),
        roles=scene.roles,
        run_dir=scene.run_dir,
        model_dir=model_dir,
        observer=scene.notes,
        evaluate=None,
    )
    scene.loop.run_until_complete(TrainLoop(parts).run())
    assert scene.notes.causes("tripwire") == []
    assert scene.roles.learner.version == NUM_STEPS
    found, wanted = read_metrics(scene.run_dir), read_metrics(here.run_dir)
    assert len(found) == len(wanted) == NUM_STEPS
    names = ("reward_mean", "loss", "grad_norm", "reply_tokens_mean", "entropy_nats")
    for name in (*names, "num_optimizer_steps", "reference_kl_nats", "ratio_p50", "update_ratio"):
        values = [[line[name] for line in lines if name in line] for lines in (found, wanted)]
        np.testing.assert_allclose(values[0], values[1], rtol=TOLERANCE, atol=TOLERANCE, err_msg=name)
    lanes = {span["lane"] for line in scene.run_dir.timeline.read_lines() for span in line["spans"]}
    assert {"learner", "environments", "engine 0", "engine 1"} <= lanes
    # Checkpoints are of two ranks; the exported weights are whole.
    step_path = scene.run_dir.path / "checkpoints" / f"step-{NUM_STEPS:06d}"
    assert (step_path / "COMPLETE").is_file() or list(step_path.rglob("*.safetensors"))


def test_workers_of_both_nodes_are_answered_by_the_judge_on_the_first(scene: Scene) -> None:
    """Two groups of two are attempted, one by each of two workers."""
    plans = [
        [plan_for(example, max_reply_tokens=4, sample_index=index) for index in range(2)]
        for example in SpellTask().examples(Split.HELD_OUT)[:2]
    ]

    async def attempt() -> list[Group]:
        assert scene.roles.run_group is not None
        return list(await asyncio.gather(*map(scene.roles.run_group, plans)))

    groups = scene.loop.run_until_complete(attempt())
    # Random weights answer, and it is no verdict.
    told = Counter(rollout.outcome.extracted for group in groups for rollout in group.rollouts)
    assert told == Counter(f"judge_unparsable on {number % scene.num_nodes}" for number in range(4))


def test_the_state_of_a_rank_with_another_disk_is_sent_to_the_run_and_back(
    scene: Scene, tmp_path: Path
) -> None:
    learner = scene.roles.learner
    assert isinstance(learner, RayLearner)
    here, sent, again = (tmp_path / name for name in ("here", "sent", "again"))
    for path in (here, sent, again):
        path.mkdir()
    scene.loop.run_until_complete(learner.save_state(here))
    facts = learner.facts
    learner.facts = replace(facts, sees_run=False)
    scene.loop.run_until_complete(learner.call(see, ranks={0}))
    try:
        scene.loop.run_until_complete(learner.save_state(sent))
        # Both ranks' tensors and the counters, bit for bit what two ranks write to one disk.
        assert read_files(sent) == read_files(here)
        assert len(list(sent.glob("*.safetensors"))) == 2
        scene.loop.run_until_complete(learner.load_state(sent))
        scene.loop.run_until_complete(learner.save_state(again))
        assert read_files(again) == read_files(here)
        next(iter(sent.glob("*.safetensors"))).unlink()
        with pytest.raises(CorruptRecord, match="cannot be restored"):
            scene.loop.run_until_complete(learner.load_state(sent))
    finally:
        learner.facts = facts
        scene.loop.run_until_complete(learner.call(see, ranks={0, 1}))


def see(learner: Learner, ranks: set[int]) -> None:
    """Let some ranks see the run's disk, and no other."""
    learner.sees_run = learner.ranks.index in ranks


def read_files(path: Path) -> dict[str, bytes]:
    """Return counters and tensors by file; the headers' own order is any."""
    found = {one.name: one.read_bytes() for one in path.glob("*.json")}
    for one in path.glob("*.safetensors"):
        found |= {f"{one.name}/{name}": value.numpy().tobytes() for name, value in load_file(one).items()}
    return found


@pytest.fixture
def ray_dir() -> Iterator[str]:
    """A folder of another Ray node: short, as paths of sockets end at 107 bytes."""
    with tempfile.TemporaryDirectory(prefix="r-", ignore_cleanup_errors=True) as folder:
        yield folder


def test_a_node_that_somebody_adds_may_be_used_and_lost(scene: Scene, tmp_path: Path, ray_dir: str) -> None:
    """More nodes join by Ray's own command. Their loss is no event of the run."""
    if scene.num_nodes == 1:
        pytest.skip("a network beside loopback is needed")
    import ray

    before = {node["NodeID"] for node in ray.nodes()}
    words = ["start", "--block", f"--address={os.environ[RAY_ADDRESS]}", "--num-cpus=1"]
    words += ["--resources", '{"added": 1}', f"--temp-dir={ray_dir}"]
    added = spawn([sys.executable, "-m", "ray.scripts.scripts", *words], tmp_path / "added.log")
    try:
        wait_until(lambda: "added" in ray.cluster_resources(), 120.0)
        find_node = ray.remote(num_cpus=0, resources={"added": 0.1})(
            lambda: ray.get_runtime_context().get_node_id()
        )
        assert ray.get(find_node.remote()) not in before
        terminate(added, 10.0)
        wait_until(lambda: any(not node["Alive"] for node in ray.nodes()), 120.0)
    finally:
        terminate(added, 10.0)

    async def act() -> None:
        await scene.roles.learner.score([], 1.0)

    scene.loop.run_until_complete(act())


async def ask_for_ever(roles: Roles) -> None:
    """Ask a role that lives: its answers are worth nothing once another role of the run is gone."""
    while True:
        await roles.learner.score([], 1.0)
        await asyncio.sleep(0.1)


def test_prc_5_a_killed_engine_is_survived_and_the_last_one_ends_every_wait(scene: Scene) -> None:
    pids = [scene.placement.role_pids[f"engine-{index}"] for index in range(2)]
    request = request_for(np.arange(1, 5, dtype=np.int32), max_tokens=4, seed=1)
    events: list[ReplicaEvent] = []

    async def survive() -> None:
        engine = scene.roles.engine
        assert isinstance(engine, EnginePool)
        engine.report_to(events.append)
        expected = await engine.generate(request)
        os.kill(pids[0], signal.SIGKILL)
        found = await engine.generate(request)
        np.testing.assert_array_equal(found.token_ids, expected.token_ids)
        # New weights reach the other one, and the lost one is told by name.
        update = await scene.roles.publish()
        await engine.update(update)
        assert [(event.replica, event.cause) for event in events] == [("engine-0", ReplicaCause.LOST)]
        assert f"process {pids[0]}, ended" in events[0].detail

    async def end() -> str:
        os.kill(pids[1], signal.SIGKILL)
        with pytest.raises(EngineLost) as caught:
            await ask_for_ever(scene.roles)
        with pytest.raises(EngineError):
            await scene.roles.engine.generate(request)
        return str(caught.value)

    scene.loop.run_until_complete(survive())
    started_at = time.monotonic()
    message = scene.loop.run_until_complete(end())
    assert time.monotonic() - started_at < 120.0
    assert message.startswith(f"role engine-1 on node {scene.num_nodes - 1}"), message
    assert f"process {pids[1]}" in message
