"""The least time that a step's work takes on a device: what its matrix products and its reads allow.

Decoding is bound by the larger of products and of reading weights and keys and values, step by step;
prefill and training by products alone. Norms, softmaxes, sampling and the optimizer count for nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.gpu.device import DevicePeaks
from strop.policy.footprint import ModelSize

_ITEM = 2
"""Bytes of a weight or a cached value in bf16."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Roofline:
    """Least seconds of one step, and what they consist of."""

    prefill_s: float
    decode_s: float
    train_s: float

    @property
    def step_s(self) -> float:
        """Least seconds of the whole step, one part after the other."""
        return self.prefill_s + self.decode_s + self.train_s


def decode_seconds(
    size: ModelSize, peaks: DevicePeaks, prompt_lens: Sequence[int], reply_lens: Sequence[int]
) -> float:
    """Return the least time to decode replies together, each row leaving when its reply ends.

    Shapes: one prompt and one reply length per row. A reply's first token comes from the prefill.
    """
    prompts, replies = np.asarray(prompt_lens), np.asarray(reply_lens)
    kv_bytes = 2 * size.num_layers * size.num_kv_heads * size.head_width * _ITEM
    weight_bytes = _ITEM * (size.body_params + size.head_params)
    attention_flop = 4 * size.num_layers * size.num_heads * size.head_width
    total = 0.0
    for step in range(1, int(replies.max())):
        live = replies > step
        num_slots = float((prompts[live] + step).sum())
        flop = 2.0 * (size.body_params + size.head_params) * live.sum() + attention_flop * num_slots
        read = weight_bytes + kv_bytes * num_slots
        total += max(flop / peaks.flop_per_s, read / peaks.bytes_per_s)
    return total


def train_seconds(
    size: ModelSize, peaks: DevicePeaks, num_positions: int, num_scored: int, lengths: Sequence[int]
) -> float:
    """Return the least time of forward and backward.

    `lengths` are the sequences' lengths, prompt included: each position attends to what is before it.
    """
    attention = 12.0 * size.num_layers * size.num_heads * size.head_width
    pairs = sum(length * length / 2 for length in lengths)
    flop = 6.0 * (size.body_params * num_positions + size.head_params * num_scored) + attention * pairs
    return flop / peaks.flop_per_s


def prefill_seconds(size: ModelSize, peaks: DevicePeaks, num_positions: int) -> float:
    """Return the least time to feed prompts, each once."""
    return 2.0 * size.body_params * num_positions / peaks.flop_per_s
