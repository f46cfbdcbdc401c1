"""The default size of micro-batches."""

from __future__ import annotations

from pathlib import Path

from strop.policy.footprint import DEFAULT_MICRO_BATCH_POSITIONS, ModelSize
from strop.policy.micro_batch import MAX_GPU_POSITIONS, default_positions, positions_within
from tests.policy.worlds import load_model, make_model

QWEN_1_5B = ModelSize(
    num_layers=28,
    hidden_width=1536,
    mlp_width=8960,
    num_heads=12,
    num_kv_heads=2,
    head_width=128,
    vocab_size=151_936,
    max_positions=32_768,
    is_tied=True,
)


def test_gpus_take_what_half_of_their_memory_holds() -> None:
    # 1.5B: 1.544e9 parameters of 18 bytes are 27.8 GB, the head 1.1 GB. A position keeps
    # 28 * (2 * 1536 * 12 + 6 * 14 * 128 * 2 + 4 * 8960 * 2) = 28 * 130,048 = 3.64 MB.
    # 80 GB: 0.5 * 51.1e9 / 3.64e6 = 7,017 -> 6 * 1024. 24 GB hold not even the weights' state.
    assert positions_within(80 * 10**9, QWEN_1_5B, "bfloat16") == 6 * 1024
    assert positions_within(24 * 10**9, QWEN_1_5B, "bfloat16") == DEFAULT_MICRO_BATCH_POSITIONS
    assert positions_within(10**12, QWEN_1_5B, "bfloat16") == MAX_GPU_POSITIONS


def test_processors_keep_their_own(tmp_path: Path) -> None:
    assert default_positions(load_model(make_model(tmp_path))) == DEFAULT_MICRO_BATCH_POSITIONS
