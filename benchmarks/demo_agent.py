"""What `make demo-agent` costs and gains, under three seeds: games won of 100, held out, greedy."""

from __future__ import annotations

from benchmarks.demo import measure_recipe
from benchmarks.figures import Measured

MAX_S = 900.0
"""From its start to its report."""
MIN_GAIN = 0.115
"""Of the mean over three seeds: three standard errors, where half of the games are won."""


def measure_demo_agent(*, is_quick: bool) -> Measured:
    """Train by the recipe under each seed."""
    return measure_recipe(
        "demo-agent.toml", ("train.steps=2",), is_quick=is_quick, min_gain=MIN_GAIN, max_s=MAX_S
    )
