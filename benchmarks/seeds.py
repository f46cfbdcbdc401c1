"""Do all ways of running the demo learn the same? Its accuracy under another seed, in each of them.

`asynchronous` and `ray-demo` train each arm once, under seed 0, and time it. One run cannot tell a way that
learns less from bad luck: 100 sums alone leave a difference a standard error of 0.05, and each run draws
other replies. Here nothing is timed, so other work beside it does no harm.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean

from benchmarks import asynchronous, ray_demo
from benchmarks.demo import train_demo
from benchmarks.figures import Figure, Measured

REFERENCE = "one process"
ARMS: Mapping[str, Sequence[str]] = {
    REFERENCE: (),
    **{name: changes for name, changes in asynchronous.ARMS.items() if name != "synchronous"},
    "on Ray": ray_demo.ON_RAY,
}
SEEDS = (1,)
"""Half an hour on two cores for each."""
SLACK = 0.10 / len(SEEDS) ** 0.5
"""Of means over 100 sums a seed: arms of equal skill differ by less nineteen times of twenty."""


def measure_seeds(*, is_quick: bool) -> Measured:
    """Train every arm under every seed and compare the means with the first arm's."""
    short = ("train.steps=3", "eval.num_examples=8") if is_quick else ()
    found: dict[str, list[float]] = {name: [] for name in ARMS}
    # Seed by seed, so that a benchmark that is ended early has printed whole comparisons.
    for seed in SEEDS[:1] if is_quick else SEEDS:
        for name, changes in ARMS.items():
            found[name].append(train_demo(*changes, *short, f"seed={seed}").accuracy_after)
            print(f"seed {seed}, {name}: {found[name][-1]:.2f}", flush=True)
    goal = None if is_quick else fmean(found[REFERENCE]) - SLACK
    figures = [
        Figure(
            name=f"accuracy, {name}",
            unit="share",
            value=fmean(accuracies),
            measured=tuple(accuracies),
            at_least=None if name == REFERENCE else goal,
        )
        for name, accuracies in found.items()
    ]
    return Measured(figures=figures, details={"seeds": SEEDS, "arms": ARMS})
