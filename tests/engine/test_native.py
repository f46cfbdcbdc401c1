"""The engine in this process against transformers' own generation, and against itself in company."""

from __future__ import annotations

import asyncio
import traceback
from collections.abc import Awaitable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers.models.auto.modeling_auto import AutoModelForCausalLM

from strop.engine import Completion, Engine, GenerationRequest, WeightTransport, WeightUpdate
from strop.engine.native import NativeEngine
from strop.errors import EngineError
from strop.policy.language_model import LanguageModel
from strop.policy.weights import own_tensors, publish_tensors
from strop.rollout import FinishReason, FloatArray, Sampling
from strop.tokenizer import Tokenizer
from tests.engine.contract_suite import EngineContract, run
from tests.engine.requests import PROMPTS, SAMPLINGS, ask, assert_same_bits, generate_all, mixed_requests
from tests.fixtures.places import line_of
from tests.fixtures.tiny_model import tiny_model

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama, a key-value head for every query head": {"num_key_value_heads": 4},
    "llama, one key-value head for four": {"num_key_value_heads": 1},
    "llama, head of its own": {"tie_word_embeddings": False},
    "qwen2": {},
    "qwen3": {},
    "mistral": {"sliding_window": None},
    "mistral, a window": {"sliding_window": 4},
    "gemma2, windows and caps": {"sliding_window": 4},
    "gemma2, caps alone": {"layer_types": ["full_attention"] * 2},
}


@pytest.fixture(scope="module")
def model(tiny_model_dir: Path) -> LanguageModel:
    """Shared by tests that leave the weights alone."""
    return LanguageModel.load(tiny_model_dir, dtype=torch.float32)


@pytest.fixture(scope="module")
def tokenizer(tiny_model_dir: Path) -> Tokenizer:
    return Tokenizer.load(tiny_model_dir)


@pytest.mark.parametrize("is_static", [False, True], ids=["moving", "static"])
class TestNativeEngine(EngineContract):
    @pytest.fixture
    def engine(self, tiny_model_dir: Path, tokenizer: Tokenizer, is_static: bool) -> Engine:
        model = LanguageModel.load(tiny_model_dir, dtype=torch.float32)
        return NativeEngine(model, tokenizer, max_num_seqs=4, is_static=is_static)

    @pytest.fixture
    def broken_update(self, model: LanguageModel, tmp_path: Path) -> WeightUpdate:
        path = tmp_path / "w.safetensors"
        publish_tensors(own_tensors(model), path)
        return WeightUpdate(version=8, digest="0" * 64, transport=WeightTransport.FILE, path=str(path))


def load_reference(model_dir: Path) -> Any:
    """Return transformers' own model with its eager attention."""
    return AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32, attn_implementation="eager")


def truncated_log_softmax(logits: FloatArray, sampling: Sampling) -> FloatArray:
    """Compute the sampled distribution once more, in float64 and with plain sorting."""
    scaled = logits.astype(np.float64) / (sampling.temperature or 1.0)
    probs = np.exp(scaled - scaled.max())
    probs /= probs.sum()
    if sampling.temperature == 0.0 or not sampling.is_truncated:
        whole: FloatArray = np.log(probs).astype(np.float32)
        return whole
    order = sorted(range(len(probs)), key=lambda token: (-probs[token], token))[: sampling.top_k]
    kept, mass, total = [], 0.0, sum(probs[token] for token in order)
    for token in order:
        if mass >= sampling.top_p * total:
            break
        kept.append(token)
        mass += probs[token]
    out = np.full(len(probs), -np.inf)
    out[kept] = np.log(probs[kept] / mass)
    return out.astype(np.float32)


def assert_alike(left: Sequence[Completion], right: Sequence[Completion]) -> None:
    """Same tokens; log-probabilities up to the rounding of another batch shape."""
    for ours, theirs in zip(left, right, strict=True):
        assert ours.token_ids.tolist() == theirs.token_ids.tolist()
        assert ours.logprobs == pytest.approx(theirs.logprobs, abs=1e-4)
        assert (ours.text, ours.finish_reason) == (theirs.text, theirs.finish_reason)


def alone(
    model: LanguageModel, tokenizer: Tokenizer, requests: Sequence[GenerationRequest]
) -> list[Completion]:
    """Give every request an engine of its own."""
    return [run(NativeEngine(model, tokenizer).generate(request)) for request in requests]


# ---------------------------------------------------------------- against transformers


@pytest.mark.parametrize("name", FAMILIES)
def test_replies_equal_transformers_own(name: str, tmp_path: Path) -> None:
    """Greedy tokens are those of `generate`, and every log-probability is that of a full forward."""
    model_dir = tiny_model(tmp_path, family=name.split(",", maxsplit=1)[0], **FAMILIES[name])
    tokenizer = Tokenizer.load(model_dir)
    engine = NativeEngine(LanguageModel.load(model_dir, dtype=torch.float32), tokenizer)
    reference = load_reference(model_dir)
    requests = [
        ask(tokenizer, prompt, seed=seed, sampling=sampling, max_tokens=20)
        for prompt in PROMPTS
        for seed, sampling in enumerate(SAMPLINGS)
    ]
    for request, completion in zip(requests, run(generate_all(engine, requests)), strict=True):
        prompt = torch.from_numpy(request.prompt_ids.astype(np.int64))[None]
        if request.sampling.temperature == 0.0:
            greedy = reference.generate(
                prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=20
            )
            assert completion.token_ids.tolist() == greedy[0, prompt.shape[1] :].tolist()
        reply = torch.from_numpy(completion.token_ids.astype(np.int64))[None]
        with torch.no_grad():
            logits = reference(torch.cat([prompt, reply], dim=1)).logits[0, prompt.shape[1] - 1 : -1]
        expected = [
            truncated_log_softmax(row, request.sampling)[token]
            for row, token in zip(logits.numpy(), completion.token_ids, strict=True)
        ]
        assert completion.logprobs == pytest.approx(np.array(expected), abs=1e-4)


def test_the_terminator_ends_a_reply_and_is_part_of_it(model: LanguageModel, tokenizer: Tokenizer) -> None:
    request = ask(tokenizer, max_tokens=40)
    (whole,) = run(generate_all(NativeEngine(model, tokenizer), [request]))
    stop_id = int(whole.token_ids[5])
    position = whole.token_ids.tolist().index(stop_id)
    stopped = replace(request, stop_token_ids=frozenset({stop_id}))
    (completion,) = run(generate_all(NativeEngine(model, tokenizer), [stopped]))
    assert completion.finish_reason is FinishReason.EOS
    assert completion.token_ids.tolist() == whole.token_ids[: position + 1].tolist()
    assert completion.text == tokenizer.decode(whole.token_ids[:position])


# ---------------------------------------------------------------- company


@pytest.mark.parametrize("max_num_seqs", [3, 16, 128])
def test_a_reply_does_not_depend_on_the_batch_around_it(
    max_num_seqs: int, model: LanguageModel, tokenizer: Tokenizer
) -> None:
    """Fewer rows than requests: they are admitted as others end, into holes that were compacted."""
    requests = mixed_requests(tokenizer)
    together = run(generate_all(NativeEngine(model, tokenizer, max_num_seqs=max_num_seqs), requests))
    assert_alike(together, alone(model, tokenizer, requests))


async def test_a_request_that_comes_late_is_admitted(model: LanguageModel, tokenizer: Tokenizer) -> None:
    """Also one that is longer than the running batch was planned for."""
    early = [ask(tokenizer, seed=seed, max_tokens=30) for seed in range(3)]
    late = [ask(tokenizer, seed=9, max_tokens=5), ask(tokenizer, "long " * 20, seed=9, max_tokens=60)]
    engine = NativeEngine(model, tokenizer, max_num_seqs=8)
    waiting = asyncio.gather(*map(engine.generate, early))
    for _ in range(30):
        await asyncio.sleep(0)
    assert not waiting.done()
    together = [*await asyncio.gather(*map(engine.generate, late)), *await waiting]
    apart = [await NativeEngine(model, tokenizer).generate(request) for request in [*late, *early]]
    assert_alike(together, apart)


# ---------------------------------------------------------------- stop strings


def test_a_stop_string_over_several_tokens_cuts_the_text_and_keeps_the_tokens(
    model: LanguageModel, tokenizer: Tokenizer
) -> None:
    request = ask(tokenizer, max_tokens=60)
    (whole,) = run(generate_all(NativeEngine(model, tokenizer), [request]))
    pieces = [tokenizer.decode([token]) for token in whole.token_ids.tolist()]
    # The first three tokens in a row that are ASCII, so that each is a character of the text.
    start = next(i for i in range(1, 57) if all(piece.isascii() for piece in pieces[i : i + 3]))
    stop = "".join(pieces[start : start + 3])
    assert len(stop) >= 3
    (completion,) = run(
        generate_all(NativeEngine(model, tokenizer), [replace(request, stop_strings=("never said", stop))])
    )
    assert completion.finish_reason is FinishReason.STOP_STRING
    assert completion.token_ids.tolist() == whole.token_ids[: start + 3].tolist()
    assert len(completion.logprobs) == start + 3
    assert completion.text == tokenizer.decode(whole.token_ids[: start + 3]).removesuffix(stop)
    assert stop not in completion.text


# ---------------------------------------------------------------- refusals and endings


def refused_beside(refused: Awaitable[Any], answered: Awaitable[Any]) -> tuple[str, Any]:
    """Return what the one is refused with, and what the other one gets meanwhile."""

    async def act() -> list[Any]:
        return list(await asyncio.gather(refused, answered, return_exceptions=True))

    error, answer = run(act())
    assert isinstance(error, EngineError)
    return str(error), answer


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_tokens": 506}, "a request has 7 prompt tokens and asks for 506. Allowed: "),
        ({"max_tokens": 0}, "asks for 0"),
        ({"prompt_ids": np.array([], dtype=np.int32)}, "has 0 prompt tokens"),
        (
            {"prompt_ids": np.array([3, 262], dtype=np.int32)},
            "token ids from 3 to 262. Allowed: ids from 0 to 261",
        ),
        ({"prompt_ids": np.array([-1, 3], dtype=np.int32)}, "token ids from -1 to 3"),
    ],
)
def test_what_cannot_be_generated_is_refused(
    changes: dict[str, Any], message: str, model: LanguageModel, tokenizer: Tokenizer
) -> None:
    bad, engine = replace(ask(tokenizer, "1+2 = ?"), **changes), NativeEngine(model, tokenizer)
    said, answer = refused_beside(engine.generate(bad), engine.generate(ask(tokenizer)))
    assert message in said
    assert isinstance(answer, Completion)


@pytest.mark.parametrize(
    ("prompt", "reply", "message"),
    [
        ([3] * 500, [4] * 13, "has 500 prompt tokens and has a reply of 13. Allowed: "),
        ([3], [], "has a reply of 0"),
        ([], [4], "has 0 prompt tokens"),
        ([3, 4], [262], "token ids from 3 to 262. Allowed: ids from 0 to 261"),
    ],
)
def test_what_cannot_be_scored_is_refused(
    prompt: list[int], reply: list[int], message: str, model: LanguageModel, tokenizer: Tokenizer
) -> None:
    engine, sound = NativeEngine(model, tokenizer), np.array([3, 4], np.int32)
    asked = engine.score(np.array(prompt, np.int32), np.array(reply, np.int32), 1.0)
    said, answer = refused_beside(asked, engine.score(sound, sound, 1.0))
    assert message in said
    assert len(answer.logprobs) == 2


def test_the_longest_possible_request_is_answered(model: LanguageModel, tokenizer: Tokenizer) -> None:
    request = replace(ask(tokenizer, "1+2 = ?", max_tokens=505), stop_token_ids=frozenset())
    assert len(request.prompt_ids) == 7
    assert len(run(NativeEngine(model, tokenizer).generate(request)).token_ids) == 505


class BrokenModel:
    """A model whose trunk fails after some calls, as one that runs out of memory does."""

    def __init__(self, model: LanguageModel, error: Exception, *, num_good_calls: int) -> None:
        self._model = model
        self._error = error
        self._num_good_calls = num_good_calls

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def trunk(self, *arguments: Any) -> torch.Tensor:
        if self._num_good_calls == 0:
            raise self._error
        self._num_good_calls -= 1
        return self._model.trunk(*arguments)


@pytest.mark.parametrize("num_good_calls", [0, 3])
@pytest.mark.parametrize("error", [RuntimeError("out of memory"), IndexError("a bug")])
def test_a_failure_while_decoding_answers_everyone_who_waits(
    error: Exception, num_good_calls: int, model: LanguageModel, tokenizer: Tokenizer
) -> None:
    """In the prefill (0 good calls) and in a decode step, for admitted and for waiting requests."""
    broken: Any = BrokenModel(model, error, num_good_calls=num_good_calls)
    engine = NativeEngine(broken, tokenizer, max_num_seqs=2)
    requests = [ask(tokenizer, seed=seed) for seed in range(5)]

    async def act() -> list[Completion | BaseException]:
        waiting = asyncio.gather(*map(engine.generate, requests), return_exceptions=True)
        return await asyncio.wait_for(waiting, 10)

    for failure in run(act()):
        assert isinstance(failure, EngineError)
        place = f"test_native.py:{line_of(BrokenModel.trunk, 'raise')}"
        assert str(failure) == f"generation failed: {type(error).__name__}: {error} ({place})"
        assert "raise self._error" in "".join(traceback.format_exception(failure))


@pytest.mark.parametrize("num_cycles", [1, 2, 40])
def test_closing_answers_everyone_who_waits(
    num_cycles: int, model: LanguageModel, tokenizer: Tokenizer
) -> None:
    """Before the decoder has begun, while it gathers requests, and in the middle of decoding."""
    engine = NativeEngine(model, tokenizer, max_num_seqs=2)
    endless = replace(ask(tokenizer, max_tokens=200), stop_token_ids=frozenset())
    requests = [replace(endless, seed=seed) for seed in range(5)]

    async def act() -> list[Completion | BaseException]:
        waiting = asyncio.gather(*map(engine.generate, requests), return_exceptions=True)
        for _ in range(num_cycles):
            await asyncio.sleep(0)
        await engine.close()
        return await asyncio.wait_for(waiting, 10)

    for failure in run(act()):
        assert isinstance(failure, EngineError)
        assert "closed" in str(failure)


async def test_others_can_train_while_replies_are_decoded(model: LanguageModel, tokenizer: Tokenizer) -> None:
    """The decoder's mode without gradients must not reach coroutines of the same thread."""
    engine = NativeEngine(model, tokenizer)
    waiting = asyncio.create_task(engine.generate(ask(tokenizer, max_tokens=20)))
    seen = []
    while not waiting.done():
        await asyncio.sleep(0)
        seen.append(torch.is_inference_mode_enabled() or not torch.is_grad_enabled())
    assert len(seen) > 20
    assert not any(seen)


# Steps over tensors that never move, which GPUs replay as graphs, called here as they are.


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


async def test_weights_that_are_not_finite_are_refused(tiny_model_dir: Path, tokenizer: Tokenizer) -> None:
    model = LanguageModel.load(tiny_model_dir, dtype=torch.float32)
    engine = NativeEngine(model, tokenizer, is_static=True)
    request = ask(tokenizer, max_tokens=200)
    waiting = engine.generate(request)
    with torch.no_grad():
        model.head_weight.fill_(np.nan)
    with pytest.raises(EngineError, match=r"not finite\. Allowed: finite logits"):
        await waiting
