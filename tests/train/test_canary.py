"""The weight canary: an engine that says it took new weights and did not is named."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from strop.cluster import Roles
from strop.engine import (
    Completion,
    GenerationRequest,
    ReplyScore,
    WeightReceipt,
    WeightTransport,
    WeightUpdate,
)
from strop.engine.native import NativeEngine
from strop.engine.pool import EnginePool, ReplicaCause
from strop.errors import EngineError, WeightMismatch
from strop.policy.language_model import LanguageModel
from strop.rollout import FloatArray, IntArray
from strop.train import EvalSummary
from strop.train.publishing import CanaryFinding, CanaryScores, WeightCanary, find_fault
from tests.engine.held import Desk, HeldEngine
from tests.fixtures.apart import ApartPlacement
from tests.fixtures.spell import PaysAlways
from tests.fixtures.tiny_run import Composition, new_run, summary, tiny_spec

IDS = np.arange(1, 9, dtype=np.int32)
OLD = np.linspace(-4.0, -0.5, 8, dtype=np.float32)


def shifted(values: FloatArray, nats: float) -> FloatArray:
    """Shift values up and down in turn, so that a mean of signed differences would be 0."""
    return (values + nats * np.where(np.arange(8) % 2, 1, -1)).astype(np.float32)


NEW = shifted(OLD, 0.5)
NEAR = CanaryScores(learner_T=OLD, engine_T=shifted(OLD, 0.02))
NEARER = CanaryScores(learner_T=OLD, engine_T=shifted(OLD, 0.005))


@pytest.mark.parametrize(
    ("engine", "learner", "last", "named"),
    [
        (shifted(NEW, 0.03), NEW, None, None),
        (shifted(NEW, 0.03), NEW, NEAR, None),
        *((shifted(OLD, nats), OLD, None, "at most 0.04") for nats in (0.05, float("nan"), float("inf"))),
        # An update far below the tolerance, as at small learning rates in bf16.
        (NEAR.engine_T, shifted(OLD, 1e-4), NEAR, "did not change at all while .* moved by 0.0001 nats"),
        (shifted(NEAR.engine_T, 1e-4), shifted(OLD, 1e-4), NEAR, None),
        # Where the learner's are equal too, nothing follows: a resumed run publishes what was served.
        (NEAR.engine_T, OLD, NEAR, None),
        # The gap was 0.005; the learner moved by 0.03, still within the tolerance of 0.04.
        (shifted(OLD, 0.004), shifted(OLD, 0.03), NEARER, "nearer .* which moved by 0.03 nats"),
        (shifted(OLD, 0.026), shifted(OLD, 0.03), NEARER, None),
        # A move of 0.006 is not clear beside a gap of 0.005.
        (shifted(OLD, 0.001), shifted(OLD, 0.006), NEARER, None),
    ],
)
def test_an_engine_with_other_weights_has_a_fault(
    engine: FloatArray, learner: FloatArray, last: CanaryScores | None, named: str | None
) -> None:
    def find(policy_version: int) -> str | None:
        score = ReplyScore(logprobs=engine, policy_version=policy_version)
        return find_fault(score, version=2, learner_T=learner, last=last, tolerance_nats=0.04)

    found = find(2)
    assert (found is None) is (named is None)
    assert re.search(named or "", found or "")
    assert "version 1 after version 2" in (find(1) or "")


class ScoringEngine(HeldEngine):
    """Scores as the weights that it really has say."""

    def __init__(self, *, keeps_old_weights: bool = False) -> None:
        super().__init__()
        self.keeps_old_weights = keeps_old_weights
        self.weights = 0

    async def update(self, update: WeightUpdate) -> Any:
        receipt = await super().update(update)
        if not self.keeps_old_weights:
            self.weights = update.version
        return receipt

    async def score(self, prompt_ids: Any, reply_ids: Any, temperature: float) -> ReplyScore:
        if self.failure is not None:
            raise self.failure
        return ReplyScore(logprobs=shifted(OLD, 0.01 * self.weights), policy_version=self.version)


def fleet(*engines: ScoringEngine) -> Desk:
    desk = Desk(len(engines))
    desk.engines[:] = engines
    for replica, engine in zip(desk.pool._replicas.values(), engines, strict=True):
        replica.engine = engine
    return desk


async def publish(desk: Desk, canary: WeightCanary, version: int) -> list[CanaryFinding]:
    await desk.pool.update(WeightUpdate(version=version, digest="d", transport=WeightTransport.SHARED))
    return await canary.check(desk.pool, version, shifted(OLD, 0.01 * version))


async def test_smp_6_a_replica_that_silently_keeps_old_weights_is_named_and_gets_no_request() -> None:
    """Incident: agent runs sampled base weights throughout because the adapter could not be loaded."""
    desk = fleet(ScoringEngine(), ScoringEngine())
    canary = WeightCanary(IDS, IDS, tolerance_nats=0.04)
    assert await publish(desk, canary, 1) == []
    # Its receipt names the new version and digest all the same.
    desk.engines[1].keeps_old_weights = True  # type: ignore[attr-defined]
    findings = await publish(desk, canary, 2)
    assert [desk.pool.serves(name) for name in ("e0", "e1")] == [True, False]
    desk.engines[1].keeps_old_weights = False  # type: ignore[attr-defined]
    await publish(desk, canary, 3)
    await asyncio.sleep(0)
    assert await publish(desk, canary, 4) == []
    assert [desk.pool.serves(name) for name in ("e0", "e1")] == [True, True]
    (finding,) = findings
    assert finding.replica == "e1"
    assert finding.detail == (
        "weight_canary: its scores did not change at all while the learner's moved by 0.01 nats"
    )
    assert desk.causes == [("e1", ReplicaCause.CANARY), ("e1", ReplicaCause.BACK)]


async def test_a_replica_that_cannot_score_is_unproven() -> None:
    desk = fleet(ScoringEngine(), ScoringEngine())
    desk.engines[0].failure = EngineError("out of memory")
    canary = WeightCanary(IDS, IDS, tolerance_nats=0.04)
    assert await publish(desk, canary, 1) == []
    desk.engines[1].failure = EngineError("out of memory")
    with pytest.raises(EngineError, match="none of 2 engines is left"):
        await canary.check(desk.pool, 1, OLD)
    assert desk.causes == [("e0", ReplicaCause.UNPROVEN), ("e1", ReplicaCause.UNPROVEN)]


# Engines serve what the learner has made wherever that counts, and what they acknowledge is compared.


def test_an_evaluation_that_is_due_is_one_of_the_weights_of_its_step(
    tmp_path: Path, tiny_model_dir: Path
) -> None:
    train = {"steps": 5, "max_staleness": 4}
    spec = tiny_spec(train=train, eval={"every": 2}, placement={"kind": "ray"})
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
    spec = tiny_spec(train={"steps": 2}, algorithm=drop, placement={"kind": "ray"})
    placement = ApartPlacement(spec, tiny_model_dir, tmp_path / "weights")
    sent: list[int] = []
    made = Composition(spec, tiny_model_dir, new_run(tmp_path), placement=placement, task=PaysAlways())
    made.run(lambda roles: replace(roles, engine=Watched(roles.engine, sent)))
    assert [line["policy_version"] for line in made.notes.steps] == [0, 0]
    assert sent == [0]


@dataclass
class Watched:
    """An engine of which is noted which versions it was sent, and whose acknowledgement may be changed."""

    engine: Any
    sent: list[int]
    change: dict[str, Any] = field(default_factory=dict)

    async def update(self, update: WeightUpdate) -> WeightReceipt:
        receipt: WeightReceipt = await self.engine.update(update)
        self.sent.append(receipt.version)
        return replace(receipt, **self.change)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)


@pytest.mark.parametrize("change", [{"version": 7}, {"digest": "e" * 64}])
@pytest.mark.parametrize("is_apart", [True, False])
def test_a_receipt_for_anything_but_what_was_published_ends_the_run(
    tmp_path: Path, tiny_model_dir: Path, is_apart: bool, change: dict[str, Any]
) -> None:
    spec = tiny_spec(placement={"kind": "ray"} if is_apart else {})
    placement = ApartPlacement(spec, tiny_model_dir, tmp_path / "weights") if is_apart else None
    made = Composition(spec, tiny_model_dir, new_run(tmp_path), placement=placement)
    named = r"version 7 \(" if "version" in change else r"version 0 \(eeeeeeeeeeee\)"
    with pytest.raises(WeightMismatch, match=rf"{named}.*after version 0 \("):
        made.run(lambda roles: replace(roles, engine=Watched(roles.engine, [], change)))
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
    ("make_engine", "version", "every", "evaluated", "causes"),
    # An evaluation waits for the proof too; a checkpoint does so without one.
    [(FarOff, 0, 1, [], []), (FarOffLater, 1, 1, [0], ["parity"]), (FarOffLater, 1, None, [0], ["parity"])],
    ids=["gate", "later", "no evaluation"],
)
def test_nothing_is_made_of_weights_before_they_are_proven(
    tmp_path: Path,
    tiny_model_dir: Path,
    make_engine: type[NativeEngine],
    version: int,
    every: int | None,
    evaluated: list[int],
    causes: list[str],
) -> None:
    """No check of the gate, no evaluation and no checkpoint, although all are due."""
    spec = tiny_spec(train={"checkpoint_every": 1}, eval={"every": every}, placement={"kind": "ray"})
    placement = ApartPlacement(spec, tiny_model_dir, tmp_path / "weights", make_engine=make_engine)
    seen: list[int] = []

    async def evaluate(step: int, on_progress: Callable[[], None]) -> EvalSummary:
        seen.append(step)
        return summary(step)

    made = Composition(spec, tiny_model_dir, new_run(tmp_path), placement=placement, evaluate=evaluate)
    with pytest.raises(WeightMismatch, match=rf"no engine serves version {version}: .* 1 nats"):
        made.run()
    assert seen == evaluated
    assert made.notes.causes("gate")[-1:] == causes
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
    spec = tiny_spec(train={"steps": 2}, placement={"kind": "ray"})
    placement = ApartPlacement(spec, tiny_model_dir, tmp_path / "weights")
    made = Composition(spec, tiny_model_dir, new_run(tmp_path), placement=placement)
    replicas: list[Forgetful] = []

    def pair(roles: Roles) -> Roles:
        replicas.append(Forgetful(tiny_model_dir, roles))
        return replace(roles, engine=EnginePool({"sound": roles.engine, "forgetful": replicas[0]}))

    made.run(pair)
    assert set(replicas[0].asked_at) == {0}
    alarms = [event for event in made.notes.events if event.cause == "weight_canary"]
    assert [(event.kind.value, event.detail.partition(":")[0]) for event in alarms] == [
        ("tripwire", "forgetful")
    ]
    assert alarms[0].step == 1, "the step whose weights were published, not that of the publication before"
    assert "weight_canary: its scores" in alarms[0].detail
    assert len(made.notes.steps) == 2
