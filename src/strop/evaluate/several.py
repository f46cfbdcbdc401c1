"""What several comparisons, and several training seeds, ask of statistics.

Whoever compares five runs with one baseline finds a difference by chance about five times as often as p
says; Holm's correction takes that back. And a run that is repeated under another seed comes out otherwise:
an interval over problems cannot know by how much, one over seeds can, from two seeds a side on.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean, variance

from strop.evaluate.comparison import CONFIDENCE, Interval

_FARTHEST = 1e4
"""In deviations: beyond the quantile at 95 % of one degree of freedom, 12.7."""


def correct_by_holm(p_values: Sequence[float]) -> list[float]:
    """Return p values that hold for all comparisons together, in the order given.

    Units: probabilities. The chance that one at least of true null hypotheses is rejected stays below the
    level, however the comparisons depend on each other.
    Source: S. Holm, Scand. J. Statist. 6 (1979), 65-70.
    """
    ranked = sorted(range(len(p_values)), key=lambda index: p_values[index])
    corrected, largest = [1.0] * len(p_values), 0.0
    for rank, index in enumerate(ranked):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[index]))
        corrected[index] = largest
    return corrected


def difference_over_seeds(before: Sequence[float], after: Sequence[float]) -> Interval | None:
    """Estimate the difference of two means over training seeds, as if seeds were drawn at random.

    One score a seed; the two sides need not have the same seeds. None where it cannot be told: fewer than
    two seeds on a side, or no spread on either.
    Units: those of the scores.
    Source: B. L. Welch, Biometrika 34 (1947), 28-35; the degrees of freedom are rounded down, which widens.
    """
    if min(len(before), len(after)) < 2:
        return None
    one, other = variance(before) / len(before), variance(after) / len(after)
    if one + other == 0.0:
        return None
    freedom = (one + other) ** 2 / (one**2 / (len(before) - 1) + other**2 / (len(after) - 1))
    half = student_quantile(0.5 + CONFIDENCE / 2, math.floor(freedom + 1e-9)) * math.sqrt(one + other)
    change = fmean(after) - fmean(before)
    return Interval(estimate=change, low=change - half, high=change + half)


def student_quantile(probability: float, freedom: int) -> float:
    """Return where Student's distribution reaches a probability of 0.5 or more, by bisection."""
    low, high = 0.0, _FARTHEST
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if _student_cdf(middle, freedom) < probability else (low, middle)
    return high


def _student_cdf(t: float, freedom: int) -> float:
    """Return P(T <= t) for t >= 0 and a whole number of degrees of freedom.

    Source: M. Abramowitz and I. A. Stegun, Handbook of Mathematical Functions (1964), 26.7.3 and 26.7.4.
    """
    angle = math.atan(t / math.sqrt(freedom))
    cosine, sine = math.cos(angle), math.sin(angle)
    term = total = cosine if freedom % 2 else 1.0
    for k in range(3 if freedom % 2 else 2, freedom - 1, 2):
        term *= (k - 1) / k * cosine**2
        total += term
    if freedom % 2 == 0:
        inside = sine * total
    elif freedom == 1:
        inside = 2 / math.pi * angle
    else:
        inside = 2 / math.pi * (angle + sine * total)
    return 0.5 + inside / 2
