"""Engines serve what the learner has made wherever that counts, and what they acknowledge is compared."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from strop.cluster import Roles
from strop.engine import Completion, GenerationRequest, WeightReceipt, WeightUpdate
from strop.engine.contract import ReplyScore
from strop.engine.native import NativeEngine
from strop.engine.router import Router
from strop.errors import WeightMismatch
from strop.policy.language_model import LanguageModel
from strop.rollout import IntArray
from strop.train import EvalSummary
from tests.fixtures.apart import ApartPlacement
from tests.fixtures.spell import PaysAlways
from tests.fixtures.tiny_run import Composition, new_run, summary, tiny_spec


def test_an_evaluation_that_is_due_is_one_of_the_weights_of_its_step(
    tmp_path: Path, tiny_model_dir: Path
) -> None:
    train = {"steps": 5, "max_staleness": 4}
    spec = tiny_spec(train=train, eval={"every": 2}, placement={"kind": "process"})
    placement = ApartPlacement(spec, tiny_model_dir, tmp_path / "weights")
    served: dict[int, int] = {}
    sent: list[int] = []

    async def evaluate(step: int, on_progress: Callable[[], None]) -> EvalSummary:
        served[step] = sent[-1]
        return summary(step)

    made = Composition(spec, tiny_model_dir, new_run(tmp_path), placement=placement, evaluate=evaluate)
    made.run(lambda roles: replace(roles, engine=Watched(roles.engine, sent)))
    assert served == {0: 0, 2: 2, 4: 4, 5: 5}
    assert sent == [0, 1, 2, 3, 4, 5]


def test_weights_that_a_step_did_not_move_are_not_sent_again(tmp_path: Path, tiny_model_dir: Path) -> None:
    """And what is sampled next is sampled all the same: the engine serves what the step has made."""
    drop = {"zero_variance": "drop"}
    spec = tiny_spec(train={"steps": 2}, algorithm=drop, placement={"kind": "process"})
    placement = ApartPlacement(spec, tiny_model_dir, tmp_path / "weights")
    sent: list[int] = []
    made = Composition(spec, tiny_model_dir, new_run(tmp_path), placement=placement, task=PaysAlways())
    made.run(lambda roles: replace(roles, engine=Watched(roles.engine, sent)))
    assert [line["policy_version"] for line in made.notes.steps] == [0, 0]
    assert sent == [0]


@dataclass
class Watched:
    """An engine of which is noted which versions it was sent."""

    engine: Any
    sent: list[int]

    async def update(self, update: WeightUpdate) -> WeightReceipt:
        receipt: WeightReceipt = await self.engine.update(update)
        self.sent.append(receipt.version)
        return receipt

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)


@dataclass
class Misreporting:
    """An engine that acknowledges something else than it was sent."""

    engine: Any
    change: dict[str, Any]

    async def update(self, update: WeightUpdate) -> WeightReceipt:
        receipt: WeightReceipt = await self.engine.update(update)
        return replace(receipt, **self.change)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)


@pytest.mark.parametrize("change", [{"version": 7}, {"digest": "e" * 64}])
@pytest.mark.parametrize("is_apart", [True, False])
def test_a_receipt_for_anything_but_what_was_published_ends_the_run(
    tmp_path: Path, tiny_model_dir: Path, is_apart: bool, change: dict[str, Any]
) -> None:
    spec = tiny_spec(placement={"kind": "process"} if is_apart else {})
    placement = ApartPlacement(spec, tiny_model_dir, tmp_path / "weights") if is_apart else None
    made = Composition(spec, tiny_model_dir, new_run(tmp_path), placement=placement)
    named = r"version 7 \(" if "version" in change else r"version 0 \(eeeeeeeeeeee\)"
    with pytest.raises(
        WeightMismatch, match=rf"the engine serves {named}.*after version 0 \(.* was published"
    ):
        made.run(lambda roles: replace(roles, engine=Misreporting(roles.engine, change)))
    assert made.notes.steps == []


class FarOff(NativeEngine):
    """Scores as no engine of these weights does, from the version on that a test says."""

    from_version = 0

    async def score(self, prompt_ids: IntArray, reply_ids: IntArray, temperature: float) -> ReplyScore:
        found = await super().score(prompt_ids, reply_ids, temperature)
        return replace(found, logprobs=found.logprobs - (self.version >= self.from_version))


class FarOffLater(FarOff):
    """The same, once it has been sent something."""

    from_version = 1


@pytest.mark.parametrize(
    ("make_engine", "version", "evaluated", "causes"),
    [(FarOff, 0, [], []), (FarOffLater, 1, [0], ["parity"])],
    ids=["gate", "later"],
)
def test_nothing_is_made_of_weights_before_they_are_proven(
    tmp_path: Path,
    tiny_model_dir: Path,
    make_engine: type[NativeEngine],
    version: int,
    evaluated: list[int],
    causes: list[str],
) -> None:
    """No check of the gate, no evaluation and no checkpoint, although all are due."""
    spec = tiny_spec(train={"checkpoint_every": 1}, eval={"every": 1}, placement={"kind": "process"})
    placement = ApartPlacement(spec, tiny_model_dir, tmp_path / "weights", make_engine=make_engine)
    seen: list[int] = []

    async def evaluate(step: int, on_progress: Callable[[], None]) -> EvalSummary:
        seen.append(step)
        return summary(step)

    made = Composition(spec, tiny_model_dir, new_run(tmp_path), placement=placement, evaluate=evaluate)
    with pytest.raises(
        WeightMismatch, match=rf"no engine serves version {version}: .* 1 nats from the learner's on average"
    ):
        made.run()
    assert seen == evaluated
    assert made.notes.causes("gate")[-1:] == causes
    assert made.run_dir.checkpoint_steps() == []


def test_no_checkpoint_follows_weights_that_are_not_proven(tmp_path: Path, tiny_model_dir: Path) -> None:
    """Without an evaluation, which would have waited for the proof."""
    spec = tiny_spec(train={"checkpoint_every": 1}, placement={"kind": "process"})
    placement = ApartPlacement(spec, tiny_model_dir, tmp_path / "weights", make_engine=FarOffLater)
    made = Composition(spec, tiny_model_dir, new_run(tmp_path), placement=placement)
    with pytest.raises(WeightMismatch, match="no engine serves version 1"):
        made.run()
    assert made.run_dir.checkpoint_steps() == []


class Forgetful(NativeEngine):
    """Acknowledges the first weights that a step has made, and goes on with those before; notes who asks."""

    def __init__(self, model_dir: Path, roles: Roles) -> None:
        super().__init__(LanguageModel.load(model_dir, dtype=torch.float32), roles.tokenizer)
        self.asked_at: list[int] = []

    def _load(self, update: WeightUpdate) -> None:
        if update.version != 1:
            super()._load(update)

    async def generate(self, request: GenerationRequest) -> Completion:
        self.asked_at.append(self.version)
        return await super().generate(request)


def test_a_replica_samples_nothing_before_it_has_shown_what_it_computes_with(
    tmp_path: Path, tiny_model_dir: Path
) -> None:
    spec = tiny_spec(train={"steps": 2}, placement={"kind": "process"})
    placement = ApartPlacement(spec, tiny_model_dir, tmp_path / "weights")
    made = Composition(spec, tiny_model_dir, new_run(tmp_path), placement=placement)
    replicas: list[Forgetful] = []

    def pair(roles: Roles) -> Roles:
        replicas.append(Forgetful(tiny_model_dir, roles))
        return replace(roles, engine=Router({"sound": roles.engine, "forgetful": replicas[0]}))

    made.run(pair)
    assert set(replicas[0].asked_at) == {0}
    alarms = [event for event in made.notes.events if event.cause == "weight_canary"]
    assert [(event.kind.value, event.detail.partition(":")[0]) for event in alarms] == [
        ("tripwire", "forgetful")
    ]
    assert alarms[0].step == 1, "the step whose weights were published, not that of the publication before"
    assert "weight_canary: its scores" in alarms[0].detail
    assert len(made.notes.steps) == 2
