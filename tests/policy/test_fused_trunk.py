"""The fused layers are the model's own: values, gradients, and one storage for weights and views."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from strop.policy.attention import PrefixSharedAttention
from strop.policy.fused_trunk import build_fused_trunk
from strop.policy.language_model import LanguageModel, load_module
from strop.policy.learner import Learner
from strop.policy.packing import PackedBatch
from strop.policy.weights import load_published, own_tensors, publish_tensors
from strop.spec.train import OptimizerSpec
from tests.fixtures.kernels import needs_kernels
from tests.fixtures.tiny_model import tiny_model
from tests.policy.worlds import World, reinforce, relative_error

pytestmark = needs_kernels

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama, biases": {"attention_bias": True, "mlp_bias": True},
    "qwen2": {"family": "qwen2"},
    "qwen3": {"family": "qwen3"},
    "mistral": {"family": "mistral", "sliding_window": None},
    "mistral, a window": {"family": "mistral", "sliding_window": 4},
    "qwen2, a window in the last layer": {
        "family": "qwen2",
        "use_sliding_window": True,
        "sliding_window": 4,
        "max_window_layers": 1,
    },
}


def load(path: Path, *, may_fuse: bool) -> LanguageModel:
    return LanguageModel.load(path, dtype=torch.float32, may_fuse=may_fuse)


def run_trunk(model: LanguageModel) -> torch.Tensor:
    batch = PackedBatch.of_groups([World(seed).packed(5, [3, 1, 7]) for seed in range(3)], model.device)
    attention = PrefixSharedAttention(batch.layout, model.device)
    return model.trunk(batch.token_ids_N, batch.position_ids_N, attention)


@pytest.mark.parametrize("config", FAMILIES.values(), ids=list(FAMILIES))
def test_values_and_gradients_are_those_of_the_models_own_layers(
    tmp_path: Path, config: dict[str, Any]
) -> None:
    path = tiny_model(tmp_path, **config)
    gradients, outputs = [], []
    for may_fuse in (True, False):
        model = load(path, may_fuse=may_fuse)
        assert (model.fused is not None) == may_fuse
        outputs.append(run_trunk(model).detach())
        learner = Learner(model, OptimizerSpec())
        groups = [World(seed).packed(5, [3, 1, 7]) for seed in range(3)]
        gradients.append(learner.gradients(groups, temperature=0.7, token_terms=reinforce))
    torch.testing.assert_close(outputs[0], outputs[1], atol=1e-5, rtol=1e-5)
    assert relative_error(gradients[0], gradients[1]) <= 1e-5


def test_in_bf16_the_fused_layers_are_at_least_as_exact(tmp_path: Path) -> None:
    path = tiny_model(tmp_path, dtype="bfloat16")
    exact = run_trunk(load(path, may_fuse=False)).detach()
    errors = []
    for may_fuse in (True, False):
        model = LanguageModel.load(path, dtype=torch.bfloat16, may_fuse=may_fuse)
        errors.append(float((run_trunk(model).detach().float() - exact).norm()))
    # They round in fewer places; chance decides single values, hence the allowance.
    assert errors[0] <= 1.1 * errors[1]


@pytest.mark.parametrize(
    "config", [{"family": "gemma2"}, {"hidden_act": "gelu"}], ids=["other layers", "other activation"]
)
def test_what_is_built_otherwise_is_not_taken_apart(tmp_path: Path, config: dict[str, Any]) -> None:
    module = load_module(tiny_model(tmp_path, **config), torch.float32)
    assert build_fused_trunk(module) is None


def test_layers_that_look_alike_and_compute_otherwise_are_found_by_the_proof(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A family may scale its residuals, say, with the same parts under the same names."""
    path = tiny_model(tmp_path)
    assert load(path, may_fuse=True).fused is not None
    monkeypatch.setattr("strop.policy.fused_trunk.add_rms_norm", _wrong_norm)
    assert load(path, may_fuse=True).fused is None


def _wrong_norm(
    x: torch.Tensor, added: torch.Tensor | None, weight: torch.Tensor, epsilon: float
) -> tuple[torch.Tensor, torch.Tensor]:
    total = x if added is None else x + 0.5 * added
    return total, torch.nn.functional.rms_norm(total, weight.shape, weight, epsilon)


def test_joined_weights_follow_every_way_of_changing_them(tmp_path: Path) -> None:
    """A step of the optimizer and a published file both change parameters in place."""
    path = tiny_model(tmp_path / "model", family="qwen2")
    fused, plain = load(path, may_fuse=True), load(path, may_fuse=False)
    learner = Learner(fused, OptimizerSpec(lr=0.01))
    learner.step([World().packed(5, [3, 1, 7])], temperature=1.0, token_terms=reinforce)
    digest = publish_tensors(own_tensors(fused), tmp_path / "published.safetensors")
    load_published(plain, tmp_path / "published.safetensors", expected_digest=digest)
    torch.testing.assert_close(run_trunk(fused), run_trunk(plain), atol=1e-5, rtol=1e-5)

    other = load(path, may_fuse=True)
    load_published(other, tmp_path / "published.safetensors", expected_digest=digest)
    assert torch.equal(run_trunk(other), run_trunk(fused))
