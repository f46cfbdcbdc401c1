"""Published scores of base models, and comparisons with them.

None of them was measured here. They have no task version of strop, so a score is comparable only under the
same protocol: harness task and its version, few-shot examples, budget, stop strings and metric
(`Baseline.protocol`). `status` says how far a score can be trusted. The rows are data (`baselines.json`):
common conditions are written once, and a row may override them.

The protocol includes lm-eval's version of its task, which is raised when prompts or verdicts change, but not
the release of lm-eval. It does not include engine, number format and machine either; they are named with the
difference.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from importlib.resources import files
from typing import Any

from pydantic import BaseModel, ConfigDict

from strop.evaluate.harness.result import HarnessResult
from strop.evaluate.result import EvalResult
from strop.rollout import Split


class BaselineStatus(StrEnum):
    """How far a published score can be trusted."""

    REFERENCE = "reference"
    """Measured with one GPU per engine and a sufficient budget; use it for comparisons."""
    SUPERSEDED = "superseded"
    """Measured again later under better conditions; kept to recognise it."""
    UNVERIFIED = "unverified"
    """Measured once, under doubtful or unstated conditions."""


class Baseline(BaseModel):
    """One published score of a model."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    model: str
    task: str
    """strop's task."""
    harness_task: str | None
    """lm-eval's task; None if another program judged."""
    harness_version: str | None
    harness_task_version: str | None = None
    """lm-eval's version of its task in that release."""
    num_fewshot: int | None
    metric: str
    value_pct: float | None
    """None if only a range was published; see `note`."""
    num_examples: int | None
    """Number of items behind the mean: prompts, or instructions."""
    num_prompts: int | None = None
    """Number of prompts, if the mean is over other items."""
    stderr_pct: float | None
    """Binomial, from value and number of examples."""
    split: str
    max_reply_tokens: int | None
    stops: tuple[str, ...] | str | None
    """'harness': those of lm-eval's task. None: not stated."""
    tensor_parallel: int | None
    dtype: str | None
    engine: str | None
    temperature: float | None
    seed: int | None
    published: str | None
    """Date of the published table, as YYYY-MM-DD."""
    status: BaselineStatus
    supersedes: str | None
    """Date of the table whose value this one replaces."""
    note: str | None

    @property
    def num_asked(self) -> int | None:
        """Number of prompts."""
        return self.num_prompts or self.num_examples

    @property
    def protocol(self) -> tuple[Any, ...]:
        """The conditions that a comparable score must share."""
        return (
            *(self.harness_task, self.harness_task_version, self.num_fewshot, self.metric),
            *(self.max_reply_tokens, self.stops, self.split),
        )


@cache
def all_baselines() -> tuple[Baseline, ...]:
    """Return every published score, references first. Reads the package's data file once."""
    data = json.loads(files("strop.evaluate").joinpath("baselines.json").read_text(encoding="utf-8"))
    return tuple(Baseline.model_validate({**data["conditions"], **row}) for row in data["baselines"])


def find_baselines(
    model: str, task: str, *, num_fewshot: int | None = None, metric: str | None = None
) -> tuple[Baseline, ...]:
    """Return the scores of a model on a task of strop or of lm-eval; None matches any."""
    return tuple(
        baseline
        for baseline in all_baselines()
        if baseline.model == model
        and task in (baseline.task, baseline.harness_task)
        and num_fewshot in (None, baseline.num_fewshot)
        and metric in (None, baseline.metric)
    )


def find_reference(model: str, harness_task: str, num_fewshot: int, metric: str) -> Baseline | None:
    """Return the one score that may be quoted, or None."""
    for baseline in find_baselines(model, harness_task, num_fewshot=num_fewshot, metric=metric):
        if baseline.status is BaselineStatus.REFERENCE and baseline.harness_task == harness_task:
            return baseline
    return None


_METRIC_NAMES = {"pass_at_1": "pass@1"}


@dataclass(frozen=True, kw_only=True, slots=True)
class ReferenceComparison:
    """A score, the published one, and the differences of their protocols."""

    baseline: Baseline
    metric: str
    """lm-eval's name of the metric, with its filter."""
    value_pct: float
    differing: tuple[str, ...]
    """Each field of the protocol that differs, with both values; empty if the scores are comparable."""

    @property
    def delta_points(self) -> float | None:
        """Percentage points above the published score; None if the protocols differ."""
        if self.differing or self.baseline.value_pct is None:
            return None
        return self.value_pct - self.baseline.value_pct

    def describe(self) -> str:
        """Describe it in one line."""
        published = "range" if self.baseline.value_pct is None else f"{self.baseline.value_pct:.2f} %"
        if self.baseline.stderr_pct is not None:
            published += f" ± {self.baseline.stderr_pct:.2f}"
        name = f"{self.baseline.harness_task} {self.baseline.metric}"
        if self.delta_points is None:
            return f"{name}: not compared with the published {published}: {'; '.join(self.differing)}"
        return (
            f"{name}: {self.value_pct:.2f} %, {self.delta_points:+.2f} points to the published {published}"
            f" ({self.baseline.published}, lm-eval {self.baseline.harness_version}, {self.baseline.engine},"
            f" {self.baseline.dtype})"
        )


def find_model_name(text: str) -> str | None:
    """Return the model with published scores in a user's text: its id, or a path that ends in it."""
    path = text.rstrip("/").partition("@")[0]
    names = {baseline.model for baseline in all_baselines()}
    return next((name for name in sorted(names) if path == name or path.endswith(f"/{name}")), None)


def compare_with_references(model: str, result: HarnessResult) -> list[ReferenceComparison]:
    """Compare a result of lm-eval, and each part of a group, with the model's reference scores."""
    comparisons = []
    scores = [
        (task, part, key, metric)
        for task, part in result.scored_parts.items()
        for key, metric in part.metrics.items()
    ]
    for task, part, key, metric in scores:
        for baseline in _references(model):
            if baseline.harness_task != task or baseline.metric != _published_name(key):
                continue
            is_same_split = result.split is Split.HELD_OUT and baseline.split == "test"
            differing = _differing(
                ("harness_task_version", result.task_version, baseline.harness_task_version),
                ("num_fewshot", result.num_fewshot, baseline.num_fewshot),
                ("max_reply_tokens", result.max_reply_tokens, baseline.max_reply_tokens),
                ("stops", "harness", baseline.stops),
                ("split", baseline.split if is_same_split else result.split.value, baseline.split),
                ("num_examples", part.num_examples, baseline.num_asked),
                ("temperature", 0.0, baseline.temperature),
                ("seed", result.seed, baseline.seed),
            )
            value_pct = 100 * metric.value
            comparisons.append(
                ReferenceComparison(baseline=baseline, metric=key, value_pct=value_pct, differing=differing)
            )
    return comparisons


def compare_own_result(model: str, result: EvalResult) -> list[ReferenceComparison]:
    """Compare a score of strop's own task with the model's references; their protocols always differ.

    Empty if no greedy reply was judged.
    """
    if result.greedy.accuracy is None:
        return []
    value_pct = 100 * result.greedy.accuracy
    references = [baseline for baseline in _references(model) if baseline.task == result.task]
    # Only the group, whose name is the shortest; its parts add nothing.
    shortest = min((len(baseline.harness_task or "") for baseline in references), default=0)
    return [
        ReferenceComparison(
            baseline=baseline,
            metric="greedy",
            value_pct=value_pct,
            differing=(
                _differ("harness_task", "strop's own prompt and verifier", baseline.harness_task),
                *_differing(
                    ("max_reply_tokens", result.max_reply_tokens, baseline.max_reply_tokens),
                    ("num_examples", result.num_examples, baseline.num_asked),
                ),
            ),
        )
        for baseline in references
        if len(baseline.harness_task or "") == shortest
    ]


def _references(model: str) -> list[Baseline]:
    return [
        baseline
        for baseline in all_baselines()
        if baseline.model == model and baseline.status is BaselineStatus.REFERENCE
    ]


def _published_name(key: str) -> str:
    """Return the published name of a metric of lm-eval."""
    metric, _, filter_name = key.partition(",")
    if filter_name.endswith(("-match", "-extract")):
        return filter_name
    return _METRIC_NAMES.get(metric, metric.removesuffix("_acc"))


def _differing(*fields: tuple[str, object, object]) -> tuple[str, ...]:
    return tuple(_differ(name, ours, theirs) for name, ours, theirs in fields if ours != theirs)


def _differ(name: str, ours: object, theirs: object) -> str:
    return f"{name} is {ours} here and {theirs} there"
