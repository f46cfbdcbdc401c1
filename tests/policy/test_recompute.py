"""Activations that a backward computes again give the same gradients, and are not kept."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from strop.policy.footprint import must_recompute, rank_state_bytes, read_model_size, state_bytes
from strop.policy.language_model import DTYPES, LanguageModel
from strop.policy.learner import Learner
from strop.spec.train import OptimizerSpec
from tests.fixtures.kernels import HAS_KERNELS
from tests.policy.worlds import Gradients, World, make_model, reinforce


def gradients(path: Path, dtype: str, *, may_fuse: bool, is_recomputed: bool) -> Gradients:
    model = LanguageModel.load(path, dtype=DTYPES[dtype], may_fuse=may_fuse)
    assert (model.fused is not None) == (may_fuse and HAS_KERNELS)
    if is_recomputed:
        model.recompute_activations()
    learner = Learner(model, OptimizerSpec(), micro_batch_positions=20)
    groups = [World(seed).packed(5, [3, 1, 7]) for seed in range(3)]
    return learner.gradients(groups, temperature=0.7, token_terms=reinforce)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("may_fuse", [True, False])
def test_gradients_are_the_same_bits(tmp_path: Path, dtype: str, may_fuse: bool) -> None:
    path = make_model(tmp_path, family="qwen3", head_dim=16)
    kept = gradients(path, dtype, may_fuse=may_fuse, is_recomputed=False)
    again = gradients(path, dtype, may_fuse=may_fuse, is_recomputed=True)
    assert [name for name in kept if not torch.equal(kept[name], again[name])] == []


def test_memory_decides(tmp_path: Path) -> None:
    size = read_model_size(make_model(tmp_path))
    # Layer: q and o 32 x 32, k and v 32 x 16, three of 32 x 48: 2048 + 1024 + 4608 = 7680; two of them.
    # Embedding, which is the head too: 262 x 32 = 8384. In fp32 16 bytes each: 23744 x 16 = 379904.
    # A position keeps per layer two norms, 2 x 32 x 16, attention 6 x 6 x 8 x 4, MLP 4 x 48 x 4: 2944;
    # the head holds 256 rows of 262 logits in 12 bytes: 804864.
    assert rank_state_bytes(size, "float32", 1) == 379904
    needed = 379904 + 100 * 2 * 2944 + 804864
    for have_bytes, is_needed in ((needed / 0.9 + 1, False), (needed / 0.9 - 1, True), (None, False)):
        have = None if have_bytes is None else int(have_bytes)
        assert must_recompute(size, "float32", num_positions=100, have_bytes=have) is is_needed
    # On 4 ranks a quarter of it, and the head's gradient; gathered 8384 + 2 x 7680 in fp32, reduced 8384.
    by_hand = 379904 // 4 + 4 * 8384 + 4 * (8384 + 2 * 7680) + 8 * 8384
    assert rank_state_bytes(size, "float32", 4) == by_hand
    # With 100 trained parameters beside the frozen: no gradient of the head, 50 of a layer on their way.
    assert state_bytes(size, "float32", 100) == 4 * 23744 + 16 * 100
    by_hand = (4 * 23744 + 16 * 100) // 4 + 4 * (8384 + 2 * 7680) + 8 * 50
    assert rank_state_bytes(size, "float32", 4, 100) == by_hand
