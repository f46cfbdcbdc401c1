"""Attention over a packed row with shared prompts as one block-sparse kernel, for GPUs.

The whole row is one sequence for PyTorch's FlexAttention. A position sees what its group's prompt and its
own reply hold before it; which blocks of 128 by 128 hold anything to see is worked out from the layout, so
nothing of size N by N is ever made. The kernel is compiled once with dynamic lengths; rows are padded to
few lengths, and padding costs the blocks on its diagonal. Softmax and sums are in fp32.

Values are those of `PrefixSharedAttention`, the path of CPUs and the fallback here: `shared_attention`
proves the compiled kernel against it, gradients included, before it is first used on sizes of heads.

Shapes: N positions of the row, W padded positions, B = W / 128 blocks, H query heads, K key-value heads,
E head width.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from strop.policy.attention import PLAIN, ScoreRule
from strop.policy.packing import PackedLayout, to_device

BLOCK = 128
"""Rows and columns of a block, FlexAttention's default."""
_COARSE = 1024
"""Longer rows are padded to multiples of this, so that few lengths occur."""

FlexKernel = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, BlockMask, float], torch.Tensor]
"""Maps (query, key, value, mask, scale) to the output. Shapes: (1, H or K, W, E) to (1, H, W, E)."""


def padded_length(num_positions: int) -> int:
    """Return W for N positions."""
    step = BLOCK if num_positions <= _COARSE else _COARSE
    return -(-num_positions // step) * step


def run_flex(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: BlockMask, scale: float
) -> torch.Tensor:
    """Call FlexAttention with grouped queries; to be compiled."""
    output: torch.Tensor = flex_attention(
        query, key, value, block_mask=mask, scale=scale, enable_gqa=query.shape[1] != key.shape[1]
    )
    return output


class FlexSharedAttention:
    """Causal attention over a packed row: prompts among themselves, replies over prompt and self.

    Of layers without windows, caps and sinks; `shared_attention` has the others computed elsewhere.
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
    """Say what each position sees, and which blocks hold something to see."""
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

    Padding is a group of its own, which nothing else sees.
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
