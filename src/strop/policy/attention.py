"""strop's attention inside any transformers decoder, through transformers' AttentionInterface.

The model code stays transformers' own. Its attention calls land here and are passed to the
`AttentionContext` of the forward under way: one that shares prompts between the replies of a group
(`prefix_attention.PrefixSharedAttention`), or one that reads and writes a KV cache (`engine.kv_cache`).
All tokens of a forward are one flat row, so linears never see padding.

Shapes: N tokens of the flat row, H query heads, K key-value heads, E head width.

Not covered, and refused: sliding windows, attention soft-capping, sinks, attention dropout, models
that cross-attend. `language_model` proves every loaded model against its own eager attention.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from transformers import AttentionInterface

from strop.errors import ConfigError, explain_refusal

ATTENTION_NAME = "strop"


class AttentionContext(Protocol):
    """Attention of one forward over a flat row of tokens."""

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float
    ) -> torch.Tensor:
        """Return the attention output.

        Shapes: query (H, N, E), key and value (K, N, E), all after rotary embedding; returns (N, H, E).
        """
        ...


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
    """Hand one layer's attention to the context; the signature is transformers'."""
    if attention_context is None:
        raise RuntimeError("a model set to strop's attention was called without an attention context")
    _refuse_unsupported(options)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    layer = int(module.layer_idx)  # type: ignore[arg-type]
    output = attention_context.attend(layer, query[0], key[0], value[0], scale)
    return output.unsqueeze(0), None


def _refuse_unsupported(options: dict[str, Any]) -> None:
    """Refuse attention variants that the contexts do not compute."""
    for name in ("sliding_window", "softcap", "s_aux"):
        if options.get(name) is not None:
            raise ConfigError(
                explain_refusal(
                    f"the model's attention uses {name}={options[name]!r}",
                    allowed="full causal attention with rotary positions and grouped queries",
                    next_step="choose a Llama, Qwen2, Qwen3, Mistral or SmolLM family model without it",
                )
            )


AttentionInterface.register(ATTENTION_NAME, _attend)
