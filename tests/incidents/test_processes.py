"""Incidents of the process group, as far as run directories, locks and disks can cause them."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from strop.errors import CheckRefused, RunStopped, StoreError
from strop.hardware import require_free_disk
from strop.hardware.machine import read_cgroup_memory
from strop.policy.footprint import checkpoint_bytes, read_model_size
from strop.record import RunDir, list_runs
from strop.rollout import Example, Outcome
from strop.store import AtomicDirectory, verify_directory
from tests.fixtures.tiny_disk import tiny_disk
from tests.fixtures.tiny_run import ACCEPTED, Composition, Notes, SpellTask, new_run, read_curve, tiny_spec

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


def test_prc_8_a_disk_that_fills_up_ends_a_run_which_goes_on_once_there_is_room(
    tmp_path: Path, tiny_model_dir: Path
) -> None:
    """Incident: the disk filled in the middle of a run; what was half-written was taken for whole."""
    spec = tiny_spec(train={"steps": 6, "checkpoint_every": 2, "accept": f"{ACCEPTED}; room: tested here"})
    whole = Composition(spec, tiny_model_dir, new_run(tmp_path / "whole"))
    whole.run()
    with tiny_disk(tmp_path / "disk", size_bytes=1 << 24) as disk:
        made = Composition(spec, tiny_model_dir, new_run(disk))
        # Room for two checkpoints and a half.
        size = sum(path.stat().st_size for path in whole.run_dir.checkpoint_path(6).rglob("*"))
        ballast = disk / "ballast"
        ballast.write_bytes(b"x" * int(shutil.disk_usage(disk).free - 2.5 * size))
        with pytest.raises(RunStopped, match="the disk is nearly full: ") as caught:
            made.run()
        assert "the same command goes on from checkpoint step-000004" in str(caught.value)
        assert [line["step"] for line in made.run_dir.metrics.read()] == [1, 2, 3, 4, 5]
        assert made.notes.causes("tripwire") == ["disk_low"]
        assert made.run_dir.checkpoint_steps() == [2, 4]
        verify_directory(made.run_dir.checkpoint_path(4))
        ballast.unlink()
        run_dir = RunDir.open(made.run_dir.path)
        run_dir.acquire()
        Composition(spec, tiny_model_dir, run_dir).run()
        assert read_curve(run_dir.path) == read_curve(whole.run_dir.path)


def test_prc_8_a_disk_that_is_nearly_full_gets_one_more_checkpoint(
    tmp_path: Path, tiny_model_dir: Path
) -> None:
    """Incident: hours of training were lost, because the disk filled between two checkpoints."""

    class Filler(Notes):
        """Someone else's program, which leaves room for 1.1 checkpoints after step 3."""

        def on_step(self, metrics: Mapping[str, float]) -> None:
            super().on_step(metrics)
            if metrics["step"] == 3:
                free = shutil.disk_usage(disk).free
                (disk / "ballast").write_bytes(b"x" * int(free - 1.1 * size))

    spec = tiny_spec(train={"steps": 6, "checkpoint_every": 2})
    with tiny_disk(tmp_path / "disk", size_bytes=1 << 24) as disk:
        made = Composition(spec, tiny_model_dir, new_run(disk), notes=Filler())
        size = checkpoint_bytes(read_model_size(tiny_model_dir), "float32")
        with pytest.raises(RunStopped, match="goes on from checkpoint step-000003"):
            made.run()
        assert made.run_dir.checkpoint_steps() == [2, 3]
        verify_directory(made.run_dir.checkpoint_path(3))


@pytest.mark.skipif(sys.platform != "linux", reason="resident memory is read from /proc")
def test_prc_8_a_leak_of_a_fixed_amount_per_step_is_named(tmp_path: Path, tiny_model_dir: Path) -> None:
    """Incident: host memory grew for hours until the kernel ended the run."""
    kept: list[bytes] = []

    class Leaking(SpellTask):
        def verify(self, example: Example, text: str) -> Outcome:
            kept.append(b"x" * 200_000)
            return super().verify(example, text)

    # 12 judgements of 0.2 MB a step. Short replies: a step is quick.
    spec = tiny_spec(train={"steps": 36, "checkpoint_every": 50})
    task = Leaking(max_reply_tokens=4)
    made = Composition(spec, tiny_model_dir, new_run(tmp_path), task=task)
    made.run()
    alarm = next(event for event in made.notes.events if event.cause == "memory_growth")
    assert alarm.step <= 36
    assert re.match(r"resident memory grew by 2\.\d MiB in each of the last 24 steps", alarm.detail)


def test_prc_8_an_ordinary_run_raises_no_memory_alarm(tmp_path: Path, tiny_model_dir: Path) -> None:
    spec = tiny_spec(train={"steps": 40, "checkpoint_every": 50})
    made = Composition(spec, tiny_model_dir, new_run(tmp_path), task=SpellTask(max_reply_tokens=4))
    made.run()
    assert "memory_growth" not in made.notes.causes("tripwire")
    assert all(line["memory_bytes"] > 0 for line in made.notes.steps)


def test_prc_8_memory_is_compared_with_what_is_free_in_this_container(tmp_path: Path) -> None:
    """Incident: a run was planned with the memory of the host, and ended by its container's limit."""
    limit, used, stat = (tmp_path / name for name in ("memory.max", "memory.current", "memory.stat"))
    paths = [(tmp_path / "absent", tmp_path / "absent"), (limit, used)]
    limit.write_text("1000000\n")
    used.write_text("900000\n")
    assert read_cgroup_memory(paths) == (1_000_000, 100_000)
    # Files read lately can be dropped at any time.
    stat.write_text("anon 600000\ninactive_file 250000\n")
    assert read_cgroup_memory(paths) == (1_000_000, 350_000)
    limit.write_text("max\n")
    assert read_cgroup_memory(paths) == (None, None)


def test_prc_8_the_gate_refuses_a_run_whose_checkpoints_do_not_fit(
    tmp_path: Path, tiny_model_dir: Path
) -> None:
    """Incident: the disk filled hours into a run whose needs were known before its start."""
    with tiny_disk(tmp_path / "disk") as disk:
        made = Composition(tiny_spec(), tiny_model_dir, new_run(disk))
        with pytest.raises(CheckRefused, match=r"room: memory .* checkpoints 0\.0 of 0\.0 GiB free at "):
            made.run()
        assert made.run_dir.metrics.read() == []


# A run whose engine never answers from its n-th request on; the gate asks 64 times.
HANG = """
import asyncio, sys
from dataclasses import replace
from pathlib import Path
from tests.fixtures.tiny_run import ACCEPTED, Composition, new_run, tiny_spec
class Silent:
    def __init__(self, engine, num_left):
        self.engine, self.num_left = engine, num_left
    async def generate(self, request):
        self.num_left -= 1
        if self.num_left < 0:
            await asyncio.Event().wait()
        return await self.engine.generate(request)
    def __getattr__(self, name):
        return getattr(self.engine, name)
spec = tiny_spec(tripwires={"max_stall_s": 2.0}, train={"checkpoint_every": 1})
made = Composition(spec, Path(sys.argv[2]), new_run(Path(sys.argv[1])))
made.run(lambda roles: replace(roles, engine=Silent(roles.engine, 64 + 12 + 5)))
"""


@pytest.mark.slow
def test_prc_1_an_engine_that_never_answers_ends_the_run_naming_the_stage(
    tmp_path: Path, tiny_model_dir: Path
) -> None:
    """Incident: trainers waited for ever for an engine whose process was alive and idle."""
    ended = subprocess.run(
        [sys.executable, "-c", HANG, str(tmp_path / "runs"), str(tiny_model_dir)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert ended.returncode == 1, ended.stderr
    (path,) = (tmp_path / "runs").iterdir()
    with RunDir.open(path) as run:
        stall = run.events.read()[-1]
        assert (stall.kind, stall.step, stall.cause) == ("tripwire", 1, "stall")
        assert "stage generate has not moved for" in stall.detail
        assert run.checkpoint_steps() == [1]
    assert "Thread 0x" in ended.stderr
