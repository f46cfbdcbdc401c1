"""A server of OpenAI's completions as an engine: what it says is read by strop's rules, or refused."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import httpx
import numpy as np
import pytest

from strop.engine import Completion, GenerationRequest, WeightTransport, WeightUpdate
from strop.engine.openai import KEY_VARIABLE, OpenAiEngine
from strop.errors import ConfigError, EngineError
from strop.rollout import FinishReason, Sampling
from strop.tokenizer import Tokenizer
from tests.engine.requests import ask
from tests.fixtures.engine_actor import canned_server
from tests.fixtures.tiny_tokenizer import EOS_TEXT

VLLM = {"data": [{"id": "org/name", "owned_by": "vllm"}]}
OTHER = {"data": [{"id": "org/name", "owned_by": "somebody"}]}


def choice(**said: Any) -> dict[str, Any]:
    return {"choices": [{"finish_reason": "length", **said}]}


def generate(
    tokenizer: Tokenizer, request: GenerationRequest, answer: Any, models: Any = VLLM, status: int = 200
) -> Completion:
    """Ask a server that says one thing."""
    body = answer if isinstance(answer, str) else json.dumps(answer)
    answers: Mapping[str, tuple[int, str]] = {
        "/v1/models": (200, json.dumps(models)),
        "/v1/completions": (status, body),
    }

    async def act() -> Completion:
        async with canned_server(answers) as url:
            engine = OpenAiEngine(f"{url}/v1", tokenizer, model="org/name", version=3)
            try:
                return await engine.generate(request)
            finally:
                await engine.close()

    return asyncio.run(act())


def said(tokenizer: Tokenizer, text: str) -> dict[str, Any]:
    ids = tokenizer.encode(text).tolist()
    return {"token_ids": ids, "logprobs": {"token_logprobs": [-0.5] * len(ids)}, "text": text}


@pytest.mark.parametrize(
    ("text", "changes", "models", "spoken", "reason"),
    [
        (" 3", {}, VLLM, " 3", FinishReason.LENGTH),
        # Without token ids the text is encoded again.
        (" 3", {"token_ids": None}, OTHER, " 3", FinishReason.LENGTH),
        # A stop string is cut off; what was sampled is kept, to the token that completed it.
        ("3 END", {"finish_reason": "stop"}, VLLM, "3", FinishReason.STOP_STRING),
        ("3 END", {"finish_reason": "stop", "token_ids": None}, VLLM, "3", FinishReason.STOP_STRING),
        # A terminator is kept and not read aloud.
        (f" 3{EOS_TEXT}", {"finish_reason": "stop", "text": None}, VLLM, " 3", FinishReason.EOS),
    ],
)
def test_a_reply_is_read_by_strops_rules(
    tokenizer: Tokenizer, text: str, changes: dict[str, Any], models: Any, spoken: str, reason: FinishReason
) -> None:
    answer = {name: value for name, value in (said(tokenizer, text) | changes).items() if value is not None}
    request = ask(tokenizer, stop_strings=(" END",))
    reply = generate(tokenizer, request, choice(**answer), models=models)
    assert reply.token_ids.tolist() == tokenizer.encode(text).tolist()
    assert (reply.text, reply.finish_reason, reply.policy_version) == (spoken, reason, 3)
    assert reply.logprobs.tolist() == [-0.5] * len(reply.token_ids)


@pytest.mark.parametrize(
    ("answer", "status", "message"),
    [
        (choice(text=" 3"), 200, "0 log-probabilities and 2 token ids"),
        (choice(text=" 3", logprobs={"token_logprobs": [-1.0]}), 200, "1 log-probabilities and 2 token ids"),
        (choice(text=" 3", logprobs={"token_logprobs": [-1.0, None]}), 200, "2 log-probabilities and 2"),
        ({"choices": []}, 200, "no choices"),
        ({"error": "too long"}, 400, "status 400: .*too long"),
        ("<html>", 200, "with status 200: <html>"),
        ("[]", 200, "with status 200: \\[]"),
    ],
)
def test_log_4_what_is_missing_is_never_filled_in(
    answer: Any, status: int, message: str, tokenizer: Tokenizer
) -> None:
    with pytest.raises(EngineError, match=message):
        generate(tokenizer, ask(tokenizer), answer, models=OTHER, status=status)


def test_a_server_that_is_not_there_is_told(tokenizer: Tokenizer) -> None:
    engine = OpenAiEngine("http://127.0.0.1:9/v1", tokenizer, model="x")
    with pytest.raises(EngineError, match=r"127\.0\.0\.1:9/v1 cannot be used so: it did not answer /models"):
        asyncio.run(engine.generate(ask(tokenizer)))


def test_the_model_is_chosen_or_refused(tokenizer: Tokenizer) -> None:
    answer = choice(**said(tokenizer, " 3"))
    one = {"data": [{"id": "whatever"}]}
    assert generate(tokenizer, ask(tokenizer), answer, models=one).text == " 3"
    two = {"data": [{"id": "b"}, {"id": "a"}]}
    with pytest.raises(ConfigError, match=r"has no model org/name. Allowed: one of a, b"):
        generate(tokenizer, ask(tokenizer), answer, models=two)
    with pytest.raises(ConfigError, match="one of none"):
        generate(tokenizer, ask(tokenizer), answer, models={})


def test_top_k_goes_to_vllm_alone(tokenizer: Tokenizer) -> None:
    request = ask(tokenizer, sampling=Sampling(top_k=5))
    with pytest.raises(EngineError, match=r"sampling.top_k=5 is no setting"):
        generate(tokenizer, request, choice(), models=OTHER)
    assert generate(tokenizer, request, choice(**said(tokenizer, " 3"))).text == " 3"


def watched(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, answer: Any
) -> tuple[OpenAiEngine, list[httpx.Request]]:
    """Return an engine whose messages are kept and answered in this process."""
    seen: list[httpx.Request] = []

    def speak(request: httpx.Request) -> httpx.Response:
        seen.append(request)
        return httpx.Response(200, json=VLLM if request.url.path == "/v1/models" else answer)

    monkeypatch.setenv(KEY_VARIABLE, "secret")
    engine = OpenAiEngine("http://server/v1/", tokenizer, model="org/name")
    monkeypatch.setattr(engine._client, "_transport", httpx.MockTransport(speak))
    monkeypatch.setattr(engine._client, "_mounts", {})
    return engine, seen


async def test_a_request_is_sent_as_it_was_asked(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, seen = watched(tokenizer, monkeypatch, choice(**said(tokenizer, " 3")))
    request = replace(ask(tokenizer, stop_strings=("!",)), seed=2**63 + 5)
    await asyncio.gather(engine.generate(request), engine.generate(request))
    # The models are asked for once.
    assert [str(message.url) for message in seen] == [
        "http://server/v1/models",
        *["http://server/v1/completions"] * 2,
    ]
    assert seen[1].headers["authorization"] == "Bearer secret"
    assert json.loads(seen[1].content) == {
        "model": "org/name",
        "prompt": request.prompt_ids.tolist(),
        "max_tokens": 12,
        "temperature": 1.0,
        "top_p": 1.0,
        "seed": 5,
        "logprobs": 1,
        "stop": ["!"],
        "stop_token_ids": [tokenizer.eos_id],
        "return_token_ids": True,
        "top_k": 0,
        "include_stop_str_in_output": True,
    }


async def test_given_replies_are_scored_by_echo(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Prompt of 2, reply of 3, and one token that the server samples behind them.
    values = [None, -1.0, -2.0, -3.0, -4.0, -9.0]
    engine, _ = watched(tokenizer, monkeypatch, choice(logprobs={"token_logprobs": values}))
    prompt, reply = np.array([1, 2], np.int32), np.array([3, 4, 5], np.int32)
    with pytest.raises(EngineError, match=r"scored at temperature 0.5, not 1"):
        await engine.score(prompt, reply, 0.5)
    with pytest.raises(EngineError, match="no log-probabilities of a text that it is given"):
        await engine.score(prompt, np.array([3] * 7, np.int32), 1.0)
    assert (await engine.score(prompt, reply, 1.0)).logprobs.tolist() == [-2.0, -3.0, -4.0]


async def test_it_is_never_trained_with(tokenizer: Tokenizer) -> None:
    engine = OpenAiEngine("http://server/v1", tokenizer, model="x")
    with pytest.raises(EngineError, match="weight update 1 was published to it"):
        await engine.update(WeightUpdate(version=1, digest="d", transport=WeightTransport.SHARED))
    await engine.close()
    with pytest.raises(EngineError, match="closed"):
        await engine.generate(ask(tokenizer))
