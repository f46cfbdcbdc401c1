"""The engine's wire: what comes is what was sent, what is shared is sent once, damage is refused."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strop.engine import Completion
from strop.engine.remote import RemoteEngine
from strop.engine.wire import (
    ErrorForm,
    GenerateAnswer,
    GenerateCall,
    ScoreAnswer,
    ScoreCall,
    ScoreForm,
    read_floats,
    read_ids,
    write_floats,
    write_ids,
)
from strop.errors import ConfigError, DataError, EngineError, StropError, WeightMismatch
from strop.rollout import FinishReason, VersionSegment
from strop.tokenizer import Tokenizer
from tests.engine.requests import ask, mixed_requests

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


BROKEN: list[tuple[dict[str, Any], str]] = [
    ({"num_tokens": [1]}, "1 replies to 2 requests"),
    ({"num_tokens": [1, -1]}, "0 errors in 1 places"),
    ({"errors": [ErrorForm(kind="EngineError", message="m")]}, "1 errors in 0 places"),
    ({"policy_versions": [3, 3, 3]}, "columns of other lengths than 2 replies"),
    ({"segments": {2: [(0, 1)]}}, "columns of other lengths than 2 replies"),
    ({"num_tokens": [1, 2]}, "2 token ids came for 3 tokens"),
    ({"token_ids": "BQAAAA=="}, "1 token ids came for 2 tokens"),
    ({"token_ids": "%"}, "token ids are unreadable"),
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


# Scoring many given replies through an engine elsewhere: few connections, no prompt sent twice.

Answer = Callable[[ScoreCall], ScoreAnswer]


class Desk:
    """A server of one path, which counts who is served at the same time."""

    def __init__(self, answer: Answer) -> None:
        self._answer = answer
        self._num_open = 0
        self.max_open = 0
        self.calls: list[ScoreCall] = []

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        lines = head.decode().lower().split("\r\n")
        length = next(int(line.split(":")[1]) for line in lines if line.startswith("content-length"))
        self._num_open += 1
        self.max_open = max(self.max_open, self._num_open)
        call = ScoreCall.model_validate_json(await reader.readexactly(length))
        self.calls.append(call)
        await asyncio.sleep(0.02)
        body = self._answer(call).model_dump_json().encode()
        self._num_open -= 1
        writer.write(b"HTTP/1.1 200 OK\r\nConnection: close\r\n")
        writer.write(f"Content-Length: {len(body)}\r\n\r\n".encode() + body)
        await writer.drain()
        writer.close()


@asynccontextmanager
async def connect(desk: Desk) -> AsyncIterator[RemoteEngine]:
    server = await asyncio.start_server(desk.serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    engine = RemoteEngine(f"http://127.0.0.1:{port}", "k" * 16)
    try:
        yield engine
    finally:
        await engine.close()
        server.close()
        await server.wait_closed()


def score_all(desk: Desk, num_prompts: int) -> list[list[float]]:
    async def act() -> list[list[float]]:
        async with connect(desk) as engine:
            asked: list[Awaitable[object]] = []
            for prompt in range(num_prompts):
                for reply in range(4):
                    ids = np.array([prompt, 7], np.int32), np.array([reply] * (reply + 1), np.int32)
                    asked.append(engine.score(*ids, 1.0))
            scores = await asyncio.gather(*asked)
            return [score.logprobs.tolist() for score in scores]  # type: ignore[attr-defined]

    return asyncio.run(act())


def form(ids: list[int], version: int = 3) -> ScoreForm:
    values = np.array([-float(token_id) for token_id in ids], np.float32)
    return ScoreForm(logprobs=write_floats(values), policy_version=version)


def test_the_replies_to_a_prompt_travel_together_and_few_prompts_at_once() -> None:
    desk = Desk(lambda call: ScoreAnswer(scores=[form(read_ids(reply).tolist()) for reply in call.replies]))
    found = score_all(desk, 40)
    assert found == [[-float(reply)] * (reply + 1) for _ in range(40) for reply in range(4)]
    assert sorted(read_ids(call.prompt_ids)[0] for call in desk.calls) == list(range(40))
    for call in desk.calls:
        assert [read_ids(reply).tolist() for reply in call.replies] == [[0], [1, 1], [2] * 3, [3] * 4]
    # A thousand prompts must not take a thousand connections.
    assert desk.max_open <= 8


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (lambda call: ScoreAnswer(scores=[form([1])]), r"1 scores of 4 replies"),
        (lambda call: ScoreAnswer(scores=[form([1])] * 4), r"1 log-probabilities came for 2 tokens"),
    ],
)
def test_scores_of_something_else_are_refused(answer: Answer, message: str) -> None:
    with pytest.raises(EngineError, match=message):
        score_all(Desk(answer), 1)
