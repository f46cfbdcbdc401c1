"""Compare a score with the user's own stored ones, from an earlier evaluation of any model.

With equal protocols there is a difference with a 95 % interval: over the same problems for strop's own tasks
(`compare_results`); for lm-eval from both standard errors, as if the examples were others, which is wider.
Otherwise the differing fields are named. Engine and number format are not part of a protocol; if they differ,
the notes say so.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from strop.errors import CorruptRecord, StoreError
from strop.evaluate.comparison import (
    PSEUDO_PROBLEMS,
    Interval,
    compare_results,
    describe_difference,
    list_plan_differences,
    paired_difference,
    pass_at_k,
)
from strop.evaluate.harness import HarnessMetric, HarnessResult
from strop.evaluate.result import PROTOCOL_FIELDS, EvalResult, ExampleScore, read_result
from strop.rollout import Split

NORMAL_95 = 1.959963984540054
_PERCENT = 100.0
_HARNESS_PROTOCOL = (
    *("task_version", "data_digest", "num_fewshot", "max_reply_tokens", "stops", "seed", "arguments"),
)
"""Fields that comparable results of lm-eval share, besides task and number of examples."""
_NO_SHARES = ("perplexity", "bits_per_byte")
"""Metrics of lm-eval that are no shares although they may be in [0, 1]."""

Result = EvalResult | HarnessResult


@dataclass(frozen=True, kw_only=True, slots=True)
class BaselineScore:
    """A baseline's score for comparison with another one; shares are percentages."""

    of: str = ""
    """Origin of the score, for people."""
    value: float | None
    low: float | None = None
    high: float | None = None
    """Ends of the 95 % interval."""
    stderr: float | None = None
    difference: Interval | None = None
    """Points above it; None if the scores are not comparable. Its ends are NaN if an error is unknown."""
    differing: tuple[str, ...] = ()
    """Each field of the protocol that differs, with both values; empty if the scores are comparable."""
    notes: tuple[str, ...] = ()


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


def name_of(result: Result) -> str:
    """Return the full name of a result's task."""
    return result.full_name if isinstance(result, EvalResult) else result.task


Kind = tuple[type[Result], str, Split | None]
"""The harness (by the class of its results), the task and the split; lm-eval's tasks say theirs."""


def _kind_of(result: Result) -> Kind:
    return type(result), name_of(result), result.split if isinstance(result, EvalResult) else None


def group_last(results: Mapping[Path, Result]) -> dict[Kind, dict[Path, Result]]:
    """Return the results of each task at its last step."""
    groups: dict[Kind, dict[Path, Result]] = {}
    for path, result in results.items():
        groups.setdefault(_kind_of(result), {})[path] = result
    for kind, group in groups.items():
        last = max(result.step for result in group.values())
        groups[kind] = {path: result for path, result in group.items() if result.step == last}
    return groups


def read_stored(path: Path) -> dict[Path, Result]:
    """Return the results in a file or a folder, by path; of a run's folder also those in its `eval/`.

    Raises: StoreError if a file cannot be read; CorruptRecord if one is damaged, or `path` is no result.
    """
    if path.is_file():
        result = _read(path)
        if result is None:
            raise CorruptRecord(
                f"{path} is no result",
                allowed="a file that `strop eval` wrote, by strop or by lm-eval",
                next_step="name such a file, or the folder of an evaluation",
            )
        return {path: result}
    files = sorted([*path.glob("*.json"), *(path / "eval").glob("*.json")])
    return {file: result for file in files if (result := _read(file)) is not None}


def _read(path: Path) -> Result | None:
    """Return the result in a file; None if it is another kind of file."""
    try:
        data = path.read_bytes()
        values = json.loads(data)
    except OSError as error:
        raise StoreError(
            f"the result {path} cannot be read ({error})",
            allowed="a file that an evaluation wrote",
            next_step="check the path",
        ) from error
    except ValueError:
        return None
    if not isinstance(values, dict):
        return None
    if "protocol_digest" in values:
        return read_result(path)
    if not {"harness", "metrics"} <= values.keys():
        return None
    try:
        return HarnessResult.read(data)
    except ValueError as error:
        raise CorruptRecord(
            f"{path} is no complete result of lm-eval ({error})",
            allowed="a result as it was written",
            next_step="run the evaluation again",
        ) from error


def list_obstacles(before: Result, after: Result) -> tuple[str, ...]:
    """Return the reasons why two results of one task are not comparable; empty if they are."""
    if isinstance(before, EvalResult) and isinstance(after, EvalResult):
        by_key = {difference.key: difference for difference in list_plan_differences(before, after)}
        words = (" there", " here")
        reasons = [describe_difference(by_key[key], words) for key in PROTOCOL_FIELDS if key in by_key]
        reasons += [
            f"the result {where} is {result.validity.value}"
            for result, where in ((before, "there"), (after, "here"))
            if not result.is_valid
        ]
        return tuple(reasons)
    if isinstance(before, HarnessResult) and isinstance(after, HarnessResult):
        fields = ("num_examples", *_HARNESS_PROTOCOL)
        return tuple(
            f"{key} {getattr(before, key)!r} there and {getattr(after, key)!r} here"
            for key in fields
            if getattr(before, key) != getattr(after, key)
        )
    return ("lm-eval's prompts and filters on one side, strop's own on the other",)


def compare_with_stored(baseline: StoredBaseline, result: Result) -> dict[tuple[str, str], BaselineScore]:
    """Return the baseline's score for each score of a result, by task (or part of a group) and metric.

    Empty if the baseline has no result of the task.
    """
    before = baseline.choose(result)
    if before is None:
        return {}
    of = f"{baseline.name}, step {before.step}" if before.step else baseline.name
    obstacles = list_obstacles(before, result)
    notes = [
        f"{key} {getattr(before, key)} there and {getattr(result, key)} here"
        for key in ("engine", "dtype")
        if getattr(before, key, None) != getattr(result, key, None)
    ]
    notes += ["the same weights there and here"] if before.model_digest == result.model_digest else []
    if isinstance(before, EvalResult) and isinstance(result, EvalResult):
        scores = _compare_own(before, result, may_compare=not obstacles)
    else:
        assert isinstance(before, HarnessResult)
        assert isinstance(result, HarnessResult)
        scores = _compare_harness(before, result, may_compare=not obstacles)
    return {key: replace(score, of=of, differing=obstacles, notes=tuple(notes)) for key, score in scores}


def _compare_own(
    before: EvalResult, after: EvalResult, *, may_compare: bool
) -> Iterator[tuple[tuple[str, str], BaselineScore]]:
    task = after.full_name
    comparison = compare_results(before, after) if may_compare else None
    for name, score in before.scores.items():
        change = getattr(comparison, name, None)
        yield (
            (task, name),
            BaselineScore(
                value=None if score.accuracy is None else 100 * score.accuracy,
                low=100 * score.low,
                high=100 * score.high,
                difference=None if change is None else _scaled(change),
            ),
        )
    for k, estimate in before.pass_at_k.items():
        difference = _compare_pass(before, after, k) if may_compare else None
        yield (
            (task, f"pass@{k}"),
            BaselineScore(
                value=None if estimate.value is None else 100 * estimate.value,
                low=100 * estimate.low,
                high=100 * estimate.high,
                difference=None if difference is None else _scaled(difference),
            ),
        )


def _compare_pass(before: EvalResult, after: EvalResult, k: int) -> Interval | None:
    """Return the change of pass@k over the examples with k judged replies on both sides."""
    if before.sampled is None or after.sampled is None:
        return None
    pairs = [
        (earlier, later, earlier.problem or name)
        for name, earlier in before.sampled.by_example.items()
        if min(earlier.num_judged, (later := after.sampled.by_example[name]).num_judged) >= k
    ]
    if not pairs:
        return None
    return paired_difference(
        [_pass_of(earlier, k) for earlier, _, _ in pairs],
        [_pass_of(later, k) for _, later, _ in pairs],
        [problem for _, _, problem in pairs],
    )


def _pass_of(example: ExampleScore, k: int) -> float:
    return pass_at_k(example.num_judged, round(example.num_judged * (example.solved_frac or 0.0)), k)


def _compare_harness(
    before: HarnessResult, after: HarnessResult, *, may_compare: bool
) -> Iterator[tuple[tuple[str, str], BaselineScore]]:
    parts_after = after.scored_parts
    for task, part in before.scored_parts.items():
        other = parts_after.get(task)
        for name, metric in part.metrics.items():
            now = None if other is None else other.metrics.get(name)
            scale = scale_of(name, metric)
            low, high = interval_of(name, metric, part.num_examples)
            difference = None
            if may_compare and other is not None and now is not None and scale == scale_of(name, now):
                earlier = widen(metric, part.num_examples, scale)
                difference = compare_apart(earlier, widen(now, other.num_examples, scale), scale)
            yield (
                (task, name),
                BaselineScore(
                    value=scale * metric.value,
                    stderr=None if metric.stderr is None else scale * metric.stderr,
                    low=low,
                    high=high,
                    difference=difference,
                ),
            )


def widen(metric: HarnessMetric, num_examples: int | None, scale: float) -> HarnessMetric:
    """Return a share with a standard error above 0; lm-eval's is 0 if all examples have the same score.

    The minimum is that of the intervals in `comparison`, with `PSEUDO_PROBLEMS` at either end.
    """
    if metric.stderr is None or num_examples is None or scale != _PERCENT:
        return metric
    num_counted = num_examples + 2 * PSEUDO_PROBLEMS
    middle = (num_examples * metric.value + PSEUDO_PROBLEMS) / num_counted
    least = math.sqrt(middle * (1.0 - middle) / (num_counted - 1.0))
    return metric.model_copy(update={"stderr": max(metric.stderr, least)})


def compare_apart(before: HarnessMetric, after: HarnessMetric, scale: float) -> Interval:
    """Return the change of a metric, as if over other examples; the ends are NaN without both errors."""
    change = scale * (after.value - before.value)
    if before.stderr is None or after.stderr is None:
        return Interval(estimate=change, low=math.nan, high=math.nan)
    half = NORMAL_95 * scale * math.hypot(before.stderr, after.stderr)
    return Interval(estimate=change, low=change - half, high=change + half)


def scale_of(name: str, metric: HarnessMetric) -> float:
    """Return 100 for a share, which is shown as a percentage, else 1 (for example a perplexity)."""
    is_share = 0.0 <= metric.value <= 1.0 and not any(word in name for word in _NO_SHARES)
    return _PERCENT if is_share else 1.0


def interval_of(name: str, metric: HarnessMetric, num_examples: int) -> tuple[float | None, float | None]:
    """Return the 95 % interval of a metric of lm-eval from its standard error; None without one."""
    scale = scale_of(name, metric)
    stderr = widen(metric, num_examples, scale).stderr
    if stderr is None:
        return None, None
    low, high = scale * (metric.value - NORMAL_95 * stderr), scale * (metric.value + NORMAL_95 * stderr)
    return (max(low, 0.0), min(high, scale)) if scale == _PERCENT else (low, high)


def _scaled(change: Interval) -> Interval:
    return Interval(estimate=100 * change.estimate, low=100 * change.low, high=100 * change.high)


def require_one_model(name: str, results: Mapping[Path, Result]) -> str | None:
    """Return an error text if the results of a task at its last step are of several models, else None."""
    for (_, task, _), same in group_last(results).items():
        models = {result.model_digest: path for path, result in same.items()}
        if len(models) > 1:
            shown = ", ".join(map(str, models.values()))
            return f"{name} has results of {len(models)} models on {task}: {shown}"
    return None


def tasks_of(results: Sequence[Result], split: Split) -> set[tuple[bool, str]]:
    """Return the tasks of the results, strop's of a split: whether lm-eval evaluated it, and the name."""
    return {
        (isinstance(result, HarnessResult), result.task)
        for result in results
        if isinstance(result, HarnessResult) or result.split is split
    }
