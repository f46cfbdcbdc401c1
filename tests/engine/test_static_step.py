"""Steps over tensors that never move, which GPUs replay as graphs, called here as they are."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from strop.engine.native import NativeEngine
from strop.errors import EngineError
from strop.policy.language_model import LanguageModel
from strop.rollout import Sampling
from strop.tokenizer import Tokenizer
from tests.engine.contract_suite import run
from tests.engine.requests import ask, assert_same_bits, generate_all, mixed_requests


@pytest.fixture(scope="module")
def model(tiny_model_dir: Path) -> LanguageModel:
    return LanguageModel.load(tiny_model_dir, dtype=torch.float32)


@pytest.fixture(scope="module")
def tokenizer(tiny_model_dir: Path) -> Tokenizer:
    return Tokenizer.load(tiny_model_dir)


@pytest.mark.parametrize("max_num_seqs", [3, 16, 64])
def test_static_steps_draw_the_same_tokens(
    model: LanguageModel, tokenizer: Tokenizer, max_num_seqs: int
) -> None:
    """Groups, every kind of sampling, ragged lengths, stops; rows end and are admitted all the time."""
    requests = mixed_requests(tokenizer)
    expected = run(generate_all(NativeEngine(model, tokenizer, max_num_seqs=max_num_seqs), requests))
    static = NativeEngine(model, tokenizer, max_num_seqs=max_num_seqs, is_static=True)
    for ours, theirs in zip(run(generate_all(static, requests)), expected, strict=True):
        assert ours.token_ids.tolist() == theirs.token_ids.tolist()
        assert ours.logprobs == pytest.approx(theirs.logprobs, abs=1e-4)
        assert (ours.text, ours.finish_reason) == (theirs.text, theirs.finish_reason)


def test_weights_changed_in_place_are_those_of_the_next_token(
    tiny_model_dir: Path, tokenizer: Tokenizer
) -> None:
    """What a graph relies on: after a change the same tensors hold the new weights, and are read again."""
    model = LanguageModel.load(tiny_model_dir, dtype=torch.float32)
    engine = NativeEngine(model, tokenizer, is_static=True)
    request = ask(tokenizer, sampling=Sampling(temperature=0.0))
    before = run(engine.generate(request))
    places = {name: parameter.data_ptr() for name, parameter in model.named_parameters()}
    with torch.no_grad():
        for parameter in model.module.parameters():
            parameter.mul_(-0.5)
    changed = run(engine.generate(request))
    assert {name: parameter.data_ptr() for name, parameter in model.named_parameters()} == places
    assert changed.token_ids.tolist() != before.token_ids.tolist()
    assert_same_bits([changed], [run(NativeEngine(model, tokenizer, is_static=True).generate(request))])


def test_the_next_batch_of_other_lengths_finds_the_same_cache(
    model: LanguageModel, tokenizer: Tokenizer
) -> None:
    """A new cache would need new graphs."""
    engine = NativeEngine(model, tokenizer, is_static=True)
    run(generate_all(engine, [ask(tokenizer, seed=seed, max_tokens=5) for seed in range(4)]))
    batch = engine._batch
    run(generate_all(engine, [ask(tokenizer, "x", seed=seed, max_tokens=9) for seed in range(4)]))
    assert engine._batch is batch


def test_weights_that_are_not_finite_are_refused(tiny_model_dir: Path, tokenizer: Tokenizer) -> None:
    model = LanguageModel.load(tiny_model_dir, dtype=torch.float32)
    engine = NativeEngine(model, tokenizer, is_static=True)
    request = ask(tokenizer, max_tokens=200)

    async def act() -> None:
        waiting = engine.generate(request)
        with torch.no_grad():
            model.head_weight.fill_(np.nan)
        await waiting

    with pytest.raises(EngineError, match=r"not finite\. Allowed: finite logits"):
        run(act())
