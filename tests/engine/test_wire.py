"""The engine's wire: what comes is what was sent, what is shared is sent once, damage is refused."""

from __future__ import annotations

import struct
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strop.engine import Completion
from strop.engine.wire import (
    ErrorForm,
    GenerateAnswer,
    GenerateCall,
    ScoreCall,
    read_floats,
    read_ids,
    write_floats,
    write_ids,
)
from strop.errors import ConfigError, DataError, EngineError, StropError, WeightMismatch
from strop.rollout import FinishReason, Sampling, VersionSegment
from strop.tokenizer import Tokenizer
from tests.engine.requests import ask, mixed_requests
from tests.fixtures.builders import request_for

ids = st.lists(st.integers(0, 2**31 - 1), max_size=20).map(lambda values: np.array(values, np.int32))


@st.composite
def completions(draw: st.DrawFn) -> Completion:
    token_ids = draw(ids)
    # Any 32 bits: a value is never rounded, whatever it means.
    bits = draw(st.lists(st.integers(0, 2**32 - 1), min_size=len(token_ids), max_size=len(token_ids)))
    segments = draw(st.lists(st.tuples(st.integers(0, 99), st.integers(0, 9)), max_size=3))
    return Completion(
        token_ids=token_ids,
        logprobs=np.array(bits, np.uint32).view(np.float32),
        text=draw(st.text(max_size=9).filter(lambda text: text.isprintable())),
        finish_reason=draw(st.sampled_from(FinishReason)),
        policy_version=draw(st.integers(0, 10**6)),
        segments=tuple(VersionSegment(start=start, version=version) for start, version in segments),
    )


errors = st.text(max_size=5).map(EngineError)


def facts(outcome: Completion | StropError) -> Any:
    if isinstance(outcome, StropError):
        return type(outcome), str(outcome)
    return (
        outcome.token_ids.tolist(),
        outcome.logprobs.tobytes(),
        outcome.text,
        outcome.finish_reason,
        outcome.policy_version,
        outcome.segments,
    )


@settings(max_examples=150, deadline=None)
@given(outcomes=st.lists(st.one_of(completions(), errors), max_size=6))
def test_replies_and_errors_cross_unchanged_in_their_order(outcomes: list[Completion | StropError]) -> None:
    answer = GenerateAnswer.of(outcomes)
    for message in (answer.model_dump_json(), answer.model_dump_json(exclude_defaults=True)):
        came = GenerateAnswer.model_validate_json(message).read(len(outcomes))
        assert [facts(one) for one in came] == [facts(one) for one in outcomes]
    for one in came:
        if isinstance(one, Completion):
            assert (one.token_ids.dtype.str, one.logprobs.dtype.str) == ("<i4", "<f4")


def test_requests_cross_unchanged(tokenizer: Tokenizer) -> None:
    sent = [
        replace(request, seed=2**64 - 1 - place) for place, request in enumerate(mixed_requests(tokenizer))
    ]
    call = GenerateCall.of(sent)
    came = GenerateCall.model_validate_json(call.model_dump_json()).read()
    for ours, theirs in zip(sent, came, strict=True):
        assert theirs.prompt_ids.tolist() == ours.prompt_ids.tolist()
        assert theirs.prompt_ids.dtype == ours.prompt_ids.dtype
        for name in ("seed", "sampling", "max_tokens", "stop_token_ids", "stop_strings"):
            assert getattr(theirs, name) == getattr(ours, name)


def test_what_a_group_shares_is_sent_once(tokenizer: Tokenizer) -> None:
    call = GenerateCall.of([ask(tokenizer, prompt, seed=seed) for prompt in "ab" for seed in range(8)])
    assert (len(call.prompts), len(call.manners), len(call.requests)) == (2, 1, 16)
    first, *others = call.read()
    assert all(other.prompt_ids is first.prompt_ids for other in others[:7])


def test_a_token_takes_at_most_seventeen_bytes() -> None:
    random = np.random.default_rng(0)
    prompts = [random.integers(0, 150_000, 60).astype(np.int32) for _ in range(8)]
    requests = [
        request_for(
            prompt,
            max_tokens=32,
            seed=int(random.integers(0, 2**63)),
            stops={151643, 151645},
            sampling=Sampling(temperature=0.7),
            stop_strings=("\n\nQuestion:",),
        )
        for prompt in prompts
        for _ in range(8)
    ]
    # Short ones, which are dear: 32 tokens of four characters each.
    replies = [
        Completion(
            token_ids=random.integers(0, 150_000, 32).astype(np.int32),
            logprobs=-random.random(32).astype(np.float32),
            text="So 12 * 4 = 48 apples. " * 6,
            finish_reason=FinishReason.EOS,
            policy_version=123,
        )
        for _ in requests
    ]
    asked = GenerateCall.of(requests).model_dump_json()
    answered = GenerateAnswer.of(replies).model_dump_json(exclude_defaults=True)
    num_tokens = 8 * 60 + 64 * 32
    assert (len(asked) + len(answered)) / num_tokens <= 17.0


BROKEN: list[tuple[dict[str, Any], str]] = [
    ({"num_tokens": [1]}, "1 replies to 2 requests"),
    ({"num_tokens": [1, -1]}, "0 errors in 1 places"),
    ({"num_tokens": [1, -2]}, "0 errors in 0 places"),
    ({"errors": [ErrorForm(kind="EngineError", message="m")]}, "1 errors in 0 places"),
    ({"texts": ["x"]}, "columns of other lengths than 2 replies"),
    ({"finish_reasons": []}, "columns of other lengths than 2 replies"),
    ({"policy_versions": [3, 3, 3]}, "columns of other lengths than 2 replies"),
    ({"segments": {2: [(0, 1)]}}, "columns of other lengths than 2 replies"),
    ({"num_tokens": [1, 2]}, "2 token ids came for 3 tokens"),
    ({"token_ids": "BQAAAA=="}, "1 token ids came for 2 tokens"),
    ({"token_ids": "%"}, "token ids are unreadable"),
    ({"token_ids": "BQAA"}, "token ids are unreadable"),
    # -2 and 5.
    ({"token_ids": "/v///wUAAAA="}, "a token id is -2"),
    ({"logprobs": "AACAvw=="}, "1 log-probabilities came for 2 tokens"),
    ({"logprobs": "%"}, "log-probabilities are unreadable"),
]


@pytest.mark.parametrize(("change", "message"), BROKEN)
def test_columns_that_do_not_fit_are_refused(change: dict[str, Any], message: str) -> None:
    reply = Completion(
        token_ids=np.array([5], np.int32),
        logprobs=np.array([-1.0], np.float32),
        text="x",
        finish_reason=FinishReason.LENGTH,
        policy_version=3,
    )
    good = GenerateAnswer.of([reply, reply])
    assert len(good.read(2)) == 2
    with pytest.raises(EngineError, match=message):
        good.model_copy(update=change).read(2)


def test_a_request_that_names_what_did_not_come_is_refused(tokenizer: Tokenizer) -> None:
    call = GenerateCall.of([ask(tokenizer)])
    with pytest.raises(EngineError, match="a request names prompt 0 of 0"):
        call.model_copy(update={"prompts": []}).read()


def test_unknown_or_missing_fields_are_refused(tokenizer: Tokenizer) -> None:
    fields = GenerateCall.of([ask(tokenizer)]).model_dump()
    (form,) = fields["requests"]
    for bad in (form | {"beams": 4}, {k: v for k, v in form.items() if k != "seed"}, form | {"seed": -1}):
        with pytest.raises(ValueError, match="validation error"):
            GenerateCall.model_validate(fields | {"requests": [bad]})


@settings(deadline=None)
@given(token_ids=ids)
def test_ids_and_scores_read_back_equal(token_ids: np.ndarray) -> None:
    assert read_ids(write_ids(token_ids)).tolist() == token_ids.tolist()
    call = ScoreCall.of(token_ids, [token_ids, token_ids[:1]], 0.5)
    assert [read_ids(reply).tolist() for reply in call.replies] == [
        token_ids.tolist(),
        token_ids[:1].tolist(),
    ]
    values = np.frombuffer(struct.pack("<3f", 0.0, -0.0, -1e-45), np.float32)
    assert read_floats(write_floats(values), 3).tobytes() == values.tobytes()


@pytest.mark.parametrize("kind", [EngineError, WeightMismatch, ConfigError, DataError])
def test_errors_come_home_as_their_class(kind: type[StropError]) -> None:
    came = ErrorForm.model_validate_json(ErrorForm.of(kind("what\nwhy")).model_dump_json()).read()
    assert type(came) is kind
    assert str(came) == "what\nwhy"


def test_an_error_of_an_unknown_class_is_an_engine_error() -> None:
    assert type(ErrorForm(kind="SystemExit", message="m").read()) is EngineError
