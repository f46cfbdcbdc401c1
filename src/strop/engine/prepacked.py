"""Linear layers in the blocked layout that the CPU's matrix kernels want.

A plain product packs the weight matrix anew at every call. At the few rows of a decode step that is
a good part of the work. With SmolLM2-135M's matrices, the time of a product falls

* in bf16 by 8 % at 64 rows, 23 % at 16 and 40 % at 5 (one thread of an AMD EPYC with avx512_bf16),
* in float32 by 20 to 40 % at 64 rows, and by half at 16, at 4 and in the LM head (two threads, AVX2).

The packed copies cost the bytes of the weights once more, and are made again when the weights change.

The layout and the products are PyTorch's own (oneDNN), reached by the operators that its compiler uses
for frozen models. Covered: processors whose instructions these operators take, models with fused layers.
Elsewhere the plain product computes the same.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from strop.policy.fused_trunk import JoinedLinear
from strop.policy.language_model import LanguageModel


class PrepackedProducts:
    """Multiplies by packed copies of a model's weights, made when first asked for."""

    def __init__(self) -> None:
        self._packed: dict[int, tuple[torch.Tensor, torch.Tensor | None]] = {}
        self._multiply: Any = torch.ops.mkldnn._linear_pointwise

    @classmethod
    def for_model(cls, model: LanguageModel) -> PrepackedProducts | None:
        """Return products for a model, or None where packing does not apply."""
        return cls() if model.fused is not None and _can_pack(model.dtype) else None

    def invalidate(self) -> None:
        """Drop the packed copies: the weights have changed."""
        self._packed = {}

    def multiply(self, linear: JoinedLinear, x: torch.Tensor) -> torch.Tensor:
        """Return linear(x). Without gradients only."""
        packed = self._packed.get(id(linear))
        if packed is None:
            packed = self._packed[id(linear)] = _pack(linear)
        output: torch.Tensor = self._multiply(x, packed[0], packed[1], "none", [], "")
        return output


@functools.cache
def _can_pack(dtype: torch.dtype) -> bool:
    """Whether the operators work here and are right, which a small weight tells: both differ by version."""
    # Small whole numbers, whose products and sums are exact in either type.
    weight = (torch.arange(16 * 32) % 7 - 3.0).view(16, 32).to(dtype)
    x = (torch.arange(3 * 32) % 5 - 2.0).view(3, 32).to(dtype)
    try:
        packed = torch.ops.mkldnn._reorder_linear_weight(weight)
        product = torch.ops.mkldnn._linear_pointwise(x, packed, None, "none", [], "")
    except (AttributeError, RuntimeError):
        return False
    return torch.equal(product, torch.nn.functional.linear(x, weight))


def _pack(linear: JoinedLinear) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return packed weight and bias. Both are copies: half old and half new would be neither."""
    weight: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(linear.weight)
    bias = linear.bias()
    return weight, None if bias is None else bias.detach().clone()
