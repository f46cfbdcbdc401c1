"""The loop cannot tell where its engine lives: the same run in one process and in two, bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest

from strop.cluster.contract import build_placement
from strop.engine.vllm.environment import VLLM
from strop.store import ModelHandle
from tests.conftest import require_system_part
from tests.fixtures.tiny_model import tiny_model
from tests.fixtures.tiny_run import Composition, new_run, read_curve, reopen, tiny_spec


def train(root: Path, model_dir: Path, kind: str) -> Path:
    """Train in two attempts without an alarm, and return the run."""
    run_path = None
    for steps in (2, 4):
        spec = tiny_spec(
            model={"dtype": "bfloat16"},
            train={"steps": steps},
            placement={"kind": kind},
            engine={"max_num_seqs": 7},
        )
        run_dir = new_run(root / kind) if run_path is None else reopen(run_path)
        run_path = run_dir.path
        placement = build_placement(spec, ModelHandle(path=model_dir, digest="unused"), run_path / "roles")
        made = Composition(spec, model_dir, run_dir, placement=placement)
        made.run()
        assert made.notes.causes("tripwire") == []
    assert run_path is not None
    return run_path


@pytest.mark.slow
def test_an_engine_in_another_process_reaches_the_same_curve(tmp_path: Path) -> None:
    """Rewards, tokens, log-probabilities, losses and the final weights and moments are equal.

    Both runs go on from a checkpoint once, where the engine's process starts anew.
    """
    model_dir = tiny_model(tmp_path / "model", dtype="bfloat16")
    here = read_curve(train(tmp_path, model_dir, "inline"))
    apart = train(tmp_path, model_dir, "ray")
    assert read_curve(apart) == here
    rewards = [line["reward_mean"] for line in here.metrics]
    assert len(rewards) == 4
    # Something was learned from: rewards differ within a step, and weights moved at each.
    assert all(line["grad_norm"] > 0 for line in here.metrics)
    assert len(set(rewards)) > 1
    assert [line["policy_version"] for line in here.metrics] == [1, 2, 3, 4]


# The loop trains with vLLM as its engine: the same run file, and one word of it changed.


@pytest.mark.slow
@pytest.mark.usefixtures("frugal_vllm")
def test_a_run_with_vllm_passes_the_gate_and_learns(tmp_path: Path) -> None:
    require_system_part("the environment of vLLM (make vllm-deps)", VLLM.is_ready())
    model_dir = tiny_model(tmp_path / "model", head_dim=32)
    spec = tiny_spec(
        train={"steps": 3},
        placement={"kind": "ray"},
        engine={"kind": "vllm", "max_num_seqs": 12},
    )
    run_dir = new_run(tmp_path / "runs")
    roles_dir = run_dir.path / "roles"
    placement = build_placement(spec, ModelHandle(path=model_dir, digest="unused"), roles_dir)
    made = Composition(spec, model_dir, run_dir, placement=placement)
    made.run()
    curve = read_curve(run_dir.path)
    assert made.notes.causes("tripwire") == []
    # The gate has compared vLLM's log-probabilities with the trainer's; each step does.
    assert [line["policy_version"] for line in curve.metrics] == [1, 2, 3]
    assert all(line["drift_mean_nats"] < 1e-3 for line in curve.metrics)
    assert all(line["grad_norm"] > 0 for line in curve.metrics)
