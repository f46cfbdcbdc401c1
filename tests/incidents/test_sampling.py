"""Incidents of the group on sampling, by id; of sampling ahead too."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from strop.cluster import Roles
from strop.engine import (
    Completion,
    Engine,
    GenerationRequest,
    WeightReceipt,
    WeightTransport,
    WeightUpdate,
    stream_seed,
)
from strop.engine.native import NativeEngine
from strop.policy.language_model import LanguageModel
from strop.policy.weights import own_tensors, publish_tensors, weights_digest
from strop.record.rollouts import read_rollouts
from strop.rollout import Example, FinishReason, Outcome
from strop.tokenizer import Tokenizer
from strop.train.publishing import Publishing
from tests.engine.requests import ask
from tests.fixtures.spell import SpellTask
from tests.fixtures.tiny_run import ACCEPTED, Composition, new_run, tiny_spec
from tests.incidents.faulty_engines import TamperedEngine
from tests.train.test_asynchronous import NUM_STEPS, compose


@pytest.fixture
def tokenizer(tiny_model_dir: Path) -> Tokenizer:
    return Tokenizer.load(tiny_model_dir)


@pytest.fixture
def model(tiny_model_dir: Path) -> LanguageModel:
    return LanguageModel.load(tiny_model_dir, dtype=torch.float32)


def publish_other(model_dir: Path, path: Path, *, version: int, factor: float = 1.3) -> WeightUpdate:
    """Publish weights that are not those of the model directory."""
    other = LanguageModel.load(model_dir, dtype=torch.float32)
    for _, parameter in other.named_parameters():
        parameter.data.mul_(factor)
    return by_file(path, publish_tensors(own_tensors(other), path), version=version)


def by_file(path: Path, digest: str, *, version: int) -> WeightUpdate:
    return WeightUpdate(version=version, digest=digest, transport=WeightTransport.FILE, path=str(path))


def test_smp_6_overlapping_updates_are_applied_one_after_the_other(
    model: LanguageModel, tokenizer: Tokenizer, tiny_model_dir: Path, tmp_path: Path
) -> None:
    """Incident: overlapping updates left a mixture of two versions."""
    updates = [
        publish_other(tiny_model_dir, tmp_path / f"w{version}", version=version, factor=1 + version / 10)
        for version in (1, 2, 3)
    ]
    engine, request = NativeEngine(model, tokenizer), ask(tokenizer)

    async def act() -> tuple[list[WeightReceipt], Completion]:
        speaking = asyncio.create_task(engine.generate(request))
        await asyncio.sleep(0)
        receipts = await asyncio.gather(*map(engine.update, updates))
        await speaking
        return receipts, await engine.generate(request)

    receipts, reply = asyncio.run(act())
    assert [(receipt.version, receipt.digest) for receipt in receipts] == [
        (update.version, update.digest) for update in updates
    ]
    assert weights_digest(model) == updates[-1].digest
    assert reply.policy_version == 3


def test_smp_1_every_reply_of_a_run_has_a_seed_of_its_own() -> None:
    """Incident: a constant seed in the sampling parameters; 83 rollouts held 3 distinct completions."""
    places = itertools.product((0, 1), ("a", "b"), (0, 1), range(16), (0, 1))
    assert len({stream_seed(*place) for place in places}) == 2 * 2 * 2 * 16 * 2


def test_smp_1_a_constant_seed_raises_an_alarm_in_the_first_step(
    tmp_path: Path, tiny_model_dir: Path
) -> None:
    """Incident: 83 rollouts held 3 distinct completions, and nothing counted them."""
    # The gate finds that too: what one stream draws is not drawn from the distribution.
    accepted = f"{ACCEPTED}; parity: to see what the step says"
    spec = tiny_spec(train={"group_size": 32, "steps": 1, "accept": accepted})
    made = Composition(spec, tiny_model_dir, new_run(tmp_path))
    made.run(lambda roles: replace(roles, engine=TamperedEngine(roles.engine, seed=7)))
    assert "duplicate_completions" in made.notes.causes("tripwire")
    # 3 groups of 32 with one reply each.
    assert made.notes.steps[0]["duplicate_frac"] == 1.0


def test_smp_2_replies_cut_at_4_tokens_raise_an_alarm_in_step_1(tmp_path: Path, tiny_model_dir: Path) -> None:
    """Incident: replies cut at 128 tokens were right in 0.3 % of cases, ended ones in 35.6 %."""
    task = SpellTask(max_reply_tokens=4, stop_strings=())
    made = Composition(tiny_spec(train={"steps": 1}), tiny_model_dir, new_run(tmp_path), task=task)
    made.run()
    assert "truncation" in made.notes.causes("tripwire")
    cut = [
        rollout
        for rollout in read_rollouts(made.run_dir.rollouts_path(1))
        if rollout.reply is not None and rollout.reply.finish_reason is FinishReason.LENGTH
    ]
    assert len(cut) > 6
    assert {(rollout.num_sampled_tokens, rollout.outcome.truncated) for rollout in cut} == {(4, True)}


class AbortsSome:
    """An engine that gives up on every third reply after 5 tokens, as one does while weights move."""

    def __init__(self, engine: Engine, num_times: int) -> None:
        """`num_times`: how often it gives up on one reply."""
        self._engine = engine
        self._num_times = num_times
        self._places: dict[int, int] = {}
        self._times_asked: Counter[int] = Counter()
        self.texts: list[str] = []

    async def generate(self, request: GenerationRequest) -> Completion:
        # What is asked again has the same seed.
        place = self._places.setdefault(request.seed, len(self._places))
        self._times_asked[request.seed] += 1
        is_aborted = place % 3 == 0 and self._times_asked[request.seed] <= self._num_times
        completion = await self._engine.generate(request)
        if not is_aborted:
            return completion
        self.texts.append("cut short")
        return replace(
            completion,
            token_ids=completion.token_ids[:5],
            logprobs=completion.logprobs[:5],
            text="cut short",
            finish_reason=FinishReason.ABORT,
        )

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)


class Listening(SpellTask):
    """Notes what it is asked to judge."""

    def __init__(self) -> None:
        super().__init__()
        self.judged: list[str] = []

    async def verify(self, example: Example, text: str) -> Outcome:
        self.judged.append(text)
        return await super().verify(example, text)


def test_smp_3_an_aborted_reply_is_never_judged_and_its_fate_is_recorded(
    tmp_path: Path, tiny_model_dir: Path
) -> None:
    """Incident: replies cut at a weight update were accepted if they had one token."""
    task = Listening()
    made = Composition(tiny_spec(train={"steps": 2}), tiny_model_dir, new_run(tmp_path), task=task)
    made.run(lambda roles: replace(roles, engine=AbortsSome(roles.engine, num_times=9)))
    assert "cut short" not in task.judged
    for line in made.notes.steps:
        rollouts = read_rollouts(made.run_dir.rollouts_path(int(line["step"])))
        aborted = [r for r in rollouts if r.reply is not None and r.reply.finish_reason is FinishReason.ABORT]
        assert len(aborted) == 4
        fates = {(r.outcome.failure.owner, r.outcome.failure.kind) for r in aborted if r.outcome.failure}
        assert fates == {("engine", "abort")}
        assert all(r.outcome.reward is None for r in aborted)
        # Out of the loss, and counted.
        kept = sum(r.num_sampled_tokens for r in rollouts if r not in aborted)
        assert line["num_scored_tokens"] == kept
        assert line["failed_frac"] == pytest.approx(4 / 12)
        assert line["refilled_frac"] == pytest.approx(4 / 12)
    assert made.notes.causes("tripwire") == ["verifier_errors"] * 2


def old_where_long(request: GenerationRequest, completion: Completion) -> Completion:
    """Say of a long reply that it is of weights far back, as of an engine that took that long for it."""
    is_late = len(completion.token_ids) > LATE_TOKENS
    return (
        replace(completion, policy_version=max(completion.policy_version - 3, 0)) if is_late else completion
    )


LATE_TOKENS = 10


@pytest.mark.parametrize("is_biased", [True, False])
def test_smp_7_evicting_what_takes_long_is_named(
    tmp_path: Path, tiny_model_dir: Path, is_biased: bool
) -> None:
    """Incident: batches of whatever ended first, and slow prompts evicted: short replies are trained on."""
    made = compose(tmp_path, tiny_model_dir)

    def delay(roles: Roles) -> Roles:
        return replace(roles, engine=TamperedEngine(roles.engine, tamper=old_where_long))

    made.run(delay if is_biased else None)
    alarms = [event for event in made.notes.events if event.cause == "selection_bias"]
    assert bool(alarms) == is_biased
    wasted = [line.get("wasted_token_frac", 0.0) for line in made.notes.steps]
    assert any(wasted) == is_biased
    if is_biased:
        assert "long replies come too late and are evicted" in alarms[0].detail
        assert min(line.get("used_length_ratio", 1.0) for line in made.notes.steps) < 0.9


@pytest.mark.parametrize(("steps", "ahead"), [(5, 1), (5, 3), (1, 2)])
def test_prc_2_a_run_ends_by_rule_where_fewer_steps_are_left_than_it_may_be_ahead(
    tmp_path: Path, tiny_model_dir: Path, steps: int, ahead: int
) -> None:
    """Incident: a partial batch at the end, or fewer steps than the lag, were waited for without end."""
    made = compose(tmp_path, tiny_model_dir, checkpoint_every=NUM_STEPS, steps=steps, max_staleness=ahead)
    made.run()
    assert [line["step"] for line in made.notes.steps] == list(range(1, steps + 1))
    assert made.notes.steps[-1].get("num_groups_ahead", 0) == 0
    assert made.run_dir.is_finished
    trained = [read_rollouts(path) for path in made.run_dir.rollouts_files()]
    assert [len(rollouts) for rollouts in trained] == [12] * steps


def test_prc_2_a_step_without_its_weights_ends_the_run_and_waits_for_nothing(
    tmp_path: Path, tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Incident: staleness 0, 8 prompts per step, weights synchronised every 16: each side waited."""
    publish = Publishing.publish

    async def publish_first(self: Publishing, step: int) -> None:
        if step == 0:
            await publish(self, step)

    monkeypatch.setattr(Publishing, "publish", publish_first)
    made = compose(tmp_path, tiny_model_dir, max_staleness=0, checkpoint_every=NUM_STEPS)
    with pytest.raises(AssertionError, match="weights"):
        made.run()
    assert np.isfinite(made.notes.steps[0]["loss"])
