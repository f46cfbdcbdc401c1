"""Rollout workers on Ray judge by the user's own code: a reward function and a task class."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from strop.cluster.ray.placement import RayPlacement
from strop.rollout import Group, Split
from strop.store import ModelHandle
from strop.tasks import build_task
from tests.fixtures.builders import plan_for
from tests.fixtures.ray_traces import needs_ray
from tests.fixtures.row_files import write_rows
from tests.fixtures.tiny_model import tiny_model
from tests.fixtures.tiny_run import tiny_spec

pytestmark = [pytest.mark.slow, needs_ray]

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


def test_rewards_of_both_forms_come_from_the_workers(tmp_path: Path) -> None:
    (tmp_path / "near.py").write_text("def worth(n):\n    return n / 1000\n")
    (tmp_path / "own.py").write_text(CODE)
    rows = write_rows(tmp_path / "rows.jsonl", [{"q": f"{n}?", "n": n} for n in range(8)])
    parts = {
        "rows": {
            "name": "rows",
            "source": str(rows),
            "prompt": "q",
            "reward": f"{tmp_path / 'own.py'}:score",
        },
        "own": {"name": f"{tmp_path / 'own.py'}:Own"},
    }
    groups = asyncio.run(attempt(tmp_path, parts))
    for group in groups:
        for rollout in group.rollouts:
            fields = rollout.example.fields
            n = fields["columns"]["n"] if "columns" in fields else fields["n"]
            assert rollout.outcome.failure is None, rollout.outcome.failure
            assert rollout.outcome.reward == n / 1000
    assert {rollout.example.task for group in groups for rollout in group.rollouts} == {"rows", "Own"}


async def attempt(run_path: Path, parts: dict[str, dict[str, str]]) -> list[Group]:
    """Attempt one group of each part, on two rollout workers."""
    spec = tiny_spec(
        task={"name": "mixture", "parts": parts}, placement={"kind": "ray", "rollout_workers": 2}
    )
    examples = build_task(spec.task).examples(Split.TRAIN)
    chosen = [next(one for one in examples if one.task == name) for name in ("rows", "Own")]
    policy = ModelHandle(path=tiny_model(run_path / "model"), digest="unused")
    placement = RayPlacement(spec, policy, run_path / "roles")
    try:
        roles = await placement.start()
        assert roles.run_group is not None
        plans = [
            [plan_for(example, max_reply_tokens=4, sample_index=index) for index in range(2)]
            for example in chosen
        ]
        groups = list(await asyncio.gather(*map(roles.run_group, plans)))
        # Engine and judge worked elsewhere; when, is known here.
        assert roles.busy.keys() == {"engine-0", "verifier"}
        assert roles.busy["engine-0"].take_intervals(9)
        return groups
    finally:
        await placement.stop()
