"""What an engine of vLLM has room for, computed and refused before vLLM starts: its own words come late."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from strop.errors import ConfigError, explain_refusal
from strop.policy.footprint import COPY_BYTES, ModelSize
from strop.rollout import IntArray

CPU_KV_CACHE_BYTES = 1 << 30
"""Without a setting, on a CPU: vLLM's own default is nine tenths of the machine's memory."""
GPU_MEMORY_FRAC = 0.92
"""Without a setting, the share of a GPU's memory that vLLM 0.32 takes for everything."""
KV_BLOCK_TOKENS = 128
"""Tokens of a block of the cache on a CPU, vLLM 0.32; only whole blocks of a prompt are cached."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineLimits:
    """What one request may ask for."""

    max_positions: int
    """Prompt and reply together."""
    vocab_size: int

    def canary_ids(self) -> IntArray:
        """Return a fixed prompt that fills a block of the cache where there is room for one."""
        length = max(1, min(KV_BLOCK_TOKENS + 1, self.max_positions - 1))
        ids: IntArray = ((np.arange(length) * 7 + 1) % self.vocab_size).astype(np.int32)
        return ids


def plan_limits(
    size: ModelSize, *, dtype: str, max_model_tokens: int | None, kv_cache_bytes: int | None
) -> EngineLimits:
    """Return the limits of an engine.

    Raises: ConfigError if the model has fewer positions than asked for, or the cache has no room for one
        sequence of full length.
    """
    max_positions = max_model_tokens or size.max_positions
    if max_positions > size.max_positions:
        raise ConfigError(
            explain_refusal(
                f"engine.max_model_tokens={max_positions}, but the model has {size.max_positions} positions",
                allowed=f"1 to {size.max_positions}, or none for all",
                next_step="lower engine.max_model_tokens",
            )
        )
    token_bytes = 2 * size.num_layers * size.num_kv_heads * size.head_width * COPY_BYTES[dtype]
    # One block more, because a sequence begins at a block's start.
    needed_bytes = (max_positions + KV_BLOCK_TOKENS) * token_bytes
    if kv_cache_bytes is not None and kv_cache_bytes < needed_bytes:
        raise ConfigError(
            explain_refusal(
                f"a cache of {kv_cache_bytes} bytes for keys and values, and one sequence of"
                f" {max_positions} tokens takes {needed_bytes}",
                allowed=f"{needed_bytes} bytes or more, or shorter sequences",
                next_step="raise engine.kv_cache_bytes or lower engine.max_model_tokens",
            )
        )
    return EngineLimits(max_positions=max_positions, vocab_size=size.vocab_size)
