"""Causal attention over a packed row in which each prompt stands once.

Prompts attend among themselves, replies over their group's prompt and themselves. Gradients of the
replies that share a prompt are summed into its keys and values, in fp32. Only here is padding: rows
are spread over a block of equal length and collected again.

Shapes: N positions of the row, P prompts, S replies that feed at least one position, H query heads,
K key-value heads, R = H / K, E head width (values may have another), Lp and Lr the longest prompt and
reply.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from strop.policy.attention import PLAIN, ScoreRule, weigh
from strop.policy.packing import PackedLayout
from strop.policy.short_attention import MAX_ROW_SCORES, attend_short


class _Collect(torch.autograd.Function):
    """Pick rows that are picked once each, so that the backward copies instead of adding."""

    @staticmethod
    def forward(ctx: Any, padded: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(slots)
        ctx.shape = padded.shape
        return padded.index_select(0, slots)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        (slots,) = ctx.saved_tensors
        grad = grads[0]
        return grad.new_zeros(ctx.shape).index_copy_(0, slots, grad), None


class _Share(torch.autograd.Function):
    """Repeat each prompt's keys or values for its replies; the backward sums them in fp32 or wider."""

    @staticmethod
    def forward(ctx: Any, prompts: torch.Tensor, group_of_S: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(group_of_S)
        ctx.shape = prompts.shape
        return prompts.index_select(0, group_of_S)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        (group_of_S,) = ctx.saved_tensors
        grad = grads[0]
        total = grad.new_zeros(ctx.shape, dtype=torch.promote_types(grad.dtype, torch.float32))
        total.index_add_(0, group_of_S, grad.to(total.dtype))
        return total.to(grad.dtype), None


class _Padding:
    """Moves ragged segments between the flat row and a padded block of equal rows."""

    def __init__(self, lens: Sequence[int], device: torch.device) -> None:
        self.num_rows = len(lens)
        self.width = max(lens, default=0)
        slots = [np.arange(length) + row * self.width for row, length in enumerate(lens)]
        flat = np.concatenate(slots) if slots else np.zeros(0)
        self._slots = torch.from_numpy(flat.astype(np.int64)).to(device)

    def pad(self, flat: torch.Tensor) -> torch.Tensor:
        """Spread segments over rows. Shapes: (n, heads, E) to (rows, heads, width, E)."""
        padded = flat.new_zeros(self.num_rows * self.width, *flat.shape[1:])
        padded = padded.index_copy(0, self._slots, flat)
        return padded.view(self.num_rows, self.width, *flat.shape[1:]).transpose(1, 2)

    def collect(self, padded: torch.Tensor) -> torch.Tensor:
        """Undo `pad`. Shapes: (rows, heads, width, E) to (n, heads, E)."""
        rows = padded.transpose(1, 2).reshape(self.num_rows * self.width, *padded.shape[1::2])
        collected: torch.Tensor = _Collect.apply(rows, self._slots)  # type: ignore[no-untyped-call]
        return collected


class PrefixSharedAttention:
    """Causal attention over a packed row: prompts among themselves, replies over prompt and self."""

    def __init__(self, layout: PackedLayout, device: torch.device) -> None:
        self._num_prompt_positions = layout.num_prompt_positions
        self._prompts = _Padding(layout.prompt_lens_P, device)
        # A reply of one token feeds nothing; without replies left, only prompts are computed.
        fed = [row for row, length in enumerate(layout.reply_lens_S) if length > 0]
        self._replies = _Padding([layout.reply_lens_S[row] for row in fed], device)
        self._group_of_S = torch.tensor([layout.group_of_S[row] for row in fed], device=device)
        self._has_replies = bool(fed)
        prompt_lens = torch.tensor([layout.prompt_lens_P[layout.group_of_S[row]] for row in fed])
        self._prompt_lens_S = prompt_lens.to(device)
        longest = [
            layout.prompt_lens_P[group] + layout.reply_lens_S[row]
            for row, group in enumerate(layout.group_of_S)
        ]
        self._longest = max([*layout.prompt_lens_P, *longest])
        self._device = device
        self._biases: dict[int | None, tuple[_FoldedBias, _FoldedBias]] = {}

    def _bias_of(self, window: int | None) -> tuple[_FoldedBias, _FoldedBias]:
        """Return the masks of prompts and of replies, made once per window."""
        # A window that holds the longest sequence hides nothing.
        window = None if window is None or window >= self._longest else window
        if window not in self._biases:
            self._biases[window] = (
                _FoldedBias(self._see_prompts(window)),
                _FoldedBias(self._see_replies(window)),
            )
        return self._biases[window]

    def _see_prompts(self, window: int | None) -> torch.Tensor:
        """Say which key each prompt position sees. Shapes: (P, Lp, Lp), bool."""
        width = self._prompts.width
        sees = _banded(width, window, self._device)
        return sees.expand(self._prompts.num_rows, -1, -1)

    def _see_replies(self, window: int | None) -> torch.Tensor:
        """Say which key each reply position sees. Shapes: (S, Lr, Lp + Lr), bool."""
        width, num_rows = self._replies.width, self._replies.num_rows
        places = torch.arange(self._prompts.width, device=self._device)
        sees_prompt = (places < self._prompt_lens_S[:, None])[:, None].expand(-1, width, -1)
        if window is not None:
            queries = self._prompt_lens_S[:, None] + torch.arange(width, device=self._device)
            sees_prompt = sees_prompt & (queries[:, :, None] - places < window)
        # Padded rows see themselves, so no softmax runs over nothing; they are dropped later.
        sees_reply = _banded(width, window, self._device).expand(num_rows, -1, -1)
        return torch.cat([sees_prompt, sees_reply], dim=2)

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
        query, key, value = (x.transpose(0, 1) for x in (query, key, value))
        cut = self._num_prompt_positions
        keys_P, values_P = self._prompts.pad(key[:cut]), self._prompts.pad(value[:cut])
        prompt_bias, reply_bias = self._bias_of(rule.window)
        attended = _attend_folded(
            self._prompts.pad(query[:cut]), keys_P, values_P, prompt_bias, scaling, rule
        )
        prompts = self._prompts.collect(attended)
        if not self._has_replies:
            return prompts
        keys = torch.cat([self._share(keys_P), self._replies.pad(key[cut:])], dim=2)
        values = torch.cat([self._share(values_P), self._replies.pad(value[cut:])], dim=2)
        attended = _attend_folded(self._replies.pad(query[cut:]), keys, values, reply_bias, scaling, rule)
        return torch.cat([prompts, self._replies.collect(attended)], dim=0)

    def _share(self, prompts: torch.Tensor) -> torch.Tensor:
        shared: torch.Tensor = _Share.apply(prompts, self._group_of_S)  # type: ignore[no-untyped-call]
        return shared


def _banded(width: int, window: int | None, device: torch.device) -> torch.Tensor:
    """Say what each position of a sequence sees of it. Shapes: (width, width), bool."""
    sees = torch.ones(width, width, dtype=torch.bool, device=device).tril()
    return sees if window is None else sees.triu(1 - window)


class _FoldedBias:
    """An additive mask, laid out for folded queries and made once per ratio and type."""

    def __init__(self, visible: torch.Tensor) -> None:
        self._visible = visible
        """Which key a position sees. Shapes: (rows, L, T), bool."""
        self._made: dict[tuple[int, int, torch.dtype], torch.Tensor] = {}

    def get(self, num_kv_heads: int, ratio: int, dtype: torch.dtype) -> torch.Tensor:
        """Return the mask. Shapes: (rows * K, R * L, T)."""
        key = (num_kv_heads, ratio, dtype)
        if key not in self._made:
            bias = torch.zeros(self._visible.shape, dtype=dtype, device=self._visible.device)
            bias.masked_fill_(~self._visible, float("-inf"))
            self._made[key] = bias.repeat(1, ratio, 1).repeat_interleave(num_kv_heads, dim=0)
        return self._made[key]


def _attend_folded(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    bias: _FoldedBias,
    scaling: float,
    rule: ScoreRule,
) -> torch.Tensor:
    """Attend with the R query heads of a key-value head laid out as further query rows.

    Grouped attention then needs no copies of keys and values.
    Shapes: query (rows, H, L, E), keys (rows, K, T, E), values (rows, K, T, F); returns (rows, H, L, F).
    """
    rows, num_heads, length, head_width = query.shape
    num_kv_heads, num_keys = keys.shape[1], keys.shape[2]
    ratio = num_heads // num_kv_heads
    folded = query.reshape(rows, num_kv_heads, ratio * length, head_width)
    if not rule.is_linear:
        mask = bias.get(1, ratio, query.dtype).unsqueeze(1)
        weights = weigh(scaling * folded @ keys.transpose(2, 3), rule, mask, num_kv_heads)
        output = weights.to(values.dtype) @ values
    elif query.device.type == "cpu" and ratio * length * num_keys <= MAX_ROW_SCORES:
        mask = bias.get(num_kv_heads, ratio, query.dtype)
        output = attend_short(folded.flatten(0, 1), keys.flatten(0, 1), values.flatten(0, 1), mask, scaling)
    else:
        mask = bias.get(1, ratio, query.dtype).unsqueeze(1)
        output = torch.nn.functional.scaled_dot_product_attention(
            folded, keys, values, attn_mask=mask, scale=scaling
        )
    return output.reshape(rows, num_heads, length, values.shape[-1])
