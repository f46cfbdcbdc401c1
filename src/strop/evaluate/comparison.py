"""Confidence intervals of scores, and changes between two results of one protocol.

Several rollouts of one example are not independent, because easy examples are solved again and
again; nor are several examples of one problem. Every interval here is therefore over problems, not over
rollouts. All use one method (`_interval_of_mean`): each has a width, and covers the truth also near 0 and 1,
where scores of trained models are. None includes the variation over training seeds.

A policy may be right more often because it can do more, or because it has learned the format that the
verifier reads. So three changes are reported: of accuracy, of the format, and of accuracy where the format
was right on both sides (REW-7, EVA-6); and the change of the reward.

Comparing five runs with one baseline finds a difference by chance about five times as often as p says:
`correct_by_holm` corrects that. Only `difference_over_seeds` estimates the variation over training seeds; it
needs two seeds per side.

Shapes: P = examples, C = problems (an example or more each), G = scored rollouts of one example (ragged).
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import NormalDist, fmean, variance
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from strop.errors import CheckRefused, ConfigError, DataError
from strop.evaluate.result import PROTOCOL_FIELDS, EvalPlan, EvalResult, ExampleScore, Score, refuse_invalid

CONFIDENCE = 0.95
"""Nominal coverage of every interval of this room."""
PSEUDO_PROBLEMS = 1.5
"""Problems that an interval adds at either end of the scale of a score."""
_FARTHEST_DEVIATIONS = 1e4
"""Larger than the quantile at 95 % with one degree of freedom, 12.7."""
_ROUNDING = 1e-9


@dataclass(frozen=True, kw_only=True, slots=True)
class Interval:
    """An estimate and the interval around it, all in the same unit."""

    estimate: float
    low: float
    high: float


def _interval_of_mean(
    values_P: Sequence[float] | NDArray[np.float64],
    problems_P: Sequence[str] | None,
    ends: tuple[float, float],
) -> Interval:
    """Estimate the mean of a bounded score over at least one example.

    An adjusted Wald interval: as if `PSEUDO_PROBLEMS` more had the lowest score, and as many the highest
    (`ends`). So it has a width even if all scores are equal, and allows for a few problems of a kind that is
    missing in the sample. By enumeration, at nominal 95 %, it covers a share of right answers in at least
    92 % of cases, for 1 to 1000 problems and every share, where Wilson's interval falls below 86 % for rare
    ones; and a paired difference in at least 92.5 %, for 2 to 100 problems and any rates of gains and
    losses. Graded scores vary less and are covered more often.

    `problems_P` names the problem of each example; examples of one problem are not independent draws. None:
    all problems are different.
    Units: those of the scores.
    Source: A. Agresti and B. A. Coull, Am. Stat. 52 (1998), 119-126, for shares, who add 1.9 at either end;
        D. G. Bonett and R. M. Price, J. Educ. Behav. Stat. 37 (2012), 479-488, for differences, who add 1.
        Our enumeration (tests/evaluate/test_statistics.py) shows that 1.5, with one degree of freedom less,
        holds for both with few problems. Over problems of several examples the mean is a ratio, with the
        variance of W. G. Cochran, Sampling Techniques (1977), section 9A.1.
    """
    if problems_P is None:
        totals_C, sizes_C = np.asarray(values_P, dtype=np.float64), np.ones(len(values_P))
    else:
        places = {name: place for place, name in enumerate(dict.fromkeys(problems_P))}
        places_P = [places[name] for name in problems_P]
        totals_C = np.bincount(places_P, weights=values_P).astype(np.float64)
        sizes_C = np.bincount(places_P).astype(np.float64)
    low, high = ends
    mean_size = float(sizes_C.mean())
    num_problems = len(sizes_C) + 2 * PSEUDO_PROBLEMS
    middle = (float(totals_C.sum()) / mean_size + PSEUDO_PROBLEMS * (low + high)) / num_problems
    squares = float(np.sum((totals_C - middle * sizes_C) ** 2)) / mean_size**2
    squares += PSEUDO_PROBLEMS * ((low - middle) ** 2 + (high - middle) ** 2)
    deviation = math.sqrt(squares / num_problems / (num_problems - 1))
    half = NormalDist().inv_cdf(0.5 + CONFIDENCE / 2) * deviation
    return Interval(
        estimate=float(np.mean(values_P)), low=max(low, middle - half), high=min(high, middle + half)
    )


def clustered_interval(
    solved_P_G: Sequence[Sequence[bool]],
    problems_P: Sequence[str] | None = None,
) -> Interval:
    """Estimate the solved share of examples with one or several rollouts each.

    Shapes: ragged P, G in. Examples without any rollout are skipped; if all are, the result is the interval
    [0, 1] around NaN.
    Units: shares in [0, 1]; every example has the same weight.
    """
    shares_P = [sum(solved_G) / len(solved_G) if solved_G else None for solved_G in solved_P_G]
    return _interval_of_shares(shares_P, problems_P)


def _interval_of_shares(shares_P: Sequence[float | None], problems_P: Sequence[str] | None) -> Interval:
    """Estimate the mean of the shares that are not None."""
    is_known = [share is not None for share in shares_P]
    known_P = [share for share in shares_P if share is not None]
    if not known_P:
        return Interval(estimate=math.nan, low=0.0, high=1.0)
    names_P = None if problems_P is None else list(itertools.compress(problems_P, is_known))
    return _interval_of_mean(known_P, names_P, (0.0, 1.0))


def pass_at_k(num_rollouts: int, num_solved: int, k: int) -> float:
    """Estimate the chance that at least one of k rollouts of an example solves it.

    Units: a probability. Unbiased: the share of all k-subsets of the rollouts that hold a solved one,
    counted in whole numbers and divided once, so it is the nearest float for any numbers.
    Raises: ConfigError if k is below 1 or above the number of rollouts.
    Source: arXiv:2107.03374, section 2.1.
    """
    if not 1 <= k <= num_rollouts:
        raise ConfigError(
            f"pass@{k} from {num_rollouts} rollouts per example",
            allowed=f"k from 1 to {num_rollouts}",
            next_step="draw more rollouts per example or lower k",
        )
    num_subsets = math.comb(num_rollouts, k)
    return (num_subsets - math.comb(num_rollouts - num_solved, k)) / num_subsets


def pass_at_k_interval(
    solved_P_G: Sequence[Sequence[bool]],
    k: int,
    problems_P: Sequence[str] | None = None,
) -> Interval:
    """Estimate pass@k over examples with at least k rollouts.

    Shapes: ragged P, G in. Examples with fewer than k rollouts are skipped; the caller counts them.
    Units: probabilities.
    """
    estimates_P = [
        pass_at_k(len(solved_G), sum(solved_G), k) if len(solved_G) >= k else None for solved_G in solved_P_G
    ]
    return _interval_of_shares(estimates_P, problems_P)


def sign_test(num_up: int, num_down: int) -> float:
    """Return the probability of a split at least this uneven if gains and losses were equally likely.

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
    problems_P: Sequence[str] | None = None,
    *,
    full_scale: float = 1.0,
) -> Interval:
    """Estimate the change of the mean score over the same examples.

    `full_scale`: the largest possible change of one example.
    Shapes: P, P and P, in the same order of examples.
    Units: those of the scores; the ends are within [-full_scale, full_scale].
    Raises: DataError if there is no example, the sides differ in length, or a change is above `full_scale`.
    """
    if len(before_P) != len(after_P) or not before_P:
        raise DataError(
            f"a paired difference of {len(before_P)} and {len(after_P)} examples",
            allowed="the same examples on both sides, one at least",
            next_step="evaluate both models on the same examples",
        )
    change_P: NDArray[np.float64] = np.asarray(after_P, dtype=np.float64) - np.asarray(before_P)
    largest = float(np.abs(change_P).max())
    # In this form a NaN is refused, too.
    if not largest <= full_scale * (1.0 + _ROUNDING):
        raise DataError(
            f"a change of {largest:g} in a score of which {full_scale:g} is the full scale",
            allowed="changes within the full scale",
            next_step="give the scale that the scores have",
        )
    return _interval_of_mean(change_P, problems_P, (-full_scale, full_scale))


def correct_by_holm(p_values: Sequence[float]) -> list[float]:
    """Return p values corrected for the number of comparisons, in the same order.

    Units: probabilities. The chance that at least one true null hypothesis is rejected stays below the
    level, whatever the dependence between the comparisons.
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

    One score per seed; the two sides need not have the same seeds. None with fewer than two seeds on a side,
    or without any spread.
    Units: those of the scores.
    Source: B. L. Welch, Biometrika 34 (1947), 28-35; the degrees of freedom are rounded down, which widens.
    """
    if min(len(before), len(after)) < 2:
        return None
    var_before, var_after = variance(before) / len(before), variance(after) / len(after)
    total = var_before + var_after
    if total == 0.0:
        return None
    freedom = total**2 / (var_before**2 / (len(before) - 1) + var_after**2 / (len(after) - 1))
    half = student_quantile(0.5 + CONFIDENCE / 2, math.floor(freedom + 1e-9)) * math.sqrt(total)
    change = fmean(after) - fmean(before)
    return Interval(estimate=change, low=change - half, high=change + half)


def student_quantile(probability: float, freedom: int) -> float:
    """Return the quantile of Student's distribution for a probability of at least 0.5, by bisection."""
    low, high = 0.0, _FARTHEST_DEVIATIONS
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


_Read = Callable[[ExampleScore], float | None]
_READABLE_FIELDS = ("stop_strings", "part_reply_tokens", "first_prompt")
_CONTEXT_CHARS = 40
"""Characters of long texts that are shown before and behind their first difference."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Change(Interval):
    """The change of accuracy, and its components. Examples unscored on a side are left out."""

    format_ok: Interval | None
    """Change of the share of replies in the right format; None if the task does not check it."""
    in_format: Interval | None
    """Change of accuracy among replies in the right format, over the examples that have such replies on
    both sides; None if there are none."""
    reward: Interval | None
    num_examples: int
    """Compared examples."""
    num_in_format: int
    """Examples behind `in_format`."""
    num_gained: int
    """Examples solved more often than before."""
    num_lost: int
    """Examples solved less often."""
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
    """Training seeds of the side with fewer. No interval includes the variation over seeds."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """A setting in which two runs or results differ, or a fact about them."""

    key: str
    before: Any
    after: Any


def compare_results(before: EvalResult, after: EvalResult) -> Comparison:
    """Compare two results of one protocol.

    Units: differences of shares in [-1, 1], with a 95 % interval over problems (`paired_difference`).
    Raises: CheckRefused if one result is invalid, or if their protocols differ.
    """
    return compare_seeds([before], [after])


def compare_seeds(before: Sequence[EvalResult], after: Sequence[EvalResult]) -> Comparison:
    """Compare like `compare_results`, with one or more results per side, from different training seeds.

    An example's score is its mean over the seeds that judged it, so the interval is still over problems.
    """
    for result in (*before, *after):
        refuse_invalid(result)
    first, *others = (*before, *after)
    for other in others:
        _require_one_protocol(first, other)
    parts = {label: _compare(before, after, part.example_ids) for label, part in first.parts.items()}
    return replace(_compare(before, after, tuple(first.greedy.by_example)), parts=parts)


def _require_one_protocol(before: EvalResult, after: EvalResult) -> None:
    by_key = {difference.key: difference for difference in list_plan_differences(before, after)}
    differences = [by_key[name] for name in PROTOCOL_FIELDS if name in by_key]
    if not differences:
        return
    # These fields explain a differing digest.
    differences += [by_key[name] for name in _READABLE_FIELDS if name in by_key]
    shown = "; ".join(map(describe_difference, differences))
    raise CheckRefused(
        f"two results were measured by different protocols: {shown}",
        allowed="results that agree in " + ", ".join(PROTOCOL_FIELDS),
        next_step="evaluate both models with the same task, split and sampling",
    )


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


def describe_difference(difference: Difference, words: tuple[str, str] = ("", "")) -> str:
    """Describe a difference in one line; of long texts only the first difference."""
    before, after = difference.before, difference.after
    if isinstance(before, str) and isinstance(after, str):
        pairs = enumerate(zip(before, after, strict=False))
        first = next((i for i, (char, other) in pairs if char != other), min(len(before), len(after)))
        start = max(first - _CONTEXT_CHARS, 0)
        before, after = (text[start : start + 2 * _CONTEXT_CHARS] for text in (before, after))
    return f"{difference.key} {before!r}{words[0]} and {after!r}{words[1]}"


def _change(
    before: Sequence[Score | None], after: Sequence[Score | None], example_ids: Collection[str]
) -> Change | None:
    scores_before, scores_after = ([score for score in side if score is not None] for side in (before, after))
    if len(scores_before) < len(before) or len(scores_after) < len(after):
        return None
    pairs = {
        name: (
            [score.by_example[name] for score in scores_before],
            [score.by_example[name] for score in scores_after],
        )
        for name in sorted(example_ids)
    }
    solved = _read_both(pairs, lambda example: example.solved_frac)
    if not solved.problems:
        return None
    in_format = _read_both(pairs, lambda example: example.in_format_solved_frac)
    reward = _read_both(pairs, lambda example: example.reward_mean)
    accuracy = _difference(solved)
    assert accuracy is not None
    # The scale includes 0 and 1: most rewards are shares of full marks.
    rewards = [0.0, 1.0, *itertools.chain.from_iterable(reward.values)]
    # Over problems: changes of several examples of one problem are not independent.
    changes: dict[str, float] = defaultdict(float)
    for problem, (earlier, later) in zip(solved.problems, solved.values, strict=True):
        changes[problem] += later - earlier
    moved = [change for change in changes.values() if abs(change) > _ROUNDING]
    num_up = sum(change > 0.0 for change in moved)
    return Change(
        estimate=accuracy.estimate,
        low=accuracy.low,
        high=accuracy.high,
        format_ok=_difference(_read_both(pairs, lambda example: example.format_ok_frac)),
        in_format=_difference(in_format),
        reward=_difference(reward, full_scale=max(rewards) - min(rewards)),
        num_examples=len(solved.problems),
        num_in_format=len(in_format.problems),
        num_gained=sum(later > earlier for earlier, later in solved.values),
        num_lost=sum(later < earlier for earlier, later in solved.values),
        p_value=sign_test(num_up, len(moved) - num_up),
    )


class _Both(NamedTuple):
    """A number of some examples before and after, and their problems."""

    problems: list[str]
    values: list[tuple[float, float]]


def _read_both(
    pairs: Mapping[str, tuple[Sequence[ExampleScore], Sequence[ExampleScore]]], read: _Read
) -> _Both:
    """Return a number of each example before and after, as the mean over seeds, if both sides have it."""
    both = _Both([], [])
    for name, (before, after) in pairs.items():
        values_before, values_after = (
            [value for score in side if (value := read(score)) is not None] for side in (before, after)
        )
        if values_before and values_after:
            both.problems.append(before[0].problem or name)
            both.values.append((fmean(values_before), fmean(values_after)))
    return both


def _difference(both: _Both, full_scale: float = 1.0) -> Interval | None:
    if not both.values:
        return None
    before_P, after_P = zip(*both.values, strict=True)
    return paired_difference(before_P, after_P, both.problems, full_scale=full_scale)
