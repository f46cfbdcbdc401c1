"""What the demo costs and gains: one whole run, measured from outside and read from its run directory."""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.process_memory import run_watched

ROOT = Path(__file__).parents[1]
RECIPE = ROOT / "recipes" / "arithmetic.toml"
STEP_SECONDS = "seconds_step"
"""Metric that holds the wall seconds of a training step."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DemoResult:
    """One run of the demo, in an environment and with a model that are already there."""

    whole_s: float
    """Wall time of the command: start, both evaluations, training, report."""
    train_s: float
    """Wall time of all training steps together."""
    num_steps: int
    peak_bytes: int
    """Over the process tree, shared pages once."""
    accuracy_before: float
    """Greedy, held-out."""
    accuracy_after: float
    load_before: float


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


def read_step_seconds(run_dir: Path) -> list[float]:
    """Return the wall seconds of every training step of a run.

    Raises: DemoFailed if no step was recorded.
    """
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    metrics: list[dict[str, Any]] = [json.loads(line) for line in lines]
    seconds = [float(entry[STEP_SECONDS]) for entry in metrics if STEP_SECONDS in entry]
    if not seconds:
        raise DemoFailed(
            f"{run_dir.name}/metrics.jsonl holds no line with {STEP_SECONDS}. Allowed: one per step."
        )
    return seconds


def measure_demo(
    *changes: str,
    look: Callable[[Path], None] = lambda run_dir: None,
    root: Path | None = None,
    recipe: Path = RECIPE,
) -> DemoResult:
    """Train by the demo's recipe, or another one, into a temporary folder; report what it cost and gained.

    `changes` are settings behind the recipe; `look` is shown the run's directory before it goes.
    Raises: DemoFailed if the command fails or its run directory is not complete.
    """
    load_before = os.getloadavg()[0]
    with tempfile.TemporaryDirectory(prefix="strop-bench-", dir=root) as folder:
        strop = str(Path(sys.executable).parent / "strop")
        begun_at = time.perf_counter()
        command = [strop, "train", str(recipe), f"output.root={folder}", *changes]
        done = run_watched(command, ROOT, dict(os.environ))
        whole_s = time.perf_counter() - begun_at
        run_dirs = sorted(path.parent for path in Path(folder).glob("*/run.json"))
        if done.exit_code != 0 or not run_dirs:
            raise DemoFailed(
                f"the demo ended with code {done.exit_code} and {len(run_dirs)} run directories."
            )
        before, after = read_accuracies(run_dirs[-1])
        seconds = read_step_seconds(run_dirs[-1])
        look(run_dirs[-1])
    return DemoResult(
        whole_s=whole_s,
        train_s=sum(seconds),
        num_steps=len(seconds),
        peak_bytes=done.peak_bytes,
        accuracy_before=before,
        accuracy_after=after,
        load_before=load_before,
    )
