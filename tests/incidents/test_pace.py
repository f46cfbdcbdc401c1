"""Incidents of silent slowness: nothing is wrong but the time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from strop.cluster import Roles
from strop.engine import Completion, Engine, GenerationRequest
from strop.engine.contract import ReplyScore, WeightReceipt, WeightUpdate
from strop.plan.planning import predict_run
from strop.policy.learner import Term
from strop.policy.optimizer import StepPlan, StepReport
from strop.rollout import IntArray
from strop.train.watch import process
from tests.fixtures.spell import SpellTask
from tests.fixtures.tiny_run import Composition, new_run, tiny_spec
from tests.record.test_prediction import PLANNED

DELAY_S = 0.4


@dataclass
class SlowEngine:
    """An engine on the wrong device: right in all it says, and late."""

    engine: Engine
    delay_s: float = DELAY_S

    async def generate(self, request: GenerationRequest) -> Completion:
        await asyncio.sleep(self.delay_s)
        return await self.engine.generate(request)

    async def score(self, prompt_ids: IntArray, reply_ids: IntArray, temperature: float) -> ReplyScore:
        return await self.engine.score(prompt_ids, reply_ids, temperature)

    async def update(self, update: WeightUpdate) -> WeightReceipt:
        return await self.engine.update(update)

    async def close(self) -> None:
        await self.engine.close()


def slow_down(roles: Roles) -> Roles:
    return replace(roles, engine=SlowEngine(roles.engine))


@pytest.mark.parametrize("is_slow", [True, False])
def test_prc_9_a_stage_that_is_slower_than_planned_is_named(
    tmp_path: Path, tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch, is_slow: bool
) -> None:
    """Incident: a model loaded on the CPU took 470 s for a step of 85 s, and nothing said so."""
    # Seconds of the incident would be seconds of this test: here tenths of them count.
    monkeypatch.setattr(process, "MIN_EXCESS_S", 0.1)
    planned = (
        {"generate": DELAY_S / 20, "learn": 60.0, "sync": 60.0}
        if is_slow
        else dict.fromkeys(("generate", "learn", "sync"), 60.0)
    )
    run = Composition(
        tiny_spec(train={"steps": 5}),
        tiny_model_dir,
        new_run(tmp_path),
        prediction=replace(PLANNED, seconds=planned, num_reply_tokens=1e6, num_positions=1e6),
    )
    run.run(slow_down)
    found = [event for event in run.notes.events if event.cause == "slower_than_plan"]
    if not is_slow:
        assert found == []
        return
    assert [event.step for event in found] == [4, 5]
    assert all(event.detail.startswith("generate took ") for event in found)
    assert "look on which device the engine computes" in found[0].detail


LATE_S = 2.2
"""A little longer than the shortest excess that counts, for each step."""


@dataclass
class Fault:
    """What makes a stage slow. `calls` counts what it was asked for."""

    calls: int = 0
    seen: set[int] = field(default_factory=set)

    def engine(self, engine: Engine) -> Engine:
        return engine

    def delay_s(self, terms: Sequence[Term]) -> float:
        """Seconds that a step of the learner takes longer."""
        return 0.0


class WrongDevice(Fault):
    """Every reply is computed where it takes longer."""

    def engine(self, engine: Engine) -> Engine:
        return SlowEngine(engine, LATE_S)


class WaitsAtEveryToken(Fault):
    """The learner asks the device for one value at a time: `.item()` in a loop over log-probabilities."""

    def delay_s(self, terms: Sequence[Term]) -> float:
        num_tokens = sum(
            len(reply.token_ids) for term in terms for group in term.groups for reply in group.replies
        )
        self.calls += num_tokens
        # So long for each of some hundred tokens that it is more than counts.
        return num_tokens * LATE_S / 80


class CompilesEveryLength(Fault):
    """The learner compiles anew for each number of positions that it has not seen."""

    def delay_s(self, terms: Sequence[Term]) -> float:
        num = sum(
            len(group.prompt_ids) + len(r.token_ids)
            for t in terms
            for group in t.groups
            for r in group.replies
        )
        is_new = num not in self.seen
        self.seen.add(num)
        return LATE_S if is_new else 0.0


def with_fault(fault: Fault) -> Callable[[Roles], Roles]:
    """Put a fault into a run's engine or learner."""

    def change(roles: Roles) -> Roles:
        learner, step_terms = roles.learner, roles.learner.step_terms

        async def late(terms: Sequence[Term], plan: StepPlan | None = None) -> StepReport:
            await asyncio.sleep(fault.delay_s(terms))
            return await step_terms(terms, plan)

        learner.step_terms = late  # type: ignore[method-assign]
        return replace(roles, learner=learner, engine=fault.engine(roles.engine))

    return change


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "stage"),
    [(WrongDevice(), "generate"), (WaitsAtEveryToken(), "learn"), (CompilesEveryLength(), "learn")],
    ids=lambda value: type(value).__name__ if isinstance(value, Fault) else None,
)
def test_prc_9_what_slows_a_stage_is_named_beside_the_plan_of_this_machine(
    tmp_path: Path, tiny_model_dir: Path, fault: Fault, stage: str
) -> None:
    """Incident: the wrong device, a wait at every token, a compilation for every length: nothing said so."""
    task = SpellTask()
    spec = tiny_spec(train={"steps": 4})
    plan = predict_run(spec, task, tiny_model_dir, None, cache_dir=tmp_path / "cache")
    assert plan is not None
    run = Composition(spec, tiny_model_dir, new_run(tmp_path), task=task, prediction=plan)
    run.run(with_fault(fault))
    # The first of four steps warms up. What else this machine is busy with may make other stages slow too.
    (alarm,) = [
        event
        for event in run.notes.events
        if event.cause == "slower_than_plan" and event.detail.startswith(f"{stage} took ")
    ]
    assert alarm.step == 4
    assert f"and {plan.seconds[stage]:.3g} s were planned on {plan.hardware}" in alarm.detail
