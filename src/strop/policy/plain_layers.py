"""The passes of fused layers and of the head in plain PyTorch, each compiled to one kernel on GPUs.

What the C kernels are to CPUs (`strop.kernels`), with PyTorch's gradients. Uncompiled they are the same
functions in several passes through memory; that is how the tests run them, and what happens on a GPU
on which nothing can be compiled, after a warning.

Shapes: N rows, D hidden width, H heads, E head width, I MLP width, V vocabulary, M tokens.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any, TypeVar

import torch

Result = TypeVar("Result")


def _compiled_on_gpus(function: Callable[..., Result]) -> Callable[..., Result]:
    """Compile a function of tensors when it is first called on a GPU, for any number of rows."""
    chosen: Callable[..., Result] | None = None

    @functools.wraps(function)
    def call(first: torch.Tensor, *others: Any) -> Result:
        nonlocal chosen
        if first.device.type != "cuda":
            return function(first, *others)
        if chosen is None:
            chosen = compile_for_any_length(function)
        try:
            return chosen(first, *others)
        except _compile_errors() as error:
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

    # With and without gradients, in inference mode, with and without optional inputs, in each type: more than
    # the eight forms after which PyTorch would go on uncompiled.
    config: Any = torch._dynamo.config
    config.recompile_limit = max(config.recompile_limit, 64)
    compiled: Callable[..., Result] = torch.compile(function, dynamic=True)
    return compiled


@functools.cache
def _compile_errors() -> tuple[type[Exception], ...]:
    """Return what a call raises that could not be compiled; what kernels raise is not among it."""
    from torch._dynamo.exc import TorchDynamoException

    return (TorchDynamoException,)


@_compiled_on_gpus
def add_rms_norm(
    x: torch.Tensor, added: torch.Tensor | None, weight: torch.Tensor, epsilon: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return x + added, and its RMS norm times weight. Shapes: all (N, D), weight (D)."""
    total = x if added is None else x + added
    wide = total.to(torch.promote_types(total.dtype, torch.float32))
    scale = torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + epsilon)
    return total, (wide * scale).to(x.dtype) * weight


@_compiled_on_gpus
def rotate(heads: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor, num_rotated: int) -> torch.Tensor:
    """Apply rotary positions to the first heads. Shapes: heads (N, H, E), cosine and sine (N, E)."""
    rotated, others = heads[:, :num_rotated], heads[:, num_rotated:]
    left, right = rotated.chunk(2, dim=-1)
    turned = torch.cat([-right, left], dim=-1)
    return torch.cat([rotated * cosine[:, None] + turned * sine[:, None], others], dim=1)


@_compiled_on_gpus
def gate(gate_up: torch.Tensor) -> torch.Tensor:
    """Return silu(gate) * up. Shapes: (N, 2 I), gate first, to (N, I)."""
    gate_part, up = gate_up.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate_part) * up


@_compiled_on_gpus
def log_sum_exp(logits: torch.Tensor, temperature: float) -> torch.Tensor:
    """Return log sum exp(logits / temperature) of each row. Shapes: (N, V) to (N), fp32."""
    return torch.logsumexp(logits.float() / temperature, dim=-1)


@_compiled_on_gpus
def _spread_gradient_(
    logits: torch.Tensor, log_sums: torch.Tensor, factors: torch.Tensor, temperature: float
) -> torch.Tensor:
    """Replace logits by -factor * p. Shapes: (N, V), (N), (N)."""
    probs = torch.exp(logits.float() / temperature - log_sums[:, None])
    return logits.copy_(probs * -factors[:, None])


def token_gradient_(
    logits: torch.Tensor,
    log_sums: torch.Tensor,
    row: torch.Tensor,
    targets: torch.Tensor,
    grads: torch.Tensor,
    temperature: float,
) -> None:
    """Replace logits by the gradient that tokens' log-probabilities send them.

    Shapes: logits (N, V), log_sums (N), row (m) ascending, targets (m) int64, grads (m) fp32.
    """
    # d logprob / d logits = (onehot - p) / temperature, summed over the tokens of a row.
    grads = grads / temperature
    factors = torch.zeros_like(log_sums).index_add_(0, row, grads)
    probs = torch.exp(logits[row, targets].float() / temperature - log_sums[row])
    # Written and not added: of a likely token 1 - p is left, which a sum in bf16 would not keep.
    own = _sum_equal(row * logits.shape[1] + targets, grads) - factors[row] * probs
    _spread_gradient_(logits, log_sums, factors, temperature)
    logits[row, targets] = own.to(logits.dtype)


def _sum_equal(keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Return for each entry the sum of the values with its key. Shapes: all (m)."""
    ordered, order = torch.sort(keys)
    places = torch.zeros_like(order)
    places[1:] = (ordered[1:] != ordered[:-1]).cumsum(0)
    sums = torch.zeros_like(values).index_add_(0, places, values[order])
    return torch.empty_like(values).index_copy_(0, order, sums[places])
