"""Figures with goals: each benchmark of them works."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from benchmarks.figures import Figure
from benchmarks.long_tail import run_once
from benchmarks.recording import measure_invented, share_of_steps
from benchmarks.run import FIGURES, measure_figures
from strop.record import Event, EventKind, RunDir
from strop.tokenizer import Tokenizer
from tests.conftest import require_system_part
from tests.fixtures.sandboxed import best_level
from tests.fixtures.tiny_tokenizer import tiny_tokenizer
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


def test_steps_that_are_invented_are_recorded_and_read() -> None:
    figures = {figure.name: figure for figure in measure_invented(200, is_quick=True)}
    assert figures["64 x 200 tokens: share of a step"].at_most == 0.01
    assert figures["64 x 200 tokens: all rows listed"].at_most == 15.0
    assert all(figure.value > 0.0 for figure in figures.values())


def test_a_share_is_what_the_run_noted_and_what_its_logs_take(tmp_path: Path) -> None:
    with RunDir.create(tmp_path, "tiny", "", "digest", {}) as run:
        for step in (1, 2):
            run.timeline.add("learner", "record", 0.0, 10.0 * step)
            run.timeline.write(step)
            run.events.append(Event(kind=EventKind.NOTICE, step=step, cause="told"))
            run.metrics.append(step, {"seconds_step": 1000.0})
    # Of a thousand seconds each, logs take next to nothing.
    assert share_of_steps(run.path) == pytest.approx([0.01, 0.02], rel=0.5)
    assert [path.name for path in tmp_path.iterdir()] == [run.path.name]


def test_long_attempts_hold_up_neither_engine_nor_learner(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(tiny_tokenizer(tmp_path / "chat"))
    waiting, ahead = (run_once(tokenizer, number, 5, "continue", num_prompts=1) for number in (0, 4))
    assert waiting.longest_turns > 40 * waiting.shortest_turns
    # No attempt was cut, left out or too old, however long: the batches are those of the synchronous run.
    assert (ahead.num_evicted, waiting.staleness_max) == (0, 0)
    assert 0 < ahead.staleness_max <= 4
    assert (ahead.longest_turns, ahead.shortest_turns) == (waiting.longest_turns, waiting.shortest_turns)
    assert ahead.step_s < 0.5 * waiting.step_s
    assert ahead.learner_frac > 2 * waiting.learner_frac
    assert ahead.rows_frac > 2 * waiting.rows_frac
