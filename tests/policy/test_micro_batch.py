"""The default size of micro-batches."""

from __future__ import annotations

from pathlib import Path

from strop.policy.footprint import DEFAULT_MICRO_BATCH_POSITIONS, MAX_GPU_POSITIONS, ModelSize, gpu_positions
from strop.policy.scoring import default_positions
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
    assert gpu_positions(80 * 10**9, QWEN_1_5B, "bfloat16") == 6 * 1024
    assert gpu_positions(24 * 10**9, QWEN_1_5B, "bfloat16") == DEFAULT_MICRO_BATCH_POSITIONS
    assert gpu_positions(10**12, QWEN_1_5B, "bfloat16") == MAX_GPU_POSITIONS


def test_ranks_adapters_and_activations_that_are_computed_again_leave_more_room() -> None:
    # Adapters of 10 million parameters: frozen copies of 3.1 GB and 18 bytes for each trained one, 0.2 GB.
    # 24 GB: 0.5 * 19.7e9 / 3.64e6 = 2,700 -> 2 * 1024.
    assert gpu_positions(24 * 10**9, QWEN_1_5B, "bfloat16", num_trained=10**7) == 2 * 1024
    # Two of the stream's tensors per layer, and one layer's inside: 28 * 6,144 + 130,048 = 302 kB.
    # 32 GB: 0.5 * 3.1e9 / 302e3 = 5,170 -> 5 * 1024.
    assert gpu_positions(32 * 10**9, QWEN_1_5B, "bfloat16", is_recomputed=True) == 5 * 1024
    # Of four ranks each keeps a fourth of 16 bytes per parameter and the head's gradient, 7.1 GB, and gathers
    # embedding and two layers with their gradients, 2.1 GB. 40 GB: 0.5 * 29.8e9 / 3.64e6 = 4,090 -> 3 * 1024.
    assert gpu_positions(40 * 10**9, QWEN_1_5B, "bfloat16", num_ranks=4) == 3 * 1024
    assert gpu_positions(40 * 10**9, QWEN_1_5B, "bfloat16") == DEFAULT_MICRO_BATCH_POSITIONS


def test_processors_keep_their_own(tmp_path: Path) -> None:
    assert default_positions(load_model(make_model(tmp_path))) == DEFAULT_MICRO_BATCH_POSITIONS
