"""Intervals, pass@k, paired differences and their test: how sure a score is.

Several rollouts of one example are not independent, because easy examples are solved again and
again. Every interval here is therefore over examples, not over rollouts. Nothing assumes a normal
distribution of scores near 0 or 1, where scores of trained models lie.

Shapes: P = examples, G = scored rollouts of one example (ragged).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from strop.errors import ConfigError, DataError, explain_refusal

CONFIDENCE = 0.95
"""Coverage that every interval of this room aims at."""
_CHUNK = 1000


@dataclass(frozen=True, kw_only=True, slots=True)
class Interval:
    """An estimate and the interval around it, all in the same unit."""

    estimate: float
    low: float
    high: float


def wilson_interval(num_solved: float, num_trials: float, confidence: float = CONFIDENCE) -> Interval:
    """Estimate a solved share from independent trials, one rollout per example.

    Both counts may be fractional (see `clustered_interval`). No trials give the interval [0, 1]
    around an undefined estimate (NaN).
    Units: shares in [0, 1].
    Source: E. B. Wilson, J. Am. Stat. Assoc. 22 (1927), 209-212.
    """
    if num_trials <= 0:
        return Interval(estimate=math.nan, low=0.0, high=1.0)
    z = NormalDist().inv_cdf(0.5 + confidence / 2)
    share = num_solved / num_trials
    shrink = 1 + z * z / num_trials
    middle = (share + z * z / (2 * num_trials)) / shrink
    half = z * math.sqrt(share * (1 - share) / num_trials + z * z / (4 * num_trials**2)) / shrink
    # The ends are exact where nothing or everything was solved; rounding would leave a residue.
    low = 0.0 if num_solved <= 0 else max(0.0, middle - half)
    high = 1.0 if num_solved >= num_trials else min(1.0, middle + half)
    return Interval(estimate=share, low=low, high=high)


def clustered_interval(solved_P_G: Sequence[Sequence[bool]], confidence: float = CONFIDENCE) -> Interval:
    """Estimate the solved share of examples that were tried several times each.

    Shapes: ragged P, G in. Examples without any rollout take no part.
    Units: shares in [0, 1]; every example counts the same, however often it was tried.
    """
    shares_P = [sum(solved_G) / len(solved_G) for solved_G in solved_P_G if solved_G]
    return _interval_of_shares(shares_P, sum(len(solved_G) for solved_G in solved_P_G), confidence)


def _interval_of_shares(shares_P: Sequence[float], num_trials: int, confidence: float) -> Interval:
    """Estimate the mean of one share per example, made from so many trials in all.

    The number of trials that enters the Wilson interval is the effective one: how many independent
    trials would estimate the mean as well, given how much examples differ. It lies between the
    number of examples and the number of trials.
    Source: effective sample size after Korn and Graubard, Survey Methodology 24 (1998), 193-201;
        with Wilson's interval as studied by Franco et al., J. Surv. Stat. Methodol. 7 (2019), 334.
    """
    num_examples = len(shares_P)
    if num_examples == 0:
        return wilson_interval(0, 0, confidence)
    share = float(np.mean(shares_P))
    variance_of_mean = float(np.var(shares_P, ddof=1)) / num_examples if num_examples > 1 else 0.0
    # No difference between examples says nothing about trials: then the examples are the trials.
    num_effective = float(num_examples)
    if variance_of_mean > 0.0:
        num_effective = max(num_effective, min(num_trials, share * (1 - share) / variance_of_mean))
    return wilson_interval(share * num_effective, num_effective, confidence)


def pass_at_k(num_rollouts: int, num_solved: int, k: int) -> float:
    """Estimate the chance that at least one of k rollouts of an example solves it.

    Units: a probability. Unbiased: the share of all k-subsets of the rollouts that hold a solved one,
    counted in whole numbers and divided once, so it is the nearest float for any numbers.
    Raises: ConfigError if k is below 1 or above the number of rollouts.
    Source: arXiv:2107.03374, section 2.1.
    """
    if not 1 <= k <= num_rollouts:
        raise ConfigError(
            explain_refusal(
                f"pass@{k} from {num_rollouts} rollouts per example",
                allowed=f"k from 1 to {num_rollouts}",
                next_step="draw more rollouts per example or lower k",
            )
        )
    num_subsets = math.comb(num_rollouts, k)
    return (num_subsets - math.comb(num_rollouts - num_solved, k)) / num_subsets


def pass_at_k_interval(
    solved_P_G: Sequence[Sequence[bool]], k: int, confidence: float = CONFIDENCE
) -> Interval:
    """Estimate pass@k over examples that were tried k times or more.

    Shapes: ragged P, G in. Examples with fewer than k rollouts take no part; the caller counts them.
    Units: probabilities. The interval is over examples. Of G rollouts, G // k disjoint sets of k are
    independent trials, so no more than that count.
    """
    tried_P_G = [solved_G for solved_G in solved_P_G if len(solved_G) >= k]
    estimates_P = [pass_at_k(len(solved_G), sum(solved_G), k) for solved_G in tried_P_G]
    return _interval_of_shares(estimates_P, sum(len(solved_G) // k for solved_G in tried_P_G), confidence)


def sign_test(num_up: int, num_down: int) -> float:
    """Return how probable a split of changes at least this uneven is, if up and down were equally likely.

    Units: a probability, two-sided and exact; 1 without any change. For one rollout per example this
    is McNemar's exact test.
    Source: Q. McNemar, Psychometrika 12 (1947), 153-157, with the binomial in place of chi-squared.
    """
    num_changes = num_up + num_down
    tail = num_ways = 1  # To choose none of the changes.
    for index in range(min(num_up, num_down)):
        num_ways = num_ways * (num_changes - index) // (index + 1)
        tail += num_ways
    return min(1.0, float(2 * tail / 2**num_changes))


def paired_difference(
    before_P: Sequence[float],
    after_P: Sequence[float],
    *,
    confidence: float = CONFIDENCE,
    num_resamples: int = 10_000,
    seed: int = 0,
) -> Interval:
    """Estimate by how much the mean score of the same examples has changed.

    Shapes: P and P, in the same order of examples.
    Units: those of the scores. A percentile bootstrap over examples, with a fixed seed so that a
        report can be made again; it has width 0 if every example changed by the same amount.
    Raises: DataError if there is no example or the two differ in length.
    Source: B. Efron, Ann. Statist. 7 (1979), 1-26.
    """
    if len(before_P) != len(after_P) or not before_P:
        raise DataError(
            explain_refusal(
                f"a paired difference of {len(before_P)} and {len(after_P)} examples",
                allowed="the same examples on both sides, one at least",
                next_step="evaluate both models on the same examples",
            )
        )
    change_P: NDArray[np.float64] = np.asarray(after_P, dtype=np.float64) - np.asarray(before_P)
    stream = np.random.default_rng(seed)
    means: list[NDArray[np.float64]] = []
    for start in range(0, num_resamples, _CHUNK):
        num_rows = min(_CHUNK, num_resamples - start)
        drawn = stream.integers(0, len(change_P), size=(num_rows, len(change_P)))
        means.append(change_P[drawn].mean(axis=1))
    tail = (1 - confidence) / 2
    low, high = np.quantile(np.concatenate(means), [tail, 1 - tail])
    return Interval(estimate=float(np.mean(change_P)), low=float(low), high=float(high))
