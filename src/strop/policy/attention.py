"""strop's attention inside any transformers decoder, through transformers' AttentionInterface.

The model code stays transformers' own. Its attention calls land here and are passed to the
`AttentionContext` of the forward under way: one that shares prompts between the replies of a group
(`prefix_attention.PrefixSharedAttention`), or one that reads and writes a KV cache (`kv_cache`).
All tokens of a forward are one flat row, so linears never see padding.

Besides full causal attention the contexts compute sliding windows, soft caps on scores and sinks, and
values of another width than keys (`ScoreRule`). A layer that asks for anything else cannot be packed:
`proof` finds that out when a model is loaded, and each sequence is then computed by itself.

Shapes: N tokens of the flat row, H query heads, K key-value heads, E head width, F width of values.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from transformers import AttentionInterface

ATTENTION_NAME = "strop"


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ScoreRule:
    """What a layer does to its scores beside scaling them."""

    window: int | None = None
    """How many positions a token sees, itself included; None: all before it."""
    cap: float | None = None
    """Scores s become cap * tanh(s / cap)."""
    sinks: torch.Tensor | None = None
    """Scores of a key per head that every token sees and whose value is 0. Shapes: (H,)."""

    @property
    def is_linear(self) -> bool:
        """Whether scores stay as they are, and none is added: windows only mask."""
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


# What models pass along that says nothing about scores, or what the context knows better: dropout is 0
# outside of training mode.
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
    asked = sorted(name for name in options.keys() - _WITHOUT_MEANING if options[name] is not None)
    if asked:
        raise NotImplementedError(f"its attention takes {', '.join(asked)}")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    layer = int(module.layer_idx)  # type: ignore[arg-type]
    output = attention_context.attend(layer, query[0], key[0], value[0], scale, rule)
    return output.unsqueeze(0), None


AttentionInterface.register(ATTENTION_NAME, _attend)
