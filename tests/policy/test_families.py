"""Families with windows, caps, sinks, biases, latent heads and states say in company what they say alone."""

from __future__ import annotations

import asyncio
import warnings
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig
from transformers.models.auto.modeling_auto import AutoModelForCausalLM

from strop.engine.contract import check_room
from strop.engine.native import NativeEngine
from strop.errors import EngineError
from strop.policy.families import Layout, read_max_positions, why_alone
from strop.policy.footprint import read_model_size
from strop.policy.language_model import LanguageModel
from strop.policy.learner import Learner
from strop.policy.proof import judge, shorten_config
from strop.policy.scoring import score_groups
from strop.policy.weights import load_published, own_tensors, publish_tensors
from strop.spec.model import LoraSpec
from strop.spec.train import OptimizerSpec
from strop.tokenizer import Tokenizer
from tests.engine.requests import ask, assert_same_bits, generate_all
from tests.fixtures.families import family_model
from tests.policy.family_verdicts import Own, list_sequences, make_groups, measure_family
from tests.policy.worlds import reinforce, relative_error

PACKED: dict[str, tuple[str, dict[str, Any]]] = {
    "a window": ("mistral", {}),
    "windows in some layers, caps on scores and logits": ("gemma2", {}),
    "windows and full layers by turns": ("olmo3", {}),
    "windows and sinks": ("gpt_oss", {}),
    "a bias of the head": ("phi", {}),
    "divided logits": ("granite", {}),
    "values narrower than keys": ("deepseek_v3", {}),
    "long-rope": ("phi3", {}),
    "absolute positions": ("gpt2", {}),
    "a hybrid family with attention alone": ("granitemoehybrid", {"layer_types": ["full_attention"] * 4}),
}
ALONE: dict[str, tuple[str, dict[str, Any]]] = {
    "a state": ("mamba2", {}),
    "a convolution": ("lfm2", {}),
    "a state and attention by turns": ("qwen3_next", {}),
    "a state beside attention": ("falcon_h1", {}),
    "attention code of its own": ("bloom", {}),
    "attention code of its own, rotary": ("gptj", {}),
    "chunks": ("llama4_text", {}),
    "states that are not given back": ("rwkv", {}),
}


def load(path: Path, dtype: torch.dtype = torch.float32) -> LanguageModel:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        return LanguageModel.load(path, dtype=dtype)


@pytest.mark.parametrize(("family", "changes"), PACKED.values(), ids=list(PACKED))
def test_packed_and_alone_a_model_says_the_same(tmp_path: Path, family: str, changes: dict[str, Any]) -> None:
    verdict = measure_family(family_model(tmp_path, family, **changes))
    assert verdict.run == "packed"
    assert verdict.is_exact(), verdict


@pytest.mark.parametrize(("family", "changes"), ALONE.values(), ids=list(ALONE))
def test_what_cannot_be_packed_is_run_sequence_by_sequence(
    tmp_path: Path, family: str, changes: dict[str, Any]
) -> None:
    verdict = measure_family(family_model(tmp_path, family, **changes))
    assert verdict.run == "alone"
    assert verdict.is_exact(), verdict


BOTH = {**PACKED, **ALONE}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("family", "changes"), BOTH.values(), ids=list(BOTH))
def test_a_small_model_of_its_config_shows_how_a_whole_one_is_run(
    tmp_path: Path, family: str, changes: dict[str, Any], dtype: torch.dtype
) -> None:
    """Ranks of a learner learn it so: none of them holds a whole model."""
    path = family_model(tmp_path, family, **changes)
    whole = load(path, dtype)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        shape, form, implementation = judge(path, dtype)
    assert replace(shape, num_layers=4, vocab_size=whole.shape.vocab_size) == whole.shape
    assert form == whole.form
    assert implementation == whole.module.config.get_text_config()._attn_implementation


def test_the_small_model_has_a_layer_of_each_kind_and_few_words() -> None:
    kinds = ["sliding_attention"] * 5 + ["full_attention"]
    config = AutoConfig.for_model("gemma3_text", num_hidden_layers=30, layer_types=kinds * 5)
    short = shorten_config(deepcopy(config))
    assert (short.num_hidden_layers, short.layer_types) == (6, kinds)
    assert short.vocab_size == 1024 < config.vocab_size
    assert shorten_config(AutoConfig.for_model("llama", num_hidden_layers=80)).num_hidden_layers == 2


@pytest.mark.parametrize("family", ["gemma2", "gpt_oss", "phi", "deepseek_v3", "mamba2", "qwen3_next"])
def test_in_bf16_they_are_loaded_and_generate_what_they_score(tmp_path: Path, family: str) -> None:
    path = family_model(tmp_path, family, dtype="bfloat16")
    model, tokenizer = load(path, torch.bfloat16), Tokenizer.load(path)
    assert model.head_weight.dtype == torch.bfloat16
    engine = NativeEngine(model, tokenizer, max_num_seqs=4)
    requests = [ask(tokenizer, "x", seed=seed, max_tokens=6) for seed in range(6)]
    replies = asyncio.run(generate_all(engine, requests))
    gaps = []
    for request, reply in zip(requests, replies, strict=True):
        score = asyncio.run(engine.score(request.prompt_ids, reply.token_ids, 1.0))
        gaps.append(np.abs(score.logprobs - reply.logprobs))
    assert float(np.concatenate(gaps).mean()) < 0.06


def test_a_window_no_shorter_than_the_context_is_no_window(tmp_path: Path) -> None:
    groups, scores = make_groups(), []
    for index, window in enumerate((13, 512, None, 8)):
        path = family_model(tmp_path / str(index), "mistral", sliding_window=window)
        scores.append(np.concatenate(score_groups(load(path), groups, 1.0)))
    assert scores[0].tobytes() == scores[1].tobytes() == scores[2].tobytes()
    assert np.abs(scores[3] - scores[2]).max() > 0.01


def test_long_rope_ends_where_its_frequencies_change(tmp_path: Path) -> None:
    """Sampled as a short sequence and trained as a long one, a token would have two log-probabilities."""
    path = family_model(tmp_path, "phi3")
    model = load(path)
    assert (model.shape.max_positions, read_model_size(path).max_positions) == (64, 64)
    with pytest.raises(EngineError, match="64"):
        check_room(60, 5, "asks for", model.shape.max_positions)
    exact: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    exact.eval()
    token_ids = torch.arange(65)[None]
    with torch.no_grad():
        short, long = exact(input_ids=token_ids[:, :64]).logits, exact(input_ids=token_ids).logits
    assert float((short - long[:, :64]).abs().max()) > 0.01


def test_sparse_attention_ends_where_it_would_choose(tmp_path: Path) -> None:
    path = family_model(tmp_path, "deepseek_v32", index_topk=14)
    assert load(path).shape.max_positions == 14
    assert read_max_positions({"model_type": "deepseek_v3", "max_position_embeddings": 99}) == 99
    assert read_max_positions({"model_type": "mamba"}) == 2**20


def test_a_model_that_is_run_one_by_one_says_so_when_it_is_loaded(tmp_path: Path) -> None:
    path = family_model(tmp_path, "mamba2")
    with pytest.warns(RuntimeWarning, match="by itself.*because its layers carry a state") as caught:
        model = LanguageModel.load(path, dtype=torch.float32)
    assert caught[0].filename == __file__
    assert model.is_alone
    assert model.shape.layout is Layout.ALONE
    assert read_model_size(path).alone_because == model.shape.alone_because


def test_what_the_config_tells_beforehand() -> None:
    assert why_alone({"model_type": "llama"}) is None
    assert why_alone({"model_type": "qwen3_5", "text_config": {"model_type": "qwen3_5_text"}})
    assert why_alone({"model_type": "lfm2", "layer_types": ["conv", "full_attention"]})
    assert why_alone({"model_type": "lfm2", "layer_types": ["full_attention"]}) is None
    # Its positions are counted along the row, whatever its layers are.
    assert why_alone({"model_type": "bart", "layer_types": ["full_attention"]})


@pytest.mark.parametrize("family", ["mamba2", "qwen3_next", "gemma2", "phi"])
def test_a_step_moves_them_and_published_weights_arrive(tmp_path: Path, family: str) -> None:
    path = family_model(tmp_path / "model", family)
    model, other = load(path), load(path)
    groups = make_groups()
    before = np.concatenate(score_groups(model, groups, 1.0))
    learner = Learner(model, OptimizerSpec(lr=0.01))
    report = learner.step(groups, temperature=1.0, token_terms=reinforce)
    # Two replies feed something, the longest row 7 + 5; or prompts of 8 tokens and 13 positions of replies.
    assert report.num_positions == (2 * 12 if model.is_alone else 8 + 13)
    digest = publish_tensors(own_tensors(model), tmp_path / "published.safetensors")
    load_published(other, tmp_path / "published.safetensors", expected_digest=digest)
    moved, received = (np.concatenate(score_groups(one, groups, 1.0)) for one in (model, other))
    assert np.abs(moved - before).max() > 0.01
    np.testing.assert_allclose(received, moved, atol=1e-5)


@pytest.mark.parametrize("family", ["phi", "mamba2", "falcon_h1", "gpt_oss", "mixtral", "deepseek_v3"])
def test_an_export_is_the_model_that_was_trained(tmp_path: Path, family: str) -> None:
    path = family_model(tmp_path / "model", family)
    learner = Learner(load(path), OptimizerSpec(lr=0.01))
    learner.step(make_groups(), temperature=1.0, token_terms=reinforce)
    (tmp_path / "export").mkdir()
    learner.export(tmp_path / "export", path)
    own = Own(tmp_path / "export")
    expected = [own.logprobs(prompt, reply) for prompt, reply, _ in list_sequences(make_groups())]
    scores = learner.score(make_groups(), 1.0)
    np.testing.assert_allclose(np.concatenate(scores), np.concatenate(expected), atol=1e-5)
    np.testing.assert_allclose(
        np.concatenate(score_groups(load(tmp_path / "export"), make_groups(), 1.0)),
        np.concatenate(scores),
        atol=1e-5,
    )


@pytest.mark.parametrize("family", ["gpt2", "gemma2", "mamba2", "bloom", "qwen3_next"])
def test_activations_that_are_computed_again_change_no_gradient(tmp_path: Path, family: str) -> None:
    path, gradients = family_model(tmp_path, family), []
    for recomputes in (False, True):
        model = load(path)
        if recomputes:
            model.recompute_activations()
        learner = Learner(model, OptimizerSpec())
        found = learner.gradients(make_groups(), temperature=1.0, token_terms=reinforce)
        gradients.append({name: one for name, one in found.items() if float(one.norm()) > 0.0})
    assert relative_error(gradients[1], gradients[0]) <= 1e-5


def test_adapters_learn_where_sequences_are_computed_by_themselves(tmp_path: Path) -> None:
    model = load(family_model(tmp_path, "qwen3_next"))
    model.adapt(LoraSpec(rank=2, targets="q_proj,v_proj"), seed=0)
    learner = Learner(model, OptimizerSpec(lr=0.01))
    before = np.concatenate(learner.score(make_groups(), 1.0))
    learner.step(make_groups(), temperature=1.0, token_terms=reinforce)
    assert np.abs(np.concatenate(learner.score(make_groups(), 1.0)) - before).max() > 1e-3


@pytest.mark.parametrize("family", ["qwen3_next", "rwkv"])
def test_company_changes_no_reply_of_a_model_with_states(tmp_path: Path, family: str) -> None:
    """Rows of one prompt begin together, end apart, and others are admitted between them."""
    path = family_model(tmp_path, family)
    model, tokenizer = load(path), Tokenizer.load(path)
    requests = [
        ask(tokenizer, prompt, seed=seed, max_tokens=2 + 3 * seed)
        for prompt in ("ab", "xyz", "q")
        for seed in range(3)
    ]
    together = asyncio.run(generate_all(NativeEngine(model, tokenizer, max_num_seqs=4), requests))
    alone = [asyncio.run(generate_all(NativeEngine(model, tokenizer), [one]))[0] for one in requests]
    for one, other in zip(together, alone, strict=True):
        assert one.token_ids.tolist() == other.token_ids.tolist()
        np.testing.assert_allclose(one.logprobs, other.logprobs, atol=3e-5)
    again = asyncio.run(generate_all(NativeEngine(model, tokenizer, max_num_seqs=4), requests))
    assert_same_bits(together, again)
