"""What a transformers causal LM is made of: its sizes, its trunk, its layers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from strop.policy.families import Layout, read_max_positions


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelShape:
    """The sizes that memory and caches are computed from, and how sequences are laid out."""

    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_width: int
    """Of queries and keys."""
    value_width: int
    hidden_width: int
    vocab_size: int
    max_positions: int
    has_plain_scores: bool = True
    """Whether values are as wide as keys, and scores are neither capped nor joined by sinks."""
    alone_because: str | None = None
    """Why each sequence is computed by itself; None where rows are packed."""

    @property
    def layout(self) -> Layout:
        """How sequences are laid out for a forward."""
        return Layout.PACKED if self.alone_because is None else Layout.ALONE


def read_shape(module: Any) -> ModelShape:
    """Read the sizes of a model, from its head and the text part of its config."""
    text = module.config.get_text_config()
    vocab_size, hidden_width = module.get_output_embeddings().weight.shape
    num_heads = _read_size(text, "num_attention_heads") or 1
    width = _read_size(text, "head_dim") or hidden_width // num_heads
    return ModelShape(
        num_layers=_read_size(text, "num_hidden_layers") or len(decoder_layers(module)),
        num_heads=num_heads,
        num_kv_heads=_read_size(text, "num_key_value_heads") or num_heads,
        head_width=width,
        value_width=width,
        hidden_width=int(hidden_width),
        vocab_size=int(vocab_size),
        max_positions=read_max_positions(text.to_dict()),
    )


def _read_size(config: Any, name: str) -> int | None:
    """Return a size, None where a config has none, or another one for each layer."""
    try:
        value = getattr(config, name, None)
    except RuntimeError:
        return None
    return int(value) if isinstance(value, int) else None


def find_trunk(module: Any) -> Any:
    """Return the part of a causal LM without its head, None where there is none."""
    trunk = module.base_model
    return trunk if trunk is not module else getattr(module, "model", None)


def decoder_layers(module: Any) -> list[torch.nn.Module]:
    """Return the layers of a decoder: the list of modules that holds most of its weights."""
    parts: list[torch.nn.Module] = list(find_trunk(module).modules())
    lists = [part for part in parts if isinstance(part, torch.nn.ModuleList)]
    return list(max(lists, key=_count_weights))


def _count_weights(layers: Any) -> int:
    return sum(weight.numel() for weight in layers.parameters())
