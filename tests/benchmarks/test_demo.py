"""The demonstrations: run directories read, memory watched, steps on Ray split into work and overhead."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.demo import ROOT, STEP_SECONDS, DemoFailed, count_tokens, read_accuracies, read_step_seconds
from benchmarks.process_memory import run_watched, tree_bytes
from benchmarks.ray_demo import split_steps
from tests.fixtures.jobs import wait_for


def write_evaluation(run_dir: Path, step: int, accuracy: float) -> None:
    path = run_dir / "eval" / f"arithmetic-step-{step:06d}.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps({"step": step, "greedy": {"accuracy": accuracy}}))


def test_the_first_and_the_last_evaluation_count(tmp_path: Path) -> None:
    for step, accuracy in ((20, 0.5), (0, 0.25), (100, 0.75)):
        write_evaluation(tmp_path, step, accuracy)
    assert read_accuracies(tmp_path) == (0.25, 0.75)


def test_one_evaluation_is_not_a_gain(tmp_path: Path) -> None:
    write_evaluation(tmp_path, 0, 0.25)
    with pytest.raises(DemoFailed, match=r"1 evaluations\. Allowed: one before, one after"):
        read_accuracies(tmp_path)


def test_metrics_without_step_seconds_are_named(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    with pytest.raises(DemoFailed, match=STEP_SECONDS):
        read_step_seconds(tmp_path)


@pytest.mark.parametrize(
    ("accuracies", "learned"),
    [([0.9, 0.0, 0.7, 0.7, 0.7, 0.7, 0.9], 60), ([0.6] * 7, None), ([1.0] * 3, None)],
)
def test_the_tokens_until_a_run_has_learned(accuracies: list[float], learned: int | None) -> None:
    lines = [{"accuracy": accuracy, "num_scored_tokens": 10.0} for accuracy in accuracies]
    assert count_tokens(lines) == (10 * len(accuracies), learned)


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
    done = run_watched([sys.executable, "-c", parent], tmp_path, dict(os.environ))
    # 200 MB of zeroed, touched bytes and two small interpreters.
    assert done.exit_code == 0
    assert 200_000_000 <= done.peak_bytes < 300_000_000


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


def test_work_is_taken_away_from_each_step_that_is_only_its_own(tmp_path: Path) -> None:
    lines = [
        {"step": 1, "policy_version": 1, "seconds_step": 20.0, "seconds_compute": 5.0},
        {"step": 2, "policy_version": 2, "seconds_step": 10.0, "seconds_compute": 5.0},
        {"step": 3, "policy_version": 3, "seconds_step": 8.0, "seconds_compute": 4.0},
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    role = tmp_path / "attempts" / "1" / "roles" / "engine-0"
    role.mkdir(parents=True)
    role.with_suffix(".log").write_text("role engine-0 on node 0, process 7\n")
    log = role / "engine.log"
    said = "serving version {}, digest 0a1b; sampled for {:.3f} s since the update before\n"
    log.write_text("INFO loading\n" + "".join(said.format(version, 1.0 + version) for version in range(4)))
    (tmp_path / "eval").mkdir()
    for step in (0, 3):
        (tmp_path / "eval" / f"arithmetic-step-{step:06d}.json").write_text("{}")
    steps = split_steps(tmp_path)
    # Step 1 stands behind the evaluation at 0, which the engine's clock holds too.
    assert steps["whole_s"] == [10.0, 8.0]
    assert steps["sample_s"] == [3.0, 4.0]
    # 1 - (3 + 5) / 10 and 1 - (4 + 4) / 8.
    assert steps["overhead_frac"] == pytest.approx([0.2, 0.0])
