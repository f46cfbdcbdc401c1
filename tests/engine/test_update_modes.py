"""New weights while replies are being sampled: ended first, sampled again, or continued."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest
import torch

from strop.engine import (
    Completion,
    GenerationRequest,
    UpdateMode,
    WeightReceipt,
    WeightTransport,
    WeightUpdate,
)
from strop.engine.native import NativeEngine
from strop.errors import EngineError, WeightMismatch
from strop.policy.language_model import LanguageModel
from strop.policy.scoring import score_replies
from strop.policy.weights import own_tensors, publish_tensors
from strop.rollout import VersionSegment
from strop.tokenizer import Tokenizer
from tests.engine.requests import ask, generate_all
from tests.fixtures.builders import request_for

NUM_TOKENS = 24
CHANGED_AFTER = 10
"""Turns of the event loop before the update: about as many tokens are sampled by then."""


def load(model_dir: Path) -> LanguageModel:
    return LanguageModel.load(model_dir, dtype=torch.float32)


def changed(model_dir: Path) -> LanguageModel:
    """Return the model with other weights, as after a large optimizer step."""
    model = load(model_dir)
    with torch.no_grad():
        for index, (_, parameter) in enumerate(sorted(model.named_parameters())):
            generator = torch.Generator().manual_seed(index)
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.05)
    return model


@pytest.fixture
def update(tiny_model_dir: Path, tmp_path: Path) -> WeightUpdate:
    path = tmp_path / "new.safetensors"
    digest = publish_tensors(own_tensors(changed(tiny_model_dir)), path)
    return WeightUpdate(version=5, digest=digest, transport=WeightTransport.FILE, path=str(path))


def request_of(tokenizer: Tokenizer, seed: int = 0) -> GenerationRequest:
    """Ask for a reply that only its limit ends."""
    asked = ask(tokenizer, seed=seed, max_tokens=NUM_TOKENS)
    return request_for(asked.prompt_ids, max_tokens=NUM_TOKENS, seed=seed, sampling=asked.sampling)


async def change_in_between(
    engine: NativeEngine, requests: list[GenerationRequest], update: WeightUpdate
) -> tuple[list[Completion], WeightReceipt, Completion]:
    """Start replies, update while they are sampled, and ask for one more behind the update."""
    running = [asyncio.ensure_future(engine.generate(request)) for request in requests]
    for _ in range(CHANGED_AFTER):
        await asyncio.sleep(0)
    updating = asyncio.ensure_future(engine.update(update))
    await asyncio.sleep(0)
    late = asyncio.ensure_future(engine.generate(requests[0]))
    replies = await asyncio.gather(*running)
    return list(replies), await updating, await late


async def run_mode(
    model_dir: Path, update: WeightUpdate, mode: UpdateMode
) -> tuple[list[Completion], Completion, list[GenerationRequest]]:
    tokenizer = Tokenizer.load(model_dir)
    engine = NativeEngine(load(model_dir), tokenizer)
    requests = [request_of(tokenizer, seed) for seed in range(3)]
    asked = WeightUpdate(
        version=update.version, digest=update.digest, transport=update.transport, path=update.path, mode=mode
    )
    replies, receipt, late = await change_in_between(engine, requests, asked)
    assert (receipt.version, receipt.digest) == (update.version, update.digest)
    return replies, late, requests


async def generate_cold(
    model: LanguageModel, model_dir: Path, requests: list[GenerationRequest]
) -> list[Completion]:
    return await generate_all(NativeEngine(model, Tokenizer.load(model_dir)), requests)


def token_lists(completions: list[Completion]) -> list[list[int]]:
    return [completion.token_ids.tolist() for completion in completions]


async def test_smp_4_drained_replies_end_under_the_weights_they_began_with(
    tiny_model_dir: Path, update: WeightUpdate
) -> None:
    replies, late, requests = await run_mode(tiny_model_dir, update, UpdateMode.DRAIN)
    assert token_lists(replies) == token_lists(
        await generate_cold(load(tiny_model_dir), tiny_model_dir, requests)
    )
    assert [reply.policy_version for reply in replies] == [0, 0, 0]
    assert all(reply.segments == () for reply in replies)
    assert late.policy_version == 5


async def test_restarted_replies_are_those_of_the_new_weights(
    tiny_model_dir: Path, update: WeightUpdate
) -> None:
    replies, late, requests = await run_mode(tiny_model_dir, update, UpdateMode.RESTART)
    cold = await generate_cold(changed(tiny_model_dir), tiny_model_dir, requests)
    assert token_lists(replies) == token_lists(cold)
    # SMP-4: the new tag, and no token of the old weights in it.
    assert [reply.policy_version for reply in replies] == [5, 5, 5]
    assert all(reply.segments == () for reply in replies)
    assert late.token_ids.tolist() == cold[0].token_ids.tolist()


async def test_continued_replies_say_which_version_sampled_which_token(
    tiny_model_dir: Path, update: WeightUpdate
) -> None:
    replies, late, requests = await run_mode(tiny_model_dir, update, UpdateMode.CONTINUE)
    old = await generate_cold(load(tiny_model_dir), tiny_model_dir, requests)
    for reply, before, request in zip(replies, old, requests, strict=True):
        first, second = reply.segments
        assert (first, second.version) == (VersionSegment(start=0, version=0), 5)
        assert 0 < second.start < NUM_TOKENS
        # The version of the whole reply is that of its oldest token, which staleness counts from.
        assert reply.policy_version == 0
        assert reply.token_ids[: second.start].tolist() == before.token_ids[: second.start].tolist()
        # Each token's value is that of the weights that sampled it.
        values = score_replies(load(tiny_model_dir), request.prompt_ids, [reply.token_ids], 1.0)[0]
        gaps = np.abs(values - reply.logprobs)
        assert float(gaps[: second.start].max()) < 1e-4
        assert float(gaps[second.start :].mean()) > 1e-2
    assert (late.policy_version, late.segments) == (5, ())


@pytest.mark.parametrize("mode", list(UpdateMode))
async def test_a_broken_update_in_between_keeps_the_old_weights(
    tiny_model_dir: Path, update: WeightUpdate, mode: UpdateMode
) -> None:
    tokenizer = Tokenizer.load(tiny_model_dir)
    engine = NativeEngine(load(tiny_model_dir), tokenizer)
    requests = [request_of(tokenizer)]
    broken = WeightUpdate(
        version=5, digest="0" * 64, transport=WeightTransport.FILE, path=update.path, mode=mode
    )
    running = asyncio.ensure_future(engine.generate(requests[0]))
    for _ in range(CHANGED_AFTER):
        await asyncio.sleep(0)
    with pytest.raises(WeightMismatch, match=r"0{64}"):
        await engine.update(broken)
    reply = await running
    assert reply.policy_version == engine.version == 0
    assert [reply.token_ids.tolist()] == token_lists(
        await generate_cold(load(tiny_model_dir), tiny_model_dir, requests)
    )


async def test_an_engine_that_is_closed_tells_a_waiting_update(
    tiny_model_dir: Path, update: WeightUpdate
) -> None:
    tokenizer = Tokenizer.load(tiny_model_dir)
    engine = NativeEngine(load(tiny_model_dir), tokenizer)
    running = asyncio.ensure_future(engine.generate(request_of(tokenizer)))
    for _ in range(CHANGED_AFTER):
        await asyncio.sleep(0)
    updating = asyncio.ensure_future(engine.update(update))
    await asyncio.sleep(0)
    await engine.close()
    for waiting in (running, updating):
        with pytest.raises(EngineError, match="an engine that is closed"):
            await waiting


async def test_scores_come_while_replies_are_sampled(tiny_model_dir: Path) -> None:
    """Where generation never pauses, waiting for a pause would be waiting for ever."""
    tokenizer = Tokenizer.load(tiny_model_dir)
    engine = NativeEngine(load(tiny_model_dir), tokenizer)
    request = request_of(tokenizer)
    running = asyncio.ensure_future(engine.generate(request))
    for _ in range(CHANGED_AFTER):
        await asyncio.sleep(0)
    await engine.score(request.prompt_ids, request.prompt_ids, 1.0)
    was_running = not running.done()
    await running
    assert was_running
