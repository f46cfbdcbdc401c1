"""Splitting a step over ranks: nothing is lost, groups stay whole where they can, loads are even."""

from __future__ import annotations

from statistics import fmean

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strop.policy.balancing import PositionCost, restore_order, shard_groups
from strop.policy.footprint import ModelSize
from strop.policy.packing import PackedGroup
from tests.policy.worlds import World


def lengths(group: PackedGroup) -> tuple[int, ...]:
    return tuple(len(reply.token_ids) for reply in group.replies)


def test_costs_follow_from_the_sizes_of_a_model() -> None:
    size = ModelSize(
        num_layers=2,
        hidden_width=8,
        mlp_width=16,
        num_heads=2,
        num_kv_heads=1,
        head_width=4,
        vocab_size=100,
        max_positions=64,
        is_tied=True,
    )
    # Per layer: query and output 2 * 8*8, key and value 2 * 8*4, MLP 3 * 8*16 = 576; two layers 1,152.
    assert size.body_params == 1152
    cost = PositionCost.of_model(size)
    # 12 * 2 layers * 8 channels / (6 * 1,152); 800 head parameters / 1,152.
    assert cost.per_pair == pytest.approx(192 / 6912)
    assert cost.per_scored == pytest.approx(800 / 1152)
    # 6 positions; pairs 6*6/2.
    assert cost.of_prompt(6) == pytest.approx(6 + 18 * cost.per_pair)
    # 4 positions behind 6, 3 of them scored: pairs 4*6 + 4*4/2.
    assert cost.of_reply(4, 3, 6) == pytest.approx(4 + 32 * cost.per_pair + 3 * cost.per_scored)


def loads_of(shards: list[list[PackedGroup]]) -> list[int]:
    return [sum(group.num_positions for group in shard) for shard in shards]


def test_groups_stay_whole_where_that_is_even() -> None:
    groups = [World(seed).packed(3, [10, 10, 10]) for seed in range(8)]
    shards = shard_groups(groups, 4)
    assert all(any(part is group for group in groups) for shard in shards for part in shard)
    assert len(set(loads_of(shards))) == 1


def test_a_group_is_cut_where_ranks_would_idle() -> None:
    groups = [World(0).packed(2, [20] * 8), World(1).packed(2, [20])]
    shards = shard_groups(groups, 3)
    assert sum(len(shard) for shard in shards) > 2
    # 9 replies of 19 positions over 3 ranks, and a prompt of 2 for each piece.
    assert max(loads_of(shards)) <= 3 * 19 + 2 * 2


@settings(max_examples=60, deadline=None)
@given(
    sizes=st.lists(st.lists(st.integers(1, 40), min_size=1, max_size=6), max_size=8),
    num_ranks=st.integers(1, 5),
    keeps_groups=st.booleans(),
)
def test_every_reply_is_trained_once(sizes: list[list[int]], num_ranks: int, keeps_groups: bool) -> None:
    groups = [World(seed).packed(2, replies) for seed, replies in enumerate(sizes)]
    shards = shard_groups(groups, num_ranks, keeps_groups=keeps_groups)
    assert len(shards) == num_ranks
    parts = [part for shard in shards for part in shard]
    assert sorted(id(reply) for part in parts for reply in part.replies) == sorted(
        id(reply) for group in groups for reply in group.replies
    )
    assert not keeps_groups or len(parts) == len(groups)
    # The same groups are split the same way.
    again = shard_groups(groups, num_ranks, keeps_groups=keeps_groups)
    assert [list(map(lengths, shard)) for shard in again] == [list(map(lengths, shard)) for shard in shards]
    if parts and not keeps_groups:
        heaviest = max(2 + length for replies in sizes for length in replies)
        num_positions = sum(2 * len(replies) + sum(replies) for replies in sizes)
        assert max(loads_of(shards)) <= num_positions / num_ranks + heaviest


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
