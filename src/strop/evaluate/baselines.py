"""Published scores of base models, with the conditions that they hold under.

None of them was measured here. A score has no task version of strop, so it is comparable only with one
that was made under the same protocol: harness task and its version, examples shown, budget, stop strings
and metric (`Baseline.protocol`). `status` says how far it can be trusted. The rows are data
(`baselines.json`): conditions that most rows share stand once, and a row may have its own.
"""

from __future__ import annotations

import json
from enum import StrEnum
from functools import cache
from importlib.resources import files
from typing import Any

from pydantic import BaseModel, ConfigDict


class BaselineStatus(StrEnum):
    """How far a published score can be trusted."""

    REFERENCE = "reference"
    """Measured with one GPU per engine and a budget that does not cut; to be compared with."""
    SUPERSEDED = "superseded"
    """Measured again under better conditions; kept to recognise it."""
    UNVERIFIED = "unverified"
    """Measured once, under conditions that are doubtful or not stated."""


class Baseline(BaseModel):
    """One published score of a model."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    model: str
    task: str
    """strop's task."""
    harness_task: str | None
    """lm-eval's task; None where another program judged."""
    harness_version: str | None
    harness_task_version: str | None = None
    """lm-eval's version of its task in that release; it is raised when prompts or verdicts change."""
    num_fewshot: int | None
    metric: str
    value_pct: float | None
    """None where only a range was published; see `note`."""
    num_examples: int | None
    """What the mean is over: prompts, or instructions."""
    num_prompts: int | None = None
    """Prompts that were asked, where the mean is over something else."""
    stderr_pct: float | None
    """Binomial, from value and number of examples."""
    split: str
    max_reply_tokens: int | None
    stops: tuple[str, ...] | str | None
    """'harness': those of the harness's task. None: not stated."""
    tensor_parallel: int | None
    dtype: str | None
    engine: str | None
    temperature: float | None
    seed: int | None
    published: str | None
    """Day of the table, as YYYY-MM-DD."""
    status: BaselineStatus
    supersedes: str | None
    """Day of the table whose value this one replaces."""
    note: str | None

    @property
    def num_asked(self) -> int | None:
        """Prompts that were asked."""
        return self.num_prompts or self.num_examples

    @property
    def protocol(self) -> tuple[Any, ...]:
        """What must agree before a score may be compared with this one."""
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
    """Return the one score that may be quoted, or None where there is none."""
    found = find_baselines(model, harness_task, num_fewshot=num_fewshot, metric=metric)
    return next(
        (
            baseline
            for baseline in found
            if baseline.status is BaselineStatus.REFERENCE and baseline.harness_task == harness_task
        ),
        None,
    )
