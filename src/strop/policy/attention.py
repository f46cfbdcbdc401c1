"""strop's attention inside any transformers decoder, through transformers' AttentionInterface.

The model code remains that of transformers. Its attention calls arrive here and are passed to the
`AttentionContext` of the current forward: one that shares prompts between the replies of a group
(`PrefixSharedAttention`), or one that reads and writes a KV cache (`kv_cache`).
All tokens of a forward are one flat row, so linears never see padding.

Besides full causal attention the contexts compute sliding windows, soft caps on scores and sinks, and
values of another width than keys (`ScoreRule`). A layer that needs anything else cannot be packed:
`proof` detects that when a model is loaded, and each sequence is then computed by itself.

Shapes: N tokens of the flat row, P prompts, S replies that feed at least one position, Lp and Lr the longest
of each, H query heads, K key-value heads, R = H / K, E head width, F width of values. In short attention:
B rows, Q queries and T keys of a row.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from transformers import AttentionInterface

from strop.policy.packing import PackedLayout

ATTENTION_NAME = "strop"


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ScoreRule:
    """How a layer changes its scores besides scaling."""

    window: int | None = None
    """Positions that a token sees, itself included; None: all earlier ones."""
    cap: float | None = None
    """Scores s become cap * tanh(s / cap)."""
    sinks: torch.Tensor | None = None
    """Scores of one further key per head, which every token sees and whose value is 0. Shapes: (H,)."""

    @property
    def is_linear(self) -> bool:
        """Whether scores are neither changed nor added: windows only mask."""
        return self.cap is None and self.sinks is None


PLAIN = ScoreRule()


class AttentionContext(Protocol):
    """Attention of one forward over a flat row of tokens."""

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scaling: float,
        rule: ScoreRule = PLAIN,
    ) -> torch.Tensor:
        """Return the attention output.

        Shapes: query (H, N, E), key (K, N, E), value (K, N, F), positions applied; returns (N, H, F).
        """
        ...


def weigh(scores: torch.Tensor, rule: ScoreRule, bias: torch.Tensor, num_kv_heads: int) -> torch.Tensor:
    """Turn scaled scores into attention weights, with a cap and sinks. At least in fp32.

    Shapes: scores (rows, K, R * L, T) with the R query heads of a key-value head one after the other, bias
        broadcast to it; returns the same.
    """
    if rule.cap is not None:
        scores = rule.cap * torch.tanh(scores / rule.cap)
    scores = (scores + bias).to(torch.promote_types(scores.dtype, torch.float32))
    if rule.sinks is None:
        return torch.softmax(scores, dim=-1)
    per_head = rule.sinks.to(scores.dtype).view(num_kv_heads, -1, 1)
    num_queries = scores.shape[2] // per_head.shape[1]
    sinks = per_head.expand(-1, -1, num_queries).reshape(1, num_kv_heads, -1, 1)
    joined = torch.cat([scores, sinks.expand(len(scores), -1, -1, -1)], dim=-1)
    return torch.softmax(joined, dim=-1)[..., :-1]


# Options that do not affect scores, or that the context determines: dropout is 0 outside of training mode.
_WITHOUT_MEANING = frozenset(
    {
        *("dropout", "is_causal", "use_cache", "output_attentions", "output_hidden_states", "return_dict"),
        *("position_ids", "cache_position", "position_embeddings", "past_key_values", "past_key_value"),
        *("cache", "output_router_logits", "logits_to_keep", "layer_idx", "cu_seq_lens_q", "cu_seq_lens_k"),
    }
)


def _attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    attention_context: AttentionContext | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Hand one layer's attention to the context; the signature is transformers'.

    Raises: NotImplementedError naming what a context does not compute.
    """
    if attention_context is None:
        raise NotImplementedError("its attention was called without an attention context")
    if attention_mask is not None:
        raise NotImplementedError("its layers mask keys by themselves")
    rule = ScoreRule(
        window=options.pop("sliding_window", None),
        cap=options.pop("softcap", None),
        sinks=options.pop("s_aux", None),
    )
    unknown = sorted(name for name in options.keys() - _WITHOUT_MEANING if options[name] is not None)
    if unknown:
        raise NotImplementedError(f"its attention takes {', '.join(unknown)}")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    layer = int(module.layer_idx)  # type: ignore[arg-type]
    output = attention_context.attend(layer, query[0], key[0], value[0], scale, rule)
    return output.unsqueeze(0), None


AttentionInterface.register(ATTENTION_NAME, _attend)


class PrefixSharedAttention:
    """Causal attention over a packed row: prompts among themselves, replies over prompt and self.

    Gradients of the replies that share a prompt are summed into its keys and values, in fp32. Padding exists
    only here: segments are spread over a block of equal rows and collected again.
    """

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
        """Return the masks of prompts and of replies, cached by window."""
        # A window that holds the longest sequence hides nothing.
        window = None if window is None or window >= self._longest else window
        if window not in self._biases:
            # Which key each prompt position sees. Shapes: (P, Lp, Lp), bool.
            prompts = _banded(self._prompts.width, window, self._device)
            prompts = prompts.expand(self._prompts.num_rows, -1, -1)
            # Which key each reply position sees. Shapes: (S, Lr, Lp + Lr), bool.
            width, num_rows = self._replies.width, self._replies.num_rows
            places = torch.arange(self._prompts.width, device=self._device)
            sees_prompt = (places < self._prompt_lens_S[:, None])[:, None].expand(-1, width, -1)
            if window is not None:
                queries = self._prompt_lens_S[:, None] + torch.arange(width, device=self._device)
                sees_prompt = sees_prompt & (queries[:, :, None] - places < window)
            # Padded rows see themselves, so no softmax runs over nothing; they are dropped later.
            sees_reply = _banded(width, window, self._device).expand(num_rows, -1, -1)
            self._biases[window] = (
                _FoldedBias(prompts),
                _FoldedBias(torch.cat([sees_prompt, sees_reply], dim=2)),
            )
        return self._biases[window]

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


class _Collect(torch.autograd.Function):
    """Select rows, each at most once, so that the backward copies instead of adding."""

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


def _banded(width: int, window: int | None, device: torch.device) -> torch.Tensor:
    """Return which positions of a sequence each position sees. Shapes: (width, width), bool."""
    sees = torch.ones(width, width, dtype=torch.bool, device=device).tril()
    return sees if window is None else sees.triu(1 - window)


class _FoldedBias:
    """An additive mask, laid out for folded queries and cached by ratio and type."""

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


# PyTorch's fused attention for CPUs is made for long rows: at the few dozen to few hundred keys of a packed
# reply, most of its backward is overhead. Short attention computes scores as one batched product, keeps
# only the inputs for the backward, and processes rows in blocks so that scores stay in the cache.

MAX_ROW_SCORES = 2**22
"""Scores of one row above which fused attention, which never holds them all, is used."""
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
