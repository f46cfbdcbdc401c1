"""Estimates from a config alone agree with what a model really takes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.utils.flop_counter import FlopCounterMode

from strop.errors import ConfigError
from strop.policy.attention import PrefixSharedAttention
from strop.policy.footprint import (
    DEFAULT_MICRO_BATCH_POSITIONS,
    MAX_GPU_POSITIONS,
    ModelSize,
    activation_bytes,
    cache_bytes,
    checkpoint_bytes,
    decode_flop,
    gpu_positions,
    learn_flop,
    must_recompute,
    prefill_flop,
    rank_state_bytes,
    read_model_size,
    size_of_config,
    state_bytes,
)
from strop.policy.kv_cache import KVCache
from strop.policy.language_model import DTYPES, LanguageModel
from strop.policy.learner import Learner
from strop.policy.packing import PackedBatch
from strop.policy.weights import export_tensors, own_tensors
from strop.spec.train import OptimizerSpec
from tests.fixtures.descriptions import config_of
from tests.fixtures.kernels import HAS_KERNELS
from tests.policy.worlds import SIZE, Gradients, World, build_learner, load_model, make_model, reinforce

CONFIGS: list[dict[str, Any]] = [
    {},
    {"tie_word_embeddings": False, "num_key_value_heads": 1},
    {"family": "qwen3", "head_dim": 16},
    {"num_key_value_heads": 4, "num_hidden_layers": 3},
]


@pytest.mark.parametrize("config", CONFIGS, ids=repr)
def test_all_matrices_are_counted(tmp_path: Path, config: dict[str, Any]) -> None:
    path = make_model(tmp_path, **config)
    size = read_model_size(path)
    parameters = dict(load_model(path).named_parameters())
    assert size.num_params == sum(p.numel() for p in parameters.values() if p.dim() == 2)


@pytest.mark.parametrize(
    ("name", "billions", "active"),
    [
        ("qwen3-0.6b", 0.596, 0.596),
        ("qwen-7b", 7.62, 7.62),
        ("llama-3.2-1b", 1.24, 1.24),
        ("gemma-2-9b", 9.24, 9.24),
        ("qwen3-30b-a3b", 30.5, 3.3),
        ("mixtral-8x7b", 46.7, 12.9),
        ("gpt-oss-20b", 20.9, None),
    ],
)
def test_parameters_are_those_that_were_published(name: str, billions: float, active: float | None) -> None:
    size = size_of_config(config_of(name))
    assert size.num_params / 1e9 == pytest.approx(billions, rel=0.01)
    # Those that a token passes through.
    if active is not None:
        assert (size.body_params + size.outer_params) / 1e9 == pytest.approx(active, rel=0.02)


def test_sizes_by_hand() -> None:
    size = SIZE
    # A layer: q and o 8 x 8 each, k and v 8 x 4 each, three of 8 x 10: 128 + 64 + 240 = 432.
    assert (size.body_params, size.head_params, size.num_params) == (864, 800, 1664)
    assert state_bytes(size, "bfloat16") == 1664 * 18
    assert state_bytes(size, "float32") == 1664 * 16
    # Export in the compute type, masters and two moments in fp32.
    assert checkpoint_bytes(size, "bfloat16") == 1664 * 14
    # Keys and values of 2 layers, 2 heads of width 2, 2 bytes: 32 a slot.
    assert cache_bytes(size, "bfloat16", 3, 5) == 3 * 5 * 32
    assert decode_flop(size, 10) == 2 * (864 + 800) * 10
    assert prefill_flop(size, 10) == 2 * 864 * 10
    assert learn_flop(size, 10, 5) == 6 * (864 * 10 + 800 * 5)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_learner_and_its_checkpoint_hold_the_estimated_bytes(tmp_path: Path, dtype: str) -> None:
    path = make_model(tmp_path / "model", hidden_size=64, intermediate_size=128)
    learner = build_learner(path, dtype=dtype)
    learner.step([World().packed(3, [4])], temperature=1.0, token_terms=reinforce)
    learner.save_state(tmp_path)
    stored = load_file(tmp_path / "optimizer.safetensors")
    kept = sum(tensor.nbytes for tensor in stored.values())  # Master and two moments.
    copies = 0 if dtype == "float32" else sum(p.nbytes for _, p in learner.model.named_parameters())
    gradients = learner.gradients([World().packed(3, [4])], temperature=1.0, token_terms=reinforce)
    held = kept + copies + sum(gradient.nbytes for gradient in gradients.values())
    # Norms are not counted; in a model this small they are almost a percent.
    assert state_bytes(read_model_size(path), dtype) == pytest.approx(held, rel=0.01)
    export_tensors(learner.model.module, own_tensors(learner.model), path, tmp_path / "export")
    files = (tmp_path / "export" / "model.safetensors", tmp_path / "optimizer.safetensors")
    num_bytes = sum(file.stat().st_size for file in files)
    assert checkpoint_bytes(read_model_size(path), dtype) == pytest.approx(num_bytes, rel=0.06)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_cache_has_the_estimated_bytes(tmp_path: Path, dtype: str) -> None:
    path = make_model(tmp_path)
    model = load_model(path, dtype)
    slot_bytes = KVCache.bytes_per_slot(model.shape, DTYPES[dtype])
    assert cache_bytes(read_model_size(path), dtype, 7, 30) == 7 * 30 * slot_bytes


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("may_fuse", [True, False])
@pytest.mark.parametrize("is_recomputed", [False, True])
def test_activations_are_what_autograd_keeps(
    tmp_path: Path, dtype: str, may_fuse: bool, is_recomputed: bool
) -> None:
    sizes = {"hidden_size": 256, "intermediate_size": 768, "num_attention_heads": 4, "head_dim": 64}
    path = make_model(tmp_path, vocab_size=262, num_hidden_layers=6, **sizes)
    model = LanguageModel.load(path, dtype=DTYPES[dtype], may_fuse=may_fuse)
    if is_recomputed:
        model.recompute_activations()
    batch = PackedBatch.of_groups([World(seed).packed(20, [40] * 4) for seed in range(3)], model.device)
    kept: dict[int, int] = {}
    parameters = {p.untyped_storage().data_ptr() for _, p in model.named_parameters()}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        attention = PrefixSharedAttention(batch.layout, model.device)
        hidden = model.trunk(batch.token_ids_N, batch.position_ids_N, attention)
    size, num_positions = read_model_size(path), batch.layout.num_positions
    estimate = activation_bytes(size, dtype, num_positions, is_recomputed=is_recomputed)
    estimate -= activation_bytes(size, dtype, 0)
    if is_recomputed:
        # Of the one layer that a backward computes again nothing is kept yet.
        estimate -= (activation_bytes(size, dtype, num_positions) - activation_bytes(size, dtype, 0)) // 6
    assert hidden.shape[0] == num_positions == 3 * (20 + 4 * 39)
    is_fused = model.fused is not None
    lowest, highest = (1.0, 1.8) if is_fused else (0.7, 1.5)
    if is_recomputed:
        # Only the last norm comes on top; transformers' own layers keep one tensor of the stream, not two.
        lowest, highest = (0.7, 1.1) if is_fused else (0.7, 2.0)
    assert lowest <= estimate / sum(kept.values()) <= highest


def test_learning_costs_the_estimated_flop(tmp_path: Path) -> None:
    path = make_model(tmp_path)
    learner = build_learner(path)
    groups = [World(seed).packed(4, [12] * 3) for seed in range(2)]
    with FlopCounterMode(display=False) as counter:
        learner.gradients(groups, temperature=1.0, token_terms=reinforce)
    size = read_model_size(path)
    # Attention is left out of the estimate; in a sequence this short it is little.
    num_positions = 2 * (4 + 3 * 11)
    estimate = learn_flop(size, num_positions, 2 * (1 + 3 * 11))
    assert counter.get_total_flops() == pytest.approx(estimate, rel=0.15)


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        (Path.unlink, "FileNotFoundError"),
        (lambda path: path.write_text("{"), "JSONDecodeError"),
        (lambda path: path.write_text('{"num_hidden_layers": 2}'), "hidden_size"),
    ],
    ids=["absent", "torn", "without width"],
)
def test_a_config_without_sizes_is_refused(
    tmp_path: Path, damage: Callable[[Path], None], named: str
) -> None:
    make_model(tmp_path)
    damage(tmp_path / "config.json")
    with pytest.raises(ConfigError, match=rf"sizes of the model in .* cannot be read.*{named}.*Next: fetch"):
        read_model_size(tmp_path)


@pytest.mark.parametrize(
    ("metadata", "config", "has_others"),
    [
        ({"total_parameters": 10**6}, {}, True),
        ({"total_size": 2 * 10**6}, {"torch_dtype": "bfloat16"}, True),
        ({"total_size": 4 * 10**6}, {"dtype": "float32"}, True),
        # Of packed numbers the size says nothing.
        ({"total_size": 10**6}, {"dtype": "bfloat16", "quantization_config": {"bits": 4}}, False),
        ({"total_size": 10**6}, {"dtype": None, "torch_dtype": None}, False),
        ({}, {}, False),
    ],
)
def test_an_index_counts_weights_that_are_elsewhere(
    tmp_path: Path, metadata: dict[str, Any], config: dict[str, Any], has_others: bool
) -> None:
    path = make_model(tmp_path)
    known = read_model_size(path).num_params
    (path / "model.safetensors").unlink()
    own = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**own, "dtype": None, **config}))
    index = {"metadata": metadata, "weight_map": {"x": "model-00001-of-00002.safetensors"}}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    found = read_model_size(path)
    # The sizes explain what they explain; a million are layers that they do not.
    assert found.num_params == (pytest.approx(10**6, abs=10) if has_others else known)


def test_experts_that_a_token_does_not_pass_through_are_no_work(tmp_path: Path) -> None:
    dense = {
        "hidden_size": 10, "num_hidden_layers": 4, "intermediate_size": 50, "num_attention_heads": 1,
        "vocab_size": 100, "max_position_embeddings": 64, "tie_word_embeddings": True,
    }  # fmt: skip
    sparse = {**dense, "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 20}
    size = size_of_config({**sparse, "n_shared_experts": 1, "first_k_dense_replace": 1})
    # Three layers of two chosen and one shared expert of 20, one of 50: 230 / 4, rounded down.
    assert size.mlp_width == 57
    # Six experts of 20 in three layers, each three matrices of 10 rows.
    assert size.other_params == 3 * 6 * 20 * 3 * 10
    assert size_of_config(dense).other_params == 0


# The default size of micro-batches.

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


@pytest.mark.parametrize(
    ("num_bytes", "options", "expected"),
    [
        # 1.5B: 1.544e9 parameters of 18 bytes are 27.8 GB, the head 1.1 GB. A position keeps
        # 28 * (2 * 1536 * 12 + 6 * 14 * 128 * 2 + 4 * 8960 * 2) = 28 * 130,048 = 3.64 MB.
        # 80 GB: 0.5 * 51.1e9 / 3.64e6 = 7,017 -> 6 * 1024. 24 GB hold not even the weights' state.
        (80 * 10**9, {}, 6 * 1024),
        (24 * 10**9, {}, DEFAULT_MICRO_BATCH_POSITIONS),
        (10**12, {}, MAX_GPU_POSITIONS),
        # Adapters of 10 million parameters: frozen copies of 3.1 GB and 18 bytes for each trained one,
        # 0.2 GB. 24 GB: 0.5 * 19.7e9 / 3.64e6 = 2,700 -> 2 * 1024.
        (24 * 10**9, {"num_trained": 10**7}, 2 * 1024),
        # Two of the stream's tensors per layer, and one layer's inside: 28 * 6,144 + 130,048 = 302 kB.
        # 32 GB: 0.5 * 3.1e9 / 302e3 = 5,170 -> 5 * 1024.
        (32 * 10**9, {"is_recomputed": True}, 5 * 1024),
        # Of four ranks each keeps a fourth of 16 bytes per parameter and the head's gradient, 7.1 GB, and
        # gathers embedding and two layers with their gradients, 2.1 GB. 40 GB: 0.5 * 29.8e9 / 3.64e6 = 4,090.
        (40 * 10**9, {"num_ranks": 4}, 3 * 1024),
        (40 * 10**9, {}, DEFAULT_MICRO_BATCH_POSITIONS),
    ],
)
def test_gpus_take_what_half_of_their_memory_holds(
    num_bytes: int, options: dict[str, Any], expected: int
) -> None:
    assert gpu_positions(num_bytes, QWEN_1_5B, "bfloat16", **options) == expected


# Activations that a backward computes again give the same gradients, and are not kept.


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
