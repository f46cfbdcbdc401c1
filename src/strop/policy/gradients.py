"""Summing gradients of micro-batches in fp32."""

from __future__ import annotations

import torch

from strop.kernels import calls


def add_into(total: torch.Tensor, gradient: torch.Tensor) -> None:
    """Add a gradient of the compute type to an fp32 sum of the same shape. It may be sparse in rows."""
    if gradient.is_sparse:
        total.index_add_(0, gradient._indices()[0], gradient._values().to(total.dtype))
        return
    is_bf16_to_fp32 = gradient.dtype is torch.bfloat16 and total.dtype is torch.float32
    is_dense = gradient.is_contiguous() and total.is_contiguous()
    if is_bf16_to_fp32 and is_dense and calls.can_run(gradient.device, gradient.dtype):
        calls.accumulate_(total, gradient)
    else:
        total.add_(gradient)
