"""Weights that correct for tokens sampled by another distribution than the trained one.

The ratio is exp(proximal - behavior): between the trainer's log-probability at the start of the
step and the one the engine recorded when it sampled the token. It covers both gaps, differing
numerics and older weights. A correction multiplies the policy term of a token. It is a constant:
no gradient flows through it, and it does not change the aggregation weight.

A missing behavior log-probability cannot reach this file: a sampled `Turn` without finite values
cannot be built. Sequence-level corrections are not offered here.

Shapes: N = scored tokens. Log-ratios in nats, bounded to [-20, 20] before `exp`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import numpy as np

from strop.algorithm.advantages import Float64Array
from strop.algorithm.losses import MAX_LOG_RATIO_NATS, clamp_log_ratio

if TYPE_CHECKING:
    from torch import Tensor

CorrectionFn = Callable[["Tensor", float], "Tensor"]
"""From log-ratios and the cap on their exponential to one constant weight per token."""

ICEPOP_FLOOR = 0.5


def correct_nothing(log_ratio_N: Tensor, cap: float) -> Tensor:
    """Return 1 for every token; the cap takes no part."""
    return log_ratio_N.new_ones(log_ratio_N.shape)


def truncate_tokens(log_ratio_N: Tensor, cap: float) -> Tensor:
    """Return each ratio, at most `cap`. Default cap 2. Name in a run file: tis_token."""
    return clamp_log_ratio(log_ratio_N.detach()).exp().clamp(max=cap)


def mask_tokens(log_ratio_N: Tensor, cap: float) -> Tensor:
    """Return each ratio, 0 for those above `cap`. Usual cap 3. Name: mis_token."""
    ratio_N = clamp_log_ratio(log_ratio_N.detach()).exp()
    return ratio_N.where(ratio_N <= cap, 0.0)


def mask_tokens_outside(log_ratio_N: Tensor, cap: float, floor: float = ICEPOP_FLOOR) -> Tensor:
    """Return each ratio, 0 for those below `floor` or above `cap`. Usual cap 5. Name: icepop."""
    ratio_N = clamp_log_ratio(log_ratio_N.detach()).exp()
    return ratio_N.where((ratio_N >= floor) & (ratio_N <= cap), 0.0)


CORRECTIONS: Mapping[str, CorrectionFn] = {
    "none": correct_nothing,
    "tis_token": truncate_tokens,
    "mis_token": mask_tokens,
    "icepop": mask_tokens_outside,
}


_MISMATCH_NAMES = (
    "mismatch_mean_nats",
    "mismatch_p99_nats",
    "correction_mean",
    "correction_truncated_frac",
    "correction_masked_frac",
    "effective_sample_frac",
)


def describe_mismatch(log_ratio_N: Float64Array, correction_N: Float64Array) -> dict[str, float]:
    """Summarise how far behavior and trainer are apart over one batch.

    Shapes: N in, named numbers out; all 0 for an empty batch.
    Units: `_nats` for log-ratios, `_frac` in [0, 1]. `effective_sample_frac` is (sum c)^2 / (n sum
        c^2): 1 when all corrections are equal, near 0 when one token carries the batch.
    """
    if len(log_ratio_N) == 0:
        return dict.fromkeys(_MISMATCH_NAMES, 0.0)
    distance_nats = np.abs(log_ratio_N)
    ratio_N = np.exp(np.clip(log_ratio_N, -MAX_LOG_RATIO_NATS, MAX_LOG_RATIO_NATS))
    is_masked_N = correction_N == 0.0
    # A relative margin of 1e-5: the weights come out of float32 arithmetic.
    is_truncated_N = ~is_masked_N & (correction_N < ratio_N * (1.0 - 1e-5))
    square_sum = float(np.sum(correction_N**2))
    values = (
        np.mean(distance_nats),
        np.quantile(distance_nats, 0.99),
        np.mean(correction_N),
        np.mean(is_truncated_N),
        np.mean(is_masked_N),
        np.sum(correction_N) ** 2 / (len(correction_N) * square_sum) if square_sum > 0.0 else 0.0,
    )
    return {name: float(value) for name, value in zip(_MISMATCH_NAMES, values, strict=True)}
