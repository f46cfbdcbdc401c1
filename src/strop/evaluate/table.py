"""All scores of an evaluation in one table, beside the published ones: as text, JSON and CSV.

A published score stands in the row of the score that it may be compared with, or might be: where the
protocols differ there is no difference, and `note` says which fields differ.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from functools import partial
from pathlib import Path

from strop.evaluate.baselines import ReferenceComparison, compare_own_result, compare_with_references
from strop.evaluate.harness import HarnessMetric, HarnessResult
from strop.evaluate.result import EvalResult
from strop.io import write_bytes_atomically

_NORMAL_95 = 1.959963984540054


@dataclass(frozen=True, kw_only=True, slots=True)
class ScoreRow:
    """One score. Values are percentages where they are shares, as metrics of lm-eval say it themselves."""

    task: str
    metric: str
    value: float | None
    low: float | None
    """Of the 95% interval."""
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
    """The model whose published score it is, and where it was published."""
    difference: float | None = None
    """Percentage points above it; None if the protocols differ."""
    note: str = ""


def list_rows(results: Sequence[EvalResult | HarnessResult], model: str | None) -> list[ScoreRow]:
    """Return a row for each score, in the order of the results. `model`: a name with published scores."""
    rows: list[ScoreRow] = []
    for result in results:
        if isinstance(result, HarnessResult):
            rows += _rows_of_harness(result, model)
        else:
            rows += _rows_of_own(result, model)
    return rows


def _rows_of_own(result: EvalResult, model: str | None) -> Iterator[ScoreRow]:
    found = compare_own_result(model, result) if model is not None else []
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
        row = row_of(
            metric=name,
            value=None if score.accuracy is None else 100 * score.accuracy,
            low=100 * score.low,
            high=100 * score.high,
            note="" if result.is_valid else result.verdict,
        )
        yield _beside(row, next((one for one in found if one.metric == name), None))
    for k, estimate in result.pass_at_k.items():
        yield row_of(
            metric=f"pass@{k}",
            value=None if estimate.value is None else 100 * estimate.value,
            low=100 * estimate.low,
            high=100 * estimate.high,
        )


def _rows_of_harness(result: HarnessResult, model: str | None) -> Iterator[ScoreRow]:
    found = compare_with_references(model, result) if model is not None else []
    parts = {result.task: (result.num_examples, result.metrics)}
    parts |= {name: (part.num_examples, part.metrics) for name, part in result.parts.items()}
    notes = [f"{result.truncated_frac:.1%} of replies were cut"] if result.truncation_suspect else []
    notes += [f"{result.num_cut_prompts} prompts were cut"] if result.num_cut_prompts else []
    notes += list(result.arguments)
    for task, (num_examples, metrics) in parts.items():
        for name, metric in metrics.items():
            low, high = _interval(metric)
            row = ScoreRow(
                task=task,
                metric=name,
                value=_scale(metric) * metric.value,
                low=low,
                high=high,
                num_examples=num_examples,
                num_few_shot=result.num_fewshot,
                max_reply_tokens=result.max_reply_tokens,
                step=result.step,
                engine=result.engine,
                note="; ".join(notes),
            )
            same = [one for one in found if one.metric == name and one.baseline.harness_task == task]
            yield _beside(row, next(iter(same), None))


def _scale(metric: HarnessMetric) -> float:
    """Return 100 for a share. Perplexities and their like are no shares, and stay as they are."""
    return 100.0 if 0.0 <= metric.value <= 1.0 else 1.0


def _interval(metric: HarnessMetric) -> tuple[float | None, float | None]:
    if metric.stderr is None:
        return None, None
    half = _NORMAL_95 * metric.stderr
    return _scale(metric) * (metric.value - half), _scale(metric) * (metric.value + half)


def _beside(row: ScoreRow, found: ReferenceComparison | None) -> ScoreRow:
    if found is None:
        return row
    published = found.baseline
    values = asdict(row) | {
        "baseline": published.value_pct,
        "baseline_stderr": published.stderr_pct,
        "baseline_of": f"{published.model}, {published.published}",
        "difference": found.delta_points,
        "note": "; ".join(filter(None, [row.note, *found.differing])),
    }
    return ScoreRow(**values)


COLUMNS = (
    "task",
    "metric",
    "value",
    "95% interval",
    "examples",
    "shots",
    "budget",
    "published",
    "difference",
)


def show_row(row: ScoreRow) -> tuple[object, ...]:
    """Return what a table for people has of a row, below `COLUMNS`."""
    interval = "-" if row.low is None or row.high is None else f"{row.low:.1f} to {row.high:.1f}"
    stderr = "" if row.baseline_stderr is None else f" ± {row.baseline_stderr:.2f}"
    return (
        *(row.task, row.metric, "-" if row.value is None else f"{row.value:.2f}", interval, row.num_examples),
        "-" if row.num_few_shot is None else row.num_few_shot,
        "-" if row.max_reply_tokens is None else row.max_reply_tokens,
        "-" if row.baseline is None else f"{row.baseline:.2f}{stderr}",
        "-" if row.difference is None else f"{row.difference:+.2f}",
    )


def write_table(rows: Sequence[ScoreRow], stem: Path) -> list[Path]:
    """Write a table as STEM.txt, STEM.json and STEM.csv; return the paths. Raises: StoreError."""
    lines = [tuple(map(str, show_row(row))) for row in rows]
    widths = [max(map(len, column)) for column in zip(COLUMNS, *lines, strict=True)]
    shown = [
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in (COLUMNS, *lines)
    ]
    shown += [f"{row.task} {row.metric}: {row.note}" for row in rows if row.note]
    text = io.StringIO()
    writer = csv.DictWriter(text, [field.name for field in fields(ScoreRow)], lineterminator="\n")
    writer.writeheader()
    writer.writerows(asdict(row) for row in rows)
    contents = {
        ".txt": "\n".join(shown) + "\n",
        ".json": json.dumps([asdict(row) for row in rows], indent=1, ensure_ascii=False) + "\n",
        ".csv": text.getvalue(),
    }
    paths = []
    for suffix, content in contents.items():
        path = stem.with_name(stem.name + suffix)
        write_bytes_atomically(path, content.encode())
        paths.append(path)
    return paths
