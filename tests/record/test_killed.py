"""A crash at any moment, and a disk that fills up, leave a record that can be read and gone on with."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from strop.errors import StoreError
from strop.record import RunDir
from strop.record.rollouts import read_rollouts
from tests.fixtures.killed_recording import record_step
from tests.fixtures.tiny_disk import tiny_disk

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_a_kill_before_in_or_after_any_write_leaves_a_readable_record(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.fixtures.killed_recording", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    # It did die between any two of them.
    assert found["points"] > 40
    assert found["steps"] == sorted(found["steps"])
    assert {*found["steps"]} == {0, 1, 2}


def record_until_full(run: RunDir) -> None:
    for step in range(2, 1000):
        record_step(run, step)


def test_a_disk_that_fills_up_keeps_every_step_that_was_recorded(tmp_path: Path) -> None:
    with tiny_disk(tmp_path / "disk") as disk, RunDir.create(disk, "full", "", "digest", {}) as run:
        record_step(run, 1)
        filler = disk / "filler"
        filler.write_bytes(b"x" * (900 << 10))
        with pytest.raises(StoreError, match="the disk is full"):
            record_until_full(run)
        steps = [int(line["step"]) for line in run.metrics.read()]
        assert steps == list(range(1, len(steps) + 1))
        for path in run.rollouts_files():
            assert len(read_rollouts(path)) == 1
        # With room again, the run goes on behind its last whole step.
        filler.unlink()
        run.truncate_after(len(steps))
        record_step(run, len(steps) + 1)
        assert [line["step"] for line in run.timeline.read_lines()] == [*steps, len(steps) + 1]
        assert not list(run.path.rglob("*.partial-*"))
