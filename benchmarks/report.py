"""The readable form of results: one line per pair of arms."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from benchmarks.harness import CaseResult
from benchmarks.ratio import RatioSummary

COLUMNS = (
    "case",
    "rival",
    "strop s",
    "rival s",
    "strop tok/s",
    "rival tok/s",
    "z",
    "faster",
    "per token",
    "quiet",
)


def _median(result: CaseResult, arm: str, key: str) -> float:
    return statistics.median(float(pair[arm][key]) for pair in result.turns.pairs)


def _rate(result: CaseResult, arm: str) -> float:
    return statistics.median(
        float(pair[arm]["scored_tok"]) / float(pair[arm]["step_s"]) for pair in result.turns.pairs
    )


def _interval(summary: RatioSummary) -> str:
    return f"{summary.median:.2f} [{summary.low:.2f}, {summary.high:.2f}]"


def _mean_z(result: CaseResult) -> str:
    values: list[Any] = [pair[arm].get("z") for pair in result.turns.pairs for arm in result.arms]
    known = [float(value) for value in values if value is not None]
    return f"{statistics.fmean(known):.2f}" if known else "-"


def _row(result: CaseResult) -> tuple[str, ...]:
    ours, rival = result.arms
    return (
        result.case.name,
        rival,
        f"{_median(result, ours, 'step_s'):.2f}",
        f"{_median(result, rival, 'step_s'):.2f}",
        f"{_rate(result, ours):.0f}",
        f"{_rate(result, rival):.0f}",
        _mean_z(result),
        _interval(result.speedup),
        _interval(result.speedup_per_token),
        "yes" if result.is_quiet else "NO",
    )


def render_table(results: Sequence[CaseResult]) -> str:
    """Return the results as an aligned text table; ratios carry their 95 % interval."""
    rows = [COLUMNS, *(_row(result) for result in results)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(COLUMNS))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
    return "\n".join(line.rstrip() for line in lines)
