"""The parts of a decoder layer beside its products, each one pass through memory, with gradients.

On CPUs they run on the C kernels (`strop.kernels`), which generation calls without autograd. Elsewhere, and
for types that the kernels do not take, `plain_...` computes the same in PyTorch, compiled to one kernel on
GPUs. On a GPU where nothing can be compiled it runs in several passes, after a warning.

Shapes: N positions of the flat row or rows, D hidden width, H heads of all kinds, E head width, I MLP width,
V vocabulary, M tokens.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from strop.kernels import calls

Result = TypeVar("Result")


def add_rms_norm(
    x: torch.Tensor, added: torch.Tensor | None, weight: torch.Tensor, epsilon: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return x + added, and its RMS norm times weight. Shapes: all (N, D), weight (D)."""
    if not calls.can_run(x.device, x.dtype):
        return plain_add_rms_norm(x, added, weight, epsilon)
    if not torch.is_grad_enabled():
        total, normed, _ = calls.add_rms_norm(x, added, weight, epsilon)
        return total, normed
    total, normed = _AddRmsNorm.apply(x, added, weight, epsilon)  # type: ignore[no-untyped-call]
    return total, normed


def rotate(heads: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor, num_rotated: int) -> torch.Tensor:
    """Apply rotary positions to the first heads. Shapes: heads (N, H, E), cosine and sine (N, E)."""
    if not calls.can_run(heads.device, heads.dtype):
        return plain_rotate(heads, cosine, sine, num_rotated)
    if not torch.is_grad_enabled():
        return _rotated(heads, cosine, sine, num_rotated, is_backward=False)
    rotated: torch.Tensor = _Rotate.apply(heads, cosine, sine, num_rotated)  # type: ignore[no-untyped-call]
    return rotated


def gate(gate_up: torch.Tensor) -> torch.Tensor:
    """Return silu(gate) * up. Shapes: (N, 2 I), gate first, to (N, I)."""
    if not calls.can_run(gate_up.device, gate_up.dtype):
        return plain_gate(gate_up)
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


def _compiled_on_gpus(function: Callable[..., Result]) -> Callable[..., Result]:
    """Compile a function of tensors when it is first called on a GPU, for any number of rows."""
    chosen: Callable[..., Result] | None = None

    @functools.wraps(function)
    def call(first: torch.Tensor, *others: Any) -> Result:
        nonlocal chosen
        if first.device.type != "cuda":
            return function(first, *others)
        from torch._dynamo.exc import TorchDynamoException

        if chosen is None:
            chosen = compile_for_any_length(function)
        try:
            return chosen(first, *others)
        except TorchDynamoException as error:
            lines = str(error).strip().splitlines() or [""]
            warnings.warn(
                f"{function.__name__} runs uncompiled ({type(error).__name__}: {lines[0]}), in more passes",
                RuntimeWarning,
                stacklevel=2,
            )
            chosen = function
            return function(first, *others)

    return call


def compile_for_any_length(function: Callable[..., Result]) -> Callable[..., Result]:
    """Compile a function whose tensors' lengths change from call to call."""
    import torch._dynamo

    # With and without gradients, in inference mode, with and without optional inputs, in each type: more
    # than the eight variants after which PyTorch would run uncompiled.
    config: Any = torch._dynamo.config
    config.recompile_limit = max(config.recompile_limit, 64)
    compiled: Callable[..., Result] = torch.compile(function, dynamic=True)
    return compiled


@_compiled_on_gpus
def plain_add_rms_norm(
    x: torch.Tensor, added: torch.Tensor | None, weight: torch.Tensor, epsilon: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """`add_rms_norm` in PyTorch."""
    total = x if added is None else x + added
    wide = total.to(torch.promote_types(total.dtype, torch.float32))
    scale = torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + epsilon)
    return total, (wide * scale).to(x.dtype) * weight


@_compiled_on_gpus
def plain_rotate(
    heads: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor, num_rotated: int
) -> torch.Tensor:
    """`rotate` in PyTorch."""
    rotated, others = heads[:, :num_rotated], heads[:, num_rotated:]
    left, right = rotated.chunk(2, dim=-1)
    turned = torch.cat([-right, left], dim=-1)
    return torch.cat([rotated * cosine[:, None] + turned * sine[:, None], others], dim=1)


@_compiled_on_gpus
def plain_gate(gate_up: torch.Tensor) -> torch.Tensor:
    """`gate` in PyTorch."""
    gate_part, up = gate_up.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate_part) * up


@_compiled_on_gpus
def log_sum_exp(logits: torch.Tensor, temperature: float) -> torch.Tensor:
    """`calls.log_sum_exp` in PyTorch."""
    return torch.logsumexp(logits.float() / temperature, dim=-1)


def token_gradient_(
    logits: torch.Tensor,
    log_sums: torch.Tensor,
    row: torch.Tensor,
    targets: torch.Tensor,
    grads: torch.Tensor,
    temperature: float,
) -> None:
    """`calls.token_gradient_` in PyTorch."""
    # d logprob / d logits = (onehot - p) / temperature, summed over the tokens of a row.
    grads = grads / temperature
    factors = torch.zeros_like(log_sums).index_add_(0, row, grads)
    probs = torch.exp(logits[row, targets].float() / temperature - log_sums[row])
    # Targets are overwritten, not added to: for a likely token 1 - p remains, which a sum in bf16 would lose.
    # Gradients at one place add up: the same token of the same row, scored for several replies.
    ordered, order = torch.sort(row * logits.shape[1] + targets)
    places = torch.zeros_like(order)
    places[1:] = (ordered[1:] != ordered[:-1]).cumsum(0)
    sums = torch.zeros_like(grads).index_add_(0, places, grads[order])
    own = torch.empty_like(grads).index_copy_(0, order, sums[places]) - factors[row] * probs
    logits.copy_(torch.exp(logits.float() / temperature - log_sums[:, None]) * -factors[:, None])
    logits[row, targets] = own.to(logits.dtype)
