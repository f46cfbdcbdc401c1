"""A run of a model whose sequences are computed by themselves: gate, steps, reference, checkpoint."""

from __future__ import annotations

import asyncio
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from strop.cluster.local import InlinePlacement
from strop.policy.language_model import LanguageModel
from strop.store import ModelHandle
from strop.train.gate import pass_gate
from strop.train.gate_checks import GateInput
from tests.fixtures.families import family_model
from tests.fixtures.spell import SpellTask
from tests.fixtures.tiny_run import Composition, learner_of, new_run, tiny_spec

pytestmark = pytest.mark.filterwarnings("ignore:.*each sequence is computed by itself:RuntimeWarning")


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Layers with a state and layers with attention."""
    specials: dict[str, Any] = {"bos_token_id": None, "pad_token_id": 260}
    return family_model(tmp_path_factory.mktemp("model"), "qwen3_next", **specials)


def test_the_gate_says_how_sequences_are_computed(tmp_path: Path, model_dir: Path) -> None:
    async def look() -> dict[str, str]:
        spec = tiny_spec()
        placement = InlinePlacement(spec, ModelHandle(path=model_dir, digest="unused"))
        roles = await placement.start()
        try:
            gate = GateInput(spec=spec, task=SpellTask(), roles=roles, model_dir=model_dir, run_path=tmp_path)
            return {check.name: check.detail for check in await pass_gate(gate)}
        finally:
            await placement.stop()

    detail = asyncio.run(look())["parity"]
    assert "each sequence is computed by itself, prompts once for every reply" in detail
    assert "because its layers carry a state from token to token" in detail


def test_a_run_with_a_reference_trains_and_keeps_a_model(tmp_path: Path, model_dir: Path) -> None:
    spec = tiny_spec(reference={"kl_beta": 0.01})
    made = Composition(spec, model_dir, new_run(tmp_path))
    roles = made.run()
    metrics = made.run_dir.metrics.read()
    assert [int(step["step"]) for step in metrics] == [1, 2, 3]
    assert max(step["drift_max_nats"] for step in metrics) < 1e-3
    export = made.run_dir.checkpoint_path(3) / "model"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        kept = LanguageModel.load(export, dtype=torch.float32)
    trained = dict(learner_of(roles).model.named_parameters())
    assert all(torch.equal(weight, trained[name]) for name, weight in kept.named_parameters())
    first = LanguageModel.load(model_dir, dtype=torch.float32)
    assert not all(torch.equal(weight, trained[name]) for name, weight in first.named_parameters())
