"""A score beside the user's own stored ones: those of an evaluation before this one, of any model.

A difference is given where the protocols are the same, with a 95 % interval: over the same problems for
strop's own tasks (`compare_results`); for lm-eval from both standard errors, as if they were other examples,
which is wider. Otherwise the fields that differ are named. Engine and number format are no part of a
protocol; where they differ they are named beside the difference.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
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
    *("task_version", "split", "data_digest", "num_fewshot", "max_reply_tokens", "stops", "seed"),
    "arguments",
)
"""What must agree of two results of lm-eval, beside task and number of examples."""
_NO_SHARES = ("perplexity", "bits_per_byte")
"""Metrics of lm-eval that may lie in [0, 1] and are no shares."""

Result = EvalResult | HarnessResult


@dataclass(frozen=True, kw_only=True, slots=True)
class Beside:
    """A score that stands beside another one; percentages where they are shares."""

    of: str = ""
    """Whose score it is, for people."""
    value: float | None
    low: float | None = None
    high: float | None = None
    """Ends of the 95 % interval."""
    stderr: float | None = None
    difference: Interval | None = None
    """Points above it; None if the scores may not be compared. Without width where an error is not known."""
    differing: tuple[str, ...] = ()
    """Why they may not be compared: each field of the protocol that differs, with both values."""
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredBaseline:
    """Stored results under a name of the user's."""

    name: str
    results: Mapping[Path, Result] = field(default_factory=dict)
    published: str | None = None
    """A model whose published scores are meant instead."""

    def choose(self, result: Result) -> Result | None:
        """Return what stands beside a result: of its task, at the last step, of its protocol if possible."""
        same = group_last(self.results).get(_kind_of(result), {})
        ranked = sorted((bool(list_obstacles(one, result)), str(path)) for path, one in same.items())
        return same[Path(ranked[0][1])] if ranked else None


def name_of(result: Result) -> str:
    """Return the task of a result, as its evaluation calls it."""
    return result.full_name if isinstance(result, EvalResult) else result.task


Kind = tuple[type[Result], str, Split]
"""Who asked, the task and the split."""


def _kind_of(result: Result) -> Kind:
    return type(result), name_of(result), result.split


def group_last(results: Mapping[Path, Result]) -> dict[Kind, dict[Path, Result]]:
    """Return the results of each task at its last step."""
    groups: dict[Kind, dict[Path, Result]] = {}
    for path, one in results.items():
        groups.setdefault(_kind_of(one), {})[path] = one
    for kind, group in groups.items():
        last = max(one.step for one in group.values())
        groups[kind] = {path: one for path, one in group.items() if one.step == last}
    return groups


def read_stored(place: Path) -> dict[Path, Result]:
    """Return the results in a file or a folder, by path; in a folder of a run also those in its `eval/`.

    Raises: StoreError if a file cannot be read; CorruptRecord if one is damaged, or a file is no result.
    """
    if place.is_file():
        found = _read(place)
        if found is None:
            raise CorruptRecord(
                f"{place} is no result",
                allowed="a file that `strop eval` wrote, by strop or by lm-eval",
                next_step="name such a file, or the folder of an evaluation",
            )
        return {place: found}
    paths = sorted([*place.glob("*.json"), *(place / "eval").glob("*.json")])
    return {path: result for path in paths if (result := _read(path)) is not None}


def _read(path: Path) -> Result | None:
    """Return the result in a file; None if it is something else."""
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
    """Return why two results of one task may not be compared; empty if they may."""
    if isinstance(before, EvalResult) and isinstance(after, EvalResult):
        found = {one.key: one for one in list_plan_differences(before, after)}
        words = (" there", " here")
        shown = [describe_difference(found[key], words) for key in PROTOCOL_FIELDS if key in found]
        shown += [
            f"the result {where} is {one.validity.value}"
            for one, where in ((before, "there"), (after, "here"))
            if not one.is_valid
        ]
        return tuple(shown)
    if isinstance(before, HarnessResult) and isinstance(after, HarnessResult):
        fields = ("num_examples", *_HARNESS_PROTOCOL)
        return tuple(
            f"{key} {getattr(before, key)!r} there and {getattr(after, key)!r} here"
            for key in fields
            if getattr(before, key) != getattr(after, key)
        )
    return ("lm-eval's prompts and filters on one side, strop's own on the other",)


def compare_with_stored(baseline: StoredBaseline, result: Result) -> dict[tuple[str, str], Beside]:
    """Return what stands beside each score of a result, by task (or part of a group) and metric.

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
        found = _compare_own(before, result, may_compare=not obstacles)
    else:
        assert isinstance(before, HarnessResult)
        assert isinstance(result, HarnessResult)
        found = _compare_harness(before, result, may_compare=not obstacles)
    return {key: replace(one, of=of, differing=obstacles, notes=tuple(notes)) for key, one in found}


def _compare_own(
    before: EvalResult, after: EvalResult, *, may_compare: bool
) -> Iterator[tuple[tuple[str, str], Beside]]:
    task = after.full_name
    comparison = compare_results(before, after) if may_compare else None
    for name, score in before.scores.items():
        change = getattr(comparison, name, None)
        yield (
            (task, name),
            Beside(
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
            Beside(
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
        (one, other, one.problem or name)
        for name, one in before.sampled.by_example.items()
        if min(one.num_judged, (other := after.sampled.by_example[name]).num_judged) >= k
    ]
    if not pairs:
        return None
    return paired_difference(
        [_pass_of(one, k) for one, _, _ in pairs],
        [_pass_of(other, k) for _, other, _ in pairs],
        [problem for _, _, problem in pairs],
    )


def _pass_of(example: ExampleScore, k: int) -> float:
    return pass_at_k(example.num_judged, round(example.num_judged * (example.solved_frac or 0.0)), k)


def _compare_harness(
    before: HarnessResult, after: HarnessResult, *, may_compare: bool
) -> Iterator[tuple[tuple[str, str], Beside]]:
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
                Beside(
                    value=scale * metric.value,
                    stderr=None if metric.stderr is None else scale * metric.stderr,
                    low=low,
                    high=high,
                    difference=difference,
                ),
            )


def widen(metric: HarnessMetric, num_examples: int | None, scale: float) -> HarnessMetric:
    """Return a number with an error above 0, also where all examples came out alike: lm-eval's is 0 there.

    Of a share, at least that of the interval in `comparison`, with `PSEUDO_PROBLEMS` at either end.
    """
    if metric.stderr is None or num_examples is None or scale != _PERCENT:
        return metric
    num_counted = num_examples + 2 * PSEUDO_PROBLEMS
    middle = (num_examples * metric.value + PSEUDO_PROBLEMS) / num_counted
    least = math.sqrt(middle * (1.0 - middle) / (num_counted - 1.0))
    return metric.model_copy(update={"stderr": max(metric.stderr, least)})


def compare_apart(before: HarnessMetric, after: HarnessMetric, scale: float) -> Interval:
    """Return by how much a number changed, as if over other examples; ends are NaN without both errors."""
    change = scale * (after.value - before.value)
    if before.stderr is None or after.stderr is None:
        return Interval(estimate=change, low=math.nan, high=math.nan)
    half = NORMAL_95 * scale * math.hypot(before.stderr, after.stderr)
    return Interval(estimate=change, low=change - half, high=change + half)


def scale_of(name: str, metric: HarnessMetric) -> float:
    """Return 100 for a share. Perplexities and their like are no shares, and stay as they are."""
    is_share = 0.0 <= metric.value <= 1.0 and not any(word in name for word in _NO_SHARES)
    return _PERCENT if is_share else 1.0


def interval_of(name: str, metric: HarnessMetric, num_examples: int) -> tuple[float | None, float | None]:
    """Return the 95 % interval of a number of lm-eval, by its standard error; None without one."""
    scale = scale_of(name, metric)
    stderr = widen(metric, num_examples, scale).stderr
    if stderr is None:
        return None, None
    low, high = scale * (metric.value - NORMAL_95 * stderr), scale * (metric.value + NORMAL_95 * stderr)
    return (max(low, 0.0), min(high, scale)) if scale == _PERCENT else (low, high)


def _scaled(change: Interval) -> Interval:
    return Interval(estimate=100 * change.estimate, low=100 * change.low, high=100 * change.high)


def require_one_model(name: str, results: Mapping[Path, Result]) -> str | None:
    """Return why results cannot be one baseline: those of a task at its last step are of several models."""
    for (_, task, _), same in group_last(results).items():
        models = {one.model_digest: path for path, one in same.items()}
        if len(models) > 1:
            shown = ", ".join(map(str, models.values()))
            return f"{name} has results of {len(models)} models on {task}: {shown}"
    return None


def tasks_of(results: Sequence[Result], split: Split) -> set[tuple[bool, str]]:
    """Return the tasks of results of a split: whether lm-eval asked, and the name."""
    return {(isinstance(one, HarnessResult), one.task) for one in results if one.split is split}
