"""The things that flow keep their form, and unscored never becomes 0."""

from __future__ import annotations

import dataclasses
import json
import math
import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from strop.errors import DataError, UnfitRecord
from strop.rollout import (
    FailureOwner,
    FinishReason,
    Message,
    Outcome,
    Rollout,
    Sampling,
    ToolCall,
    Turn,
    make_example,
)
from tests.fixtures.builders import rollout_of

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


def spoken(num_tokens: int, num_logprobs: int, value: float = -0.5) -> Turn:
    return Turn(
        role="assistant",
        text="x",
        token_ids=np.arange(num_tokens, dtype=np.int32),
        logprobs=np.full(num_logprobs, value, dtype=np.float32),
        policy_version=3,
        finish_reason=FinishReason.EOS,
    )


def heard(num_tokens: int) -> Turn:
    return Turn(role="user", text="?", token_ids=np.arange(num_tokens, dtype=np.int32))


def rollout(*turns: Turn) -> Rollout:
    return rollout_of(
        make_example("arithmetic", {"a": 1, "b": 2}, "3"), turns, Outcome(parts={"correct": 1.0})
    )


def test_the_id_of_an_example_is_its_content() -> None:
    first = make_example("arithmetic", {"a": 1, "b": 2}, "3")
    assert first.example_id == make_example("arithmetic", {"b": 2, "a": 1}, "3").example_id
    others = [
        make_example("arithmetic", {"a": 2, "b": 1}, "3"),
        make_example("arithmetic", {"a": 1, "b": 2}, None),
        make_example("sums", {"a": 1, "b": 2}, "3"),
    ]
    assert len({first.example_id, *(other.example_id for other in others)}) == 4


def test_the_id_of_an_example_never_changes_between_releases() -> None:
    # sha256 of '["arithmetic", {"a": 1, "b": 2}, "3"]', first 16 digits. Stored runs refer to it.
    assert make_example("arithmetic", {"a": 1, "b": 2}, "3").example_id == "2100a5b992d39972"


@given(st.dictionaries(st.text(), JSON, max_size=4), st.none() | st.text())
def test_an_example_read_back_from_json_keeps_its_id(fields: dict[str, object], answer: str | None) -> None:
    example = make_example("t", fields, answer)
    read = json.loads(json.dumps({"fields": example.fields, "answer": example.answer}))
    assert make_example("t", read["fields"], read["answer"]).example_id == example.example_id


def test_a_field_that_is_not_json_is_refused() -> None:
    with pytest.raises(DataError, match="an example of task t holds a value that is not JSON"):
        make_example("t", {"a": object()}, None)


def test_a_turn_whose_streams_differ_in_length_is_refused() -> None:
    with pytest.raises(UnfitRecord, match="a turn has 3 token ids and 2 log-probabilities"):
        spoken(3, 2)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_turn_with_a_logprob_that_is_not_finite_is_refused(value: float) -> None:
    with pytest.raises(DataError, match="not finite"):
        spoken(2, 2, value)


def test_reward_is_the_sum_of_the_parts() -> None:
    assert Outcome(parts={"correct": 1.0, "format": 0.25}).reward == 1.25
    assert Outcome(parts={"correct": 0.0}).reward == 0.0


@pytest.mark.parametrize(
    "outcome",
    [
        Outcome(parts={}),
        Outcome(parts={"correct": None}),
        Outcome(parts={"correct": 1.0, "judge": None}),
        Outcome(parts={"correct": math.nan}),
        Outcome.lost(FailureOwner.INFRA, "timeout"),
    ],
    ids=["no parts", "unscored", "one part unscored", "not a number", "lost"],
)
def test_unscored_is_none_and_never_0(outcome: Outcome) -> None:
    assert outcome.reward is None
    assert not outcome.is_scored


def test_only_what_the_policy_spoke_counts_as_sampled() -> None:
    # 5 heard, 2 spoken, 4 heard (a tool's answer), 3 spoken: 2 + 3 = 5 sampled tokens.
    last = spoken(3, 3)
    whole = rollout(heard(5), spoken(2, 2), heard(4), last)
    assert whole.num_sampled_tokens == 5
    assert whole.reply is last
    assert rollout(heard(5)).reply is None


def test_a_rollout_cannot_be_changed_and_survives_pickling() -> None:
    whole = rollout(heard(2), spoken(2, 2))
    with pytest.raises(dataclasses.FrozenInstanceError):
        whole.step = 1  # type: ignore[misc]
    copy = pickle.loads(pickle.dumps(whole))
    assert copy.example == whole.example
    assert copy.outcome == whole.outcome
    np.testing.assert_array_equal(copy.turns[1].logprobs, whole.turns[1].logprobs)


@pytest.mark.parametrize(
    ("sampling", "is_truncated"),
    [
        (Sampling(), False),
        (Sampling(temperature=0.7), False),
        (Sampling(top_p=0.9), True),
        (Sampling(top_k=50), True),
    ],
)
def test_only_top_p_and_top_k_cut_the_support(sampling: Sampling, is_truncated: bool) -> None:
    assert sampling.is_truncated is is_truncated


CALL = ToolCall(name="run", arguments='{"command": "ls", "limit": 2}', call_id="call-1")
MESSAGES = [
    Message(role="user", content="What is there?"),
    Message(role="assistant", content="", tool_calls=(CALL, ToolCall(name="stop")), reasoning="Hm."),
    Message(role="tool", content="a file", tool_call_id="call-1", name="run"),
]


@pytest.mark.parametrize("message", MESSAGES)
def test_messages_survive_json_and_pickle(message: Message) -> None:
    assert Message.from_json(json.loads(json.dumps(message.to_json()))) == message
    assert pickle.loads(pickle.dumps(message)) == message
    assert len({message, Message.from_json(message.to_json())}) == 1
    with pytest.raises(dataclasses.FrozenInstanceError):
        message.role = "user"  # type: ignore[misc]


def test_a_message_of_text_alone_is_recorded_as_it_always_was() -> None:
    assert MESSAGES[0].to_json() == {"role": "user", "content": "What is there?"}
    assert Message.from_json({"role": "user", "content": "What is there?"}) == MESSAGES[0]
    parts = [{"type": "text", "text": text} for text in ("What ", "is there?")]
    assert Message.from_json({"role": "user", "content": parts}) == MESSAGES[0]


@pytest.mark.parametrize("content", [{}, {"content": None}, {"content": ""}])
@pytest.mark.parametrize("arguments", ['{"command": "ls", "limit": 2}', {"command": "ls", "limit": 2}])
def test_a_call_as_clients_of_openai_send_it_is_read(content: dict[str, None], arguments: object) -> None:
    call = {"id": "call-1", "type": "function", "function": {"name": "run", "arguments": arguments}}
    sent = {"role": "assistant", **content, "tool_calls": [call]}
    assert Message.from_json(sent) == Message(role="assistant", tool_calls=(CALL,))


@pytest.mark.parametrize(
    "value",
    [
        "Hi",
        {"content": "Hi"},
        {"role": "user", "content": 7},
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]},
        {"role": "user", "content": "Hi", "audio": {}},
        {"role": "assistant", "tool_calls": [{"function": {"arguments": "{}"}}]},
        {"role": "assistant", "tool_calls": [{"function": {"name": "run", "arguments": '{"command": '}}]},
        {"role": "assistant", "tool_calls": [{"function": {"name": "run", "arguments": "[1]"}}]},
    ],
)
def test_what_a_message_has_no_room_for_is_refused(value: object) -> None:
    with pytest.raises(DataError):
        Message.from_json(value)
