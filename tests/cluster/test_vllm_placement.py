"""The loop trains with vLLM as its engine: the same run file, and one word of it changed."""

from __future__ import annotations

from pathlib import Path

import pytest

from strop.cluster.contract import build_placement
from strop.engine.vllm.environment import VLLM
from strop.store import ModelHandle
from tests.conftest import require_system_part
from tests.fixtures.tiny_model import tiny_model
from tests.fixtures.tiny_run import Composition, new_run, read_curve, tiny_spec


@pytest.mark.slow
def test_a_run_with_vllm_passes_the_gate_and_learns(tmp_path: Path) -> None:
    require_system_part("the environment of vLLM (make vllm-deps)", VLLM.is_ready())
    model_dir = tiny_model(tmp_path / "model", head_dim=32)
    spec = tiny_spec(
        train={"steps": 3},
        placement={"kind": "process"},
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
    assert {path.name for path in roles_dir.iterdir()} == {"engine.log"}
