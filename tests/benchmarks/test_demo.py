"""The demonstrations and the benchmarks of figures: run directories read, memory watched, goals."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.demo import ROOT, read_accuracies
from benchmarks.process_memory import run_watched, tree_bytes
from benchmarks.run import measure_figures
from tests.conftest import require_system_part
from tests.fixtures.jobs import wait_for


def write_evaluation(run_dir: Path, step: int, accuracy: float) -> None:
    path = run_dir / "eval" / f"arithmetic-step-{step:06d}.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps({"step": step, "greedy": {"accuracy": accuracy}}))


def test_the_first_and_the_last_evaluation_count(tmp_path: Path) -> None:
    for step, accuracy in ((20, 0.5), (0, 0.25), (100, 0.75)):
        write_evaluation(tmp_path, step, accuracy)
    assert read_accuracies(tmp_path) == (0.25, 0.75)


def test_the_memory_of_a_grandchild_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = tmp_path / "seen"

    def look(pid: int) -> int:
        if (num_bytes := tree_bytes(pid)) >= 200_000_000:
            seen.touch()
        return num_bytes

    monkeypatch.setattr("benchmarks.process_memory.tree_bytes", look)
    # Until it was seen, or never will be.
    hold = f"""
import pathlib, time
block, until = bytearray(200_000_000), time.monotonic() + 60
while not pathlib.Path({str(seen)!r}).exists() and time.monotonic() < until:
    time.sleep(0.05)
"""
    parent = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {hold!r}], check=True)"
    exit_code, peak_bytes = run_watched([sys.executable, "-c", parent], tmp_path, dict(os.environ))
    # 200 MB of zeroed, touched bytes and two small interpreters.
    assert exit_code == 0
    assert 200_000_000 <= peak_bytes < 300_000_000


def test_what_a_benchmark_started_ends_with_it(tmp_path: Path) -> None:
    """A run that went on after its benchmark was ended kept both cores busy under the next one."""
    hold = "import os, pathlib, time; pathlib.Path('pid').write_text(str(os.getpid())); time.sleep(600)"
    act = f"""
import os, pathlib, runpy, sys
import benchmarks.run
from benchmarks.process_memory import run_watched
held = [sys.executable, "-c", {hold!r}]
benchmarks.run.main = lambda: run_watched(held, pathlib.Path({str(tmp_path)!r}), dict(os.environ))
runpy.run_module("benchmarks", run_name="__main__")
"""
    benchmark = subprocess.Popen([sys.executable, "-c", act], cwd=ROOT)
    try:
        wait_for(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text(), limit_s=120.0)
        benchmark.terminate()
        assert benchmark.wait(120) == 128 + signal.SIGTERM
    finally:
        benchmark.kill()
    # Its end is waited for, so that nothing is left of it, not even for a moment.
    assert not Path(f"/proc/{(tmp_path / 'pid').read_text()}").exists()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["start-up", "ray-calls", "judging", "sandboxes"])
def test_every_benchmark_of_figures_works(name: str) -> None:
    if name in ("judging", "sandboxes"):
        require_system_part("bubblewrap", shutil.which("bwrap") is not None)
        require_system_part("podman", shutil.which("podman") is not None and os.geteuid() == 0)
    # The others train the demo's model: minutes of processor time each.
    measured = measure_figures(name, is_quick=True)
    assert any(figure.at_least is not None or figure.at_most is not None for figure in measured.figures)
    assert all(figure.measured for figure in measured.figures)
