"""Stored results of the user's own, and each score of an evaluation beside them, as rows of a table.

With equal protocols a row has a difference with a 95 % interval, over the same problems for strop's tasks;
for lm-eval from both standard errors, as if the examples were others, which is wider. Otherwise `note` names
the differing fields, and, as beside every score, another engine or number format.
"""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

from strop.errors import CorruptRecord
from strop.evaluate.comparison import (
    NORMAL,
    PSEUDO_PROBLEMS,
    Interval,
    compare_results,
    list_plan_differences,
)
from strop.evaluate.harness import HarnessMetric, HarnessResult
from strop.evaluate.result import PROTOCOL_FIELDS, EvalResult, read_result
from strop.io import write_bytes_atomically
from strop.rollout import Split

_HARNESS_PROTOCOL = (
    *("num_examples", "task_version", "data_digest", "num_fewshot", "max_reply_tokens", "stops", "seed"),
    "arguments",
)
"""Fields that comparable results of lm-eval share, besides the task."""
_NO_SHARES = ("perplexity", "bits_per_byte")
"""Metrics of lm-eval that are no shares although they may be in [0, 1]."""

Result = EvalResult | HarnessResult
Kind = tuple[type[Result], str, Split | None]


def _kind_of(result: Result) -> Kind:
    if isinstance(result, HarnessResult):
        return HarnessResult, result.task, None
    return EvalResult, result.full_name, result.split


def group_last(results: Mapping[Path, Result]) -> dict[Kind, dict[Path, Result]]:
    """Return the results of each task at its last step."""
    groups: dict[Kind, dict[Path, Result]] = {}
    for path, result in results.items():
        groups.setdefault(_kind_of(result), {})[path] = result
    for kind, group in groups.items():
        last = max(result.step for result in group.values())
        groups[kind] = {path: result for path, result in group.items() if result.step == last}
    return groups


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredBaseline:
    """Stored results under a name that the user chose."""

    name: str
    results: Mapping[Path, Result]

    def choose(self, result: Result) -> Result | None:
        """Return the result to compare with: of the same task, at its last step, comparable if possible."""
        same = group_last(self.results).get(_kind_of(result), {})
        ranked = sorted((bool(list_obstacles(other, result)), str(path)) for path, other in same.items())
        return same[Path(ranked[0][1])] if ranked else None


def read_stored(path: Path) -> dict[Path, Result]:
    """Return the results in a file, a folder or a run, by path. Raises: StoreError if a file is none."""
    if not path.is_file():
        files = sorted([*path.glob("*.json"), *(path / "eval").glob("*.json")])
        return {file: result for file in files if (result := _read(file)) is not None}
    if (result := _read(path)) is not None:
        return {path: result}
    raise CorruptRecord(
        f"{path} is no result",
        allowed="a file that `strop eval` wrote, by strop or by lm-eval",
        next_step="name such a file, or the folder of an evaluation",
    )


def _read(path: Path) -> Result | None:
    """Return the result in a file; None if it is another kind of file."""
    try:
        data = path.read_bytes()
        values = json.loads(data)
    except (OSError, ValueError):
        return None
    keys = values.keys() if isinstance(values, dict) else ()
    if "protocol_digest" in keys:
        return read_result(path)
    if "harness" not in keys:
        return None
    try:
        return HarnessResult.model_validate_json(data)
    except ValueError as error:
        raise CorruptRecord(
            f"{path} is no complete result of lm-eval ({error})",
            allowed="a result as it was written",
            next_step="run the evaluation again",
        ) from error


def list_obstacles(before: Result, after: Result) -> list[str]:
    """Return the reasons why two results of one task are not comparable; empty if they are."""
    if isinstance(before, EvalResult) and isinstance(after, EvalResult):
        differing = [str(one) for one in list_plan_differences(before, after) if one.key in PROTOCOL_FIELDS]
        sides = ((before, "there"), (after, "here"))
        return differing + [f"the result {w} is {one.validity}" for one, w in sides if not one.is_valid]
    return _name_differing(before, after, _HARNESS_PROTOCOL)


def _name_differing(before: Result, after: Result, names: Sequence[str]) -> list[str]:
    pairs = [(name, getattr(before, name, None), getattr(after, name, None)) for name in names]
    return [f"{name} {there} there and {here} here" for name, there, here in pairs if there != here]


@dataclass(frozen=True, kw_only=True, slots=True)
class ScoreRow:
    """One score beside one baseline. Shares are percentages, other metrics of lm-eval have their own unit.

    `low` and `high` are the ends of 95 % intervals; a `difference` is None where the protocols differ.
    """

    task: str
    metric: str
    value: float | None
    low: float | None
    high: float | None
    num_examples: int
    num_few_shot: int | None = None
    max_reply_tokens: int | None
    step: int
    engine: str
    stderr: float | None = None
    note: str = ""
    baseline: float | None = None
    baseline_of: str = ""
    same_protocol: bool | None = None
    difference: float | None = None
    difference_low: float | None = None
    difference_high: float | None = None


def list_rows(results: Sequence[Result], stored: Sequence[StoredBaseline] = ()) -> list[ScoreRow]:
    """Return a row for each score and each of its baselines, in the order of the results."""
    rows: list[ScoreRow] = []
    for result in results:
        chosen = [(one.name, before) for one in stored if (before := one.choose(result)) is not None]
        tables = [_compare(name, before, result) for name, before in chosen]
        for row in _rows_of(result):
            key = row.task, row.metric
            rows += [table[key] for table in tables if key in table] or [row]
    return rows


def _compare(name: str, before: Result, after: Result) -> dict[tuple[str, str], ScoreRow]:
    """Return the rows of a result beside a baseline, by task (or part of a group) and metric."""
    obstacles = list_obstacles(before, after)
    is_same_model = before.model_digest == after.model_digest
    notes = obstacles + _name_differing(before, after, ("engine", "dtype"))
    notes += ["the same weights there and here"] if is_same_model else []
    known = {(row.task, row.metric): row for row in _rows_of(before)}
    table = {}
    for row in _rows_of(after):
        if (old := known.get((row.task, row.metric))) is None:
            continue
        change = None if obstacles else _difference(before, after, old, row)
        low, high = (None, None) if change is None or math.isnan(change.low) else (change.low, change.high)
        told = [row.note, *notes]
        if is_same_model and low is not None and high is not None and not low <= 0.0 <= high:
            told.append("they score otherwise: compare parallelism, number format and kernels")
        table[row.task, row.metric] = replace(
            row,
            baseline=old.value,
            baseline_of=f"{name}, step {before.step}" if before.step else name,
            same_protocol=not obstacles,
            difference=None if change is None else change.estimate,
            difference_low=low,
            difference_high=high,
            note="; ".join(filter(None, told)),
        )
    return table


def _rows_of(result: Result) -> Iterator[ScoreRow]:
    """Yield the scores of a result, without a baseline."""
    if isinstance(result, HarnessResult):
        for task, part in result.scored_parts.items():
            for name, metric in part.metrics.items():
                yield _row_of_harness(result, task, part.num_examples, name, metric)
        return
    scores = {name: (score.accuracy, score.low, score.high) for name, score in result.scores.items()}
    scores |= {f"pass@{k}": (one.value, one.low, one.high) for k, one in result.pass_at_k.items()}
    for name, (value, low, high) in scores.items():
        yield ScoreRow(
            task=result.full_name,
            metric=name,
            value=None if value is None else 100 * value,
            low=100 * low,
            high=100 * high,
            num_examples=result.num_examples,
            max_reply_tokens=result.max_reply_tokens,
            step=result.step,
            engine="strop",
            note="" if result.is_valid else result.verdict,
        )


def _row_of_harness(
    result: HarnessResult, task: str, num_examples: int, name: str, metric: HarnessMetric
) -> ScoreRow:
    is_share = 0.0 <= metric.value <= 1.0 and not any(word in name for word in _NO_SHARES)
    value, stderr = metric.value, metric.stderr
    if is_share:
        # lm-eval's error is 0 if all examples have the same score; the least is that of `comparison`.
        num_counted = num_examples + 2 * PSEUDO_PROBLEMS
        middle = (num_examples * value + PSEUDO_PROBLEMS) / num_counted
        least = math.sqrt(middle * (1.0 - middle) / (num_counted - 1.0))
        value, stderr = 100 * value, None if stderr is None else 100 * max(stderr, least)
    low, high = (None, None) if stderr is None else (value - NORMAL * stderr, value + NORMAL * stderr)
    if is_share and low is not None and high is not None:
        low, high = max(low, 0.0), min(high, 100.0)
    return ScoreRow(
        task=task,
        metric=name,
        value=value,
        low=low,
        high=high,
        stderr=stderr,
        num_examples=num_examples,
        num_few_shot=result.num_fewshot,
        max_reply_tokens=result.max_reply_tokens,
        step=result.step,
        engine=result.engine,
        note="; ".join(result.notes),
    )


def _difference(before: Result, after: Result, earlier: ScoreRow, later: ScoreRow) -> Interval | None:
    """Return the change between two comparable scores; its ends are NaN if an error is unknown."""
    if isinstance(before, EvalResult) and isinstance(after, EvalResult):
        change = getattr(compare_results(before, after), later.metric, None)
        if change is None:
            return None
        return Interval(estimate=100 * change.estimate, low=100 * change.low, high=100 * change.high)
    if earlier.value is None or later.value is None:
        return None
    half = math.nan
    if earlier.stderr is not None and later.stderr is not None:
        half = NORMAL * math.hypot(earlier.stderr, later.stderr)
    estimate = later.value - earlier.value
    return Interval(estimate=estimate, low=estimate - half, high=estimate + half)


COLUMNS = (
    *("task", "metric", "value", "95% interval", "examples", "shots", "budget", "baseline", "of"),
    *("same protocol", "difference"),
)


def show_row(row: ScoreRow) -> tuple[object, ...]:
    """Return the cells of a row in a table for people, in the order of `COLUMNS`."""
    change = "-" if row.difference is None else f"{row.difference:+.2f}"
    if row.difference_low is not None:
        change += f" ({row.difference_low:+.1f} to {row.difference_high:+.1f})"
    return (
        *(row.task, row.metric, "-" if row.value is None else f"{row.value:.2f}"),
        "-" if row.low is None else f"{row.low:.1f} to {row.high:.1f}",
        row.num_examples,
        "-" if row.num_few_shot is None else row.num_few_shot,
        "-" if row.max_reply_tokens is None else row.max_reply_tokens,
        "-" if row.baseline is None else f"{row.baseline:.2f}",
        row.baseline_of or "-",
        {True: "yes", False: "no", None: "-"}[row.same_protocol],
        change,
    )


def write_table(rows: Sequence[ScoreRow], folder: Path, name: str) -> Path:
    """Write a table into a folder of results, as CSV; return its path. Raises: StoreError."""
    path = folder / f"{name}.csv"
    table = io.StringIO()
    writer = csv.DictWriter(table, [field.name for field in fields(ScoreRow)], lineterminator="\n")
    writer.writeheader()
    writer.writerows(asdict(row) for row in rows)
    write_bytes_atomically(path, table.getvalue().encode())
    return path
