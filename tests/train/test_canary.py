"""The weight canary: an engine that says it took new weights and did not is named."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from strop.engine import ReplyScore, WeightTransport, WeightUpdate
from strop.engine.router import ReplicaCause
from strop.errors import EngineError, WeightMismatch
from strop.rollout import FloatArray
from strop.train.publishing import CanaryFinding, CanaryScores, WeightCanary, find_fault
from tests.engine.held import Desk, HeldEngine

IDS = np.arange(1, 9, dtype=np.int32)
OLD = np.linspace(-4.0, -0.5, 8, dtype=np.float32)


def fault(
    engine: FloatArray, learner: FloatArray, *, last: CanaryScores | None = None, version: int = 2
) -> str | None:
    return find_fault(
        ReplyScore(logprobs=engine, policy_version=version),
        version=2,
        learner_T=learner,
        last=last,
        tolerance_nats=0.04,
    )


def shifted(values: FloatArray, nats: float) -> FloatArray:
    """Shift values up and down in turn, so that a mean of signed differences would be 0."""
    return (values + nats * np.where(np.arange(8) % 2, 1, -1)).astype(np.float32)


def test_an_engine_that_scores_as_the_learner_has_no_fault() -> None:
    new = shifted(OLD, 0.5)
    last = CanaryScores(learner_T=OLD, engine_T=shifted(OLD, 0.02))
    assert fault(shifted(new, 0.03), new) is None
    assert fault(shifted(new, 0.03), new, last=last) is None


def test_an_answer_of_another_version_is_a_fault() -> None:
    assert fault(OLD, OLD, version=1) == "it answered under version 1 after version 2 was published"


@pytest.mark.parametrize("nats", [0.05, float("nan"), float("inf")])
def test_scores_beyond_the_tolerance_are_a_fault(nats: float) -> None:
    found = fault(shifted(OLD, nats), OLD)
    assert found is not None
    assert "nats from the learner's on average, at most 0.04 is allowed" in found


def test_scores_that_stay_equal_while_the_learner_moves_are_a_fault() -> None:
    # An update far below the tolerance, as at small learning rates in bf16.
    engine = shifted(OLD, 0.02)
    last = CanaryScores(learner_T=OLD, engine_T=engine)
    found = fault(engine, shifted(OLD, 1e-4), last=last)
    assert found == "its scores did not change at all while the learner's moved by 0.0001 nats"
    # Where the learner's are equal too, nothing follows: a resumed run publishes what was served.
    assert fault(engine, OLD, last=last) is None
    moved = shifted(engine, 1e-4)
    assert fault(moved, shifted(OLD, 1e-4), last=last) is None


def test_noise_does_not_hide_old_weights_where_the_move_is_clear() -> None:
    # The gap was 0.005; the learner moved by 0.03, still within the tolerance of 0.04.
    last = CanaryScores(learner_T=OLD, engine_T=shifted(OLD, 0.005))
    new = shifted(OLD, 0.03)
    found = fault(shifted(OLD, 0.004), new, last=last)
    assert found == "its scores are nearer to the learner's before the update, which moved by 0.03 nats"
    assert fault(shifted(new, -0.004), new, last=last) is None
    # A move of 0.006 is not clear beside a gap of 0.005.
    assert fault(shifted(OLD, 0.001), shifted(OLD, 0.006), last=last) is None


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
    for replica, engine in zip(desk.router._replicas, engines, strict=True):
        replica.engine = engine
    return desk


async def publish(desk: Desk, canary: WeightCanary, version: int) -> list[CanaryFinding]:
    await desk.router.update(WeightUpdate(version=version, digest="d", transport=WeightTransport.SHARED))
    return await canary.check(desk.router, version, shifted(OLD, 0.01 * version))


def test_smp_6_a_replica_that_silently_keeps_old_weights_is_named_and_gets_no_request() -> None:
    """Incident: agent runs sampled base weights throughout because the adapter could not be loaded."""

    async def act() -> tuple[Desk, list[CanaryFinding]]:
        desk = fleet(ScoringEngine(), ScoringEngine())
        canary = WeightCanary(IDS, IDS, tolerance_nats=0.04)
        assert await publish(desk, canary, 1) == []
        # Its receipt names the new version and digest all the same.
        desk.engines[1].keeps_old_weights = True  # type: ignore[attr-defined]
        findings = await publish(desk, canary, 2)
        assert desk.router.load.num_serving == 1
        desk.engines[1].keeps_old_weights = False  # type: ignore[attr-defined]
        await publish(desk, canary, 3)
        await asyncio.sleep(0)
        assert await publish(desk, canary, 4) == []
        assert desk.router.load.num_serving == 2
        return desk, findings

    desk, findings = asyncio.run(act())
    (finding,) = findings
    assert finding.replica == "e1"
    assert finding.detail == (
        "weight_canary: its scores did not change at all while the learner's moved by 0.01 nats"
    )
    assert desk.causes == [("e1", ReplicaCause.CANARY), ("e1", ReplicaCause.BACK)]


def test_smp_6_where_no_engine_serves_the_published_weights_the_run_ends() -> None:
    async def act() -> None:
        engine = ScoringEngine(keeps_old_weights=True)
        engine.version = 5
        # Half a nat away: the weights of five steps ago.
        await WeightCanary(IDS, IDS, tolerance_nats=0.04).check(engine, 5, shifted(OLD, 0.5))

    with pytest.raises(WeightMismatch, match=r"serves version 5: engine: weight_canary: .* 0\.5 nats"):
        asyncio.run(act())


def test_a_replica_that_cannot_score_is_unproven() -> None:
    async def act() -> Desk:
        desk = fleet(ScoringEngine(), ScoringEngine())
        desk.engines[0].failure = EngineError("out of memory")
        canary = WeightCanary(IDS, IDS, tolerance_nats=0.04)
        assert await publish(desk, canary, 1) == []
        desk.engines[1].failure = EngineError("out of memory")
        with pytest.raises(EngineError, match="none of 2 engines is left"):
            await canary.check(desk.router, 1, OLD)
        return desk

    assert asyncio.run(act()).causes == [("e0", ReplicaCause.UNPROVEN), ("e1", ReplicaCause.UNPROVEN)]
