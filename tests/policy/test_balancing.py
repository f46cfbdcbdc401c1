"""Splitting a step over ranks: nothing is lost, groups stay whole where they can, loads are even."""

from __future__ import annotations

import time
from statistics import fmean
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from strop.errors import ConfigError
from strop.policy import balancing
from strop.policy.balancing import BatchPlan, PositionCost, partition, plan_batch, restore_order, shard_groups
from strop.policy.packing import PackedGroup
from tests.policy.worlds import SIZE, World


def lengths(group: PackedGroup) -> tuple[int, ...]:
    return tuple(len(reply.token_ids) for reply in group.replies)


def pieces_of(plan: BatchPlan) -> list[PackedGroup]:
    return [group for rank in plan.groups_W_K for batch in rank for group in batch]


def test_costs_follow_from_the_sizes_of_a_model() -> None:
    cost = PositionCost.of_model(SIZE)
    # 12 * 2 layers * 8 channels / (6 * 864); 800 head parameters / 864.
    assert cost.per_pair == pytest.approx(192 / 5184)
    assert cost.per_scored == pytest.approx(800 / 864)
    # 6 positions; pairs 6*6/2.
    assert cost.of_prompt(6) == pytest.approx(6 + 18 * cost.per_pair)
    # 4 positions behind 6, 3 of them scored: pairs 4*6 + 4*4/2.
    assert cost.of_reply(4, 3, 6) == pytest.approx(4 + 32 * cost.per_pair + 3 * cost.per_scored)


@settings(max_examples=200, deadline=None)
@given(
    weights=st.lists(st.floats(0, 1e6), max_size=60).map(lambda values: np.array(values, np.float64)),
    num_bins=st.integers(1, 20),
)
def test_no_bin_is_heavier_than_the_mean_and_the_heaviest_item(weights: np.ndarray, num_bins: int) -> None:
    bins = partition(weights, num_bins)
    assert len(bins) == len(weights)
    assert all(0 <= index < num_bins for index in bins.tolist())
    if len(weights):
        loads = np.bincount(bins, weights, num_bins)
        assert loads.max() <= (weights.sum() / num_bins + weights.max()) * (1 + 1e-9)


def test_items_that_fit_exactly_are_dealt_exactly() -> None:
    # 9+1, 8+2, 7+3, 6+4: 10 each. 5+5 has its two halves.
    bins = partition(np.array([9, 8, 7, 6, 5, 5, 4, 3, 2, 1], np.float64), 5)
    assert np.bincount(bins, [9, 8, 7, 6, 5, 5, 4, 3, 2, 1]).tolist() == [10.0] * 5


@pytest.mark.parametrize(("num_ranks", "num_micro_batches"), [(64, 4), (16, 64), (16, 1), (64, 1)])
def test_log_normal_lengths_are_even_within_a_hundredth(num_ranks: int, num_micro_batches: int) -> None:
    num_bins = num_ranks * num_micro_batches
    for seed in range(3):
        weights = np.random.default_rng(seed).lognormal(0.0, 0.6, 16 * num_bins)
        loads = np.bincount(partition(weights, num_bins), weights, num_bins)
        assert loads.max() <= 1.01 * loads.mean()


def test_an_exchange_does_not_overfill_a_bin() -> None:

    random = np.random.default_rng(1)
    weights, sizes = random.uniform(1, 9, 64), random.uniform(1, 9, 64)
    sizes_before = np.bincount(partition(weights, 8, goal_ratio=9.0), sizes, 8)
    limit = float(sizes_before.max())
    sizes_after = np.bincount(partition(weights, 8, sizes_D=sizes, max_size=limit), sizes, 8)
    assert sizes_after.max() <= limit
    unbounded = np.bincount(partition(weights, 8), sizes, 8)
    assert unbounded.max() > limit, "the bound had nothing to prevent"


def test_a_plan_is_the_same_however_long_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    groups = [World(seed).packed(5, [3 + seed * place % 17 for place in range(1, 9)]) for seed in range(24)]
    plan = plan_batch(groups, num_ranks=4, max_positions=400)
    exchange = balancing._exchange
    slept: list[float] = []

    def slow_exchange(*args: Any, **kwargs: Any) -> int:
        slept.append(0.02)
        time.sleep(slept[-1])
        return exchange(*args, **kwargs)

    monkeypatch.setattr(balancing, "_exchange", slow_exchange)
    slow = plan_batch(groups, num_ranks=4, max_positions=400)
    assert sum(slept) > 0.2
    assert slow.loads_W_K.tolist() == plan.loads_W_K.tolist()
    assert [lengths(one) for one in pieces_of(slow)] == [lengths(one) for one in pieces_of(plan)]
    hasty = plan_batch(groups, num_ranks=4, max_positions=400, max_compared=0)
    assert hasty.imbalance > plan.imbalance


def test_groups_stay_whole_where_that_is_even() -> None:
    groups = [World(seed).packed(5, [11, 11]) for seed in range(8)]
    # 25 positions each; two to a rank.
    plan = plan_batch(groups, num_ranks=4, max_positions=50)
    assert plan.loads_W_K.tolist() == [[50.0]] * 4
    assert [[len(batch) for batch in rank] for rank in plan.groups_W_K] == [[2]] * 4
    assert {id(group) for group in pieces_of(plan)} == {id(group) for group in groups}
    assert (plan.num_repeated_positions, plan.imbalance) == (0, 1.0)


def test_a_group_is_cut_where_ranks_would_idle() -> None:
    # One group of 4 + 4 * 10 positions for two ranks: the prompt is fed twice.
    (group,) = groups = [World().packed(4, [11, 11, 11, 11])]
    plan = plan_batch(groups, num_ranks=2, max_positions=100)
    assert plan.loads_W_K.tolist() == [[24.0], [24.0]]
    assert plan.num_repeated_positions == 4
    assert [lengths(piece) for piece in pieces_of(plan)] == [(11, 11), (11, 11)]
    assert all(piece.prompt_ids is group.prompt_ids for piece in pieces_of(plan))


@settings(max_examples=60, deadline=None)
@given(
    sizes=st.lists(
        st.tuples(st.integers(1, 9), st.lists(st.integers(1, 30), min_size=1, max_size=6)), max_size=8
    ),
    num_ranks=st.integers(1, 5),
    max_positions=st.integers(1, 60),
)
@example(sizes=[(2, [1, 1])], num_ranks=1, max_positions=1)
def test_every_reply_is_trained_once_within_the_budget(
    sizes: list[tuple[int, list[int]]], num_ranks: int, max_positions: int
) -> None:
    groups = [World(index).packed(*size) for index, size in enumerate(sizes)]
    plan = plan_batch(groups, num_ranks=num_ranks, max_positions=max_positions)
    assert len(plan.groups_W_K) == num_ranks
    assert len({len(rank) for rank in plan.groups_W_K}) == 1
    trained = [id(reply) for piece in pieces_of(plan) for reply in piece.replies]
    assert sorted(trained) == sorted(id(reply) for group in groups for reply in group.replies)
    prompts = {id(reply): group.prompt_ids for group in groups for reply in group.replies}
    for piece in pieces_of(plan):
        assert all(prompts[id(reply)] is piece.prompt_ids for reply in piece.replies)
        # A reply that alone exceeds the budget is a piece; one of a single token adds no position to it.
        longest = max((len(reply.token_ids) for reply in piece.replies), default=1)
        assert piece.num_positions <= max(max_positions, len(piece.prompt_ids) + longest - 1)
    fed = sum(len(piece.prompt_ids) for piece in pieces_of(plan))
    assert plan.num_repeated_positions == fed - sum(len(group.prompt_ids) for group in groups)


@pytest.mark.parametrize("wanted", [(0, 10, None), (2, 0, None), (2, 10, 0)])
def test_a_split_into_nothing_is_refused(wanted: tuple[int, int, int | None]) -> None:
    num_ranks, max_positions, num_micro_batches = wanted
    with pytest.raises(ConfigError, match=rf"for {num_ranks} ranks in .* of {max_positions} positions"):
        plan_batch([], num_ranks=num_ranks, max_positions=max_positions, num_micro_batches=num_micro_batches)


def test_shards_are_balanced_and_may_be_empty() -> None:
    groups = [World(seed).packed(2, [length]) for seed, length in enumerate((9, 5, 4, 4))]
    # Positions 10, 6, 5, 5: 10 and 5 against 6 and 5, or 10 against 6, 5 and 5.
    shards = [sum(group.num_positions for group in shard) for shard in shard_groups(groups, 2)]
    assert sum(shards) == 26
    assert max(shards) <= 16
    # One group of three replies, 2 + 3 * 3 = 11 positions, is cut between replies.
    whole = World(9).packed(2, [4, 4, 4])
    pieces = shard_groups([whole], 2)
    assert sorted(sum(len(group.replies) for group in shard) for shard in pieces) == [1, 2]
    # A pair of replies, whose loss needs both, stays together.
    assert sorted(map(len, shard_groups([whole], 2, keeps_groups=True))) == [0, 1]
    assert shard_groups([], 2) == [[], []]
    assert sorted(len(shard) for shard in shard_groups(groups[:1], 3)) == [0, 0, 1]


@pytest.mark.parametrize("keeps_groups", [False, True])
def test_shards_are_even_in_what_a_model_computes(keeps_groups: bool) -> None:
    # The longest reply has the work of all others: a third of their positions, and twice their pairs.
    groups = [World(seed).packed(1, [length]) for seed, length in enumerate((129, *[65] * 3, *[9] * 39))]
    cost = PositionCost(per_pair=1.0)

    def unevenness(shards: list[list[PackedGroup]]) -> float:
        loads = [sum(cost.of_reply(g.num_positions - 1, 1, 1) for g in shard) for shard in shards]
        return max(loads) / fmean(loads)

    by_work = unevenness(shard_groups(groups, 2, cost=cost, keeps_groups=keeps_groups))
    by_positions = unevenness(shard_groups(groups, 2, keeps_groups=keeps_groups))
    assert by_work < 1.15 < 1.3 < by_positions, (by_work, by_positions)


def test_what_ranks_find_comes_back_in_order() -> None:
    groups = [World(seed).packed(2, [3, 1 + seed, 2]) for seed in range(5)]
    shards = shard_groups(groups, 3)
    found = [[reply.token_ids.tolist() for group in shard for reply in group.replies] for shard in shards]
    expected = [reply.token_ids.tolist() for group in groups for reply in group.replies]
    assert restore_order(groups, shards, found) == expected
