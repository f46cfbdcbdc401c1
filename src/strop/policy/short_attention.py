"""Attention over many short rows as batched products, recomputed in the backward pass.

PyTorch's fused attention for CPUs is made for long rows: at the few dozen to few hundred keys of a
packed reply, most of its backward is overhead. Here scores are one batched product, nothing but the
inputs is kept for the backward, and rows are taken in blocks so that scores stay in the cache.
The values agree with fused attention to rounding; the tests compare gradients in float64.

Shapes: B rows, Q queries of a row, T keys of a row, E head width, F width of values.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

MAX_ROW_SCORES = 2**22
"""Scores of one row above which fused attention, which never holds them all, is the better choice."""
_BLOCK_SCORES = 2**20
"""Scores computed at once: 4 MiB in fp32."""


def attend_short(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, bias: torch.Tensor, scaling: float
) -> torch.Tensor:
    """Return softmax(scaling * query keys^T + bias) values.

    Shapes: query (B, Q, E), keys (B, T, E), values (B, T, F), bias (B, Q, T) or broadcast to it; returns
        (B, Q, F). Every query must see at least one key.
    """
    output: torch.Tensor = _ShortAttention.apply(query, keys, values, bias, scaling)  # type: ignore[no-untyped-call]
    return output


def _blocks(query: torch.Tensor, keys: torch.Tensor) -> Iterator[slice]:
    rows = max(_BLOCK_SCORES // (query.shape[1] * keys.shape[1]), 1)
    for start in range(0, query.shape[0], rows):
        yield slice(start, start + rows)


def _weigh(query: torch.Tensor, keys: torch.Tensor, bias: torch.Tensor, scaling: float) -> torch.Tensor:
    """Return the attention weights of some rows, at least in fp32. Shapes: (b, Q, T)."""
    scores = torch.baddbmm(bias, query, keys.transpose(1, 2), alpha=scaling)
    return torch.softmax(scores, dim=-1, dtype=torch.promote_types(scores.dtype, torch.float32))


class _ShortAttention(torch.autograd.Function):
    """The forward and backward of `attend_short`."""

    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        bias: torch.Tensor,
        scaling: float,
    ) -> torch.Tensor:
        bias = bias.expand(query.shape[0], query.shape[1], keys.shape[1])
        ctx.save_for_backward(query, keys, values, bias)
        ctx.scaling = scaling
        output = query.new_empty(*query.shape[:2], values.shape[2])
        for rows in _blocks(query, keys):
            weights = _weigh(query[rows], keys[rows], bias[rows], scaling)
            torch.bmm(weights.to(values.dtype), values[rows], out=output[rows])
        return output

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        query, keys, values, bias = ctx.saved_tensors
        grad_output = grads[0]
        grad_query, grad_keys = torch.empty_like(query), torch.empty_like(keys)
        grad_values = torch.empty_like(values)
        for rows in _blocks(query, keys):
            weights = _weigh(query[rows], keys[rows], bias[rows], ctx.scaling)
            upstream = grad_output[rows]
            torch.bmm(weights.to(values.dtype).transpose(1, 2), upstream, out=grad_values[rows])
            grad_weights = torch.bmm(upstream, values[rows].transpose(1, 2)).to(weights.dtype)
            # Through the softmax: weights * (grad - sum(grad * weights)).
            grad_weights.mul_(weights)
            mean = grad_weights.sum(dim=-1, keepdim=True)
            grad_scores = grad_weights.addcmul_(weights, mean, value=-1.0).mul_(ctx.scaling)
            grad_scores = grad_scores.to(query.dtype)
            torch.bmm(grad_scores, keys[rows], out=grad_query[rows])
            torch.bmm(grad_scores.transpose(1, 2), query[rows], out=grad_keys[rows])
        return grad_query, grad_keys, grad_values, None, None
