"""Advantages: how much better each rollout was than its group. And the weight of each rollout's tokens.

An advantage function sees the rewards of the valid members of one group, at least two of them and
not all equal, and returns one number per member. The two special cases are decided here once, by
`compare_members`, so that no function can get them wrong: a member that was not scored takes no
part, and a group without any difference gets the literal 0.

Comparison with the whole batch follows (`scale_batch`): division by the batch's spread, which keeps zeros,
or whitening, which moves a group without differences off zero.

Left out: leave-one-out spread, which is 0 for the only loser.

Shapes: P = groups, G = rollouts of one group.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from strop.errors import UnfitRecord

Float64Array = NDArray[np.float64]
AdvantageFn = Callable[[Float64Array], Float64Array]
"""From the rewards of n >= 2 scored members, not all equal, to their advantages; float64."""

MIN_MEMBERS = 2
"""Scored members below which a group has nothing to compare."""

_SPREAD_OFFSET = 1e-4
_SPREAD_FLOOR = 1e-6


def standardize(rewards_G: Float64Array) -> Float64Array:
    """Subtract the mean and divide by the sample standard deviation plus 1e-4.

    Shapes: G in and out.
    Units: standard deviations of the group.
    Source: arXiv:2402.03300, section 4.1.2; the n - 1 spread and the offset as in TRL.
    """
    spread = float(np.std(rewards_G, ddof=1))
    return (rewards_G - np.mean(rewards_G)) / (spread + _SPREAD_OFFSET)


def standardize_population(rewards_G: Float64Array) -> Float64Array:
    """Subtract the mean and divide by the population standard deviation, at least 1e-6.

    Shapes: G in and out.
    Units: standard deviations of the group.
    """
    return (rewards_G - np.mean(rewards_G)) / max(float(np.std(rewards_G)), _SPREAD_FLOOR)


def center(rewards_G: Float64Array) -> Float64Array:
    """Subtract the mean.

    Shapes: G in and out.
    Units: reward units.
    Source: arXiv:2503.20783, which explains the bias that dividing by the spread adds.
    """
    return rewards_G - np.mean(rewards_G)


def leave_one_out(rewards_G: Float64Array) -> Float64Array:
    """Subtract from each reward the mean of the others.

    Shapes: G in and out.
    Units: reward units; n / (n - 1) times what `center` gives.
    Source: arXiv:2402.14740.
    """
    num_members = len(rewards_G)
    return center(rewards_G) * (num_members / (num_members - 1))


def relate_to_mean(rewards_G: Float64Array) -> Float64Array:
    """Subtract the mean and divide by it, which weighs rare successes more.

    Shapes: G in and out.
    Units: group means.
    Raises: UnfitRecord if a reward is negative, because the mean is then no measure of success.
    """
    if float(np.min(rewards_G)) < 0.0:
        raise UnfitRecord(
            f"reward {float(np.min(rewards_G))} under the advantage max_rl",
            allowed="rewards of 0 or more",
            next_step="shift the task's reward, or choose the advantage centered",
        )
    return center(rewards_G) / float(np.mean(rewards_G))


def keep_reward(rewards_G: Float64Array) -> Float64Array:
    """Return the rewards: they are compared over the batch.

    Shapes: G in and out.
    Units: reward units.
    """
    return rewards_G


OverBatch = Literal["none", "spread", "whiten"]
"""Scaling over the batch: none, division by the standard deviation (n - 1) of all rewards plus 1e-4, or
whitening over all tokens."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Estimator:
    """An advantage estimator: the comparison within a group, and the scaling over the batch."""

    compare: AdvantageFn
    over_batch: OverBatch = "none"
    is_relative: bool = True
    """Whether a rollout is compared with others of its group."""


ADVANTAGES: dict[str, Estimator] = {
    "grpo": Estimator(compare=standardize),
    "grpo_pop": Estimator(compare=standardize_population),
    "centered": Estimator(compare=center),
    "rloo": Estimator(compare=leave_one_out),
    "max_rl": Estimator(compare=relate_to_mean),
    "batch_std": Estimator(compare=center, over_batch="spread"),
    # arXiv:2501.03262, both forms of it.
    "rpp": Estimator(compare=keep_reward, over_batch="whiten", is_relative=False),
    "rpp_baseline": Estimator(compare=center, over_batch="whiten"),
}
_WHITENED_FLOOR = 1e-4


def whiten(values_N: Float64Array, counts_N: NDArray[np.integer] | None = None) -> Float64Array:
    """Subtract the mean and divide by the population standard deviation, at least 1e-4.

    Equal values become zeros.
    Shapes: N values, each counted `counts_N` times (None: once) in mean and spread.
    """
    weight_N = np.ones(len(values_N)) if counts_N is None else counts_N.astype(np.float64)
    is_there_N = weight_N > 0
    if not is_there_N.any() or is_constant(values_N[is_there_N]):
        return np.zeros(len(values_N))
    mean = np.average(values_N, weights=weight_N)
    spread = float(np.sqrt(np.average((values_N - mean) ** 2, weights=weight_N)))
    whitened: Float64Array = (values_N - mean) / max(spread, _WHITENED_FLOOR)
    return whitened


def scale_batch(
    over_batch: OverBatch,
    advantage_P_G: Sequence[Float64Array],
    rewards_P_G: Sequence[Float64Array],
    num_trained_P_G: Sequence[NDArray[np.int64]],
    is_counted_P_G: Sequence[NDArray[np.bool_]],
) -> list[Float64Array]:
    """Relate the advantages of all groups to the batch. A rollout that does not count gets 0.

    Shapes: ragged P, G in and out, all alike.
    """
    if over_batch == "none" or not advantage_P_G:
        return list(advantage_P_G)
    counted_S = np.concatenate(is_counted_P_G)
    advantage_S = np.where(counted_S, np.concatenate(advantage_P_G), 0.0)
    rewards_S = np.concatenate(rewards_P_G)[counted_S]
    if over_batch == "spread":
        spread = float(np.std(rewards_S, ddof=1)) if len(rewards_S) > 1 else 0.0
        scaled_S = advantage_S / (spread + _SPREAD_OFFSET)
    else:
        scaled_S = np.zeros(len(advantage_S))
        scaled_S[counted_S] = whiten(advantage_S[counted_S], np.concatenate(num_trained_P_G)[counted_S])
    ends = np.cumsum([len(advantage_G) for advantage_G in advantage_P_G])[:-1]
    return [np.asarray(part) for part in np.split(scaled_S, ends)]


def find_scored(rewards_G: Sequence[float | None]) -> NDArray[np.bool_]:
    """Return which members of a group have a reward: not None, not NaN, not infinite."""
    return np.isfinite(as_rewards(rewards_G))


def has_enough_scored(rewards_G: Sequence[float | None], *, is_relative: bool = True) -> bool:
    """Whether a group may take part: half of its members are scored, and two where they are compared.

    With fewer, the lost members would decide the baseline of the others.
    """
    num_scored = int(np.sum(find_scored(rewards_G)))
    return num_scored >= MIN_MEMBERS and 2 * num_scored >= len(rewards_G) if is_relative else num_scored > 0


def as_rewards(rewards_G: Sequence[float | None]) -> Float64Array:
    """Turn rewards into float64, None into NaN."""
    return np.array([np.nan if reward is None else reward for reward in rewards_G], dtype=np.float64)


def is_constant(rewards_G: Float64Array) -> bool:
    """Whether all rewards are equal, by comparison and never by a spread near 0.

    The mean of equal numbers need not be that number in floating point; the residue divided by a
    small spread can reach the size of a real advantage.
    """
    return bool(np.max(rewards_G) == np.min(rewards_G))


def compare_members(
    advantage: AdvantageFn, rewards_G: Sequence[float | None], *, is_relative: bool = True
) -> Float64Array:
    """Give every member of one group its advantage.

    Shapes: G in and out. Members without a reward are left out of the statistics and get 0; so
        do all members of a group with fewer than two scored members or without any difference, unless
        the advantage is not relative to the group.
    Units: those of `advantage`.
    """
    rewards = as_rewards(rewards_G)
    is_scored_G = np.isfinite(rewards)
    advantage_G = np.zeros(len(rewards), dtype=np.float64)
    scored = rewards[is_scored_G]
    has_difference = len(scored) >= MIN_MEMBERS and not is_constant(scored)
    if has_difference or (len(scored) and not is_relative):
        advantage_G[is_scored_G] = advantage(scored)
    return advantage_G


def compare_turns(
    advantage: AdvantageFn,
    rewards_G: Sequence[float | None],
    earned_G_K: Sequence[Sequence[float]],
    discount: float,
) -> list[Float64Array]:
    """Give every turn of a group its advantage: its return compared with those of the same turn.

    A turn's return is its reward plus `discount` times the return of the next turn. The rest of a member's
    reward, beyond its turns' rewards, counts for its last turn.
    Shapes: G members, ragged K turns, in and out. Members without a reward take no part and get 0, as does a
        turn that no other member has, or in which all have the same return.
    Units: those of `advantage`.
    """
    advantage_G_K = [np.zeros(len(earned_K)) for earned_K in earned_G_K]
    is_scored_G = find_scored(rewards_G)
    returns_G_K = []
    for reward, earned_K in zip(as_rewards(rewards_G), earned_G_K, strict=True):
        returns_K = np.array(earned_K, dtype=np.float64)
        returns_K[-1:] += reward - returns_K.sum()
        for turn in reversed(range(len(returns_K) - 1)):
            returns_K[turn] += discount * returns_K[turn + 1]
        returns_G_K.append(returns_K)
    for turn in range(max(map(len, earned_G_K), default=0)):
        members = [
            index
            for index, returns_K in enumerate(returns_G_K)
            if is_scored_G[index] and len(returns_K) > turn
        ]
        compared = compare_members(advantage, [float(returns_G_K[index][turn]) for index in members])
        for index, value in zip(members, compared, strict=True):
            advantage_G_K[index][turn] = value
    return advantage_G_K


# The loss of a batch is the plain sum of weight times correction times token loss. All division happens here,
# once, over the complete optimizer batch, before rollouts are skipped, sharded or cut into micro-batches.
# Therefore no later split can change the gradient.

IntCounts = NDArray[np.int64]


class Aggregation(StrEnum):
    """Names of the weightings; S = rollouts that count, C = the reply limit."""

    TOKEN_MEAN = "token_mean"
    """1 / scored tokens of the batch: every token counts the same."""
    SEQ_MEAN = "seq_mean"
    """1 / (S x scored tokens of the rollout): every rollout counts the same."""
    CONST = "const"
    """1 / (S x C): every token counts the same, and long batches weigh more."""


def weigh_tokens(
    aggregation: Aggregation,
    num_scored_P_G: Sequence[IntCounts],
    is_counted_P_G: Sequence[NDArray[np.bool_]],
    max_reply_tokens: int,
) -> list[Float64Array]:
    """Compute the weight of each scored token of each rollout.

    Shapes: ragged P, G in and out. A rollout that does not count (unscored, dropped) gets 0 and
        takes no part in any sum. A rollout that counts but has no scored token gets 0 as well,
        yet it is one of the S rollouts.
    """
    num_tokens_P_G = [
        np.where(is_counted, num_scored, 0)
        for num_scored, is_counted in zip(num_scored_P_G, is_counted_P_G, strict=True)
    ]
    num_rollouts = sum(int(np.sum(is_counted)) for is_counted in is_counted_P_G)
    num_tokens = sum(int(np.sum(counts)) for counts in num_tokens_P_G)
    weight_P_G: list[Float64Array] = []
    for counts in num_tokens_P_G:
        per_token: Float64Array
        if aggregation is Aggregation.TOKEN_MEAN:
            per_token = np.full(len(counts), float(num_tokens))
        elif aggregation is Aggregation.SEQ_MEAN:
            per_token = num_rollouts * counts.astype(np.float64)
        else:
            per_token = np.full(len(counts), float(num_rollouts * max_reply_tokens))
        # maximum: a rollout without tokens has divisor 0 under seq_mean; `where` drops it anyway.
        weight_P_G.append(np.where(counts > 0, 1.0 / np.maximum(per_token, 1.0), 0.0))
    return weight_P_G


def sums_to_one(aggregation: Aggregation, *, has_empty_rollouts: bool) -> bool:
    """Whether the weights of all scored tokens of a batch with any must add up to 1."""
    if aggregation is Aggregation.SEQ_MEAN:
        return not has_empty_rollouts
    return aggregation is Aggregation.TOKEN_MEAN
