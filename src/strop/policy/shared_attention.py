"""Chooses the attention of a packed row: FlexAttention on GPUs, `PrefixSharedAttention` elsewhere.

For FlexAttention the whole row is one sequence. A position sees the earlier positions of its group's prompt
and of its reply. The layout tells which blocks of 128 by 128 hold visible pairs, so nothing of size N by N is
ever built. The kernel is compiled once with dynamic lengths; rows are padded to few lengths, and padding
costs the blocks on its diagonal. Softmax and sums are in fp32.

The compiled kernel is first tested on a small row with the model's heads, gradients included, against
`PrefixSharedAttention`. Where it cannot be compiled or gives other values, a warning says so once, and
`PrefixSharedAttention` is used.

Shapes: N positions of the row, W padded positions, B = W / 128 blocks, H query heads, K key-value heads,
E head width.
"""

from __future__ import annotations

import functools
import subprocess
import warnings
from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from strop.policy.attention import PLAIN, AttentionContext, PrefixSharedAttention, ScoreRule
from strop.policy.layers import compile_for_any_length
from strop.policy.packing import PackedLayout, to_device

BLOCK = 128
"""Rows and columns of a block, FlexAttention's default."""
_COARSE = 1024
"""Longer rows are padded to multiples of this, so that few lengths occur."""

FlexKernel = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, BlockMask, float], torch.Tensor]
"""Maps (query, key, value, mask, scale) to the output. Shapes: (1, H or K, W, E) to (1, H, W, E)."""

_PROBE = PackedLayout(prompt_lens_P=(70, 90), reply_lens_S=(130, 0, 75, 160), group_of_S=(0, 0, 1, 1))
_PROBE_TOLERANCE = {torch.float32: 1e-2, torch.bfloat16: 3e-2}
"""For outputs and gradients, relative to their norm. fp32 products may run in TF32 inside the kernel."""


def build_shared_attention(layout: PackedLayout, device: torch.device) -> AttentionContext:
    """Return the attention of a forward over a packed row."""
    # Rows of prompts alone are few and short: compiling for them would take longer than computing them.
    if device.type == "cuda" and layout.reply_lens_S:
        return _ProvenAttention(layout, device)
    return PrefixSharedAttention(layout, device)


class _ProvenAttention:
    """FlexAttention for plain layers whose heads passed the test; `PrefixSharedAttention` for all others."""

    def __init__(self, layout: PackedLayout, device: torch.device) -> None:
        self._layout = layout
        self._device = device
        self._flex: FlexSharedAttention | None = None
        self._padded: PrefixSharedAttention | None = None

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scaling: float,
        rule: ScoreRule = PLAIN,
    ) -> torch.Tensor:
        """Compute one layer's attention. Shapes: see `AttentionContext.attend`."""
        attention: AttentionContext
        sizes = (query.shape[0], key.shape[0], query.shape[2])
        is_plain = rule.is_linear and rule.window is None and key.shape[2] == value.shape[2]
        if is_plain and _compiled_flaw(sizes, query.dtype, self._device) is None:
            self._flex = self._flex or FlexSharedAttention(self._layout, self._device, compiled_kernel())
            attention = self._flex
        else:
            self._padded = self._padded or PrefixSharedAttention(self._layout, self._device)
            attention = self._padded
        return attention.attend(layer, query, key, value, scaling, rule)


@functools.cache
def compiled_kernel() -> FlexKernel:
    """Return FlexAttention compiled for rows of any length."""
    return compile_for_any_length(run_flex)


@functools.cache
def _compiled_flaw(sizes: tuple[int, int, int], dtype: torch.dtype, device: torch.device) -> str | None:
    """Return why the compiled kernel cannot be used for heads of these sizes (H, K, E), with a warning."""
    flaw = find_flex_flaw(compiled_kernel(), sizes, dtype, device)
    if flaw is not None:
        warnings.warn(
            f"FlexAttention is not used for {sizes[0]} query and {sizes[1]} key-value heads of {sizes[2]} in "
            f"{dtype} on {device} ({flaw}); padded attention is, which takes more memory and time",
            RuntimeWarning,
            stacklevel=2,
        )
    return flaw


def find_flex_flaw(
    kernel: FlexKernel, sizes: tuple[int, int, int], dtype: torch.dtype, device: torch.device
) -> str | None:
    """Compare a kernel with padded attention on a small row; return its flaw, or None."""
    # Gradients are compared too, even where the caller is scoring.
    with torch.inference_mode(mode=False), torch.enable_grad():
        num_heads, num_kv_heads, width = sizes
        generator = torch.Generator().manual_seed(0)
        query, key, value, upstream = (
            torch.randn(heads, _PROBE.num_positions, width, generator=generator).to(device, dtype)
            for heads in (num_heads, num_kv_heads, num_kv_heads, num_heads)
        )
        inputs = [part.requires_grad_() for part in (query, key, value)], upstream.transpose(0, 1)
        try:
            actual = _run_probe(FlexSharedAttention(_PROBE, device, kernel), inputs)
        except (RuntimeError, ImportError, OSError, subprocess.SubprocessError) as error:
            lines = str(error).strip().splitlines() or [""]
            return f"it does not run: {type(error).__name__}: {lines[0]}"
        expected = _run_probe(PrefixSharedAttention(_PROBE, device), inputs)
        gaps = [float((one - two).norm() / two.norm()) for one, two in zip(actual, expected, strict=True)]
    tolerance = _PROBE_TOLERANCE.get(dtype, 1e-6)
    if all(gap <= tolerance for gap in gaps):
        return None
    return f"its output and gradients differ by {', '.join(f'{gap:.2g}' for gap in gaps)}"


def _run_probe(
    attention: AttentionContext, inputs: tuple[list[torch.Tensor], torch.Tensor]
) -> list[torch.Tensor]:
    """Return output and gradients of query, key and value, in fp32."""
    parts, upstream = inputs
    output = attention.attend(0, parts[0], parts[1], parts[2], parts[0].shape[-1] ** -0.5)
    gradients = torch.autograd.grad(output, parts, upstream)
    return [part.detach().float() for part in (output, *gradients)]


def padded_length(num_positions: int) -> int:
    """Return W for N positions."""
    step = BLOCK if num_positions <= _COARSE else _COARSE
    return -(-num_positions // step) * step


def run_flex(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: BlockMask, scale: float
) -> torch.Tensor:
    """Call FlexAttention with grouped queries; this function gets compiled."""
    output: torch.Tensor = flex_attention(
        query, key, value, block_mask=mask, scale=scale, enable_gqa=query.shape[1] != key.shape[1]
    )
    return output


class FlexSharedAttention:
    """Causal attention over a packed row: prompts among themselves, replies over prompt and self.

    For layers without windows, caps and sinks.
    """

    def __init__(self, layout: PackedLayout, device: torch.device, kernel: FlexKernel) -> None:
        self._kernel = kernel
        self._width = padded_length(layout.num_positions)
        self._mask = build_block_mask(layout, self._width, device)

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scaling: float,
        rule: ScoreRule = PLAIN,
    ) -> torch.Tensor:
        """Compute one layer's attention. Shapes: see `AttentionContext.attend`."""
        assert rule.is_linear, "caps and sinks are computed elsewhere"
        assert rule.window is None, "windows are computed elsewhere"
        num_positions = query.shape[1]
        missing = (0, 0, 0, self._width - num_positions)
        padded = [torch.nn.functional.pad(part, missing).unsqueeze(0) for part in (query, key, value)]
        output = self._kernel(padded[0], padded[1], padded[2], self._mask, scaling)
        return output[0, :, :num_positions].transpose(0, 1)


def build_block_mask(layout: PackedLayout, width: int, device: torch.device) -> BlockMask:
    """Return the visibility of each pair of positions, and the blocks that hold visible pairs."""
    group_W, reply_W = label_positions(layout, width)
    groups, replies = to_device(group_W, device), to_device(reply_W, device)

    def sees(batch: torch.Tensor, head: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        is_of_group = groups[query] == groups[key]
        is_prompt_or_own = (replies[key] < 0) | (replies[query] == replies[key])
        return is_of_group & is_prompt_or_own & (query >= key)

    touched, full = find_blocks(layout, width)
    mixed_counts, mixed_indices = _list_blocks(touched & ~full, device)
    full_counts, full_indices = _list_blocks(full, device)
    return BlockMask.from_kv_blocks(
        mixed_counts, mixed_indices, full_counts, full_indices, BLOCK_SIZE=BLOCK, mask_mod=sees
    )


def label_positions(layout: PackedLayout, width: int) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Return the group and the reply of each position; -1 for no reply. Shapes: (W,) both.

    Padding has a separate group, which no other position sees.
    """
    groups = np.full(width, -1, dtype=np.int32)
    replies = np.full(width, -1, dtype=np.int32)
    num_positions, num_prompt = layout.num_positions, layout.num_prompt_positions
    prompt_groups = np.arange(len(layout.prompt_lens_P))
    groups[:num_prompt] = np.repeat(prompt_groups, layout.prompt_lens_P)
    groups[num_prompt:num_positions] = np.repeat(np.asarray(layout.group_of_S, np.int64), layout.reply_lens_S)
    replies[num_prompt:num_positions] = np.repeat(np.arange(len(layout.reply_lens_S)), layout.reply_lens_S)
    return groups, replies


def find_blocks(layout: PackedLayout, width: int) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """Return which blocks hold a visible pair, and in which all pairs are visible. Shapes: (B, B) both."""
    num_blocks = width // BLOCK
    touched = np.eye(num_blocks, dtype=np.bool_)
    full = np.zeros((num_blocks, num_blocks), dtype=np.bool_)
    prompts = list(zip(layout.prompt_starts_P.tolist(), layout.prompt_lens_P, strict=True))
    for start, length in prompts:
        _mark(touched, full, (start, length), (start, length))
    replies = zip(layout.reply_starts_S.tolist(), layout.reply_lens_S, layout.group_of_S, strict=True)
    for start, length, group in replies:
        if length > 0:
            _mark(touched, full, (start, length), (start, length))
            _mark(touched, full, (start, length), prompts[group])
    return touched, full


def _mark(
    touched: NDArray[np.bool_], full: NDArray[np.bool_], queries: tuple[int, int], keys: tuple[int, int]
) -> None:
    """Mark the blocks in which one run of positions (start, length) sees another, or itself causally."""
    first, last = queries[0] // BLOCK, (queries[0] + queries[1] - 1) // BLOCK
    key_first, key_last = keys[0] // BLOCK, (keys[0] + keys[1] - 1) // BLOCK
    # Blocks that lie inside a run altogether.
    inner, inner_end = -(-queries[0] // BLOCK), (queries[0] + queries[1]) // BLOCK
    key_inner, key_inner_end = -(-keys[0] // BLOCK), (keys[0] + keys[1]) // BLOCK
    if queries != keys:
        touched[first : last + 1, key_first : key_last + 1] = True
        full[inner:inner_end, key_inner:key_inner_end] = True
        return
    for block in range(first, last + 1):
        touched[block, key_first : block + 1] = True
        if inner <= block < inner_end:
            full[block, key_inner:block] = True


def _list_blocks(chosen: NDArray[np.bool_], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return per row of blocks how many are chosen, and these first. Shapes: (1, 1, B), (1, 1, B, B)."""
    order = np.argsort(~chosen, axis=1, kind="stable").astype(np.int32)
    counts = chosen.sum(axis=1, dtype=np.int32)
    return to_device(counts[None, None], device), to_device(order[None, None], device)
