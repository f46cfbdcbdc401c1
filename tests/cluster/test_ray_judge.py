"""A judge of the run's own is asked by rollout workers of other nodes too.

Two nodes of a job on this machine, each told what its agent would tell it. Ray takes no loopback for them.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections import Counter
from functools import partial
from pathlib import Path

import pytest

from strop.cluster.ray.placement import RayPlacement
from strop.cluster.servers import JudgeRoles
from strop.environments import RolloutPlan
from strop.hardware.ports import NODE_VARIABLE, NUM_NODES_VARIABLE
from strop.io.endpoints import ENDPOINTS_VARIABLE
from strop.rollout import Group, Split
from strop.spec.layout import RAY_NODE_MODULE
from strop.store import ModelHandle
from tests.fixtures.builders import plan_for
from tests.fixtures.judged import JudgedSpell, judge_spec
from tests.fixtures.ray_traces import needs_ray
from tests.fixtures.sockets import find_interface
from tests.fixtures.spell import SpellTask
from tests.fixtures.tiny_model import tiny_model
from tests.fixtures.tiny_run import tiny_spec

pytestmark = [pytest.mark.slow, needs_ray]

JUDGE, DIGEST = "org/judge", "0123456789abcdef"


def test_workers_of_both_nodes_are_answered_by_the_judge_on_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    interface = find_interface()
    if interface is None:
        pytest.skip("this machine has no address but loopback")
    for name, value in ((NODE_VARIABLE, "0"), (NUM_NODES_VARIABLE, "2"), ("GLOO_SOCKET_IFNAME", interface)):
        monkeypatch.setenv(name, value)
    monkeypatch.delenv(ENDPOINTS_VARIABLE, raising=False)
    joining = subprocess.Popen(
        [sys.executable, "-m", RAY_NODE_MODULE, str(tmp_path / "run")], env={**os.environ, NODE_VARIABLE: "1"}
    )
    try:
        groups = asyncio.run(attempt(tmp_path / "run"))
    finally:
        joining.terminate()
        assert joining.wait(300) == 0
    # Random weights answer, and it is no verdict.
    told = Counter(rollout.outcome.extracted for group in groups for rollout in group.rollouts)
    assert told == {"judge_unparsable on 0": 2, "judge_unparsable on 1": 2}
    # Nothing is left that holds a key.
    files = (tmp_path / "run" / "roles").rglob("*.json")
    assert [path.name for path in files if "key" in json.loads(path.read_text())] == []


async def attempt(run_path: Path) -> list[Group]:
    """Attempt two groups of two, one by each of two workers, on two nodes."""
    model_dir = tiny_model(run_path / "model")
    spec = tiny_spec(placement={"kind": "ray", "rollout_workers": 2}, job={"nodes": 2})
    section = judge_spec(run_path / "judged", "role", judge_model=JUDGE, judge_revision=DIGEST)
    # A question of 835 tokens, and 512 of an answer.
    judge_dir = tiny_model(run_path / "judge", max_position_embeddings=1536)
    policy = ModelHandle(path=model_dir, digest="unused")
    judges = JudgeRoles(
        spec.model_copy(update={"task": section}),
        policy,
        {JUDGE: ModelHandle(path=judge_dir, digest=DIGEST)},
        run_path / "roles" / "judges",
    )
    make_task = partial(JudgedSpell, JUDGE, DIGEST)
    placement = RayPlacement(spec, policy, run_path / "roles", make_task=make_task)
    try:
        await judges.start()
        roles = await placement.start()
        assert roles.run_group is not None
        return list(await asyncio.gather(*map(roles.run_group, make_plans())))
    finally:
        await placement.stop()
        await judges.stop()


def make_plans() -> list[list[RolloutPlan]]:
    return [
        [plan_for(example, max_reply_tokens=4, sample_index=index) for index in range(2)]
        for example in SpellTask().examples(Split.TRAIN)[:2]
    ]
