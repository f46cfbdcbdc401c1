"""Splits a step's groups over learner ranks of equal load.

Ranks that shard a model wait for each other. The load is estimated in positions: one for each fed position, a
share for each pair of positions that attention joins, and a share for each scored token, which passes the
head. A group's prompt is fed by each rank that has replies of it: groups stay whole where that balances, and
are cut between replies where it does not. Pieces are dealt out the largest first, each to the least loaded
rank, so the same groups are split the same way on every machine. Each rank cuts its share into micro-batches.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from strop.policy.footprint import ModelSize
from strop.policy.packing import PackedGroup

GOAL_RATIO = 1.01
"""Ratio of the largest to the mean load of the ranks that is good enough."""
_SHARES = (1.0, 1 / 2, 1 / 4, 1 / 8, 0.0)
"""Largest piece of a group, in mean loads of a rank, from try to try."""

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class PositionCost:
    """Cost of training a token, in units of one fed position's matrix products."""

    per_pair: float = 0.0
    """Cost of attention between two positions."""
    per_scored: float = 0.0
    """Cost of the head for one scored token."""

    @classmethod
    def of_model(cls, size: ModelSize) -> PositionCost:
        """Derive the shares from a model's sizes.

        A position costs 6 FLOP for each parameter of the layers and a scored token 6 for each of the head;
        a pair costs 12 for each layer and channel: scores and mixing, forward and twice that backward.
        """
        channels = size.num_layers * size.num_heads * size.head_width
        return cls(
            per_pair=12 * channels / (6 * size.body_params), per_scored=size.head_params / size.body_params
        )

    def of_prompt(self, length: int) -> float:
        """Return the cost of feeding a prompt."""
        return length + self.per_pair * length * length / 2

    def of_reply(self, length: int, num_scored: int, prompt_length: int) -> float:
        """Return the cost of a reply behind a prompt."""
        pairs = length * prompt_length + length * length / 2
        return length + self.per_pair * pairs + self.per_scored * num_scored

    def measure(self, group: PackedGroup) -> tuple[float, list[float]]:
        """Return the costs of a group's prompt and of each reply."""
        num_prompt = len(group.prompt_ids)
        replies = [
            self.of_reply(max(len(reply.token_ids) - 1, 0), len(reply.engine_logprobs), num_prompt)
            for reply in group.replies
        ]
        return self.of_prompt(num_prompt), replies


def shard_groups(
    groups: Sequence[PackedGroup],
    num_ranks: int,
    *,
    cost: PositionCost | None = None,
    keeps_groups: bool = False,
) -> list[list[PackedGroup]]:
    """Cut groups into one shard per rank, of about as much work each; a shard may be empty.

    A large group is split between replies, unless `keeps_groups`, for terms whose scope is a group.
    Weights of tokens are not changed: they were fixed for the whole batch.
    """
    measured = [(cost or PositionCost()).measure(group) for group in groups]
    mean = sum(prompt + sum(replies) for prompt, replies in measured) / num_ranks
    # A reply that outweighs a rank's share bounds the balance.
    heaviest = max((prompt + max(replies, default=0.0) for prompt, replies in measured), default=0.0)
    best, least = [list[PackedGroup]() for _ in range(num_ranks)], math.inf
    for share in (math.inf,) if keeps_groups else _SHARES:
        pieces = [
            piece
            for group, costs in zip(groups, measured, strict=True)
            for piece in _cut(group, *costs, max_cost=share * mean)
        ]
        dealt = _deal([piece_cost for _, piece_cost in pieces], num_ranks)
        load = max(sum(pieces[index][1] for index in members) for members in dealt)
        if load < least:
            best, least = [[pieces[index][0] for index in members] for members in dealt], load
        if load <= GOAL_RATIO * max(mean, heaviest):
            break
    return best


def restore_order(
    groups: Sequence[PackedGroup],
    shards: Sequence[Sequence[PackedGroup]],
    results: Sequence[Sequence[T]],
) -> list[T]:
    """Return the results of all ranks, one for each reply of a shard, in the order of the groups' replies.

    `shards` are those of `shard_groups` for the same groups.
    """
    by_reply: dict[int, T] = {}
    for shard, values in zip(shards, results, strict=True):
        replies = [reply for group in shard for reply in group.replies]
        by_reply |= {id(reply): value for reply, value in zip(replies, values, strict=True)}
    return [by_reply[id(reply)] for group in groups for reply in group.replies]


def _cut(
    group: PackedGroup, prompt_cost: float, reply_costs: list[float], *, max_cost: float
) -> Iterator[tuple[PackedGroup, float]]:
    """Cut a group between replies into pieces of equal cost, as many as the largest cost asks for."""
    total, num_pieces = prompt_cost + sum(reply_costs), len(reply_costs)
    if max_cost and total <= max_cost * num_pieces:
        num_pieces = math.ceil(total / max_cost)
    if num_pieces < 2:
        yield group, total
        return
    for members in _deal(reply_costs, num_pieces):
        part = replace(group, replies=tuple(group.replies[index] for index in members))
        yield part, prompt_cost + sum(reply_costs[index] for index in members)


def _deal(costs: Sequence[float], num_bins: int) -> list[list[int]]:
    """Assign each cost, largest first, to the least loaded bin; a bin keeps the order of the costs."""
    bins = [(0.0, index, list[int]()) for index in range(num_bins)]
    for place in sorted(range(len(costs)), key=lambda place: -costs[place]):
        load, index, members = bins[0]
        members.append(place)
        heapq.heapreplace(bins, (load + costs[place], index, members))
    return [sorted(members) for _, _, members in sorted(bins, key=lambda one: one[1])]
