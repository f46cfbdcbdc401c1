"""How many positions a learner forwards at once where its run does not say."""

from __future__ import annotations

import torch

from strop.policy.footprint import (
    DEFAULT_MICRO_BATCH_POSITIONS,
    ModelSize,
    activation_bytes,
    state_bytes,
)
from strop.policy.head import GPU_HEAD_BYTES
from strop.policy.language_model import LanguageModel

MAX_GPU_POSITIONS = 32_768
"""More keep no GPU busier."""
_ACTIVATION_FRAC = 0.5
"""Share of what weights and optimizer leave of a GPU that activations may take; caches need some too."""


def default_positions(model: LanguageModel) -> int:
    """Return the default for the device of a model.

    On a GPU it follows from the device's size and the model's, not from what happens to be free, so that a
    run that goes on later is cut the same way.
    """
    if model.device.type != "cuda":
        return DEFAULT_MICRO_BATCH_POSITIONS
    total_bytes = torch.cuda.get_device_properties(model.device).total_memory
    return positions_within(total_bytes, _size_of(model), str(model.dtype).removeprefix("torch."))


def positions_within(total_bytes: int, size: ModelSize, dtype: str) -> int:
    """Return how many positions of a model a GPU of so many bytes trains at once, in steps of 1024."""
    per_position = activation_bytes(size, dtype, 1) - activation_bytes(size, dtype, 0)
    left = total_bytes - state_bytes(size, dtype) - GPU_HEAD_BYTES
    fitting = int(_ACTIVATION_FRAC * left) // per_position // 1024 * 1024
    return max(min(fitting, MAX_GPU_POSITIONS), DEFAULT_MICRO_BATCH_POSITIONS)


def _size_of(model: LanguageModel) -> ModelSize:
    config, shape = model.module.config.get_text_config(), model.shape
    return ModelSize(
        num_layers=shape.num_layers,
        hidden_width=shape.hidden_width,
        mlp_width=int(config.intermediate_size),
        num_heads=shape.num_heads,
        num_kv_heads=shape.num_kv_heads,
        head_width=shape.head_width,
        vocab_size=shape.vocab_size,
        max_positions=shape.max_positions,
        is_tied=bool(config.tie_word_embeddings),
    )
