"""Weights are the same bytes wherever they go, or are refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import MixtralConfig
from transformers.models.auto.modeling_auto import AutoModelForCausalLM
from transformers.models.auto.tokenization_auto import AutoTokenizer

from strop.policy.attention import PrefixSharedAttention
from strop.policy.language_model import LanguageModel
from strop.policy.packing import PackedLayout
from strop.policy.publication import digest_each, tensors_digest
from strop.policy.weights import (
    export_tensors,
    find_strange,
    load_published,
    own_tensors,
    publish_tensors,
    weights_digest,
)
from strop.tokenizer import Tokenizer
from tests.policy.worlds import load_model, make_model

Tensors = dict[str, torch.Tensor]
NORM = "model.norm.weight"


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"))


def move(model: LanguageModel, seed: int = 1) -> LanguageModel:
    """Change every weight, so that the directory loaded from is no help."""
    with torch.no_grad():
        for _, parameter in model.named_parameters():
            random = torch.Generator().manual_seed(seed)
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=random).to(parameter.dtype))
    return model


@pytest.mark.parametrize(
    "change",
    [
        lambda t: t.__setitem__("aa", t.pop("a")),  # Still the first in order of name.
        lambda t: t.update(a=t["b"], b=t["a"]),
        lambda t: t.update(a=t["a"].bfloat16()),
        lambda t: t.update(a=t["a"].view(3, 2)),
        lambda t: t.__delitem__("b"),
        lambda t: t["b"].__setitem__((1, 2), torch.nextafter(t["b"][1, 2], torch.tensor(9.0))),
    ],
    ids=["renamed", "swapped", "cast", "reshaped", "dropped", "nudged"],
)
def test_every_change_changes_the_digest(change: Callable[[Tensors], None]) -> None:
    tensors = {"a": torch.arange(6.0).view(2, 3), "b": torch.ones(2, 3)}
    before = tensors_digest(tensors.items())
    assert tensors_digest(reversed(tensors.items())) == before  # The order of listing is no change.
    change(tensors)
    assert tensors_digest(tensors.items()) != before


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_published_weights_arrive_bit_by_bit(model_dir: Path, tmp_path: Path, dtype: str) -> None:
    policy, engine = move(load_model(model_dir, dtype)), load_model(model_dir, dtype)
    digest = publish_tensors(own_tensors(policy), tmp_path / "v1.safetensors")
    assert digest == weights_digest(policy) != weights_digest(engine)
    load_published(engine, tmp_path / "v1.safetensors", expected_digest=digest)
    assert weights_digest(engine) == digest
    assert [path.name for path in tmp_path.iterdir()] == ["v1.safetensors"]


@pytest.mark.parametrize(
    "config", [{}, {"family": "qwen2"}, {"family": "qwen3", "tie_word_embeddings": False}], ids=repr
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_export_is_a_plain_model_with_the_same_logits(
    tmp_path: Path, config: dict[str, object], dtype: str
) -> None:
    source, target = make_model(tmp_path / "source", **config), tmp_path / "target"
    model = move(load_model(source, dtype))
    export_tensors(model.module, own_tensors(model), source, target)
    assert "strop" not in (target / "config.json").read_text()
    plain = AutoModelForCausalLM.from_pretrained(target, attn_implementation="eager")
    assert str(plain.dtype) == f"torch.{dtype}"
    token_ids = torch.tensor([5, 200, 0, 17, 99])
    with torch.no_grad():
        expected = plain(input_ids=token_ids[None]).logits[0].float()
        attention = PrefixSharedAttention(PackedLayout.of_prompts([5]), torch.device("cpu"))
        actual = model.logits(model.trunk(token_ids, torch.arange(5), attention)).float()
    tolerance = 1e-5 if dtype == "float32" else 0.05
    assert float((actual - expected).abs().max() / expected.abs().max()) <= tolerance
    # Bit-equal where nothing is computed: the tensors themselves.
    assert tensors_digest(plain.named_parameters()) == weights_digest(model)


def test_ckp_2_an_export_speaks_and_stops_like_its_source(model_dir: Path, tmp_path: Path) -> None:
    policy = load_model(model_dir)
    export_tensors(policy.module, own_tensors(policy), model_dir, tmp_path)
    theirs, own = AutoTokenizer.from_pretrained(tmp_path), Tokenizer.load(tmp_path)
    text = "the answer is 7"
    assert theirs.encode(text, add_special_tokens=False) == own.encode(text).tolist()
    chat = theirs.apply_chat_template(
        [{"role": "user", "content": text}], tokenize=False, add_generation_prompt=True
    )
    assert chat == f"<|start|>user\n{text}<|end|>\n<|start|>assistant\n"
    assert own.digest == Tokenizer.load(model_dir).digest
    assert json.loads((tmp_path / "generation_config.json").read_text())["eos_token_id"] == 260


@pytest.mark.parametrize("stored", ["float32", "bfloat16"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_ckp_1_loaded_tensors_are_those_of_the_files_and_a_changed_one_is_named(
    tmp_path: Path, stored: str, dtype: str
) -> None:
    path = make_model(tmp_path, dtype=stored, tie_word_embeddings=False)
    model = load_model(path, dtype)
    assert find_strange(digest_each(model.named_parameters()), path) == []
    changed = "model.layers.1.mlp.up_proj.weight"
    with torch.no_grad():
        dict(model.named_parameters())[changed].view(-1)[3] += 1.0
    assert find_strange(digest_each(model.named_parameters()), path) == [changed]


def test_tensors_in_several_files_are_all_compared(tmp_path: Path) -> None:
    path = make_model(tmp_path)
    module: Any = AutoModelForCausalLM.from_pretrained(path)
    (path / "model.safetensors").unlink()
    module.save_pretrained(path, max_shard_size="20KB")
    assert len(list(path.glob("*.safetensors"))) > 2
    model = load_model(path)
    assert find_strange(digest_each(model.named_parameters()), path) == []
    move(model)
    assert len(find_strange(digest_each(model.named_parameters()), path)) == len(own_tensors(model))


def test_what_a_family_stores_in_other_pieces_is_compared_as_it_is_loaded(tmp_path: Path) -> None:
    """Mixtral's experts: one tensor each in the file, one for all of them in the model."""
    config = MixtralConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        num_local_experts=2,
    )
    made: Any = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
    made.save_pretrained(tmp_path)
    module: Any = AutoModelForCausalLM.from_pretrained(tmp_path)
    names = {name for name, _ in module.named_parameters()}
    assert names - load_file(tmp_path / "model.safetensors").keys(), "all are stored as they are"
    assert find_strange(digest_each(module.named_parameters()), tmp_path) == []
    (experts,) = [name for name in names if name.endswith("experts.down_proj")]
    with torch.no_grad():
        module.get_parameter(experts)[1, 0, 0] += 1.0
    assert find_strange(digest_each(module.named_parameters()), tmp_path) == [experts]
