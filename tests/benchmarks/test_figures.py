"""Figures with goals of their own: when a goal is reached, and that each benchmark of them works."""

from __future__ import annotations

import os
import shutil

import pytest

from benchmarks.figures import Figure
from benchmarks.run import FIGURES, measure_figures
from tests.conftest import require_system_part
from tests.fixtures.sandboxed import best_level
from tools.slurm_cluster import is_installed


@pytest.mark.parametrize(
    ("at_least", "at_most", "is_reached"),
    [(5.0, None, True), (5.1, None, False), (None, 5.0, True), (None, 4.9, False), (None, None, True)],
)
def test_a_goal_is_reached_at_its_bound(
    at_least: float | None, at_most: float | None, is_reached: bool
) -> None:
    figure = Figure(name="f", unit="s", value=5.0, measured=(5.0,), at_least=at_least, at_most=at_most)
    assert figure.is_reached is is_reached
    assert ("FAIL" in figure.describe()) is not is_reached


WHOLE_RUNS = (
    "asynchronous",
    "busy",
    "demo",
    "demo-agent",
    "planning",
    "ray-demo",
    "recording",
    "reverse-text",
    "runtime-kills",
    "seeds",
    "trackers",
)
"""Train the demo's model, kill at random, or install four trackers: a minute of processor time and more each
even with `--quick`."""


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in FIGURES if name not in WHOLE_RUNS])
def test_every_benchmark_of_figures_works(name: str, request: pytest.FixtureRequest) -> None:
    if name in ("code-judge", "runtime"):
        require_system_part("a sandbox with namespaces", best_level() == "namespace")
    if name == "remote-sandboxes":
        require_system_part("bubblewrap", shutil.which("bwrap") is not None)
    if name == "sandboxes":
        require_system_part("podman", shutil.which("podman") is not None and os.geteuid() == 0)
    if name == "launch":
        require_system_part("slurm-wlm", is_installed())
    # Random weights do not pass the gate before training.
    model = request.getfixturevalue("smollm2_dir" if name == "mirror" else "tiny_model_dir")
    measured = measure_figures(name, is_quick=True, model=str(model))
    assert any(figure.at_least is not None or figure.at_most is not None for figure in measured.figures)
    assert all(figure.measured for figure in measured.figures)
    if name == "kills":
        # No speeds: kills must leave the same curve, and nothing else, on any machine.
        assert all(figure.is_reached for figure in measured.figures), measured.details
