"""What the demo costs and gains, under three seeds: as its recipe says, and with four mini-batches a step.

Each run is measured from outside and read from its run directory. Four optimizer steps a batch are worth it
if the same accuracy takes no more sampled tokens.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.figures import Figure, Measured
from benchmarks.process_memory import run_watched

ROOT = Path(__file__).parents[1]
RECIPE = ROOT / "recipes" / "arithmetic.toml"
STEP_SECONDS = "seconds_step"
"""Metric that holds the wall seconds of a training step."""
SEEDS = (0, 1, 2)
ARMS: Mapping[str, Sequence[str]] = {"": (), ", four mini-batches": ("train.mini_batches=4",)}
SLACK = 0.10 / len(SEEDS) ** 0.5
"""Of mean accuracies over 100 sums a seed: arms of equal skill differ by less nineteen times of twenty."""
LEARNED_ACCURACY, NUM_LEARNED_STEPS = 0.7, 4
"""Of the training rollouts, in so many steps in a row: the demo has learned, whatever its last steps add."""


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
    sampled_tokens: int
    """In all training steps."""
    learned_tokens: int | None
    """In those up to `LEARNED_ACCURACY`; None: it was not reached."""
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


def read_metrics(run_dir: Path) -> list[dict[str, float]]:
    """Return the metrics of every training step of a run."""
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def read_step_seconds(run_dir: Path) -> list[float]:
    """Return the wall seconds of every training step of a run.

    Raises: DemoFailed if no step was recorded.
    """
    seconds = [float(entry[STEP_SECONDS]) for entry in read_metrics(run_dir) if STEP_SECONDS in entry]
    if not seconds:
        raise DemoFailed(
            f"{run_dir.name}/metrics.jsonl holds no line with {STEP_SECONDS}. Allowed: one per step."
        )
    return seconds


def count_tokens(lines: Sequence[Mapping[str, float]]) -> tuple[int, int | None]:
    """Return how many tokens were sampled in the steps of a run, and in those until it had learned."""
    total, learned = 0.0, None
    for index, line in enumerate(lines):
        total += line["num_scored_tokens"]
        last = lines[max(index + 1 - NUM_LEARNED_STEPS, 0) : index + 1]
        is_learned = len(last) == NUM_LEARNED_STEPS and fmean(e["accuracy"] for e in last) >= LEARNED_ACCURACY
        if learned is None and is_learned:
            learned = int(total)
    return int(total), learned


def measure_demo(*, is_quick: bool) -> Measured:
    """Train by the recipe and with four mini-batches, under each seed."""
    short = ("train.steps=4", "eval.num_examples=8") if is_quick else ()
    found: dict[str, list[DemoResult]] = {name: [] for name in ARMS}
    # Seed by seed, so that a benchmark that is ended early has printed whole comparisons.
    for seed in SEEDS[:1] if is_quick else SEEDS:
        for name, changes in ARMS.items():
            found[name].append(train_demo(*changes, *short, f"seed={seed}"))
            print(f"seed {seed}{name}: {found[name][-1]}", flush=True)
    figures = []
    for name, runs in found.items():
        recipe = None if is_quick or runs is found[""] else found[""]
        accuracies = [run.accuracy_after for run in runs]
        # Of a run that has not learned, all: an arm that never learns does not look cheap.
        learned = [run.learned_tokens or run.sampled_tokens for run in runs]
        figures += [
            mean_figure(f"accuracy before{name}", "share", [run.accuracy_before for run in runs]),
            mean_figure(
                f"accuracy after{name}",
                "share",
                accuracies,
                at_least=fmean(run.accuracy_after for run in recipe) - SLACK if recipe else None,
            ),
            mean_figure(
                f"sampled tokens until {LEARNED_ACCURACY:g} are right{name}",
                "tokens",
                learned,
                at_most=fmean(run.learned_tokens or run.sampled_tokens for run in recipe) if recipe else None,
            ),
            mean_figure(f"sampled tokens{name}", "tokens", [run.sampled_tokens for run in runs]),
            mean_figure(f"training{name}", "s", [run.train_s for run in runs]),
            mean_figure(f"whole command{name}", "s", [run.whole_s for run in runs]),
            mean_figure(f"memory at the peak{name}", "GB", [run.peak_bytes / 1e9 for run in runs]),
        ]
    details = {name or "recipe": [asdict(run) for run in runs] for name, runs in found.items()}
    return Measured(figures=figures, details={"seeds": SEEDS, "runs": details})


def mean_figure(
    name: str,
    unit: str,
    values: Sequence[float],
    *,
    at_least: float | None = None,
    at_most: float | None = None,
) -> Figure:
    """Return the mean of one value for each seed."""
    return Figure(
        name=name,
        unit=unit,
        value=fmean(values),
        measured=tuple(values),
        at_least=at_least,
        at_most=at_most,
    )


def train_demo(
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
        sampled, learned = count_tokens(read_metrics(run_dirs[-1]))
        look(run_dirs[-1])
    return DemoResult(
        whole_s=whole_s,
        train_s=sum(seconds),
        num_steps=len(seconds),
        peak_bytes=done.peak_bytes,
        accuracy_before=before,
        accuracy_after=after,
        sampled_tokens=sampled,
        learned_tokens=learned,
        load_before=load_before,
    )
