"""Incidents of sampling ahead: producers without bound, and schedules that starve."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from strop.cluster import Roles
from strop.engine import Completion, GenerationRequest
from strop.errors import RunStopped
from strop.record.rollouts import read_rollouts
from strop.rollout import Example, Group
from strop.train.generation import BufferLimits, RolloutBuffer
from strop.train.publishing import Publishing
from tests.incidents.faulty_engines import TamperedEngine
from tests.train.test_asynchronous import NUM_STEPS, compose
from tests.train.test_generation import example_of, group_of


def test_smp_7_a_producer_far_faster_than_the_learner_stays_within_its_bound() -> None:
    """Incident: above 7,400 samples were generated and evicted at staleness 0."""
    ahead: list[int] = []

    async def act() -> RolloutBuffer:
        version = 0

        async def attempt(number: int, example: Example) -> Group:
            return group_of(number, version)

        limits = BufferLimits(groups_per_step=4, max_staleness=2, num_steps=20)
        source = RolloutBuffer(limits, find_example=example_of, attempt=attempt)
        for step in range(20):
            version = step
            source.admit(step)
            # A hundred times as long as all that may be sampled takes: the learner's step.
            for _ in range(100 * 4 * 3):
                await asyncio.sleep(0)
                ahead.append(source.num_ahead)
            await source.take()
        return source

    source = asyncio.run(act())
    assert max(ahead) == 4 * (2 + 1)
    # Not one was sampled in vain.
    assert source.counts["started"] == 20 * 4
    assert source.counts["evicted"] == 0


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


def test_prc_2_a_stall_is_named_with_what_it_waits_for(
    tmp_path: Path, tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Incident: staleness 0, 8 prompts per step, weights synchronised every 16: each side waited."""
    publish = Publishing.publish

    async def publish_first(self: Publishing, step: int) -> None:
        if step == 0:
            await publish(self, step)

    monkeypatch.setattr(Publishing, "publish", publish_first)
    made = compose(tmp_path, tiny_model_dir, max_staleness=0, checkpoint_every=NUM_STEPS)
    with pytest.raises(RunStopped, match=r"step 2 waits for rollouts, and none may be sampled"):
        made.run()
    (stall,) = [event for event in made.notes.events if event.cause == "stall"]
    assert stall.step == 1
    assert "the engine serves the weights after step 0, and train.max_staleness=0" in stall.detail
    assert np.isfinite(made.notes.steps[0]["loss"])
