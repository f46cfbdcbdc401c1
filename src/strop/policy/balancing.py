"""Splits a step's groups over learner ranks and micro-batches of equal load.

Ranks that shard a model wait for each other at every micro-batch, so each takes the same number of them, and
single micro-batches must have equal loads. The load is estimated in positions: one for each fed position, a
share for each pair of positions that attention joins, and a share for each scored token, which passes the
head. A group's prompt is fed by each rank that has replies of it: groups stay whole where that balances, and
are cut between replies where it does not.

Items are dealt out in rounds, the largest first, each round's largest to the least loaded bin; then the most
and the least loaded bins exchange the pairs of items that balance them best, all pairs of bins at once. That
is O(n log n), and a search ends after a bounded number of comparisons. They are counted and not timed: the
same groups are split the same way on every machine, however busy it is.

Shapes: P groups, D items that are dealt out, B bins, M slots of a bin, Q pairs of bins.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from strop.errors import ConfigError
from strop.policy.footprint import DEFAULT_MICRO_BATCH_POSITIONS, ModelSize
from strop.policy.packing import PackedGroup

GOAL_RATIO = 1.01
"""Ratio of the largest to the mean load of the micro-batches that is good enough."""
MAX_COMPARED = 10_000_000
"""Pairs of items that one plan compares for exchanges: some tenths of a second of one core at most."""
_PER_PIECE = 400
"""Cost of cutting a piece from a group, in comparisons."""
_MAX_ROUNDS = 96
_MAX_IDLE_ROUNDS = 12
"""Rounds of exchanges without a lighter heaviest bin, after which the search ends."""
_MAX_OF_BIN = 24
"""Items of a bin that one exchange chooses from. Bins with more items are balanced anyway."""
_MAX_EXTRA_MICRO_BATCHES = 3

IndexArray = NDArray[np.int64]
LoadArray = NDArray[np.float64]
T = TypeVar("T")


@dataclass(slots=True)
class Effort:
    """The remaining budget of a search, in pairs of items that it compares."""

    num_left: int = MAX_COMPARED

    @property
    def is_spent(self) -> bool:
        """Whether the budget is used up."""
        return self.num_left <= 0


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


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class BatchPlan:
    """The micro-batches of each rank."""

    groups_W_K: tuple[tuple[tuple[PackedGroup, ...], ...], ...]
    """Groups of each micro-batch of each rank. A micro-batch may be empty where there is too little work."""
    loads_W_K: LoadArray
    """Estimated cost of each micro-batch."""
    num_repeated_positions: int
    """Prompt positions that are fed more than once because their group was cut."""

    @property
    def imbalance(self) -> float:
        """Ratio of the largest to the mean load of the micro-batches; 1 is perfect."""
        mean = float(self.loads_W_K.mean())
        return float(self.loads_W_K.max()) / mean if mean else 1.0


def plan_batch(
    groups: Sequence[PackedGroup],
    *,
    num_ranks: int,
    max_positions: int,
    cost: PositionCost | None = None,
    num_micro_batches: int | None = None,
    max_compared: int = MAX_COMPARED,
) -> BatchPlan:
    """Split groups over ranks and micro-batches of at most `max_positions` fed positions each.

    `num_micro_batches` per rank defaults to the least that holds everything. Groups are cut between replies
    only, and a single reply that exceeds the budget makes a micro-batch. After `max_compared` comparisons the
    best split so far is taken.
    Raises: ConfigError if there is no rank, no position or no micro-batch to fill.
    """
    if num_ranks < 1 or max_positions < 1 or (num_micro_batches is not None and num_micro_batches < 1):
        raise ConfigError(
            f"a batch for {num_ranks} ranks in {num_micro_batches or 'any number of'} micro-batches"
            f" of {max_positions} positions",
            allowed="at least one of each",
            next_step="raise placement.learners or train.micro_batch_tokens to 1 or more",
        )
    effort = Effort(max_compared)
    cost = cost or PositionCost()
    least = num_micro_batches or max(
        1, math.ceil(sum(group.num_positions for group in groups) / (num_ranks * max_positions))
    )
    best: _Dealt | None = None
    for count in range(least, least + (1 if num_micro_batches else 1 + _MAX_EXTRA_MICRO_BATCHES)):
        dealt = _deal_finer(groups, cost, num_ranks * count, max_positions, effort)
        if best is None or dealt.num_over < best.num_over:
            best = dealt
        if not best.num_over or effort.is_spent:
            break
    assert best is not None
    return _arrange(best, groups, num_ranks)


def shard_groups(
    groups: Sequence[PackedGroup],
    num_ranks: int,
    *,
    max_positions: int = DEFAULT_MICRO_BATCH_POSITIONS,
    cost: PositionCost | None = None,
    keeps_groups: bool = False,
) -> list[list[PackedGroup]]:
    """Cut groups into one shard per rank, of about as much work each; a shard may be empty.

    A large group is split between replies, unless `keeps_groups`, for terms whose scope is a group.
    Weights of tokens are not changed: they were fixed for the whole batch.
    """
    if keeps_groups:
        measured = [_measure(group, cost or PositionCost()) for group in groups]
        costs = np.array([prompt + sum(replies) for prompt, replies in measured], dtype=np.float64)
        bins = partition(costs, num_ranks).tolist() if groups else []
        return [
            [group for group, chosen in zip(groups, bins, strict=True) if chosen == rank]
            for rank in range(num_ranks)
        ]
    plan = plan_batch(groups, num_ranks=num_ranks, max_positions=max_positions, cost=cost)
    return [[group for micro_batch in rank for group in micro_batch] for rank in plan.groups_W_K]


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


def partition(
    weights_D: LoadArray,
    num_bins: int,
    *,
    sizes_D: LoadArray | None = None,
    max_size: float = math.inf,
    goal_ratio: float = 1.001,
    effort: Effort | None = None,
) -> IndexArray:
    """Return the bin of each item, so that the bins' weights are as equal as a bounded search gets them.

    No bin weighs more than the mean and the heaviest item together. An exchange makes no bin larger than
    `max_size`, in the unit of `sizes_D`. The search's comparisons are subtracted from `effort`.
    Shapes: all (D,).
    """
    effort = Effort() if effort is None else effort
    sizes_D = weights_D if sizes_D is None else sizes_D
    items_M_B = _deal_in_rounds(weights_D, num_bins)
    # One more value, for empty slots (-1).
    weights, sizes = np.append(weights_D, 0.0), np.append(sizes_D, 0.0)
    # Lower bound of the heaviest bin.
    least = max(float(weights_D.sum()) / num_bins, float(weights.max()))
    best, best_at = math.inf, 0
    for index in range(_MAX_ROUNDS if num_bins > 1 else 0):
        loads_B = weights[items_M_B].sum(axis=0)
        heaviest = float(loads_B.max())
        if heaviest < best:
            best, best_at = heaviest, index
        is_stuck = index - best_at >= _MAX_IDLE_ROUNDS
        if heaviest <= goal_ratio * least or is_stuck or effort.is_spent:
            break
        effort.num_left -= _exchange(
            items_M_B, weights, sizes, loads_B, goal=goal_ratio * least, max_size=max_size, index=index
        )
    bin_D = np.zeros(len(weights_D) + 1, np.int64)
    bin_D[items_M_B] = np.arange(num_bins)
    return bin_D[:-1]


def _deal_in_rounds(weights_D: LoadArray, num_bins: int) -> IndexArray:
    """Give each bin one item per round, the largest of the round to the least loaded. Empty slots are -1."""
    order = np.argsort(-weights_D, kind="stable")
    num_rounds = -(-len(order) // num_bins)
    dealt = np.full(num_rounds * num_bins, -1, np.int64)
    dealt[: len(order)] = order
    # One more slot, so that a bin can take an item without giving one.
    items_M_B = np.full((num_rounds + 1, num_bins), -1, np.int64)
    loads_B = np.zeros(num_bins)
    weights = np.append(weights_D, 0.0)
    for index, row in enumerate(dealt.reshape(num_rounds, num_bins)):
        takers = np.argsort(loads_B, kind="stable")
        items_M_B[index, takers] = row
        loads_B[takers] += weights[row]
    return items_M_B


def _exchange(
    items_M_B: IndexArray,
    weights: LoadArray,
    sizes: LoadArray,
    loads_B: LoadArray,
    *,
    goal: float,
    max_size: float,
    index: int,
) -> int:
    """Exchange one item of each bin above the goal with a light bin, in place, where that balances them.

    Returns the number of pairs of items that were compared.
    """
    order = np.argsort(loads_B, kind="stable")
    num_pairs = min(len(order) // 2, int((loads_B > goal).sum()))
    heavy_Q = order[::-1][:num_pairs]
    # Other partners in each round: two bins with nothing to exchange must not be paired for ever.
    light_Q = np.roll(order[: len(order) // 2], -index)[:num_pairs]
    num_slots = len(items_M_B)
    slots = np.unique((np.arange(min(num_slots, _MAX_OF_BIN)) + index * _MAX_OF_BIN) % num_slots)
    slots = np.union1d(slots, num_slots - 1)
    given_Q_M, taken_Q_M = items_M_B[np.ix_(slots, heavy_Q)].T, items_M_B[np.ix_(slots, light_Q)].T
    moved_Q_M_M = weights[given_Q_M][:, :, None] - weights[taken_Q_M][:, None, :]
    wanted_Q = (loads_B[heavy_Q] - loads_B[light_Q]) / 2
    miss_Q_M_M = np.abs(moved_Q_M_M - wanted_Q[:, None, None])
    if math.isfinite(max_size):
        sizes_B = sizes[items_M_B].sum(axis=0)
        grown_Q_M_M = sizes[given_Q_M][:, :, None] - sizes[taken_Q_M][:, None, :]
        is_over = (sizes_B[light_Q][:, None, None] + grown_Q_M_M > max_size) & (grown_Q_M_M > 0)
        is_over |= (sizes_B[heavy_Q][:, None, None] - grown_Q_M_M > max_size) & (grown_Q_M_M < 0)
        miss_Q_M_M[is_over] = np.inf
    best_Q = miss_Q_M_M.reshape(num_pairs, -1).argmin(axis=1)
    pair_Q = np.arange(num_pairs)
    is_better_Q = miss_Q_M_M.reshape(num_pairs, -1)[pair_Q, best_Q] < wanted_Q * (1 - 1e-9)
    give_Q, take_Q = np.divmod(best_Q, len(slots))
    give_Q, take_Q = slots[give_Q][is_better_Q], slots[take_Q][is_better_Q]
    heavy_Q, light_Q = heavy_Q[is_better_Q], light_Q[is_better_Q]
    items_M_B[give_Q, heavy_Q], items_M_B[take_Q, light_Q] = (
        items_M_B[take_Q, light_Q],
        items_M_B[give_Q, heavy_Q],
    )
    return miss_Q_M_M.size


@dataclass(frozen=True, slots=True)
class _Piece:
    """A group, or some replies of one."""

    group: PackedGroup
    cost: float
    num_positions: int


@dataclass(frozen=True, slots=True)
class _Dealt:
    """Pieces in bins."""

    pieces: list[_Piece]
    bin_D: IndexArray
    loads_B: LoadArray
    num_over: int
    """Bins of more than one piece that exceed the budget of positions."""


def _deal_finer(
    groups: Sequence[PackedGroup], cost: PositionCost, num_bins: int, max_positions: int, effort: Effort
) -> _Dealt:
    """Deal groups out whole, and again in smaller and smaller pieces until they balance."""
    measured = [_measure(group, cost) for group in groups]
    mean = sum(prompt + sum(replies) for prompt, replies in measured) / num_bins
    # A reply that outweighs a bin bounds the balance.
    heaviest = max((prompt + max(replies, default=0.0) for prompt, replies in measured), default=0.0)
    best: _Dealt | None = None
    for share in (1.0, 1 / 2, 1 / 4, 1 / 8, 0.0):
        pieces = [
            piece
            for group, costs in zip(groups, measured, strict=True)
            for piece in _cut(group, *costs, max_cost=share * mean, max_positions=max_positions)
        ]
        effort.num_left -= _PER_PIECE * len(pieces)
        weights_D = np.array([piece.cost for piece in pieces], np.float64)
        sizes_D = np.array([piece.num_positions for piece in pieces], np.float64)
        bin_D = partition(
            weights_D, num_bins, sizes_D=sizes_D, max_size=max_positions, goal_ratio=1.005, effort=effort
        )
        sizes_B = np.bincount(bin_D, sizes_D, num_bins)
        num_over = int(((sizes_B > max_positions) & (np.bincount(bin_D, minlength=num_bins) > 1)).sum())
        dealt = _Dealt(pieces, bin_D, np.bincount(bin_D, weights_D, num_bins).astype(np.float64), num_over)
        if best is None or (dealt.num_over, dealt.loads_B.max()) < (best.num_over, best.loads_B.max()):
            best = dealt
        is_even = dealt.loads_B.max() <= GOAL_RATIO * max(dealt.loads_B.mean(), heaviest)
        if (is_even and not dealt.num_over) or effort.is_spent:
            break
        if len(pieces) == sum(len(group.replies) for group in groups):
            break  # No piece can be cut further.
    assert best is not None
    return best


def _measure(group: PackedGroup, cost: PositionCost) -> tuple[float, list[float]]:
    """Return the costs of a group's prompt and of each reply."""
    num_prompt = len(group.prompt_ids)
    replies = [
        cost.of_reply(max(len(reply.token_ids) - 1, 0), len(reply.engine_logprobs), num_prompt)
        for reply in group.replies
    ]
    return cost.of_prompt(num_prompt), replies


def _cut(
    group: PackedGroup, prompt_cost: float, reply_costs: list[float], *, max_cost: float, max_positions: int
) -> Iterator[_Piece]:
    """Cut a group between replies into the fewest pieces of equal cost within the bounds."""
    num_replies, num_prompt = len(reply_costs), len(group.prompt_ids)
    total, num_fed = sum(reply_costs), group.num_positions - num_prompt
    if num_replies < 2 or (prompt_cost + total <= max_cost and num_prompt + num_fed <= max_positions):
        yield _Piece(group, prompt_cost + total, num_prompt + num_fed)
        return
    least = max(_num_pieces(prompt_cost + total, max_cost), _num_pieces(num_fed, max_positions - num_prompt))
    pieces: list[_Piece] = []
    for num_pieces in range(min(least, num_replies), num_replies + 1):
        shares = _share_out(reply_costs, num_pieces)
        pieces = []
        for share in shares:
            part = replace(group, replies=tuple(group.replies[index] for index in share))
            cost = prompt_cost + sum(reply_costs[index] for index in share)
            pieces.append(_Piece(part, cost, part.num_positions))
        if all(piece.num_positions <= max_positions for piece in pieces):
            break
    yield from pieces


def _share_out(costs: list[float], num_shares: int) -> list[list[int]]:
    """Assign each cost, largest first, to the least loaded share; a share keeps the order of the costs."""
    shares = [(0.0, index, list[int]()) for index in range(num_shares)]
    for place in sorted(range(len(costs)), key=lambda place: -costs[place]):
        load, index, members = shares[0]
        members.append(place)
        heapq.heapreplace(shares, (load + costs[place], index, members))
    return [sorted(members) for _, _, members in sorted(shares, key=lambda share: share[1])]


def _num_pieces(total: float, room: float) -> int:
    return math.ceil(total / room) if room > 0 and math.isfinite(total / room) else 2**31


def _arrange(dealt: _Dealt, groups: Sequence[PackedGroup], num_ranks: int) -> BatchPlan:
    """Place bins of similar load next to each other in time, and balance the ranks."""
    num_micro_batches = len(dealt.loads_B) // num_ranks
    bins_K_W = np.argsort(-dealt.loads_B, kind="stable").reshape(num_micro_batches, num_ranks)
    # Snake order: the rank with the largest bin of one round gets the smallest of the next.
    bins_K_W[1::2] = bins_K_W[1::2, ::-1]
    members: list[list[PackedGroup]] = [[] for _ in dealt.loads_B]
    for piece, index in zip(dealt.pieces, dealt.bin_D.tolist(), strict=True):
        members[index].append(piece.group)
    fed = sum(len(piece.group.prompt_ids) for piece in dealt.pieces)
    return BatchPlan(
        groups_W_K=tuple(tuple(tuple(members[index]) for index in bins) for bins in bins_K_W.T.tolist()),
        loads_W_K=dealt.loads_B[bins_K_W.T],
        num_repeated_positions=fed - sum(len(group.prompt_ids) for group in groups),
    )
