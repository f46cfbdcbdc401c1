"""Comparison of runs with the first of them, as a table of changes.

The numbers come from `strop.run.runs.compare_many`; this module only shows them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import fmean
from typing import TYPE_CHECKING

from strop.run.runs import Arm, ManyComparison, list_changes

if TYPE_CHECKING:
    from strop.evaluate import Interval, Summary

COLUMNS = ("run", "replies", "share", "first", "this", "change", "95% interval", "p", "p (Holm)")
"""Columns of `list_changes_in_words`. p (Holm) holds for all comparisons together."""


def list_changes_in_words(comparison: ManyComparison) -> list[tuple[str, ...]]:
    """Return the rows of the table of changes, in `COLUMNS`; shares are means over an arm's seeds."""
    rows: list[tuple[str, ...]] = []
    for other in comparison.others:
        name = other.arm.label
        for key, change in list_changes(other.change).items():
            before, after = (_scores_of(arm, key) for arm in (comparison.baseline, other.arm))
            shares = _mean_share(before, "accuracy"), _mean_share(after, "accuracy")
            p_values = f"{change.p_value:.2g}", f"{other.p_values[key]:.2g}"
            rows.append((name, key, "accuracy", *shares, *_show_change(change), *p_values))
            over_seeds = other.over_seeds.get(key)
            if over_seeds is not None:
                rows.append((name, key, "accuracy, over seeds", "", "", *_show_change(over_seeds), "", ""))
            if change.format_ok is not None:
                shares = _mean_share(before, "format_ok_frac"), _mean_share(after, "format_ok_frac")
                rows.append((name, key, "format ok", *shares, *_show_change(change.format_ok), "", ""))
                in_both = _show_change(change.in_format)
                rows.append((name, key, "accuracy where both have the format", "", "", *in_both, "", ""))
    return rows


def _scores_of(arm: Arm, key: str) -> list[Summary]:
    """Return the scores of an arm's results by a key of `ArmChange`."""
    label, _, kind = key.rpartition(": ")
    return [(result.parts[label] if label else result).scores[kind] for result in arm.results]


def _mean_share(scores: Sequence[Summary], name: str) -> str:
    values = [value for score in scores if (value := getattr(score, name)) is not None]
    return f"{fmean(values):.1%}" if values else "-"


def _show_change(change: Interval | None) -> tuple[str, str]:
    if change is None:
        return "-", "-"
    return f"{change.estimate:+.1%}", f"{change.low:+.1%} to {change.high:+.1%}"


def list_remarks(comparison: ManyComparison, *, is_declared: bool) -> Iterator[str]:
    """Yield remarks on the table for the reader. `is_declared`: --vary named the settings that may differ."""
    others = comparison.others
    for other in others:
        for key, change in list_changes(other.change).items():
            prefix = f"{other.arm.label}: " if len(others) > 1 else ""
            yield (
                f"{prefix}{key}: {change.num_gained} of {change.num_examples} examples solved more often,"
                f" {change.num_lost} less often, p = {change.p_value:.2g}"
            )
    if len(others) > 1:
        number = "both" if len(others) == 2 else f"all {len(others)}"
        yield f"p (Holm) holds for {number} comparisons together; each interval is one of 95 % by itself"
    if any(other.over_seeds for other in others):
        yield "intervals are over problems, with the seeds as they are; those over seeds say so"
    else:
        num_seeds = max(len(arm.paths) for arm in (comparison.baseline, *(other.arm for other in others)))
        seeds = "of one seed each" if num_seeds == 1 else "of a few seeds"
        yield f"intervals are over problems, {seeds}: what another seed would change is not in them"
    yield from comparison.notes
    if comparison.settings and not is_declared:
        keys = ", ".join(setting.key for setting in comparison.settings)
        yield f"no verdict on a cause: nothing was declared with --vary, and these differ: {keys}"
