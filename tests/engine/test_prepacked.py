"""Packed linear layers answer like plain ones, and only inside their block."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from strop.engine.prepacked import PrepackedLinears
from strop.policy.language_model import LanguageModel
from tests.fixtures.tiny_model import tiny_model


@pytest.fixture
def model(tmp_path: Path) -> LanguageModel:
    return LanguageModel.load(tiny_model(tmp_path, family="qwen2", dtype="bfloat16"), dtype=torch.bfloat16)


def first_linear(model: LanguageModel) -> torch.nn.Linear:
    """Qwen2's query projection has a bias."""
    return next(module for module in model.module.modules() if isinstance(module, torch.nn.Linear))


@pytest.mark.parametrize("num_rows", [1, 3, 64])
def test_packed_products_are_the_plain_ones(model: LanguageModel, num_rows: int) -> None:
    linear = first_linear(model)
    assert linear.bias is not None
    inputs = torch.randn(num_rows, linear.in_features).bfloat16()
    plain = linear(inputs)
    with torch.inference_mode(), PrepackedLinears(model).active():
        packed = linear(inputs)
    assert torch.allclose(plain.float(), packed.float(), atol=1e-2, rtol=1e-2)


def test_changed_weights_are_served_after_invalidation_and_packing_ends_with_its_block(
    model: LanguageModel,
) -> None:
    linear, prepacked = first_linear(model), PrepackedLinears(model)
    inputs = torch.randn(4, linear.in_features).bfloat16()
    with torch.inference_mode(), prepacked.active():
        before = linear(inputs)
    with torch.no_grad():
        linear.weight.zero_()
        assert linear.bias is not None
        linear.bias.zero_()
    assert not linear(inputs).any(), "outside the block the live weights answer"
    with torch.inference_mode(), prepacked.active():
        assert torch.equal(linear(inputs), before), "packed copies stay until they are invalidated"
    prepacked.invalidate()
    with torch.inference_mode(), prepacked.active():
        assert not linear(inputs).any()


def test_a_failure_inside_the_block_leaves_the_plain_layers(model: LanguageModel) -> None:
    with pytest.raises(ZeroDivisionError), PrepackedLinears(model).active():
        raise ZeroDivisionError
    assert all("forward" not in module.__dict__ for module in model.module.modules())


def test_float32_is_left_alone(tmp_path: Path) -> None:
    model = LanguageModel.load(tiny_model(tmp_path, family="llama", dtype="float32"), dtype=torch.float32)
    with PrepackedLinears(model).active():
        assert all("forward" not in module.__dict__ for module in model.module.modules())


def test_a_gated_mlp_is_as_exact_as_the_plain_one(model: LanguageModel) -> None:
    mlp = model.module.model.layers[0].mlp
    inputs = torch.randn(5, mlp.gate_proj.in_features, generator=torch.Generator().manual_seed(0)).bfloat16()
    plain = mlp(inputs).float()
    with torch.inference_mode(), PrepackedLinears(model).active():
        assert "forward" in mlp.__dict__
        packed = mlp(inputs).float()
    exact = mlp.float()(inputs.float())
    # The fused products round once where the plain ones round three times.
    assert (packed - exact).norm() <= 1.2 * (plain - exact).norm()
