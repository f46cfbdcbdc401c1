"""The demo's run with sampling one step ahead beside the one without: accuracy, staleness, seconds per step.

All have the engine in a process of its own, the same seed and the same examples in the same order. Where
engine and learner share all processors, as on two cores, nothing is hidden by overlap; what is measured there
is that stale rollouts teach as much. Each arm runs to its end, one after the other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Any

from benchmarks.demo import DemoResult, read_metrics, train_demo
from benchmarks.figures import Figure, Measured

APART = ("placement.kind=process",)
ARMS: Mapping[str, Sequence[str]] = {
    "synchronous": APART,
    "one step ahead": (*APART, "train.max_staleness=1"),
    "two steps ahead, replies go on": (*APART, "train.max_staleness=2", "engine.update_mode=continue"),
}
SLACK = 0.10
"""100 sums: two runs of equal skill differ by less than this in greedy accuracy nineteen times of twenty."""


def measure_asynchronous(*, is_quick: bool) -> Measured:
    """Train every arm and compare it with the first."""
    arms = {name: _train(changes, is_quick=is_quick) for name, changes in ARMS.items()}
    whole = arms["synchronous"]
    figures = []
    for name, arm in arms.items():
        after = arm["accuracy_after"]
        goal = None if name == "synchronous" or is_quick else whole["accuracy_after"] - SLACK
        figures += [
            Figure(name=f"accuracy, {name}", unit="share", value=after, measured=(after,), at_least=goal),
            _free(f"median step, {name}", "s", arm["step_s"]),
            _free(f"mean staleness, {name}", "steps", arm["staleness_mean"]),
        ]
    return Measured(figures=tuple(figures), details={"arms": arms})


def _train(changes: Sequence[str], *, is_quick: bool) -> dict[str, Any]:
    metrics: list[dict[str, float]] = []

    def look(run_dir: Path) -> None:
        metrics.extend(read_metrics(run_dir))

    short = ("train.steps=3", "eval.num_examples=8") if is_quick else ()
    result: DemoResult = train_demo(*changes, *short, look=look)
    return {
        "settings": [*changes, *short],
        "accuracy_before": result.accuracy_before,
        "accuracy_after": result.accuracy_after,
        "whole_s": result.whole_s,
        "train_s": result.train_s,
        "step_s": median(line["seconds_step"] for line in metrics),
        "staleness_mean": fmean(line.get("staleness_mean", 0.0) for line in metrics),
        "staleness_max": max(line.get("staleness_max", 0.0) for line in metrics),
        "reward_last": metrics[-1]["reward_mean"],
    }


def _free(name: str, unit: str, value: float) -> Figure:
    return Figure(name=name, unit=unit, value=value, measured=(value,))
