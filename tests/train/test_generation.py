"""The source of groups: how far it runs ahead, what a batch is, and that every group has one end."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from strop.errors import EngineError
from strop.rollout import Example, Group, Outcome, make_example
from strop.train.generation import (
    Batch,
    BufferLimits,
    GroupStatus,
    RolloutBuffer,
    measure_discarded,
)
from tests.fixtures.builders import rollout_of, spoken_turn


def example_of(number: int) -> Example:
    return make_example("count", {"n": number}, None)


def group_of(number: int, version: int, reward: float = 1.0) -> Group:
    reply = spoken_turn("x", [7], logprob=-0.5, version=version)
    rollouts = tuple(
        rollout_of(example_of(number), (reply,), Outcome(parts={"right": reward * index}), sample_index=index)
        for index in range(2)
    )
    return Group(example=example_of(number), rollouts=rollouts)


@dataclass
class World:
    """An engine that answers when it is told to, and stamps what it serves."""

    version: int = 0
    waiting: dict[int, asyncio.Future[None]] = field(default_factory=dict)
    begun: list[int] = field(default_factory=list)
    is_instant: bool = True
    reward_of: Callable[[int], float] = lambda number: 1.0
    learner_version: int = 0
    max_staleness: int = 10

    async def attempt(self, number: int, example: Example) -> Group:
        assert example == example_of(number)
        self.begun.append(number)
        version = self.version
        if not self.is_instant:
            self.waiting[number] = asyncio.get_running_loop().create_future()
            await self.waiting[number]
        return group_of(number, version, self.reward_of(number))

    def end(self, *numbers: int) -> None:
        for number in numbers:
            self.waiting.pop(number).set_result(None)

    def source(self, *, ahead: int, groups: int = 2, steps: int = 10, **options: int) -> RolloutBuffer:
        limits = BufferLimits(groups_per_step=groups, max_staleness=ahead, num_steps=steps)
        self.max_staleness = ahead
        return RolloutBuffer(
            limits,
            find_example=example_of,
            attempt=self.attempt,
            find_discard_reason=self.find_discard_reason,
            **options,
        )

    def find_discard_reason(self, group: Group) -> GroupStatus | None:
        versions = [turn.policy_version or 0 for rollout in group.rollouts for turn in rollout.turns]
        if self.learner_version - min(versions) > self.max_staleness:
            return GroupStatus.EVICTED
        rewards = {rollout.outcome.reward for rollout in group.rollouts}
        return GroupStatus.FILTERED if len(rewards) == 1 else None


def numbers_of(batch: Batch) -> list[int]:
    assert [example_of(number) for number in batch.numbers] == [group.example for group in batch.groups]
    return batch.numbers


async def turn_over() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_smp_7_nothing_starts_further_ahead_than_allowed() -> None:
    """SMP-7: a producer without bound sampled 7,400 groups that were thrown away."""
    world = World()
    source = world.source(ahead=2)
    source.admit(0)
    await turn_over()
    # Batches 0, 1 and 2 of two groups each; batch 3 would be three steps ahead of the weights.
    assert world.begun == list(range(6))
    await source.take()
    await turn_over()
    assert world.begun == list(range(6)), "the weights did not change, so nothing more may start"
    source.admit(1)
    await turn_over()
    assert world.begun == list(range(8))


async def test_a_batch_is_the_next_groups_in_order_however_long_they_take() -> None:
    """SMP-7: whoever takes what ends first trains on short replies."""
    world = World(is_instant=False)
    source = world.source(ahead=1)
    source.admit(0)
    taking = asyncio.ensure_future(source.take())
    await turn_over()
    world.end(3, 2, 1)
    await turn_over()
    assert not taking.done()
    world.end(0)
    assert numbers_of(await taking) == [0, 1]


async def test_groups_without_signal_are_replaced_in_order() -> None:
    # Groups 1 and 2 have two equal rewards.
    world = World(reward_of=lambda number: 0.0 if number in (1, 2) else 1.0)
    source = world.source(ahead=0)
    source.admit(0)
    batch = await source.take()
    assert numbers_of(batch) == [0, 3]
    assert [(fate, group.example) for fate, group in batch.discarded] == [
        (GroupStatus.FILTERED, example_of(1)),
        (GroupStatus.FILTERED, example_of(2)),
    ]
    assert not batch.is_short
    assert source.counts["filtered"] == 2
    assert source.next_unconsumed == 4


async def test_a_batch_that_cannot_be_filled_is_short() -> None:
    world = World(reward_of=lambda number: 1.0 if number == 0 else 0.0)
    source = world.source(ahead=0)
    source.admit(0)
    batch = await source.take()
    # Four times two groups at most: 2 x (4 - 1) = 6 may be discarded, the seventh ends the search.
    assert (numbers_of(batch), len(batch.discarded), batch.is_short) == ([0], 7, True)
    assert world.begun == list(range(8))


async def test_what_ends_an_attempt_ends_the_batch_and_every_other_attempt() -> None:
    world = World(is_instant=False)
    source = world.source(ahead=1)
    source.admit(0)
    taking = asyncio.ensure_future(source.take())
    await turn_over()
    world.waiting[2].set_exception(EngineError("no engine is left"))
    with pytest.raises(EngineError, match="no engine is left"):
        await taking
    assert source.num_ahead == 0
    assert all(future.cancelled() for number, future in world.waiting.items() if number != 2)


async def test_settling_waits_for_replacements_too() -> None:
    world = World(reward_of=lambda number: 0.0 if number == 3 else 1.0)
    source = world.source(ahead=1)
    source.admit(0)
    await source.take()
    await source.settle()
    # Group 3 is replaced by group 4, under the weights of then.
    assert [number for number, _ in source.list_waiting()] == [2, 4]


@given(
    ahead=st.integers(0, 4),
    seed=st.integers(0, 1000),
    filtered=st.sets(st.integers(0, 40), max_size=12),
)
# A short batch leaves groups under way, which are too old for the next step.
@example(ahead=0, seed=0, filtered=set(range(7)))
@settings(max_examples=150, deadline=None)
def test_t8_no_group_is_too_old_and_the_ledger_balances(ahead: int, seed: int, filtered: set[int]) -> None:
    """algorithms.md T8: random lags and orders of completion; two groups a step."""
    num_steps = 8
    rng = random.Random(seed)

    async def act() -> tuple[int, int]:
        world = World(is_instant=False, reward_of=lambda number: 0.0 if number in filtered else 1.0)
        source = world.source(ahead=ahead, steps=num_steps)
        published = consumed = oldest = 0
        for step in range(num_steps):
            world.learner_version = step
            source.admit(published)
            taking = asyncio.ensure_future(source.take())
            await turn_over()
            while not taking.done():
                world.end(rng.choice(sorted(world.waiting)))
                await turn_over()
            batch = await taking
            versions = [
                turn.policy_version or 0 for g in batch.groups for r in g.rollouts for turn in r.turns
            ]
            oldest = max(oldest, step - min(versions, default=step))
            source.note(GroupStatus.TRAINED, len(batch.groups))
            consumed += len(batch.groups)
            # Groups under way keep the version that they began with, as an engine that drains does.
            published = world.version = step + 1
        counts = source.counts
        num_discarded = counts["filtered"] + counts["evicted"]
        assert counts["started"] == counts["trained"] + num_discarded + source.num_ahead
        assert counts["trained"] == consumed
        await source.close()
        return oldest, consumed

    oldest, _ = asyncio.run(act())
    assert oldest <= ahead


@pytest.mark.parametrize("seed", range(25))
def test_r3_no_group_is_lost_or_trained_twice_over_kills(seed: int) -> None:
    """algorithms.md R3: a run is killed anywhere, and goes on from its last checkpoint."""
    rng = random.Random(seed)
    num_steps = 12
    trained: dict[int, list[int]] = {}
    checkpoint: tuple[int, int, list[tuple[int, Group]]] = (0, 0, [])

    async def live(first_step: int, next_group: int, waiting: list[tuple[int, Group]]) -> None:
        nonlocal checkpoint
        world = World(version=first_step)
        source = world.source(ahead=2, steps=num_steps, first_number=next_group, first_step=first_step)
        source.restore(waiting)
        for step in range(first_step, num_steps):
            source.admit(step)
            if rng.random() < 0.15:
                await source.close()
                return
            batch = await source.take()
            # What a later life trains again was cut off the record with its step.
            trained[step] = numbers_of(batch)
            world.version = step + 1
            if step % 2:
                checkpoint = (step + 1, source.next_unconsumed, source.list_waiting())

    for _ in range(200):
        asyncio.run(live(*checkpoint))
        if len(trained) == num_steps:
            break
    assert [number for step in sorted(trained) for number in trained[step]] == list(range(2 * num_steps))


def group_of_length(number: int, num_tokens: int) -> Group:
    """Return a group of two replies of so many tokens."""
    group = group_of(number, 0)
    (turn,) = group.rollouts[0].turns
    ids, logprobs = np.full(num_tokens, 7, np.int32), np.full(num_tokens, -0.5, np.float32)
    longer = replace(turn, token_ids=ids, logprobs=logprobs)
    return replace(group, rollouts=tuple(replace(r, turns=(longer,)) for r in group.rollouts))


def batch_of(groups: list[Group], discarded: list[tuple[GroupStatus, Group]]) -> Batch:
    return Batch(
        groups=groups,
        numbers=list(range(len(groups))),
        discarded=discarded,
        discarded_numbers=list(range(len(groups), len(groups) + len(discarded))),
        is_short=False,
    )


def test_used_lengths_are_compared_with_those_of_all_that_were_dispatched() -> None:
    groups = [group_of_length(0, 10), group_of_length(1, 20)]
    discarded = [
        (GroupStatus.EVICTED, group_of_length(2, 60)),
        (GroupStatus.FILTERED, group_of_length(3, 30)),
    ]
    metrics = measure_discarded(batch_of(groups, discarded))
    assert (metrics["num_evicted_groups"], metrics["num_filtered_groups"]) == (1.0, 1.0)
    # 2 x 90 of 2 x 120 tokens; in time were 10, 20 and 30: 20 on average, 30 with the 60 that came late.
    assert metrics["wasted_token_frac"] == pytest.approx(90 / 120)
    assert metrics["used_length_ratio"] == pytest.approx(20 / 30)


def test_groups_that_were_replaced_for_their_rewards_are_no_selection_by_time() -> None:
    metrics = measure_discarded(
        batch_of([group_of_length(0, 10)], [(GroupStatus.FILTERED, group_of_length(1, 90))])
    )
    assert metrics["wasted_token_frac"] == pytest.approx(0.9)
    assert "used_length_ratio" not in metrics
    assert measure_discarded(batch_of([group_of_length(0, 10)], [])) == {}
