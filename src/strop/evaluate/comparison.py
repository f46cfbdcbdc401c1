"""Confidence intervals of scores, and changes between two results of one protocol.

Rollouts of one example are not independent, nor are examples of one problem: every interval is over problems,
by one method (`_interval_of_mean`). None includes the variation over training seeds, which only
`difference_over_seeds` estimates.

A policy may be right more often because it can do more, or because it has learned the format that the
verifier reads. So three changes are reported: of accuracy, of the format, and of accuracy where the format
was right on both sides (REW-7, EVA-6); and the change of the reward.

Shapes: P = examples, C = problems (an example or more each), G = scored rollouts of one example (ragged).
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import NormalDist, fmean, variance
from typing import Any

import numpy as np

from strop.errors import CheckRefused
from strop.evaluate.result import PROTOCOL_FIELDS, EvalPlan, EvalResult, ExampleScore, Score, refuse_invalid

CONFIDENCE = 0.95
"""Nominal coverage of every interval of this room."""
NORMAL = NormalDist().inv_cdf(0.5 + CONFIDENCE / 2)
PSEUDO_PROBLEMS = 1.5
"""Problems that an interval adds at either end of the scale of a score."""
_ROUNDING = 1e-9


@dataclass(frozen=True, kw_only=True, slots=True)
class Interval:
    """An estimate and the interval around it, all in the same unit."""

    estimate: float
    low: float
    high: float


def _interval_of_mean(
    values_P: Sequence[float], problems_P: Sequence[str] | None, ends: tuple[float, float]
) -> Interval:
    """Estimate the mean of a bounded score over at least one example.

    An adjusted Wald interval: as if `PSEUDO_PROBLEMS` more had the lowest score, and as many the highest
    (`ends`). So it has a width even if all scores are equal. By enumeration it covers, at nominal 95 %, a
    share of right answers in at least 92 % of cases and a paired difference in at least 92.5 %
    (tests/evaluate/test_statistics.py). `problems_P` names the problem of each example; None: all differ.

    Source: A. Agresti and B. A. Coull, Am. Stat. 52 (1998), 119-126; D. G. Bonett and R. M. Price, J. Educ.
        Behav. Stat. 37 (2012), 479-488; over problems of several examples the mean is a ratio, with the
        variance of W. G. Cochran, Sampling Techniques (1977), section 9A.1.
    """
    names_P = np.arange(len(values_P)) if problems_P is None else problems_P
    _, places_P = np.unique(names_P, return_inverse=True)
    totals_C = np.bincount(places_P, weights=values_P)
    sizes_C = np.bincount(places_P)
    (low, high), mean_size = ends, float(sizes_C.mean())
    num_problems = len(sizes_C) + 2 * PSEUDO_PROBLEMS
    middle = (float(totals_C.sum()) / mean_size + PSEUDO_PROBLEMS * (low + high)) / num_problems
    squares = float(np.sum((totals_C - middle * sizes_C) ** 2)) / mean_size**2
    squares += PSEUDO_PROBLEMS * ((low - middle) ** 2 + (high - middle) ** 2)
    half = NORMAL * math.sqrt(squares / num_problems / (num_problems - 1))
    return Interval(
        estimate=float(np.mean(values_P)), low=max(low, middle - half), high=min(high, middle + half)
    )


def interval_of_shares(shares_P: Sequence[float | None], problems_P: Sequence[str] | None = None) -> Interval:
    """Estimate the mean of the shares that are not None; [0, 1] around NaN if there is none."""
    known_P = [share for share in shares_P if share is not None]
    if not known_P:
        return Interval(estimate=math.nan, low=0.0, high=1.0)
    names_P = problems_P and list(itertools.compress(problems_P, (share is not None for share in shares_P)))
    return _interval_of_mean(known_P, names_P, (0.0, 1.0))


def clustered_interval(
    solved_P_G: Sequence[Sequence[bool]], problems_P: Sequence[str] | None = None
) -> Interval:
    """Estimate the solved share of examples; those without any rollout are left out."""
    return interval_of_shares([fmean(solved_G) if solved_G else None for solved_G in solved_P_G], problems_P)


def pass_at_k(num_rollouts: int, num_solved: int, k: int) -> float:
    """Estimate the chance that at least one of k rollouts of an example solves it, without bias.

    The share of all k-subsets of the rollouts that hold a solved one, in whole numbers and divided once.
    Source: arXiv:2107.03374, section 2.1.
    """
    num_subsets = math.comb(num_rollouts, k)
    return (num_subsets - math.comb(num_rollouts - num_solved, k)) / num_subsets


def pass_at_k_interval(
    solved_P_G: Sequence[Sequence[bool]], k: int, problems_P: Sequence[str] | None = None
) -> Interval:
    """Estimate pass@k over the examples with at least k rollouts; the caller counts the others."""
    estimates_P = [
        pass_at_k(len(solved_G), sum(solved_G), k) if len(solved_G) >= k else None for solved_G in solved_P_G
    ]
    return interval_of_shares(estimates_P, problems_P)


def sign_test(num_up: int, num_down: int) -> float:
    """Return the probability of a split at least this uneven if gains and losses were equally likely.

    Two-sided and exact. For one rollout per example this is McNemar's exact test.
    """
    num_changes = num_up + num_down
    tail = sum(math.comb(num_changes, number) for number in range(min(num_up, num_down) + 1))
    return min(1.0, float(2 * tail / 2**num_changes))


def paired_difference(
    before_P: Sequence[float],
    after_P: Sequence[float],
    problems_P: Sequence[str] | None = None,
    *,
    full_scale: float = 1.0,
) -> Interval:
    """Estimate the change of the mean score over the same examples, of at most `full_scale` each."""
    change_P = [after - before for before, after in zip(before_P, after_P, strict=True)]
    assert max(map(abs, change_P)) <= full_scale * (1.0 + _ROUNDING)
    return _interval_of_mean(change_P, problems_P, (-full_scale, full_scale))


def correct_by_holm(p_values: Sequence[float]) -> list[float]:
    """Return p values corrected for the number of comparisons, whatever their dependence, in the same order.

    Source: S. Holm, Scand. J. Statist. 6 (1979), 65-70.
    """
    corrected, largest = [1.0] * len(p_values), 0.0
    for rank, index in enumerate(sorted(range(len(p_values)), key=lambda index: p_values[index])):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[index]))
        corrected[index] = largest
    return corrected


def difference_over_seeds(before: Sequence[float], after: Sequence[float]) -> Interval | None:
    """Estimate the difference of two means, of one score per training seed, as if these were drawn at random.

    None with fewer than two seeds on a side, or without any spread.
    Source: B. L. Welch, Biometrika 34 (1947), 28-35; the degrees of freedom are rounded down, which widens.
    """
    if min(len(before), len(after)) < 2:
        return None
    var_before, var_after = variance(before) / len(before), variance(after) / len(after)
    total = var_before + var_after
    if total == 0.0:
        return None
    freedom = total**2 / (var_before**2 / (len(before) - 1) + var_after**2 / (len(after) - 1))
    half = student_quantile(math.floor(freedom + _ROUNDING)) * math.sqrt(total)
    change = fmean(after) - fmean(before)
    return Interval(estimate=change, low=change - half, high=change + half)


def student_quantile(freedom: int) -> float:
    """Return the half width of Student's interval at `CONFIDENCE`, by quadrature over the angle of t."""
    angles = np.linspace(0.0, np.pi / 2, 100_001)
    density = np.cos(angles) ** (freedom - 1)
    below = np.concatenate([[0.0], np.cumsum(density[1:] + density[:-1])])
    return float(math.sqrt(freedom) * np.tan(np.interp(CONFIDENCE * below[-1], below, angles)))


_READABLE_FIELDS = ("stop_strings", "part_reply_tokens")


@dataclass(frozen=True, kw_only=True, slots=True)
class Change(Interval):
    """The change of accuracy, and its components. Examples unscored on a side are left out."""

    format_ok: Interval | None
    """Change of the share of replies in the right format; None if the task does not check it."""
    in_format: Interval | None
    """Change of accuracy over the examples with replies in the right format on both sides, among these."""
    reward: Interval | None
    num_examples: int
    num_in_format: int
    """Examples behind `in_format`."""
    num_gained: int
    num_lost: int
    """Examples solved more, and less often than before."""
    p_value: float
    """Probability of such an uneven split of gained and lost problems if nothing changed (sign test)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """The changes on the same examples; None if a side has no score."""

    greedy: Change | None
    sampled: Change | None
    parts: Mapping[str, Comparison] = field(default_factory=dict)
    """Comparison of each part of a mixture, by label."""
    num_seeds: int = 1
    """Training seeds of the side with fewer."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """A setting in which two runs or results differ, or a fact about them."""

    key: str
    before: Any
    after: Any

    def __str__(self) -> str:
        """Describe it in one line; of long texts only the first difference."""
        before, after = self.before, self.after
        if isinstance(before, str) and isinstance(after, str):
            first = next((i for i in range(len(before)) if before[: i + 1] != after[: i + 1]), len(before))
            start = max(first - 40, 0)
            before, after = before[start : start + 80], after[start : start + 80]
        return f"{self.key} {before!r} and {after!r}"


def compare_results(before: EvalResult, after: EvalResult) -> Comparison:
    """Compare two results of one protocol, as `compare_seeds` does."""
    return compare_seeds([before], [after])


def compare_seeds(before: Sequence[EvalResult], after: Sequence[EvalResult]) -> Comparison:
    """Compare results of one protocol, of one or more training seeds per side.

    An example's score is its mean over the seeds that judged it, so the interval is still over problems.
    Units: differences of shares in [-1, 1], with a 95 % interval (`paired_difference`).
    Raises: CheckRefused if one result is invalid, or if their protocols differ.
    """
    for result in (*before, *after):
        refuse_invalid(result)
    first, *others = (*before, *after)
    for other in others:
        by_key = {one.key: str(one) for one in list_plan_differences(first, other)}
        if by_key.keys() & set(PROTOCOL_FIELDS):
            # The readable fields explain a differing digest.
            named = [by_key[name] for name in (*PROTOCOL_FIELDS, *_READABLE_FIELDS) if name in by_key]
            raise CheckRefused(
                f"two results were measured by different protocols: {'; '.join(named)}",
                allowed="results that agree in " + ", ".join(PROTOCOL_FIELDS),
                next_step="evaluate both models with the same task, split and sampling",
            )
    parts = {label: _compare(before, after, part.example_ids) for label, part in first.parts.items()}
    return replace(_compare(before, after, tuple(first.greedy.by_example)), parts=parts)


def _compare(
    before: Sequence[EvalResult], after: Sequence[EvalResult], example_ids: Collection[str]
) -> Comparison:
    return Comparison(
        greedy=_change([run.greedy for run in before], [run.greedy for run in after], example_ids),
        sampled=_change([run.sampled for run in before], [run.sampled for run in after], example_ids),
        num_seeds=min(len(before), len(after)),
    )


def list_plan_differences(before: EvalPlan, after: EvalPlan) -> tuple[Difference, ...]:
    """Return the fields in which two plans differ."""
    values, others = before.identity.model_dump(mode="json"), after.identity.model_dump(mode="json")
    return tuple(
        Difference(key=name, before=values[name], after=others[name])
        for name in EvalPlan.model_fields
        if values[name] != others[name]
    )


def _change(
    before: Sequence[Score | None], after: Sequence[Score | None], example_ids: Collection[str]
) -> Change | None:
    sides = [[score for score in side if score is not None] for side in (before, after)]
    if [len(before), len(after)] != list(map(len, sides)):
        return None

    def read(value_of: Callable[[ExampleScore], float | None]) -> list[tuple[str, float, float]]:
        """Return a number of each example before and after, as the mean over seeds, if both sides have it."""
        both = []
        for name in sorted(example_ids):
            examples = [[score.by_example[name] for score in side] for side in sides]
            values = [[v for one in side if (v := value_of(one)) is not None] for side in examples]
            if all(values):
                both.append((examples[0][0].problem or name, fmean(values[0]), fmean(values[1])))
        return both

    solved = read(lambda example: example.solved_frac)
    if not solved:
        return None
    in_format = read(lambda example: example.in_format_solved_frac)
    reward = read(lambda example: example.reward_mean)
    accuracy = _difference(solved)
    assert accuracy is not None
    # The scale includes 0 and 1: most rewards are shares of full marks.
    rewards = [0.0, 1.0, *(value for _, *pair in reward for value in pair)]
    # Over problems: changes of several examples of one problem are not independent.
    changes: dict[str, float] = defaultdict(float)
    for problem, earlier, later in solved:
        changes[problem] += later - earlier
    moved = [change for change in changes.values() if abs(change) > _ROUNDING]
    num_up = sum(change > 0.0 for change in moved)
    return Change(
        estimate=accuracy.estimate,
        low=accuracy.low,
        high=accuracy.high,
        format_ok=_difference(read(lambda example: example.format_ok_frac)),
        in_format=_difference(in_format),
        reward=_difference(reward, full_scale=max(rewards) - min(rewards)),
        num_examples=len(solved),
        num_in_format=len(in_format),
        num_gained=sum(later > earlier for _, earlier, later in solved),
        num_lost=sum(later < earlier for _, earlier, later in solved),
        p_value=sign_test(num_up, len(moved) - num_up),
    )


def _difference(both: Sequence[tuple[str, float, float]], full_scale: float = 1.0) -> Interval | None:
    if not both:
        return None
    problems_P, before_P, after_P = zip(*both, strict=True)
    return paired_difference(before_P, after_P, problems_P, full_scale=full_scale)
