"""Products on packed weights are the plain ones, and serve the weights they were made from."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from strop.engine.native import PrepackedProducts, _can_pack
from strop.policy.fused_trunk import JoinedLinear
from strop.policy.language_model import DTYPES, LanguageModel
from tests.fixtures.kernels import needs_kernels
from tests.fixtures.tiny_model import tiny_model

pytestmark = needs_kernels


@pytest.fixture(params=["bfloat16", "float32"])
def model(tmp_path: Path, request: pytest.FixtureRequest) -> LanguageModel:
    return LanguageModel.load(tiny_model(tmp_path, family="qwen2"), dtype=DTYPES[request.param])


def make_products(model: LanguageModel) -> tuple[PrepackedProducts, JoinedLinear]:
    """Return products and Qwen2's query, key and value projections, which have biases."""
    products = PrepackedProducts.for_model(model)
    if products is None:
        pytest.skip("this processor's instructions do not multiply packed weights; plain products run here")
    assert model.fused is not None
    return products, model.fused.linears()[0]


@pytest.mark.parametrize("num_rows", [1, 3, 64])
@torch.inference_mode()
def test_packed_products_are_the_plain_ones(model: LanguageModel, num_rows: int) -> None:
    products, linear = make_products(model)
    assert linear.bias() is not None
    inputs = torch.randn(num_rows, linear.weight.shape[1], dtype=model.dtype)
    plain, packed = linear(inputs).float(), products.multiply(linear, inputs).float()
    rounding = 1e-2 if model.dtype is torch.bfloat16 else 1e-5
    assert torch.allclose(plain, packed, atol=rounding, rtol=rounding)


@torch.inference_mode()
def test_changed_weights_are_served_after_invalidation_only(model: LanguageModel) -> None:
    products, linear = make_products(model)
    inputs = torch.randn(4, linear.weight.shape[1], dtype=model.dtype)
    before = products.multiply(linear, inputs)
    for part in linear.parts:
        part.weight.zero_()
        part.bias.zero_()
    assert not linear(inputs).any(), "the plain product reads the live weights"
    assert torch.equal(products.multiply(linear, inputs), before), "half old and half new would be neither"
    products.invalidate()
    assert not products.multiply(linear, inputs).any()


def test_a_processor_that_cannot_pack_multiplies_plainly(
    model: LanguageModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Incident: without avx512bw the first packed weight raised, and every rollout of the gate was lost."""
    _can_pack.cache_clear()
    refusal = RuntimeError("mkldnn_reorder_linear_weight: bf16 path needs the cpu support avx512bw")

    def refuse(weight: torch.Tensor) -> torch.Tensor:
        raise refusal

    monkeypatch.setattr(torch.ops.mkldnn, "_reorder_linear_weight", refuse)
    assert PrepackedProducts.for_model(model) is None
    _can_pack.cache_clear()


def test_packed_products_that_are_wrong_are_not_used(
    model: LanguageModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    _can_pack.cache_clear()
    right = torch.ops.mkldnn._linear_pointwise
    monkeypatch.setattr(torch.ops.mkldnn, "_linear_pointwise", lambda *inputs: right(*inputs) + 1.0)
    assert PrepackedProducts.for_model(model) is None
    _can_pack.cache_clear()


def test_what_cannot_be_packed_is_left_alone(tmp_path: Path) -> None:
    unfused = LanguageModel.load(tiny_model(tmp_path), dtype=torch.float32, may_fuse=False)
    assert PrepackedProducts.for_model(unfused) is None
