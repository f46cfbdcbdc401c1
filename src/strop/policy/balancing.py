"""Plans the micro-batches of a step for all learner ranks.

Ranks that shard a model wait for each other at every layer, so all run as many micro-batches, and a step
takes as long as the costliest of each round. The cost is estimated in positions: one for each fed position, a
share for each pair of positions that attention joins, and a share for each scored token, which passes the
head. A group's prompt is fed by each micro-batch that has replies of it: groups stay whole where that
balances, and are cut between replies where it does not. Pieces are dealt out the largest first, each to the
micro-batch of least cost. Every rank makes the same plan from the same groups, and executes its part of it.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from strop.policy.footprint import ModelSize
from strop.policy.packing import EMPTY_GROUP, Load, PackedGroup, cut_groups

GOAL_RATIO = 1.01
"""Ratio of the lock-step cost to a rank's mean cost that is good enough."""
_SHARES = (1.0, 1 / 2, 1 / 4, 1 / 8, 0.0)
"""Largest piece of a group, in mean costs of a micro-batch, from try to try."""
_NUM_BUDGETS = 32
"""Budgets of padded positions that are tried, up to the largest."""

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

    def of_groups(self, groups: Iterable[PackedGroup]) -> float:
        """Return the cost of groups in one micro-batch."""
        return sum(prompt + sum(replies) for prompt, replies in map(self.measure, groups))


def plan_micro_batches(
    groups: Sequence[PackedGroup],
    num_ranks: int,
    *,
    max_positions: int,
    cost: PositionCost,
    keeps_groups: bool = False,
    is_alone: bool = False,
) -> list[list[list[PackedGroup]]]:
    """Return the micro-batches of each rank, equally many; those of one round cost about the same.

    A micro-batch has at most `max_positions` fed positions, unless one reply, or with `keeps_groups` one
    group, has more; it may be `EMPTY_GROUP` alone. `keeps_groups`: for terms whose scope is a group.
    `is_alone`: see `Load`. Weights of tokens are not changed: they were fixed for the whole batch.
    """
    if not groups:
        return [[] for _ in range(num_ranks)]
    if is_alone:
        dealt = _cut_rows(groups, num_ranks, max_positions, keeps_groups=keeps_groups)
    else:
        dealt = balance_groups(groups, num_ranks, max_positions, cost, keeps_groups=keeps_groups)
    dealt = [batch or [EMPTY_GROUP] for batch in dealt]
    dealt += [[EMPTY_GROUP]] * (-len(dealt) % num_ranks)
    return [dealt[rank::num_ranks] for rank in range(num_ranks)]


def restore_order(
    groups: Sequence[PackedGroup],
    plan: Sequence[Sequence[Sequence[PackedGroup]]],
    results: Sequence[Sequence[T]],
) -> list[T]:
    """Return the results of all ranks, one for each reply of their micro-batches, in the order of the groups.

    `plan` is that of `plan_micro_batches` for the same groups.
    """
    by_reply: dict[int, T] = {}
    for micro_batches, values in zip(plan, results, strict=True):
        replies = [reply for batch in micro_batches for group in batch for reply in group.replies]
        by_reply |= {id(reply): value for reply, value in zip(replies, values, strict=True)}
    return [by_reply[id(reply)] for group in groups for reply in group.replies]


def balance_groups(
    groups: Sequence[PackedGroup],
    num_ranks: int,
    max_positions: int,
    cost: PositionCost,
    *,
    keeps_groups: bool,
) -> list[list[PackedGroup]]:
    """Return micro-batches by falling cost, so that `num_ranks` neighbours cost about the same."""
    measured = [cost.measure(group) for group in groups]
    ideal = cost.of_groups(groups) / num_ranks
    num_positions = sum(group.num_positions for group in groups)
    num_rounds = max(math.ceil(num_positions / (num_ranks * max_positions)), 1)
    best, least = list[list[PackedGroup]](), math.inf
    for share in (math.inf,) if keeps_groups else _SHARES:
        dealt = _deal_groups(groups, measured, num_rounds * num_ranks, share, cost)
        # One reply, or a group that is kept, may have more positions than fit.
        while any(
            sum(group.num_positions for group in batch) > max_positions
            and (len(batch) > 1 or (len(batch[0].replies) > 1 and not keeps_groups))
            for _, batch in dealt
        ):
            num_rounds += 1
            dealt = _deal_groups(groups, measured, num_rounds * num_ranks, share, cost)
        lock_step = sum(load for load, _ in dealt[::num_ranks])
        if lock_step < least:
            best, least = [batch for _, batch in dealt], lock_step
        if lock_step <= GOAL_RATIO * ideal:
            break
    return best


def _deal_groups(
    groups: Sequence[PackedGroup],
    measured: Sequence[tuple[float, list[float]]],
    num_bins: int,
    share: float,
    cost: PositionCost,
) -> list[tuple[float, list[PackedGroup]]]:
    """Deal groups, cut into pieces of at most a share of the mean cost; return costs and groups, falling."""
    max_cost = share * sum(prompt + sum(replies) for prompt, replies in measured) / num_bins
    pieces: list[tuple[int, list[int], float]] = []
    for index, (prompt, replies) in enumerate(measured):
        # Between replies, into pieces of equal cost.
        total, num_pieces = prompt + sum(replies), max(len(replies), 1)
        if max_cost and total <= max_cost * num_pieces:
            num_pieces = max(math.ceil(total / max_cost), 1)
        pieces += [
            (index, members, prompt + sum(replies[member] for member in members))
            for members in _deal(replies, num_pieces)
        ]
    dealt = []
    for places in _deal([piece_cost for _, _, piece_cost in pieces], num_bins):
        members_of: dict[int, list[int]] = {}
        for place in places:
            members_of.setdefault(pieces[place][0], []).extend(pieces[place][1])
        batch = [
            replace(groups[index], replies=tuple(groups[index].replies[member] for member in sorted(members)))
            for index, members in members_of.items()
        ]
        # Less than the sum of the pieces where the same group's meet.
        dealt.append((cost.of_groups(batch), batch))
    return sorted(dealt, key=lambda pair: -pair[0])


def _deal(costs: Sequence[float], num_bins: int) -> list[list[int]]:
    """Assign each cost, largest first, to the least loaded bin; a bin keeps the order of the costs."""
    bins = [(0.0, index, list[int]()) for index in range(num_bins)]
    for place in sorted(range(len(costs)), key=lambda place: -costs[place]):
        load, index, members = bins[0]
        members.append(place)
        heapq.heapreplace(bins, (load + costs[place], index, members))
    return [sorted(members) for _, _, members in sorted(bins, key=lambda one: one[1])]


def _cut_rows(
    groups: Sequence[PackedGroup], num_ranks: int, max_positions: int, *, keeps_groups: bool
) -> list[list[PackedGroup]]:
    """Return micro-batches of padded rows, the longest first, in as few rounds as fit and of equal size."""
    pieces = list(groups)
    if not keeps_groups:
        pieces = [replace(group, replies=(reply,)) for group in groups for reply in group.replies]
    pieces.sort(key=lambda piece: -Load(is_alone=True).plus(piece).width)

    def cut(share: int) -> list[list[PackedGroup]]:
        return list(cut_groups(pieces, max_positions * share // _NUM_BUDGETS, is_alone=True))

    most = math.ceil(len(cut(_NUM_BUDGETS)) / num_ranks) * num_ranks
    shares = range(1, _NUM_BUDGETS + 1)
    return cut(shares[bisect_left(shares, True, key=lambda share: len(cut(share)) <= most)])
