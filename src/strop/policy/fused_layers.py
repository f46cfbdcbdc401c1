"""The parts of a decoder layer beside its products, each one pass through memory, with gradients.

On CPUs they run on the C kernels (`strop.kernels`), elsewhere on `plain_layers`, compiled. Without
gradients, as when generating, the kernels are called as they are.

Shapes: N positions of the flat row, D hidden width, H heads of all kinds, E head width, I MLP width.
"""

from __future__ import annotations

from typing import Any

import torch

from strop.kernels import calls
from strop.policy import plain_layers


def add_rms_norm(
    x: torch.Tensor, added: torch.Tensor | None, weight: torch.Tensor, epsilon: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return x + added, and its RMS norm times weight. Shapes: all (N, D), weight (D)."""
    if not calls.can_run(x.device, x.dtype):
        return plain_layers.add_rms_norm(x, added, weight, epsilon)
    if not torch.is_grad_enabled():
        total, normed, _ = calls.add_rms_norm(x, added, weight, epsilon)
        return total, normed
    total, normed = _AddRmsNorm.apply(x, added, weight, epsilon)  # type: ignore[no-untyped-call]
    return total, normed


def rotate(heads: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor, num_rotated: int) -> torch.Tensor:
    """Apply rotary positions to the first heads. Shapes: heads (N, H, E), cosine and sine (N, E)."""
    if not calls.can_run(heads.device, heads.dtype):
        return plain_layers.rotate(heads, cosine, sine, num_rotated)
    if not torch.is_grad_enabled():
        return _rotated(heads, cosine, sine, num_rotated, is_backward=False)
    rotated: torch.Tensor = _Rotate.apply(heads, cosine, sine, num_rotated)  # type: ignore[no-untyped-call]
    return rotated


def gate(gate_up: torch.Tensor) -> torch.Tensor:
    """Return silu(gate) * up. Shapes: (N, 2 I), gate first, to (N, I)."""
    if not calls.can_run(gate_up.device, gate_up.dtype):
        return plain_layers.gate(gate_up)
    if not torch.is_grad_enabled():
        return calls.gated(gate_up)
    gated: torch.Tensor = _Gate.apply(gate_up)  # type: ignore[no-untyped-call]
    return gated


def project(x: torch.Tensor, joined: torch.Tensor, parts: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """Multiply by several matrices at once: x joined^T, with the gradient of each part.

    Shapes: x (N, D), joined (sum of outs, D), which holds the parts, each (out, D), one after the other.
    """
    if not torch.is_grad_enabled():
        return torch.nn.functional.linear(x, joined)
    product: torch.Tensor = _Project.apply(x, joined, *parts)  # type: ignore[no-untyped-call]
    return product


class _AddRmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, added: torch.Tensor | None, weight: torch.Tensor, epsilon: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.set_materialize_grads(False)
        total, normed, inverse_rms = calls.add_rms_norm(x, added, weight, epsilon)
        ctx.save_for_backward(total, weight, inverse_rms)
        ctx.has_added = added is not None
        # autograd wants an input that is also an output under a new name.
        return total.view_as(total), normed

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        total, weight, inverse_rms = ctx.saved_tensors
        grad_total, grad_normed = grads
        assert grad_normed is not None
        if grad_total is not None:
            grad_total = grad_total.contiguous()
        grad_x, grad_weight = calls.add_rms_norm_backward(
            grad_normed.contiguous(), grad_total, total, weight, inverse_rms
        )
        return grad_x, grad_x if ctx.has_added else None, grad_weight, None


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, heads: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor, num_rotated: int
    ) -> torch.Tensor:
        ctx.save_for_backward(cosine, sine)
        ctx.num_rotated = num_rotated
        return _rotated(heads, cosine, sine, num_rotated, is_backward=False)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        cosine, sine = ctx.saved_tensors
        grad = _rotated(grads[0].contiguous(), cosine, sine, ctx.num_rotated, is_backward=True)
        return grad, None, None, None


class _Gate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(gate_up)
        return calls.gated(gate_up)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        return calls.gated_backward(grads[0].contiguous(), *ctx.saved_tensors)


class _Project(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, joined: torch.Tensor, *parts: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, joined)
        ctx.sizes = [len(part) for part in parts]
        return torch.nn.functional.linear(x, joined)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, joined = ctx.saved_tensors
        grad = grads[0]
        if not any(ctx.needs_input_grad[2:]):
            # Frozen below adapters.
            return grad @ joined, None, *[None] * len(ctx.sizes)
        return grad @ joined, None, *(grad.t() @ x).split(ctx.sizes)


def _rotated(
    heads: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor, num_rotated: int, *, is_backward: bool
) -> torch.Tensor:
    out = torch.empty_like(heads)
    calls.rotate(heads, cosine, sine, out, num_rotated=num_rotated, is_backward=is_backward)
    return out
