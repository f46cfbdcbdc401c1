"""Incidents of the group on tokens, each test named after the incident's id."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from strop.algorithm import ALGORITHMS
from strop.engine import Completion, Engine, GenerationRequest
from strop.engine.dummy import DummyEngine, ScriptedReply
from strop.environments import RolloutPlan, SingleTurn, run_group
from strop.errors import ConfigError
from strop.policy.packing import PackedBatch, PackedGroup, PackedReply
from strop.policy.scoring import score_reply
from strop.rollout import (
    Example,
    FinishReason,
    Group,
    Message,
    Outcome,
    Rollout,
    Sampling,
    Split,
    make_example,
)
from strop.spec import ArithmeticSpec
from strop.tasks import TaskLimits, build_task, render_prompt, resolve_prompt_format
from strop.tokenizer import Tokenizer
from strop.train.batch import build_batch, pack_reply
from strop.train.gate import check_terminator
from tests.fixtures.tiny_tokenizer import tiny_tokenizer
from tests.incidents.faulty_engines import TamperedEngine, build_gate
from tests.policy.worlds import build_learner, load_model, make_model, terms_of

PAD_ID = 260
"""Pad token and terminator of the tiny tokenizer."""


def test_tok_3_chat_format_on_a_base_model_is_refused(tmp_path: Path) -> None:
    """Incident: a chat template applied to base models gave 42 % garbage output."""
    tokenizer = Tokenizer.load(tiny_tokenizer(tmp_path / "some-base-model", with_chat_template=False))
    with pytest.raises(ConfigError) as caught:
        resolve_prompt_format(tokenizer, "chat")
    message = str(caught.value)
    assert "model.prompt_format=chat" in message
    assert "some-base-model" in message
    assert "Next: set model.prompt_format=base" in message


def test_tok_3_prompt_is_one_decision_and_shown_byte_for_byte(tmp_path: Path) -> None:
    """Incident: raw rendering was an opt-out with different defaults in different layers.

    The text that a check prints and the ids that the engine is asked with come from one call.
    """
    task = build_task(ArithmeticSpec())
    example = task.examples(Split.TRAIN)[0]
    question = f"What is {example.fields['a']} + {example.fields['b']}?"
    expected = {True: f"<|start|>user\n{question}<|end|>\n<|start|>assistant\n", False: f"{question}\n"}
    for is_chat, text in expected.items():
        model_dir = tiny_tokenizer(tmp_path / str(is_chat), with_chat_template=is_chat)
        tokenizer = Tokenizer.load(model_dir)
        shown, prompt_ids = render_prompt(tokenizer, task.render(example), "auto")
        assert shown == text
        engine = DummyEngine(tokenizer, ["1"])
        plan = RolloutPlan(
            example=example, step=0, sample_index=0, run_seed=0, sampling=Sampling(), max_reply_tokens=4
        )
        asyncio.run(run_group(partial(SingleTurn, task), engine, tokenizer, [plan]))
        assert engine.requests[0].prompt_ids.tolist() == prompt_ids.tolist()


class Question:
    """One question whose reply may end at a stop string; right is 'yes'."""

    name = "question"
    version = "1"
    limits = TaskLimits(max_reply_tokens=16, stop_strings=("\nQ:",))

    def examples(self, split: Split) -> Sequence[Example]:
        return [make_example(self.name, {"question": "right?"}, "yes")]

    def render(self, example: Example) -> tuple[Message, ...]:
        return (Message(role="user", content="right?"),)

    def verify(self, example: Example, text: str) -> Outcome:
        return Outcome(parts={"correct": float(text == "yes")})

    def gold_replies(self, example: Example) -> tuple[str, ...]:
        return ("yes",)


def attempt(engine: Engine, tokenizer: Tokenizer, num_rollouts: int) -> Group:
    task = Question()
    plans = [
        RolloutPlan(
            example=task.examples(Split.TRAIN)[0],
            step=0,
            sample_index=index,
            run_seed=0,
            sampling=Sampling(),
            max_reply_tokens=task.limits.max_reply_tokens,
        )
        for index in range(num_rollouts)
    ]
    return asyncio.run(run_group(partial(SingleTurn, task), engine, tokenizer, plans))


def pack(group: Group) -> list[PackedGroup]:
    return list(build_batch(ALGORITHMS["rloo"], [group], 16).groups)


def drop_pads(rollout: Rollout, advantage: float, weight: float) -> PackedReply:
    """The fault of TOK-1: tokens whose id is the pad id are left out of the loss."""
    reply = pack_reply(rollout, advantage, weight)
    is_scored = reply.is_scored & (reply.token_ids != PAD_ID)
    return replace(reply, is_scored=is_scored, engine_logprobs=reply.engine_logprobs[is_scored])


def test_tok_1_a_terminator_that_is_the_pad_token_is_trained(tmp_path: Path) -> None:
    """Incident: the loss mask was "id differs from pad id", and the terminator was the pad token.

    Symptom: the model never learned to stop and ended through stop strings only.
    """
    model_dir = make_model(tmp_path)
    tokenizer = Tokenizer.load(model_dir)
    assert tokenizer.stop_token_ids == {PAD_ID}
    (group,) = pack(attempt(DummyEngine(tokenizer, ["yes", "no"]), tokenizer, 2))
    batch = PackedBatch.of_groups([group], torch.device("cpu"))
    is_last = batch.target_M == PAD_ID
    assert int(is_last.sum()) == 2
    assert bool((batch.weight_M[is_last] > 0.0).all())
    # The terminators' share of the gradient, by leaving out everything else.
    learner = build_learner(model_dir)
    only_ends = [
        replace(reply, is_scored=reply.token_ids == PAD_ID, engine_logprobs=reply.engine_logprobs[-1:])
        for reply in group.replies
    ]
    gradients = learner.gradients(
        [replace(group, replies=tuple(only_ends))],
        temperature=1.0,
        token_terms=terms_of(ALGORITHMS["rloo"]),
    )
    assert all(float(gradient.norm()) > 0.0 for gradient in gradients.values())


def test_tok_1_a_builder_that_compares_ids_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Incident: as above; the gate looks at what the builder makes of sampled terminators.

    One of the replies is nothing but its terminator, so nothing of it is left.
    """
    model_dir = make_model(tmp_path)
    tokenizer = Tokenizer.load(model_dir)
    engine = DummyEngine(tokenizer, ["yes", "", ScriptedReply(text="on and on", ends=False)])
    group = attempt(engine, tokenizer, 3)
    gate = build_gate(model_dir, engine)
    assert check_terminator(gate, [group]).is_passed
    assert check_terminator(gate, [group]).detail == "2 sampled terminators, all inside the loss mask"
    monkeypatch.setattr("strop.train.gate.pack_reply", drop_pads)
    check = check_terminator(gate, [group])
    assert not check.is_passed
    assert check.detail == "2 of 2 sampled terminators are outside the loss mask"


def test_tok_2_token_id_0_ends_nothing(tmp_path: Path) -> None:
    """Incident: a stream was cut at the first token id 0, which was taken for padding.

    In this vocabulary, as in that of the incident, it is the exclamation mark.
    """
    model_dir = make_model(tmp_path)
    tokenizer = Tokenizer.load(model_dir)
    group = attempt(DummyEngine(tokenizer, ["no!no", "yes"]), tokenizer, 2)
    ids = group.rollouts[0].turns[1].token_ids
    assert ids.tolist().index(0) == 2
    assert len(ids) == 6  # n o ! n o and the terminator.
    (packed,) = pack(group)
    reply = packed.replies[0]
    assert len(reply.token_ids) == len(reply.is_scored) == len(reply.engine_logprobs) == 6
    batch = PackedBatch.of_groups([packed], torch.device("cpu"))
    assert sorted(batch.target_M[torch.from_numpy(batch.reply_M) == 0].tolist()) == sorted(ids.tolist())
    model = load_model(model_dir)
    scores = score_reply(model, packed.prompt_ids, reply.token_ids, 1.0)
    assert len(scores) == 6
    assert bool((scores < 0.0).all())


def test_tok_2_a_stream_one_element_short_masks_the_rollout(tmp_path: Path) -> None:
    """Incident: as above; streams of one reply had different lengths, and nothing said so."""
    tokenizer = Tokenizer.load(make_model(tmp_path))

    def cut_at_0(request: GenerationRequest, completion: Completion) -> Completion:
        ids = completion.token_ids.tolist()
        length = ids.index(0) if 0 in ids else len(ids)
        return replace(completion, logprobs=completion.logprobs[:length])

    engine = TamperedEngine(DummyEngine(tokenizer, ["no!no", "yes", "no"]), tamper=cut_at_0)
    group = attempt(engine, tokenizer, 3)
    failure = group.rollouts[0].outcome.failure
    assert failure is not None
    assert failure.kind == "LengthMismatch"
    assert "6 token ids and 2 log-probabilities" in failure.detail
    (packed,) = pack(group)
    assert [tokenizer.decode(reply.token_ids[:-1]) for reply in packed.replies] == ["yes", "no"]


def test_tok_2_no_id_is_a_pad_because_there_are_none(tmp_path: Path) -> None:
    """Incident: as above. The row that is computed holds prompts and replies, and nothing between."""
    tokenizer = Tokenizer.load(make_model(tmp_path))
    (packed,) = pack(attempt(DummyEngine(tokenizer, ["yes", "no! no!"]), tokenizer, 2))
    batch = PackedBatch.of_groups([packed], torch.device("cpu"))
    parts = [packed.prompt_ids, *(reply.token_ids[:-1] for reply in packed.replies)]
    assert batch.token_ids_N.tolist() == np.concatenate(parts).tolist()


def test_tok_4_a_reply_that_ends_by_itself_is_trained_as_scored(tmp_path: Path) -> None:
    """Incident: what was trained was not what was scored, and no terminator followed."""
    tokenizer = Tokenizer.load(make_model(tmp_path))
    group = attempt(DummyEngine(tokenizer, ["yes", "no"]), tokenizer, 2)
    (packed,) = pack(group)
    for rollout, reply in zip(group.rollouts, packed.replies, strict=True):
        assert rollout.reply is not None
        assert tokenizer.decode(reply.token_ids[:-1]) == rollout.reply.text
        assert int(reply.token_ids[-1]) == tokenizer.eos_id
        assert reply.is_scored.all()


def test_tok_4_a_stop_string_is_not_scored_and_trained_as_sampled(tmp_path: Path) -> None:
    """Incident: as above, where a stop string ended the reply.

    Every sampled token keeps its own log-probability and credit: leaving out the sampled stop string, or
    adding a terminator that was never sampled, would train on what no policy did. What earns the
    reward is the text before it, and whatever would have come after is not there.
    """
    tokenizer = Tokenizer.load(make_model(tmp_path))
    group = attempt(DummyEngine(tokenizer, ["yes\nQ: and more", "no"]), tokenizer, 2)
    rollout = group.rollouts[0]
    assert rollout.reply is not None
    assert (rollout.reply.text, rollout.outcome.reward) == ("yes", 1.0)
    assert rollout.reply.finish_reason is FinishReason.STOP_STRING
    (packed,) = pack(group)
    assert tokenizer.decode(packed.replies[0].token_ids) == "yes\nQ:"
    assert packed.replies[0].is_scored.all()
    assert tokenizer.eos_id not in packed.replies[0].token_ids
