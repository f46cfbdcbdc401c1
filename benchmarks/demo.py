"""What the demo costs and gains, under five seeds, in bfloat16 and in float32.

Each run is measured from outside and read from its run directory.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.figures import Figure, Measured
from benchmarks.process_memory import run_watched

ROOT = Path(__file__).parents[1]
SEEDS = (0, 1, 2, 3, 4)
FORMATS = ("bfloat16", "float32")


@dataclass(frozen=True, kw_only=True, slots=True)
class DemoResult:
    """One run of the demo, in an environment and with a model that are already there."""

    whole_s: float
    """Wall time of the command: start, both evaluations, training, report."""
    train_s: float
    """Wall time of all training steps together."""
    peak_bytes: int
    """Over the process tree, shared pages once."""
    accuracy_before: float
    """Greedy, held-out."""
    accuracy_after: float


class DemoFailed(RuntimeError):
    """Raised when the demo did not end well or left no complete run directory."""


def read_accuracies(run_dir: Path) -> tuple[float, float]:
    """Return the greedy held-out accuracy of the first and of the last evaluation of a run.

    Raises: DemoFailed if there are fewer than two evaluations.
    """
    results: list[dict[str, Any]] = [
        json.loads(path.read_text()) for path in run_dir.glob("eval/*-step-*.json")
    ]
    results.sort(key=lambda result: int(result["step"]))
    if len(results) < 2:
        raise DemoFailed(f"{run_dir.name} holds {len(results)} evaluations. Allowed: one before, one after.")
    return float(results[0]["greedy"]["accuracy"]), float(results[-1]["greedy"]["accuracy"])


def measure_demo(*, is_quick: bool) -> Measured:
    """Train by the demo's recipe under each seed, in each number format."""
    found = {
        dtype: measure_recipe(
            "arithmetic.toml", ("train.steps=4",), is_quick=is_quick, changes=(f"model.dtype={dtype}",)
        )
        for dtype in FORMATS
    }
    figures = [replace(one, name=f"{one.name}, {dtype}") for dtype in FORMATS for one in found[dtype].figures]
    return Measured(figures=figures, details={dtype: measured.details for dtype, measured in found.items()})


def measure_demo_agent(*, is_quick: bool) -> Measured:
    """Train at the game of several turns under each seed: games won of 100, held out, greedy."""
    # The gain is three standard errors, where half of the games are won.
    return measure_recipe("demo-agent.toml", ("train.steps=2",), is_quick=is_quick, min_gain=0.1, max_s=900)


def measure_recipe(
    recipe: str,
    quick: Sequence[str],
    *,
    is_quick: bool,
    changes: Sequence[str] = (),
    min_gain: float | None = None,
    max_s: float | None = None,
) -> Measured:
    """Train by a recipe with `changes` under each seed. `quick`: settings that only show that it works."""
    changes = (*changes, *quick, "eval.num_examples=8") if is_quick else changes
    runs = []
    for seed in SEEDS[:1] if is_quick else SEEDS:
        runs.append(train_demo(ROOT / "recipes" / recipe, *changes, f"seed={seed}"))
        # At once: a benchmark that is ended early has told what was whole.
        print(f"seed {seed}: {runs[-1]}", flush=True)
    gains = [run.accuracy_after - run.accuracy_before for run in runs]
    figures = [
        mean_figure("accuracy before", "share", [run.accuracy_before for run in runs]),
        mean_figure("accuracy after", "share", [run.accuracy_after for run in runs]),
        mean_figure("gain", "share", gains, at_least=None if is_quick else min_gain),
        mean_figure("training", "s", [run.train_s for run in runs]),
        mean_figure("whole command", "s", [run.whole_s for run in runs], at_most=max_s),
        mean_figure("memory at the peak", "GB", [run.peak_bytes / 1e9 for run in runs]),
    ]
    return Measured(figures=figures, details={"seeds": SEEDS, "runs": [asdict(run) for run in runs]})


def mean_figure(name: str, unit: str, values: Sequence[float], **goal: float | None) -> Figure:
    """Return the mean of one value for each seed."""
    return Figure(name=name, unit=unit, value=fmean(values), measured=tuple(values), **goal)


def train_demo(recipe: Path, *changes: str) -> DemoResult:
    """Train by a recipe into a temporary folder; report what it cost and gained.

    `changes` are settings behind the recipe.
    Raises: DemoFailed if the command fails or its run directory is not complete.
    """
    with tempfile.TemporaryDirectory(prefix="strop-bench-") as folder:
        strop = str(Path(sys.executable).parent / "strop")
        begun_at = time.perf_counter()
        command = [strop, "train", str(recipe), f"output.root={folder}", *changes]
        exit_code, peak_bytes = run_watched(command, ROOT, dict(os.environ))
        whole_s = time.perf_counter() - begun_at
        run_dirs = sorted(path.parent for path in Path(folder).glob("*/run.json"))
        if exit_code != 0 or not run_dirs:
            raise DemoFailed(f"{recipe} ended with code {exit_code} and {len(run_dirs)} run directories.")
        before, after = read_accuracies(run_dirs[-1])
        lines = (run_dirs[-1] / "metrics.jsonl").read_text().splitlines()
        metrics: list[dict[str, float]] = [json.loads(line) for line in lines]
    return DemoResult(
        whole_s=whole_s,
        train_s=sum(line.get("seconds_step", 0.0) for line in metrics),
        peak_bytes=peak_bytes,
        accuracy_before=before,
        accuracy_after=after,
    )
