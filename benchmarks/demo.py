"""What the demo costs and gains, under five seeds, in bfloat16 and in float32.

Each run is measured from outside and read from its run directory.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.figures import Figure, Measured
from benchmarks.process_memory import run_watched

ROOT = Path(__file__).parents[1]
SEEDS = (0, 1, 2, 3, 4)
FORMATS = {dtype: (f"model.dtype={dtype}",) for dtype in ("bfloat16", "float32")}
_RAY = ("placement.kind=ray", "placement.learners=2", "engine.kind=vllm")
PLACES = {"inline": (), "on Ray": _RAY, "on Ray, a step ahead": (*_RAY, "train.max_staleness=1")}
"""Two FSDP2 ranks and vLLM; `inline` has the native engine."""


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
    return _measure_arms(FORMATS, SEEDS, is_quick=is_quick)


def measure_demo_ray(*, is_quick: bool) -> Measured:
    """Train by the demo's recipe under three seeds in one process, on Ray, and there ahead of the learner."""
    return _measure_arms(PLACES, SEEDS[:3], is_quick=is_quick)


def _measure_arms(arms: Mapping[str, Sequence[str]], seeds: Sequence[int], *, is_quick: bool) -> Measured:
    quick = ("train.steps=4",)
    found = {
        arm: measure_recipe("arithmetic.toml", quick, is_quick=is_quick, changes=changes, seeds=seeds)
        for arm, changes in arms.items()
    }
    figures = [replace(one, name=f"{one.name}, {arm}") for arm in arms for one in found[arm].figures]
    return Measured(figures=figures, details={arm: measured.details for arm, measured in found.items()})


def measure_demo_agent(*, is_quick: bool) -> Measured:
    """Train at the game of several turns under each seed: games won of 100, held out, greedy."""
    # The gain is three standard errors, where half of the games are won.
    return measure_recipe("demo-agent.toml", ("train.steps=2",), is_quick=is_quick, min_gain=0.1)


def measure_recipe(
    recipe: str,
    quick: Sequence[str],
    *,
    is_quick: bool,
    changes: Sequence[str] = (),
    seeds: Sequence[int] = SEEDS,
    min_gain: float | None = None,
) -> Measured:
    """Train by a recipe with `changes` under each seed. `quick`: settings that only show that it works."""
    changes = (*changes, *quick, "eval.num_examples=8") if is_quick else changes
    runs = []
    for seed in seeds[:1] if is_quick else seeds:
        runs.append(train_demo(ROOT / "recipes" / recipe, *changes, f"seed={seed}"))
        # At once: a benchmark that is ended early has told what was whole.
        print(f"seed {seed}: {runs[-1]}", flush=True)
    figures = []
    for what in runs[0]:
        values = tuple(run[what] for run in runs)
        name, unit = what.rsplit(", ", 1)
        goal = min_gain if name == "gain" and not is_quick else None
        figures.append(Figure(name=name, unit=unit, value=fmean(values), measured=values, at_least=goal))
    return Measured(figures=figures, details={"seeds": seeds, "runs": runs})


def train_demo(recipe: Path, *changes: str) -> dict[str, float]:
    """Train by a recipe into a temporary folder; return what it cost and gained, by figure and unit.

    `changes` are settings behind the recipe. Accuracies are greedy, held-out; memory is that of the process
    tree, shared pages once.
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
    step_s = sum(line.get("seconds_step", 0.0) for line in metrics)
    parts = ("generate", "verify", "compute")
    work_s = sum(line.get(f"seconds_{part}", 0.0) for line in metrics for part in parts)
    return {
        "accuracy before, share": before,
        "accuracy after, share": after,
        "gain, share": after - before,
        "training, s": step_s,
        "of a step, neither sampling nor computing, share": 1.0 - work_s / step_s,
        "whole command, s": whole_s,
        "memory at the peak, GB": peak_bytes / 1e9,
    }
