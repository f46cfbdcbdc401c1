"""What `make demo-agent` costs and gains, under three seeds: games won of 100, held out, greedy."""

from __future__ import annotations

from dataclasses import asdict

from benchmarks.demo import ROOT, SEEDS, mean_figure, train_demo
from benchmarks.figures import Measured

RECIPE = ROOT / "recipes" / "demo-agent.toml"
MAX_S = 900.0
"""From its start to its report."""
MIN_GAIN = 0.115
"""Of the mean over three seeds: three standard errors, where half of the games are won."""


def measure_demo_agent(*, is_quick: bool) -> Measured:
    """Train by the recipe under each seed."""
    short = ("train.steps=2", "eval.num_examples=8") if is_quick else ()
    runs = []
    for seed in SEEDS[:1] if is_quick else SEEDS:
        runs.append(train_demo(*short, f"seed={seed}", recipe=RECIPE))
        print(f"seed {seed}: {runs[-1]}", flush=True)
    gains = [run.accuracy_after - run.accuracy_before for run in runs]
    figures = [
        mean_figure("games won before", "share", [run.accuracy_before for run in runs]),
        mean_figure("games won after", "share", [run.accuracy_after for run in runs]),
        mean_figure("gain", "share", gains, at_least=None if is_quick else MIN_GAIN),
        mean_figure("training", "s", [run.train_s for run in runs]),
        mean_figure("whole command", "s", [run.whole_s for run in runs], at_most=MAX_S),
    ]
    return Measured(figures=figures, details={"seeds": SEEDS, "runs": [asdict(run) for run in runs]})
