"""Adapters start as the base model, train alone, and mean the same to peft, merged, and to the engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from strop.errors import ConfigError, CorruptRecord, StoreError
from strop.policy.footprint import checkpoint_bytes, count_trained, read_model_size, state_bytes
from strop.policy.language_model import DTYPES, LanguageModel
from strop.policy.learner import Learner
from strop.policy.lora import write_adapter
from strop.policy.packing import PackedGroup
from strop.policy.weights import weights_digest
from strop.spec.model import LoraSpec
from strop.spec.train import OptimizerSpec
from tests.fixtures.kernels import HAS_KERNELS
from tests.policy.worlds import World, make_model, reinforce, relative_error

SPEC = LoraSpec(rank=4, alpha=8.0)
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2, with biases": {"family": "qwen2"},
    "qwen3, untied": {"family": "qwen3", "tie_word_embeddings": False},
}


def make(path: Path, **config: Any) -> Path:
    """Write a model whose heads are wide enough for fused layers."""
    return make_model(path, head_dim=16, **config)


def load(path: Path, *, dtype: str = "float32", may_fuse: bool = True) -> LanguageModel:
    return LanguageModel.load(path, dtype=DTYPES[dtype], may_fuse=may_fuse)


def build(path: Path, spec: LoraSpec = SPEC, **options: Any) -> Learner:
    model = load(path, **options)
    model.adapt(spec, seed=3)
    return Learner(model, OptimizerSpec(lr=0.02))


def groups() -> list[PackedGroup]:
    return [World(seed).packed(5, [3, 1, 7], advantage=1.0 - seed) for seed in range(3)]


def train(learner: Learner, num_steps: int = 3) -> Learner:
    for _ in range(num_steps):
        learner.step(groups(), temperature=1.0, token_terms=reinforce)
    return learner


def logits_of(module: Any) -> torch.Tensor:
    """Return the logits of a plain module. Shapes: (1, N, V)."""
    token_ids = torch.from_numpy(World(7).ids(20).astype(np.int64))[None]
    with torch.no_grad():
        logits: torch.Tensor = module(input_ids=token_ids, use_cache=False).logits
    return logits


def own_scores(model: LanguageModel) -> np.ndarray:
    return np.concatenate(Learner(model, OptimizerSpec()).score(groups(), 1.0))


@pytest.mark.parametrize("may_fuse", [True, False])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_first_step_is_the_base_models(tmp_path: Path, dtype: str, may_fuse: bool) -> None:
    path = make(tmp_path, dtype=dtype)
    base, learner = (load(path, dtype=dtype, may_fuse=may_fuse), build(path, dtype=dtype, may_fuse=may_fuse))
    assert (learner.model.fused is not None) == (may_fuse and HAS_KERNELS)
    assert np.array_equal(np.concatenate(learner.score(groups(), 1.0)), own_scores(base))
    assert weights_digest(learner.model) == weights_digest(base)


@pytest.mark.parametrize("config", FAMILIES.values(), ids=list(FAMILIES))
def test_fused_layers_have_the_same_gradient(tmp_path: Path, config: dict[str, Any]) -> None:
    path = make(tmp_path, **config)
    gradients = []
    for may_fuse in (True, False):
        learner = train(build(path, may_fuse=may_fuse), 1)
        assert (learner.model.fused is not None) == (may_fuse and HAS_KERNELS)
        gradients.append(learner.gradients(groups(), temperature=0.7, token_terms=reinforce))
    # Two parts of seven layers of two blocks.
    assert len(gradients[0]) == 2 * 7 * 2
    assert relative_error(gradients[0], gradients[1]) <= 1e-4


def test_only_adapters_move_and_are_kept(tmp_path: Path) -> None:
    path = make(tmp_path / "model")
    learner = build(path)
    before = {name: copy.detach().clone() for name, copy in learner.model.named_parameters()}
    train(learner)
    moved = {name for name, copy in learner.model.named_parameters() if not torch.equal(copy, before[name])}
    assert moved == {name for name in before if "lora_" in name}
    assert all(copy.grad is None for name, copy in learner.model.named_parameters() if name not in moved)
    learner.save_state(tmp_path)
    stored = load_file(tmp_path / "optimizer.safetensors")
    assert {name.partition("/")[2] for name in stored} == moved
    # Goes on bit-equal.
    other = build(path)
    other.load_state(tmp_path)
    assert weights_digest(train(other).model) == weights_digest(train(learner).model)
    # A state of all weights is none of adapters.
    Learner(load(path), OptimizerSpec()).save_state(tmp_path)
    with pytest.raises(CorruptRecord, match="lora_A"):
        other.load_state(tmp_path)


# peft 0.21 asks transformers 5 for a property by its old name.
@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning")
@pytest.mark.parametrize("config", FAMILIES.values(), ids=list(FAMILIES))
def test_peft_and_the_merged_model_say_what_the_learner_says(tmp_path: Path, config: dict[str, Any]) -> None:
    peft = pytest.importorskip("peft", reason="peft is not installed")
    path = make(tmp_path / "model", **config)
    learner = train(build(path))
    (tmp_path / "merged").mkdir()
    learner.export(tmp_path / "merged", path)
    base = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    start = logits_of(base)
    with_peft = logits_of(peft.PeftModel.from_pretrained(base, tmp_path / "merged" / "adapter"))
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    torch.testing.assert_close(logits_of(merged), with_peft, atol=2e-4, rtol=1e-4)
    assert float((with_peft - start).abs().max()) > 0.1
    # And strop says of the merged model what it said with adapters.
    own, of_merged = np.concatenate(learner.score(groups(), 1.0)), own_scores(load(tmp_path / "merged"))
    np.testing.assert_allclose(own, of_merged, atol=2e-4)


def test_merging_by_hand(tmp_path: Path) -> None:
    learner = train(build(make(tmp_path / "model")))
    copies = {name: copy.detach() for name, copy in learner.model.named_parameters()}
    digest = learner.write_weights(tmp_path / "weights.safetensors")
    stored = load_file(tmp_path / "weights.safetensors")
    assert stored.keys() == {name for name in copies if "lora_" not in name}
    assert digest == weights_digest(learner.model)
    path = "model.layers.1.mlp.up_proj"
    first, second = copies[f"{path}.lora_A.weight"], copies[f"{path}.lora_B.weight"]
    assert (first.shape, second.shape) == ((4, 32), (48, 4))
    # alpha / rank = 8 / 4.
    torch.testing.assert_close(stored[f"{path}.weight"], copies[f"{path}.weight"] + 2.0 * second @ first)
    assert torch.equal(stored["model.norm.weight"], copies["model.norm.weight"])


def test_a_target_without_layer_is_refused(tmp_path: Path) -> None:
    model = load(make(tmp_path))
    with pytest.raises(ConfigError, match=r"no layer is called c_attn\. Allowed: .*down_proj.*q_proj"):
        model.adapt(LoraSpec(rank=2, targets="q_proj,c_attn"), seed=0)


def test_adapters_that_cannot_be_written_are_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StoreError, match=r"adapters could not be written to .*file/adapter"):
        write_adapter({"a": torch.zeros(1)}, SPEC, tmp_path / "file" / "adapter")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_learner_of_adapters_holds_the_estimated_state(tmp_path: Path, dtype: str) -> None:
    path = make(tmp_path / "model", hidden_size=64, intermediate_size=128)
    learner = train(build(path, dtype=dtype))
    size = read_model_size(path)
    trained = [copy for copy in learner.model.named_parameters() if "lora_" in copy[0]]
    num_trained = count_trained(size, SPEC)
    assert num_trained == sum(copy.numel() for _, copy in trained)
    assert count_trained(size, LoraSpec()) is None
    learner.save_state(tmp_path)
    kept = sum(tensor.nbytes for tensor in load_file(tmp_path / "optimizer.safetensors").values())
    copies = sum(copy.nbytes for name, copy in learner.model.named_parameters() if "lora_" not in name)
    copies += 0 if dtype == "float32" else sum(copy.nbytes for _, copy in trained)
    gradients = learner.gradients(groups(), temperature=1.0, token_terms=reinforce)
    held = kept + copies + sum(gradient.nbytes for gradient in gradients.values())
    # Norms are not counted.
    assert state_bytes(size, dtype, num_trained) == pytest.approx(held, rel=0.01)
    learner.export(tmp_path / "export", path)
    files = [*(tmp_path / "export").rglob("*.safetensors"), tmp_path / "optimizer.safetensors"]
    num_bytes = sum(file.stat().st_size for file in files)
    assert checkpoint_bytes(size, dtype, num_trained) == pytest.approx(num_bytes, rel=0.1)
