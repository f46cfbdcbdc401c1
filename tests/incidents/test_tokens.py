"""Incidents of the group on tokens, each test named after the incident's id."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from strop.algorithm import ALGORITHMS
from strop.engine import Completion, Engine, GenerationRequest
from strop.environments import Action, SingleTurn, run_group, run_rollout
from strop.policy.packing import PackedBatch, PackedGroup, PackedReply
from strop.policy.scoring import score_replies
from strop.rollout import (
    Example,
    FinishReason,
    Group,
    Message,
    Outcome,
    Rollout,
    Split,
    Turn,
    make_example,
)
from strop.spec.train import TripwireSpec
from strop.tasks import Task, TaskLimits
from strop.tokenizer import Tokenizer
from strop.train.batch import build_batch, pack_reply
from strop.train.gate import check_terminator
from strop.train.measure import measure_rollouts
from strop.train.watch.tripwires import find_alarms
from tests.fixtures.builders import plan_for
from tests.fixtures.dummy_engine import DummyEngine, ScriptedReply
from tests.fixtures.scripted_environment import ScriptedEnvironment
from tests.incidents.faulty_engines import TamperedEngine, build_gate
from tests.policy.worlds import load_model, make_model

PAD_ID = 260
"""Pad token and terminator of the tiny tokenizer."""


class Question(Task):
    """One question whose reply may end at a stop string; right is 'yes'."""

    name = "question"
    version = "1"
    limits = TaskLimits(max_reply_tokens=16, stop_strings=("\nQ:",))

    def examples(self, split: Split) -> Sequence[Example]:
        return [make_example(self.name, {"question": "right?"}, "yes")]

    def render(self, example: Example) -> tuple[Message, ...]:
        return (Message(role="user", content="right?"),)

    async def verify(self, example: Example, text: str) -> Outcome:
        return Outcome(parts={"correct": float(text == "yes")})

    def gold_replies(self, example: Example) -> tuple[str, ...]:
        return ("yes",)


def attempt(engine: Engine, tokenizer: Tokenizer, num_rollouts: int, task: Question | None = None) -> Group:
    task = task or Question()
    plans = [
        plan_for(
            task.examples(Split.TRAIN)[0], max_reply_tokens=task.limits.max_reply_tokens, sample_index=index
        )
        for index in range(num_rollouts)
    ]
    return asyncio.run(run_group(partial(SingleTurn, task), engine, tokenizer, plans))


def pack(group: Group) -> list[PackedGroup]:
    return list(build_batch(ALGORITHMS["rloo"], [group], 16).groups)


def drop_pads(turns: Sequence[Turn], advantage: float, weight: float) -> PackedReply:
    """The fault of TOK-1: tokens whose id is the pad id are left out of the loss."""
    reply = pack_reply(turns, advantage, weight)
    is_scored = reply.is_scored & (reply.token_ids != PAD_ID)
    return replace(reply, is_scored=is_scored, engine_logprobs=reply.engine_logprobs[is_scored])


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
    scores = score_replies(model, packed.prompt_ids, [reply.token_ids], 1.0)[0]
    assert len(scores) == 6
    assert bool((scores < 0.0).all())


@pytest.mark.parametrize(
    ("stop", "said", "scored", "sampled"),
    [
        ("\nQ:", "yes\nQ: and more", "yes", "yes\nQ:"),
        ("\nQ:", "\nQ: what", "", "\nQ:"),
        # `the` is one token here: no token boundary stands before the stop string, nor behind it.
        ("h", "so then", "so t", "so the"),
    ],
)
def test_tok_4_a_stop_string_is_not_judged_and_is_trained_as_sampled(
    tmp_path: Path, stop: str, said: str, scored: str, sampled: str
) -> None:
    """Incident: what was trained was not what was scored, where a stop string ended the reply.

    Judged is the text before it. Its tokens were sampled, up to the one that completed it: without them
    the gradient would not be that of the expected reward. Nothing that was not sampled is scored.
    """
    tokenizer = Tokenizer.load(make_model(tmp_path))
    task = Question()
    task.limits = TaskLimits(max_reply_tokens=16, stop_strings=(stop,))
    group = attempt(DummyEngine(tokenizer, [said, "no"]), tokenizer, 2, task)
    rollout, other = group.rollouts
    assert rollout.reply is not None
    assert (rollout.reply.text, rollout.outcome.reward) == (scored, float(scored == "yes"))
    assert rollout.reply.finish_reason is FinishReason.STOP_STRING
    reply = pack_reply(rollout.turns, 1.0, 1.0)
    assert tokenizer.decode(reply.token_ids) == sampled
    assert reply.is_scored.all()
    assert len(reply.engine_logprobs) == rollout.num_sampled_tokens == len(reply.token_ids)
    # A reply that ended by itself sampled its terminator, and is trained on it.
    assert pack_reply(other.turns, 1.0, 1.0).is_scored.tolist() == [True, True, True]
    assert check_terminator(build_gate(tmp_path, DummyEngine(tokenizer, [])), [group]).is_passed


def drop_stop_string(
    tokenizer: Tokenizer, turns: Sequence[Turn], advantage: float, weight: float
) -> PackedReply:
    """What strop did once: the tokens of the stop string are left out."""
    num_kept = len(tokenizer.encode(turns[1].text))
    reply = pack_reply(turns, advantage, weight)
    is_scored = np.arange(len(reply.token_ids)) < num_kept
    return replace(reply, is_scored=is_scored, engine_logprobs=reply.engine_logprobs[:num_kept])


def add_terminator(
    tokenizer: Tokenizer, turns: Sequence[Turn], advantage: float, weight: float
) -> PackedReply:
    """Trains a terminator that nobody sampled."""
    reply = pack_reply(turns, advantage, weight)
    return replace(
        reply,
        token_ids=np.append(reply.token_ids, np.int32(tokenizer.eos_id)),
        is_scored=np.append(reply.is_scored, True),
        engine_logprobs=np.append(reply.engine_logprobs, np.float32(-1.0)),
    )


@pytest.mark.parametrize("builder", [drop_stop_string, add_terminator])
def test_tok_4_a_builder_that_trains_other_tokens_than_were_sampled_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, builder: Callable[..., PackedReply]
) -> None:
    """Incident: as above; the gate compares what is trained with what was sampled."""
    model_dir = make_model(tmp_path)
    tokenizer = Tokenizer.load(model_dir)
    engine = DummyEngine(tokenizer, ["yes\nQ: and", "\nQ:"])
    group = attempt(engine, tokenizer, 2)
    gate = build_gate(model_dir, engine)
    passed = check_terminator(gate, [group])
    assert passed.is_passed
    assert passed.detail.endswith("; 2 replies trained with the stop string that ended them")
    monkeypatch.setattr("strop.train.gate.pack_reply", partial(builder, tokenizer))
    check = check_terminator(gate, [group])
    assert not check.is_passed
    assert check.detail == "2 of 2 replies are trained on other tokens than were sampled"


def test_tok_4_an_engine_that_keeps_the_stop_string_to_itself_is_refused(tmp_path: Path) -> None:
    """Incident: as above; an engine that cuts ids like text leaves nothing to train the end with."""
    model_dir = make_model(tmp_path)
    tokenizer = Tokenizer.load(model_dir)

    def cut(request: GenerationRequest, completion: Completion) -> Completion:
        num_kept = len(tokenizer.encode(completion.text))
        return replace(
            completion, token_ids=completion.token_ids[:num_kept], logprobs=completion.logprobs[:num_kept]
        )

    engine = TamperedEngine(DummyEngine(tokenizer, ["yes\nQ:", "no\nQ:"]), tamper=cut)
    check = check_terminator(build_gate(model_dir, engine), [attempt(engine, tokenizer, 2)])
    assert not check.is_passed
    assert (
        "of 2 of 2 replies that a stop string ended the engine gives no token of that string" in check.detail
    )


def talk(tokenizer: Tokenizer, engine: Engine) -> Rollout:
    """Attempt a conversation of three turns; the first reply earns nothing, the last may."""
    questions = [(Message(role="user", content=text),) for text in ("a?", "b?", "c?")]

    def judge(example: Example, actions: tuple[Action, ...]) -> Outcome:
        return Outcome(parts={"correct": float(actions[-1].text == "yes")})

    world = ScriptedEnvironment(questions[0], questions[1:], judge, stop_strings=("\nQ:",))
    plan = plan_for(Question().examples(Split.TRAIN)[0], max_reply_tokens=16)
    return asyncio.run(run_rollout(world, engine, tokenizer, plan))


def pack_samples(rollout: Rollout) -> list[tuple[list[int], PackedReply]]:
    return [(turns[0].token_ids.tolist(), pack_reply(turns, 1.0, 1.0)) for turns in rollout.samples]


@dataclass
class Spoken:
    """Samples every word letter by letter, as no encoder would, and keeps what it was asked and said."""

    tokenizer: Tokenizer
    engine: DummyEngine
    asked: list[list[int]] = field(default_factory=list)
    said: list[list[int]] = field(default_factory=list)

    def __call__(self, request: GenerationRequest, completion: Completion) -> Completion:
        letters = [self.tokenizer.encode(letter) for letter in completion.text]
        ids = np.concatenate([*letters, completion.token_ids[-1:]]).astype(np.int32)
        self.asked.append(request.prompt_ids.tolist())
        self.said.append(ids.tolist())
        return replace(completion, token_ids=ids, logprobs=np.full(len(ids), -1.0, dtype=np.float32))


def test_tok_5_three_turns_are_trained_as_the_engine_saw_and_said_them(tmp_path: Path) -> None:
    """Incident: multi-turn text was rendered again; local ids matched the engine's in 0 of 28 turns.

    Decoding and encoding is unstable here: `as` and `the` come back as one token each.
    """
    tokenizer = Tokenizer.load(make_model(tmp_path))
    engine = DummyEngine(tokenizer, ["as", "the", "yes"])
    spoken = Spoken(tokenizer, engine)
    rollout = talk(tokenizer, TamperedEngine(engine, tamper=spoken))
    assert [len(tokenizer.encode(word)) for word in ("as", "the")] == [1, 1]
    assert [len(ids) for ids in spoken.said] == [3, 4, 4]  # Letters and a terminator.
    ((prompt_ids, reply),) = pack_samples(rollout)
    assert prompt_ids + reply.token_ids.tolist() == spoken.asked[-1] + spoken.said[-1]
    # Each turn extends what was asked and said before it.
    assert prompt_ids == spoken.asked[0]
    for earlier, said, later in zip(spoken.asked, spoken.said, spoken.asked[1:], strict=False):
        assert later[: len(earlier) + len(said)] == earlier + said
    assert reply.token_ids[reply.is_scored].tolist() == [token for ids in spoken.said for token in ids]
    metrics = measure_rollouts([Group(example=rollout.example, rollouts=(rollout,))])
    assert metrics["prefix_break_frac"] == 0.0
    assert find_alarms(TripwireSpec(), 1, metrics) == []


def test_tok_5_a_tampered_turn_begins_a_new_sample(tmp_path: Path) -> None:
    """Incident: as above; a boolean came back from the world's text as another word.

    The ids of the second reply no longer read as its text, so nothing proves what a third turn behind
    them would mean. What was sampled before is trained as it was; then a sample of its own begins.
    """
    tokenizer = Tokenizer.load(make_model(tmp_path))
    engine = DummyEngine(tokenizer, ["as", "true", "yes"])

    def round_trip(request: GenerationRequest, completion: Completion) -> Completion:
        return replace(completion, text=completion.text.replace("true", "True"))

    rollout = talk(tokenizer, TamperedEngine(engine, tamper=round_trip))
    assert [turn.role for turn in rollout.turns] == [
        *("prompt", "assistant", "prompt", "assistant"),
        *("restart", "assistant"),
    ]
    assert rollout.outcome.reward == 1.0
    asked = [request.prompt_ids.tolist() for request in engine.requests]
    (first_prompt, first), (second_prompt, second) = pack_samples(rollout)
    true_ids = [*tokenizer.encode("true"), tokenizer.eos_id]
    assert first_prompt + first.token_ids.tolist() == asked[1] + true_ids
    assert second_prompt == asked[2]
    assert second.token_ids.tolist() == [*tokenizer.encode("yes"), tokenizer.eos_id]
    assert "True" in tokenizer.decode(asked[2])
    # One of the two turns that answer a reply is broken, and that is an alarm.
    metrics = measure_rollouts([Group(example=rollout.example, rollouts=(rollout,))])
    assert metrics["prefix_break_frac"] == 0.5
    (alarm,) = find_alarms(TripwireSpec(), 1, metrics)
    assert (alarm.cause, alarm.kind.value) == ("prefix_break", "tripwire")
    assert "prefix_break_frac=0.5 of the turns" in alarm.detail


def test_tok_5_both_samples_are_trained_with_the_credit_of_one_rollout(tmp_path: Path) -> None:
    """Incident: as above. The boundary changes which ids stand together, not who earns what."""
    tokenizer = Tokenizer.load(make_model(tmp_path))

    def round_trip(request: GenerationRequest, completion: Completion) -> Completion:
        return replace(completion, text=completion.text.replace("true", "True"))

    rollouts = [
        talk(tokenizer, TamperedEngine(DummyEngine(tokenizer, replies), tamper=round_trip))
        for replies in (["as", "true", "yes"], ["as", "the", "no"])
    ]
    group = Group(example=rollouts[0].example, rollouts=tuple(rollouts))
    batch = build_batch(ALGORITHMS["rloo"], [group], 16)
    # The rollouts share the first prompt; the new sample has its own.
    assert [len(packed.replies) for packed in batch.groups] == [2, 1]
    replies = [reply for packed in batch.groups for reply in packed.replies]
    assert sorted(reply.advantage for reply in replies) == [-1.0, 1.0, 1.0]
    assert len({reply.weight for reply in replies}) == 1
    assert sum(int(reply.is_scored.sum()) for reply in replies) == batch.credit.num_counted_tokens


def test_tok_5_after_a_stop_string_the_next_turn_follows_a_terminator(tmp_path: Path) -> None:
    """Incident: as above; what was sampled stays, the stop string too, and a terminator closes the turn."""
    tokenizer = Tokenizer.load(make_model(tmp_path))
    engine = DummyEngine(tokenizer, ["as\nQ: no", "yes", "no"])
    rollout = talk(tokenizer, engine)
    ((prompt_ids, reply),) = pack_samples(rollout)
    first, second = (request.prompt_ids.tolist() for request in engine.requests[:2])
    said = tokenizer.encode("as\nQ:").tolist()
    assert second[: len(first) + len(said) + 1] == [*first, *said, tokenizer.eos_id]
    assert (prompt_ids + reply.token_ids.tolist())[: len(second)] == second
    # `as` and its stop string, then `yes` and `no` with their terminators; the one between was not sampled.
    assert int(reply.is_scored.sum()) == len(said) + 4 + 3
    assert measure_rollouts([Group(example=rollout.example, rollouts=(rollout,))])["prefix_break_frac"] == 0.0
