"""The loop cannot tell where its engine lives: the same run in one process and in two, bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest

from strop.cluster.contract import build_placement
from strop.record import RunDir
from strop.store import ModelHandle
from tests.fixtures.tiny_model import tiny_model
from tests.fixtures.tiny_run import Composition, new_run, read_curve, tiny_spec


def train(root: Path, model_dir: Path, *, kind: str, dtype: str, num_steps: tuple[int, ...]) -> Path:
    """Train in one attempt for each number of steps without an alarm, and return the run."""
    run_path = None
    for steps in num_steps:
        spec = tiny_spec(
            model={"dtype": dtype},
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


def reopen(run_path: Path) -> RunDir:
    run_dir = RunDir.open(run_path)
    run_dir.acquire()
    return run_dir


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_engine_in_another_process_reaches_the_same_curve(dtype: str, tmp_path: Path) -> None:
    """Rewards, tokens, log-probabilities, losses and the final weights and moments are equal.

    Both runs go on from a checkpoint once, where the engine's process starts anew.
    """
    model_dir = tiny_model(tmp_path / "model", dtype=dtype)
    here = read_curve(train(tmp_path, model_dir, kind="inline", dtype=dtype, num_steps=(2, 4)))
    apart = train(tmp_path, model_dir, kind="process", dtype=dtype, num_steps=(2, 4))
    assert read_curve(apart) == here
    assert {path.name for path in (apart / "roles").iterdir()} == {"engine.log"}
    rewards = [line["reward_mean"] for line in here.metrics]
    assert len(rewards) == 4
    # Something was learned from: rewards differ within a step, and weights moved at each.
    assert all(line["grad_norm"] > 0 for line in here.metrics)
    assert len(set(rewards)) > 1
    assert [line["policy_version"] for line in here.metrics] == [1, 2, 3, 4]
