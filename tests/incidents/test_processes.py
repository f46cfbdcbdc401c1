"""Incidents of the process group, as far as run directories, locks and disks can cause them."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from strop.errors import CheckRefused, StoreError
from strop.hardware import require_free_disk
from strop.record import RunDir, list_runs
from strop.store import AtomicDirectory, verify_directory
from tests.fixtures.tiny_disk import tiny_disk

# Two steps of a run that is found again or created, as the loop does it.
TAKE_A_RUN = """
import sys
from pathlib import Path
from strop.record import RunDir, find_resumable
root = Path(sys.argv[1])
run = find_resumable(root, "demo", "d1") or RunDir.create(root, "demo", "", "d1", {})
with run:
    attempt = run.begin_attempt()
    print("held", flush=True)
    sys.stdin.readline()
    run.end_attempt(attempt, cause="done", exit_code=0, step=2)
    run.mark_finished()
print(run.path.name)
"""


def test_prc_6_runs_started_together_never_share_a_directory(tmp_path: Path) -> None:
    """Incident: one shared folder for all jobs was deleted by whoever finished first."""
    started = [
        subprocess.Popen(
            [sys.executable, "-c", TAKE_A_RUN, str(tmp_path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(4)
    ]
    for process in started:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
    # All hold their run before any may go on.
    names = [process.communicate("go\n", timeout=60)[0].strip() for process in started]
    assert [process.returncode for process in started] == [0] * 4
    assert len(set(names)) == 4
    runs = list_runs(tmp_path)
    assert {run.path.name for run in runs} == set(names)
    assert all(run.is_finished and run.state.num_attempts == 1 for run in runs)
    assert all((run.path / "attempts" / "1" / "attempt.json").is_file() for run in runs)


def test_prc_6_a_second_run_in_the_same_directory_is_refused(tmp_path: Path) -> None:
    with RunDir.create(tmp_path, "demo", "", "d1", {}) as run:
        with pytest.raises(CheckRefused, match="is in use by process"):
            RunDir.open(run.path).acquire()
        run.metrics.append(1, {"loss": 1.0})
    assert RunDir.open(run.path).metrics.read() == [{"step": 1, "loss": 1.0}]


def test_prc_8_a_disk_too_small_for_the_run_is_refused(tmp_path: Path) -> None:
    """Incident: the root disk filled with temporary data hours into a run."""
    with tiny_disk(tmp_path / "disk") as disk, pytest.raises(CheckRefused, match=r"needs 1620\.0 MB"):
        require_free_disk(disk / "runs", 1_620_000_000, "one checkpoint")


def test_prc_8_a_disk_that_fills_up_leaves_the_last_checkpoint_intact(tmp_path: Path) -> None:
    with (
        tiny_disk(tmp_path / "disk") as disk,
        RunDir.create(disk / "runs", "demo", "", "d1", {}) as run,
    ):
        steps = iter(range(1, 100))
        with pytest.raises(StoreError, match=r"the disk is full: .*checkpoints/step-"):
            save_until_refused(run, steps)
        latest = run.latest_checkpoint()
        assert latest is not None
        verify_directory(latest[1])
        # Nothing half-written takes the room that is left, so the loop can still say why it stopped.
        assert {path.name for path in run.checkpoints_path.iterdir()} == {
            f"step-{step:06d}" for step in run.checkpoint_steps()
        }
        run.metrics.append(next(steps), {"loss": 1.0})
        run.mark_finished()


def save_until_refused(run: RunDir, steps: Iterator[int]) -> None:
    """Write checkpoints of 200 kB until the disk says no."""
    for step in steps:
        with AtomicDirectory(run.checkpoint_path(step)) as partial:
            (partial / "state.bin").write_bytes(b"x" * 200_000)
