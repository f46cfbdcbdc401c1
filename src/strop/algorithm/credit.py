"""From the rewards of a batch to the advantage and the weight of every rollout, once per batch.

Credit is assigned for the complete optimizer batch. Micro-batches, shards and skipped rollouts come later and
cannot change it.

Skipping (`zero_variance = "skip"`) leaves a rollout out of the forward pass and in the normaliser.
That gives the gradient of forwarding it because:

- its final advantage, whitened or not, is the literal 0 for all its tokens; nothing changes it afterwards;
- a group without difference is found by comparing rewards, never by a spread near 0;
- there is no KL, entropy or other term on the same tokens, whose gradient would not vanish: the batch of an
  algorithm that `acts_on_all_tokens` is always forwarded whole;
- its tokens, rollout and group stay in the weights of the others;
- the optimizer step takes place even when nothing is forwarded (the loop's part), unless the batch
  has no scored token at all;
- no layer mixes rows (the policy's part).

Shapes: P = groups, G = rollouts of a group (ragged).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from strop.algorithm.advantages import (
    MIN_MEMBERS,
    Float64Array,
    IntCounts,
    as_rewards,
    compare_members,
    compare_turns,
    find_scored,
    has_enough_scored,
    is_constant,
    scale_batch,
    sums_to_one,
    weigh_tokens,
)
from strop.algorithm.catalog import Algorithm
from strop.errors import DataError

BoolArray = NDArray[np.bool_]
_WEIGHT_SUM_TOLERANCE = 1e-9
_BUFFER_SHARE = 5
"""The buffer is a fifth of the limit; arXiv:2503.14476 takes 4,096 of 20,480 tokens."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Credit:
    """Advantages, token weights and status of each rollout of one optimizer batch."""

    advantage_P_G: tuple[Float64Array, ...]
    """0 where a rollout has no score, or its group nothing to compare."""
    weight_P_G: tuple[Float64Array, ...]
    """Aggregation weight of each scored token of the rollout; 0 where it does not count. Skipped rollouts
    keep theirs: their absence must not raise the weights of others."""
    is_forwarded_P_G: tuple[BoolArray, ...]
    """Whether the rollout goes through the forward and backward pass."""
    num_trained_P_G: tuple[IntCounts, ...]
    """Sampled tokens; 0 for a masked rollout."""
    is_counted_P_G: tuple[BoolArray, ...]
    """Whether the rollout is in the normaliser."""
    num_counted_tokens: int
    """Scored tokens in the normaliser. 0 means: no optimizer step, no new policy version."""
    num_forwarded_tokens: int
    num_groups: int
    num_zero_variance_groups: int
    """Groups with at least two scored rollouts and no difference between them."""
    num_dropped_groups: int
    """Groups that do not count: too few scored rollouts, or dropped for equal rewards."""
    num_rollouts: int
    num_unscored: int
    """Rollouts without a reward: in no mean, in no normaliser, not trained."""
    num_empty: int
    """Scored rollouts without any sampled token; they count as rollouts."""
    num_masked_overlong: int
    num_forwarded: int
    turn_advantage_P_G_K: tuple[tuple[Float64Array, ...], ...] | None = None
    """Advantage of each turn that the policy sampled; None without credit per turn."""


def needs_replacement(
    algorithm: Algorithm,
    rewards_G: Sequence[float | None],
    num_scored_G: Sequence[int],
    max_reply_tokens: int,
) -> bool:
    """Whether a group is to be replaced by another before the batch is full (dynamic sampling).

    True only under `zero_variance = "resample"`, for a group without difference. A group with too few scored
    members failed, which a replacement would hide. The caller bounds the number of replacements.
    """
    if algorithm.zero_variance != "resample" or not has_enough_scored(rewards_G):
        return False
    shaped_G = shape_rewards(algorithm, rewards_G, num_scored_G, max_reply_tokens)
    return not _has_signal(algorithm, rewards_G, shaped_G)


def shape_rewards(
    algorithm: Algorithm,
    rewards_G: Sequence[float | None],
    num_scored_G: Sequence[int],
    max_reply_tokens: int,
) -> list[float | None]:
    """Return the rewards that advantages are computed from.

    Under `overlong = "shape"` a reply loses linearly up to 1 in the buffer before the limit.
    Units: reward units; an unscored member stays unscored.
    Source: arXiv:2503.14476, equation 13.
    """
    if algorithm.overlong != "shape":
        return list(rewards_G)
    buffer = max(max_reply_tokens // _BUFFER_SHARE, 1)
    start = max_reply_tokens - buffer
    penalties = [min(max((start - length) / buffer, -1.0), 0.0) for length in num_scored_G]
    return [
        None if reward is None else reward + penalty
        for reward, penalty in zip(rewards_G, penalties, strict=True)
    ]


def _has_signal(
    algorithm: Algorithm, rewards_G: Sequence[float | None], shaped_G: Sequence[float | None]
) -> bool:
    rewards = as_rewards(rewards_G if algorithm.filter_on == "task" else shaped_G)
    scored = rewards[np.isfinite(rewards)]
    return len(scored) >= MIN_MEMBERS and not is_constant(scored)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _GroupCredit:
    """The credit of one group."""

    advantage_G: Float64Array
    reward_G: Float64Array
    """After shaping; NaN for unscored rollouts."""
    num_trained_G: IntCounts
    is_scored_G: BoolArray
    is_counted_G: BoolArray
    is_masked_G: BoolArray
    has_difference: bool
    is_dropped: bool
    turn_advantage_G_K: tuple[Float64Array, ...] | None = None


def assign_credit(
    algorithm: Algorithm,
    rewards_P_G: Sequence[Sequence[float | None]],
    num_scored_P_G: Sequence[Sequence[int]],
    truncated_P_G: Sequence[Sequence[bool]],
    max_reply_tokens: int,
    limit_P: Sequence[int] | None = None,
    earned_P_G_K: Sequence[Sequence[Sequence[float]]] | None = None,
) -> Credit:
    """Give every rollout of one optimizer batch its advantage, weight and status.

    Shapes: ragged P, G in and out, all three inputs alike. `num_scored_P_G` holds the tokens that
        the policy sampled. An empty batch gives an empty credit.
    Units: tokens for `max_reply_tokens`, the constant of a constant normaliser, and `limit_P`, the reply
    limit
        of each group; None: `max_reply_tokens` for all.
    Units: reward units for `earned_P_G_K`, the reward of each turn; for credit per turn.
    Units: rewards in the task's units, None (or not finite) for a rollout without score.
    Raises: DataError if the inputs disagree about groups or members, or are not grouped at all.
    """
    _refuse_ragged(rewards_P_G, num_scored_P_G, truncated_P_G)
    limits = [max_reply_tokens] * len(rewards_P_G) if limit_P is None else limit_P
    groups = [
        _credit_group(algorithm, rewards_G, num_scored_G, truncated_G, limit)
        for rewards_G, num_scored_G, truncated_G, limit in zip(
            rewards_P_G, num_scored_P_G, truncated_P_G, limits, strict=True
        )
    ]
    turn_advantage_P_G_K = None
    if algorithm.has_turn_credit:
        assert earned_P_G_K is not None
        groups = [
            _credit_turns(algorithm, group, earned_G_K)
            for group, earned_G_K in zip(groups, earned_P_G_K, strict=True)
        ]
        turn_advantage_P_G_K = tuple(group.turn_advantage_G_K or () for group in groups)
    num_trained_P_G = [group.num_trained_G for group in groups]
    is_counted_P_G = [group.is_counted_G for group in groups]
    weight_P_G = weigh_part(algorithm, num_trained_P_G, is_counted_P_G, max_reply_tokens)
    advantage_P_G = scale_batch(
        # With a penalty in the reward, tokens are whitened later, after their penalties.
        "none" if algorithm.whitens_tokens else algorithm.over_batch,
        [group.advantage_G for group in groups],
        [group.reward_G for group in groups],
        num_trained_P_G,
        is_counted_P_G,
    )
    is_forwarded_P_G = [
        _find_forwarded(algorithm, group, advantage_G)
        for group, advantage_G in zip(groups, advantage_P_G, strict=True)
    ]
    return Credit(
        advantage_P_G=tuple(advantage_P_G),
        weight_P_G=tuple(weight_P_G),
        is_forwarded_P_G=tuple(is_forwarded_P_G),
        num_trained_P_G=tuple(num_trained_P_G),
        is_counted_P_G=tuple(is_counted_P_G),
        num_counted_tokens=sum(int(np.sum(group.num_trained_G[group.is_counted_G])) for group in groups),
        num_forwarded_tokens=sum(
            int(np.sum(counts[is_forwarded]))
            for counts, is_forwarded in zip(num_trained_P_G, is_forwarded_P_G, strict=True)
        ),
        num_groups=len(groups),
        num_zero_variance_groups=sum(
            int(np.sum(group.is_scored_G)) >= MIN_MEMBERS and not group.has_difference for group in groups
        ),
        num_dropped_groups=sum(group.is_dropped for group in groups),
        num_rollouts=sum(len(group.is_scored_G) for group in groups),
        num_unscored=sum(int(np.sum(~group.is_scored_G)) for group in groups),
        num_empty=sum(
            int(np.sum(group.is_scored_G & ~group.is_masked_G & (group.num_trained_G == 0)))
            for group in groups
        ),
        num_masked_overlong=sum(int(np.sum(group.is_masked_G)) for group in groups),
        num_forwarded=sum(int(np.sum(is_forwarded)) for is_forwarded in is_forwarded_P_G),
        turn_advantage_P_G_K=turn_advantage_P_G_K,
    )


def weigh_part(
    algorithm: Algorithm,
    num_trained_P_G: Sequence[IntCounts],
    is_counted_P_G: Sequence[BoolArray],
    max_reply_tokens: int,
) -> list[Float64Array]:
    """Return the weight of each scored token of the groups of one optimizer step.

    Shapes: ragged P, G in and out.
    """
    weight_P_G = weigh_tokens(algorithm.aggregation, num_trained_P_G, is_counted_P_G, max_reply_tokens)
    total = float(sum(np.sum(w * n) for w, n in zip(weight_P_G, num_trained_P_G, strict=True)))
    has_tokens = any(
        bool(np.any(is_counted & (counts > 0)))
        for counts, is_counted in zip(num_trained_P_G, is_counted_P_G, strict=True)
    )
    has_empty = any(
        bool(np.any(is_counted & (counts == 0)))
        for counts, is_counted in zip(num_trained_P_G, is_counted_P_G, strict=True)
    )
    if has_tokens and sums_to_one(algorithm.aggregation, has_empty_rollouts=has_empty):
        assert abs(total - 1.0) <= _WEIGHT_SUM_TOLERANCE, f"token weights add up to {total}, not to 1"
    return weight_P_G


def _find_forwarded(algorithm: Algorithm, group: _GroupCredit, advantage_G: Float64Array) -> BoolArray:
    """Return which rollouts of a group have a gradient."""
    is_forwarded_G = group.is_counted_G & (group.num_trained_G > 0)
    if algorithm.zero_variance != "keep" and not algorithm.acts_on_all_tokens:
        # Exact comparison: with a literal 0, or of a reward that equals its mean.
        has_advantage_G = advantage_G != 0.0
        if group.turn_advantage_G_K is not None:
            has_advantage_G = np.array(
                [bool(np.any(advantage_K)) for advantage_K in group.turn_advantage_G_K]
            )
        is_forwarded_G = is_forwarded_G & has_advantage_G
    return is_forwarded_G


def _credit_group(
    algorithm: Algorithm,
    rewards_G: Sequence[float | None],
    num_scored_G: Sequence[int],
    truncated_G: Sequence[bool],
    max_reply_tokens: int,
) -> _GroupCredit:
    is_scored_G = find_scored(rewards_G)
    shaped_G = shape_rewards(algorithm, rewards_G, num_scored_G, max_reply_tokens)
    is_short = not has_enough_scored(rewards_G, is_relative=algorithm.is_relative)
    has_difference = _has_signal(algorithm, rewards_G, shaped_G)
    # A group still here under "resample" could not be replaced.
    is_dropped = is_short or (not has_difference and algorithm.zero_variance in ("drop", "resample"))
    is_masked_G = is_scored_G & np.array(truncated_G, dtype=np.bool_) & (algorithm.overlong == "mask")
    num_trained_G = np.where(is_masked_G, 0, np.array(num_scored_G, dtype=np.int64))
    return _GroupCredit(
        advantage_G=compare_members(algorithm.advantage, shaped_G, is_relative=algorithm.is_relative),
        reward_G=as_rewards(shaped_G),
        num_trained_G=num_trained_G,
        is_scored_G=is_scored_G,
        is_counted_G=is_scored_G & (not is_dropped),
        is_masked_G=is_masked_G,
        has_difference=has_difference,
        is_dropped=is_dropped,
    )


def _credit_turns(
    algorithm: Algorithm, group: _GroupCredit, earned_G_K: Sequence[Sequence[float]]
) -> _GroupCredit:
    """Give each turn of a group an advantage; its rewards are those after shaping."""
    turns_G_K = compare_turns(
        algorithm.advantage, group.reward_G.tolist(), earned_G_K, algorithm.turn_discount
    )
    return replace(
        group,
        turn_advantage_G_K=tuple(turns_G_K),
        has_difference=any(bool(np.any(advantage_K)) for advantage_K in turns_G_K),
    )


def _refuse_ragged(
    rewards_P_G: Sequence[Sequence[float | None]],
    num_scored_P_G: Sequence[Sequence[int]],
    truncated_P_G: Sequence[Sequence[bool]],
) -> None:
    streams = {"rewards": rewards_P_G, "token counts": num_scored_P_G, "truncation flags": truncated_P_G}
    sizes: dict[str, list[int]] = {}
    for name, stream_P_G in streams.items():
        try:
            sizes[name] = [len(stream_G) for stream_G in stream_P_G]
        except TypeError as error:
            raise DataError(
                f"the {name} of a batch are not divided into groups",
                allowed="one sequence per group, holding one entry per rollout",
                next_step="pass the rollouts of each example as their own sequence",
            ) from error
    if sizes["rewards"] == sizes["token counts"] == sizes["truncation flags"]:
        return
    shown = "; ".join(f"{name} {numbers}" for name, numbers in sizes.items())
    raise DataError(
        f"the streams of a batch have different group sizes: {shown}",
        allowed="the same groups with the same number of rollouts in all three",
        next_step="build all three from the same groups",
    )
