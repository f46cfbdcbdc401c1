"""Weights of scored tokens, by which the losses of single tokens become one number.

The loss of a batch is the plain sum of weight times correction times token loss. All division
happens here, once, over the complete optimizer batch, before rollouts are skipped, sharded or cut
into micro-batches. Therefore no later split can change the gradient.

Shapes: P = groups, G = rollouts of a group (ragged). A weight belongs to every scored token of its
rollout.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from strop.algorithm.advantages import Float64Array

IntCounts = NDArray[np.int64]


class Aggregation(StrEnum):
    """Names of the weightings; S, P = rollouts and groups that count, C = the reply limit."""

    TOKEN_MEAN = "token_mean"
    """1 / scored tokens of the batch: every token counts the same."""
    SEQ_MEAN = "seq_mean"
    """1 / (S x scored tokens of the rollout): every rollout counts the same."""
    CONST = "const"
    """1 / (S x C): every token counts the same, and long batches weigh more."""
    GROUP_TOKEN_MEAN = "group_token_mean"
    """1 / (P x scored tokens of the group), P counting groups with a scored token."""
    SEQ_SUM = "seq_sum"
    """1 / S: the log-likelihood of whole rollouts."""


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
    num_groups = sum(bool(np.any(counts > 0)) for counts in num_tokens_P_G)
    weight_P_G: list[Float64Array] = []
    for counts in num_tokens_P_G:
        per_token: Float64Array
        if aggregation is Aggregation.TOKEN_MEAN:
            per_token = np.full(len(counts), float(num_tokens))
        elif aggregation is Aggregation.SEQ_MEAN:
            per_token = num_rollouts * counts.astype(np.float64)
        elif aggregation is Aggregation.CONST:
            per_token = np.full(len(counts), float(num_rollouts * max_reply_tokens))
        elif aggregation is Aggregation.GROUP_TOKEN_MEAN:
            per_token = np.full(len(counts), float(num_groups * int(np.sum(counts))))
        else:
            per_token = np.full(len(counts), float(num_rollouts))
        # maximum: a rollout without tokens has divisor 0 under seq_mean; `where` drops it anyway.
        weight_P_G.append(np.where(counts > 0, 1.0 / np.maximum(per_token, 1.0), 0.0))
    return weight_P_G


def sums_to_one(aggregation: Aggregation, *, has_empty_rollouts: bool) -> bool:
    """Whether the weights of all scored tokens of a batch with any must add up to 1."""
    if aggregation is Aggregation.SEQ_MEAN:
        return not has_empty_rollouts
    return aggregation in (Aggregation.TOKEN_MEAN, Aggregation.GROUP_TOKEN_MEAN)
