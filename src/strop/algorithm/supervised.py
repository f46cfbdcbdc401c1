"""Imitation: the cross-entropy of demonstrated tokens, and their weights over a complete batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from strop.algorithm.advantages import Float64Array

if TYPE_CHECKING:
    from torch import Tensor


def cross_entropy_terms(logp_N: Tensor) -> tuple[Tensor, Tensor]:
    """Return each token's cross-entropy and its derivative with respect to the log-probability.

    Shapes: (N,) to two of (N,). Units: nats.
    """
    current_N = logp_N.detach()
    return -current_N, -current_N.new_ones(current_N.shape)


def weigh_demonstrations(weight_S: Sequence[float], num_trained_S: Sequence[int]) -> Float64Array:
    """Return the weight of each trained token of every demonstration of one batch.

    Equal weights give the mean over all trained tokens of the batch: a_S / sum of a_S x tokens.
    Shapes: S demonstrations in and out. Weights are above 0, and a demonstration has a token.
    """
    weights, counts = np.asarray(weight_S, dtype=np.float64), np.asarray(num_trained_S, dtype=np.float64)
    shares: Float64Array = weights / np.sum(weights * counts)
    return shares
