"""The functions of kernels.c on tensors; kernels.c documents them.

Shapes: N rows of a flat batch, D hidden width, H query and K key-value heads, E head width, I width of
the MLP, V vocabulary, M scored tokens. Tensors are dense unless a row stride is taken from them.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

import torch

from strop.kernels.library import load_library

LANES = 16
"""Vector width. D, I and E are multiples of it."""

_SUFFIXES = {torch.bfloat16: "bf16", torch.float32: "f32"}
_POINTER, _COUNT, _REAL = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float
_SIGNATURES: dict[str, list[Any]] = {
    "add_rms_norm": [*[_POINTER] * 6, *[_COUNT] * 2, _REAL],
    "add_rms_norm_backward": [*[_POINTER] * 8, *[_COUNT] * 3],
    "rotate": [_POINTER, _COUNT, *[_POINTER] * 3, *[_COUNT] * 5, _REAL],
    "gated": [*[_POINTER] * 2, *[_COUNT] * 2],
    "gated_backward": [*[_POINTER] * 3, *[_COUNT] * 2],
    "decode_attention": [*[_POINTER] * 2, _COUNT, *[_POINTER] * 8, *[_COUNT] * 6, _REAL],
    "log_sum_exp": [*[_POINTER] * 2, *[_COUNT] * 2, _REAL],
    "token_gradient": [*[_POINTER] * 5, *[_COUNT] * 2, _REAL],
    "draw_tokens": [*[_POINTER] * 5, *[_COUNT] * 2],
}
_functions: dict[tuple[str, torch.dtype], Any] = {}


def can_run(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the kernels work on such tensors here."""
    return device.type == "cpu" and dtype in _SUFFIXES and load_library() is not None


def _function(name: str, dtype: torch.dtype) -> Any:
    """Return a C function for one storage type, with its signature declared."""
    key = (name, dtype)
    if key not in _functions:
        function = getattr(load_library(), f"{name}_{_SUFFIXES[dtype]}")
        function.argtypes, function.restype = _SIGNATURES[name], None
        _functions[key] = function
    return _functions[key]


def add_rms_norm(
    x: torch.Tensor, added: torch.Tensor | None, weight: torch.Tensor, epsilon: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return (x + added, its RMS norm times weight, 1 / RMS). Shapes: (N, D), weight (D); (N) fp32 last."""
    total = x if added is None else torch.empty_like(x)
    normed, inverse_rms = torch.empty_like(x), torch.empty(x.shape[0])
    _function("add_rms_norm", x.dtype)(
        x.data_ptr(),
        None if added is None else added.data_ptr(),
        weight.data_ptr(),
        total.data_ptr(),
        normed.data_ptr(),
        inverse_rms.data_ptr(),
        *x.shape,
        epsilon,
    )
    return total, normed, inverse_rms


def add_rms_norm_backward(
    grad_normed: torch.Tensor,
    grad_total: torch.Tensor | None,
    total: torch.Tensor,
    weight: torch.Tensor,
    inverse_rms: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the gradients of x (equal to that of `added`) and of the weight."""
    num_shares = torch.get_num_threads()
    grad_x = torch.empty_like(total)
    grad_weight = torch.empty(weight.shape)
    partial = torch.empty(num_shares, *weight.shape)
    _function("add_rms_norm_backward", total.dtype)(
        grad_normed.data_ptr(),
        None if grad_total is None else grad_total.data_ptr(),
        total.data_ptr(),
        weight.data_ptr(),
        inverse_rms.data_ptr(),
        grad_x.data_ptr(),
        grad_weight.data_ptr(),
        partial.data_ptr(),
        num_shares,
        *total.shape,
    )
    return grad_x, grad_weight.to(weight.dtype)


def rotate(
    heads: torch.Tensor,
    cosine: torch.Tensor,
    sine: torch.Tensor,
    out: torch.Tensor,
    *,
    num_rotated: int,
    is_backward: bool = False,
) -> None:
    """Write the rotary embedding of the first heads, and the others as they are, into `out`.

    Shapes: heads and out (N, heads, E) with any row stride, cosine and sine (N, E).
    """
    num_rows, num_heads, width = heads.shape
    direction = -1.0 if is_backward else 1.0
    _function("rotate", heads.dtype)(
        heads.data_ptr(),
        heads.stride(0),
        cosine.data_ptr(),
        sine.data_ptr(),
        out.data_ptr(),
        out.stride(0),
        num_rows,
        num_heads,
        num_rotated,
        width,
        direction,
    )


def gated(gate_up: torch.Tensor) -> torch.Tensor:
    """Return silu(gate) * up. Shapes: (N, 2 I), gate first, to (N, I)."""
    num_rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty(num_rows, width)
    _function("gated", gate_up.dtype)(gate_up.data_ptr(), out.data_ptr(), num_rows, width)
    return out


def gated_backward(grad: torch.Tensor, gate_up: torch.Tensor) -> torch.Tensor:
    """Return the gradient of `gated`. Shapes: (N, I), (N, 2 I) to (N, 2 I)."""
    grad_in = torch.empty_like(gate_up)
    _function("gated_backward", gate_up.dtype)(
        grad.data_ptr(), gate_up.data_ptr(), grad_in.data_ptr(), *grad.shape
    )
    return grad_in


@dataclass(frozen=True, slots=True, eq=False)
class CacheRows:
    """Lengths and shared prefixes of the rows of a KV cache. Shapes: all (rows), int64."""

    lengths: torch.Tensor
    """Stored tokens."""
    owners: torch.Tensor
    """The row, maybe the same, whose copy of the shared prefix is read."""
    shared: torch.Tensor
    """Slots of the shared prefix; a multiple of LANES."""


def decode_attention(
    keys: torch.Tensor,
    values: torch.Tensor,
    rows: CacheRows,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scaling: float,
    window: int | None = None,
) -> torch.Tensor:
    """Store one token per row in the cache and attend over the row so far, or a window of it.

    Returns (n, H, E).

    Shapes: keys (rows, K, slots / LANES, E, LANES), values (rows, K, slots, E), query (n, H, E), key and
        value (n, K, E); heads dense, any row stride.
    """
    num_rows, num_heads, width = query.shape
    num_kv_heads, slots = values.shape[1], values.shape[2]
    out = query.new_empty(num_rows, num_heads, width)
    strides = (ctypes.c_int64 * 3)(query.stride(0), key.stride(0), value.stride(0))
    _function("decode_attention", query.dtype)(
        keys.data_ptr(),
        values.data_ptr(),
        values.stride(0),
        rows.lengths.data_ptr(),
        rows.owners.data_ptr(),
        rows.shared.data_ptr(),
        query.data_ptr(),
        key.data_ptr(),
        value.data_ptr(),
        ctypes.addressof(strides),
        out.data_ptr(),
        num_rows,
        num_kv_heads,
        num_heads // num_kv_heads,
        width,
        slots,
        window or 0,
        scaling,
    )
    return out


def log_sum_exp(logits: torch.Tensor, temperature: float) -> torch.Tensor:
    """Return log sum exp(logits / temperature) of each row. Shapes: (N, V) to (N), fp32."""
    result = torch.empty(logits.shape[0])
    _function("log_sum_exp", logits.dtype)(
        logits.data_ptr(), result.data_ptr(), *logits.shape, 1.0 / temperature
    )
    return result


def token_gradient_(
    logits: torch.Tensor,
    log_sums: torch.Tensor,
    row: torch.Tensor,
    targets: torch.Tensor,
    grads: torch.Tensor,
    temperature: float,
) -> None:
    """Replace logits by their gradient, from that of tokens' log-probabilities.

    Shapes: logits (N, V), log_sums (N), row (m) ascending, targets (m) int64, grads (m) fp32.
    """
    first = torch.searchsorted(row, torch.arange(logits.shape[0] + 1))
    grads = grads.contiguous()
    _function("token_gradient", logits.dtype)(
        logits.data_ptr(),
        log_sums.data_ptr(),
        first.data_ptr(),
        targets.data_ptr(),
        grads.data_ptr(),
        *logits.shape,
        1.0 / temperature,
    )


def draw_tokens(
    logits: torch.Tensor, uniforms: torch.Tensor, temperatures: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw a token per row; temperature 0 takes the likeliest and reports its log-probability at 1.

    Shapes: logits (N, V), uniforms (N) fp64, temperatures (N) fp32; returns (N) int64 and (N) fp32.
    """
    inverse = torch.where(temperatures == 0.0, 0.0, 1.0 / temperatures)
    tokens, logprobs = torch.empty(logits.shape[0], dtype=torch.int64), torch.empty(logits.shape[0])
    _function("draw_tokens", logits.dtype)(
        logits.data_ptr(),
        uniforms.data_ptr(),
        inverse.data_ptr(),
        tokens.data_ptr(),
        logprobs.data_ptr(),
        *logits.shape,
    )
    return tokens, logprobs


def accumulate_(total: torch.Tensor, addend: torch.Tensor) -> None:
    """Add a dense bf16 tensor to a dense fp32 one of the same shape."""
    library = load_library()
    assert library is not None
    library.accumulate(
        ctypes.c_void_p(total.data_ptr()),
        ctypes.c_void_p(addend.data_ptr()),
        ctypes.c_int64(total.numel()),
    )
