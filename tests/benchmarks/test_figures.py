"""Figures with goals: each benchmark of them works."""

from __future__ import annotations

import os
import shutil

import pytest

from benchmarks.figures import Figure
from benchmarks.run import measure_figures
from tests.conftest import require_system_part


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


@pytest.mark.slow
@pytest.mark.parametrize("name", ["start-up", "sandboxes"])
def test_every_benchmark_of_figures_works(name: str) -> None:
    if name == "sandboxes":
        require_system_part("bubblewrap", shutil.which("bwrap") is not None)
        require_system_part("podman", shutil.which("podman") is not None and os.geteuid() == 0)
    # The others train the demo's model: minutes of processor time each.
    measured = measure_figures(name, is_quick=True)
    assert any(figure.at_least is not None or figure.at_most is not None for figure in measured.figures)
    assert all(figure.measured for figure in measured.figures)
