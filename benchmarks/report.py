"""The readable form of results: one line per pair of arms."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from benchmarks.harness import CaseResult
from benchmarks.ratio import RatioSummary


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


def _row(result: CaseResult) -> dict[str, str]:
    ours, rival = result.arms
    return {
        "case": result.case.name,
        "rival": rival,
        "strop s": f"{_median(result, ours, 'step_s'):.2f}",
        "rival s": f"{_median(result, rival, 'step_s'):.2f}",
        "strop tok/s": f"{_rate(result, ours):.0f}",
        "rival tok/s": f"{_rate(result, rival):.0f}",
        "z": _mean_z(result),
        "faster": _interval(result.speedup),
        "per token": _interval(result.speedup_per_token),
        "quiet": "yes" if result.is_quiet else "NO",
    }


def render_table(results: Sequence[CaseResult]) -> str:
    """Return the results as an aligned text table; ratios carry their 95 % interval."""
    found = [_row(result) for result in results]
    rows = [tuple(found[0]), *(tuple(row.values()) for row in found)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
    return "\n".join(line.rstrip() for line in lines)
