"""Statistics of paired measurements: the median ratio and how sure it is."""

from __future__ import annotations

import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

NUM_RESAMPLES = 10_000


@dataclass(frozen=True, kw_only=True, slots=True)
class RatioSummary:
    """A median of per-pair ratios with its bootstrap interval."""

    median: float
    low: float
    """2.5 % quantile of the resampled medians. A target is met when this end meets it."""
    high: float
    """97.5 % quantile."""
    num_pairs: int


def summarize_ratios(ratios: Sequence[float], seed: int = 0) -> RatioSummary:
    """Return the median of the ratios and its 95 % bootstrap interval.

    Raises: ValueError if there are no ratios. One ratio gives an interval of no width.
    """
    if not ratios:
        raise ValueError("no pairs were measured. Allowed: at least 1. Next: set --pairs to 6 or more.")
    generator = random.Random(seed)
    medians = sorted(
        statistics.median(generator.choices(ratios, k=len(ratios))) for _ in range(NUM_RESAMPLES)
    )
    return RatioSummary(
        median=statistics.median(ratios),
        low=medians[int(0.025 * NUM_RESAMPLES)],
        high=medians[int(0.975 * NUM_RESAMPLES) - 1],
        num_pairs=len(ratios),
    )
