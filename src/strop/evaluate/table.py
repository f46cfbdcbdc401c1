"""All scores of an evaluation in one table, beside the user's own baselines: as text, JSON and CSV.

A score has a row for each baseline. If the protocols differ, the row has no difference, and `note` names the
differing fields.
"""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from pathlib import Path

from strop.evaluate.harness import HarnessMetric, HarnessResult
from strop.evaluate.result import EvalResult
from strop.evaluate.stored import (
    BaselineScore,
    Result,
    StoredBaseline,
    compare_with_stored,
    interval_of,
    scale_of,
)
from strop.io import write_bytes_atomically


@dataclass(frozen=True, kw_only=True, slots=True)
class ScoreRow:
    """One score. Shares are percentages, other metrics of lm-eval have their own unit."""

    task: str
    metric: str
    value: float | None
    low: float | None
    """Lower end of the 95% interval."""
    high: float | None
    num_examples: int
    num_few_shot: int | None
    max_reply_tokens: int | None
    step: int
    engine: str
    """'strop' for strop's own tasks, else lm-eval's engine."""
    baseline: float | None = None
    baseline_stderr: float | None = None
    baseline_of: str = ""
    """The user's name of the stored result."""
    difference: float | None = None
    """Points above it; None if the protocols differ."""
    note: str = ""
    baseline_low: float | None = None
    """Lower end of its 95% interval."""
    baseline_high: float | None = None
    difference_low: float | None = None
    """Lower end of the difference's 95% interval; None if an error is unknown."""
    difference_high: float | None = None
    same_protocol: bool | None = None
    """Whether the two are comparable; None without a baseline."""


def list_rows(results: Sequence[Result], stored: Sequence[StoredBaseline] = ()) -> list[ScoreRow]:
    """Return a row for each score and each of its baselines, in the order of the results."""
    rows: list[ScoreRow] = []
    for result in results:
        tables = [compare_with_stored(baseline, result) for baseline in stored]
        scores = _rows_of_harness(result) if isinstance(result, HarnessResult) else _rows_of_own(result)
        for row in scores:
            key = row.task, row.metric
            rows += [_with_baseline(row, table[key]) for table in tables if key in table] or [row]
    return rows


def _rows_of_own(result: EvalResult) -> Iterator[ScoreRow]:
    row_of = partial(
        ScoreRow,
        task=result.full_name,
        num_examples=result.num_examples,
        num_few_shot=None,
        max_reply_tokens=result.max_reply_tokens,
        step=result.step,
        engine="strop",
    )
    for name, score in result.scores.items():
        yield row_of(
            metric=name,
            value=None if score.accuracy is None else 100 * score.accuracy,
            low=100 * score.low,
            high=100 * score.high,
            note="" if result.is_valid else result.verdict,
        )
    for k, estimate in result.pass_at_k.items():
        yield row_of(
            metric=f"pass@{k}",
            value=None if estimate.value is None else 100 * estimate.value,
            low=100 * estimate.low,
            high=100 * estimate.high,
        )


def _rows_of_harness(result: HarnessResult) -> Iterator[ScoreRow]:
    notes = []
    if result.truncation_suspect:
        notes.append(f"{result.truncated_frac:.1%} of replies were cut")
    elif result.max_reply_tokens is not None and result.truncated_frac is None:
        notes.append("how many replies were cut is unknown")
    notes += [f"{result.num_cut_prompts} prompts were cut"] if result.num_cut_prompts else []
    notes += list(result.arguments)
    for task, part in result.scored_parts.items():
        for name, metric in part.metrics.items():
            low, high = interval_of(name, metric, part.num_examples)
            yield ScoreRow(
                task=task,
                metric=name,
                value=scale_of(name, metric) * metric.value,
                low=low,
                high=high,
                num_examples=part.num_examples,
                num_few_shot=result.num_fewshot,
                max_reply_tokens=result.max_reply_tokens,
                step=result.step,
                engine=result.engine,
                note="; ".join(notes),
            )


def show_metric(name: str, metric: HarnessMetric) -> tuple[str, str]:
    """Format value and standard error; a share as a percentage."""
    scale = scale_of(name, metric)
    unit = "%" if scale == 100.0 else ""
    stderr = "-" if metric.stderr is None else f"{scale * metric.stderr:.1f}{unit}"
    return f"{scale * metric.value:.2f}{unit}", stderr


def show_cut(result: HarnessResult) -> str:
    """Format the share of replies that the budget cut; a dash where nothing is generated."""
    if result.max_reply_tokens is None:
        return "-"
    return "unknown" if result.truncated_frac is None else f"{result.truncated_frac:.1%}"


def _with_baseline(row: ScoreRow, baseline: BaselineScore) -> ScoreRow:
    """Return a row with one of its baselines."""
    change = baseline.difference
    has_interval = change is not None and not math.isnan(change.low)
    return replace(
        row,
        baseline=baseline.value,
        baseline_stderr=baseline.stderr,
        baseline_of=baseline.of,
        difference=None if change is None else change.estimate,
        note="; ".join(filter(None, [row.note, *baseline.differing, *baseline.notes])),
        baseline_low=baseline.low,
        baseline_high=baseline.high,
        difference_low=change.low if change is not None and has_interval else None,
        difference_high=change.high if change is not None and has_interval else None,
        same_protocol=not baseline.differing,
    )


COLUMNS = (
    "task",
    "metric",
    "value",
    "95% interval",
    "examples",
    "shots",
    "budget",
    "baseline",
    "of",
    "same protocol",
    "difference",
)


def show_row(row: ScoreRow) -> tuple[object, ...]:
    """Return the cells of a row in a table for people, in the order of `COLUMNS`."""
    interval = "-" if row.low is None or row.high is None else f"{row.low:.1f} to {row.high:.1f}"
    stderr = "" if row.baseline_stderr is None else f" ± {row.baseline_stderr:.2f}"
    change = "-" if row.difference is None else f"{row.difference:+.2f}"
    if row.difference_low is not None:
        change += f" ({row.difference_low:+.1f} to {row.difference_high:+.1f})"
    return (
        *(row.task, row.metric, "-" if row.value is None else f"{row.value:.2f}", interval, row.num_examples),
        "-" if row.num_few_shot is None else row.num_few_shot,
        "-" if row.max_reply_tokens is None else row.max_reply_tokens,
        "-" if row.baseline is None else f"{row.baseline:.2f}{stderr}",
        row.baseline_of or "-",
        {True: "yes", False: "no", None: "-"}[row.same_protocol],
        change,
    )


def describe_note(row: ScoreRow) -> str:
    """Return the line below the table for a row's note; empty if it has none."""
    of = f" ({row.baseline_of})" if row.baseline_of else ""
    return f"{row.task} {row.metric}{of}: {row.note}" if row.note else ""


def write_tables(rows: Sequence[ScoreRow], folder: Path, name: str) -> list[Path]:
    """Write a table into a folder of results, as text, JSON and CSV; return paths. Raises: StoreError."""
    # Into `tables/`: readers of the results would take a table for one of them.
    stem = folder / "tables" / name
    stem.parent.mkdir(parents=True, exist_ok=True)
    lines = [tuple(map(str, show_row(row))) for row in rows]
    widths = [max(map(len, column)) for column in zip(COLUMNS, *lines, strict=True)]
    text_lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in (COLUMNS, *lines)
    ]
    text_lines += [line for row in rows if (line := describe_note(row))]
    table = io.StringIO()
    writer = csv.DictWriter(table, [field.name for field in fields(ScoreRow)], lineterminator="\n")
    writer.writeheader()
    writer.writerows(asdict(row) for row in rows)
    contents = {
        ".txt": "\n".join(text_lines) + "\n",
        ".json": json.dumps([asdict(row) for row in rows], indent=1, ensure_ascii=False) + "\n",
        ".csv": table.getvalue(),
    }
    paths = []
    for suffix, content in contents.items():
        path = stem.with_name(stem.name + suffix)
        write_bytes_atomically(path, content.encode())
        paths.append(path)
    return paths
