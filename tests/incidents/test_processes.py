"""Incidents of the process group, as far as run directories, locks and disks can cause them."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from strop.cluster import Roles
from strop.cluster.local import ProcessPlacement
from strop.engine import Completion, GenerationRequest
from strop.errors import CheckRefused, EngineError, RunStopped, StoreError
from strop.evaluate import read_result
from strop.hardware.machine import read_cgroup_memory
from strop.io import AtomicDirectory, verify_directory
from strop.policy.footprint import checkpoint_bytes, read_model_size
from strop.record import RunDir, list_runs
from strop.rollout import Example, Outcome
from strop.run.held_out import Evaluation
from strop.spec import RunSpec
from strop.store import ModelHandle
from strop.tasks.judging import InlineJudge
from tests.fixtures.attempts import fork, wait_for_end
from tests.fixtures.silent_engine import train_until_a_write_blocks, train_until_silence
from tests.fixtures.spell import SpellTask
from tests.fixtures.tiny_disk import tiny_disk
from tests.fixtures.tiny_run import (
    ACCEPTED,
    NUM_GATE_REQUESTS,
    Composition,
    Notes,
    new_run,
    read_curve,
    tiny_spec,
)

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
    names = [process.communicate("go\n", timeout=240)[0].strip() for process in started]
    assert [process.returncode for process in started] == [0] * 4
    assert len(set(names)) == 4
    runs = list_runs(tmp_path)
    assert {run.path.name for run in runs} == set(names)
    assert all(run.is_finished and run.state.num_attempts == 1 for run in runs)
    assert all((run.path / "attempts" / "1" / "attempt.json").is_file() for run in runs)


def test_prc_8_a_disk_that_fills_up_leaves_the_last_checkpoint_intact(tmp_path: Path) -> None:
    with tiny_disk(tmp_path / "disk") as disk, RunDir.create(disk / "runs", "demo", "", "d1", {}) as run:
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
            kept.append(b"x" * 1_000_000)
            return super().verify(example, text)

    # 12 judgements of 1 MB a step, well above what the heap breathes. Short replies: a step is quick.
    spec = tiny_spec(train={"steps": 40, "checkpoint_every": 50}, tripwires={"on_alarm": "warn"})
    task = Leaking(max_reply_tokens=4)
    made = Composition(spec, tiny_model_dir, new_run(tmp_path), task=task)
    made.run()
    alarm = next(event for event in made.notes.events if event.cause == "memory_growth")
    assert re.match(r"resident memory grew by 1[0-3]\.\d MiB in each of the last 24 steps", alarm.detail)


def test_prc_8_an_ordinary_run_raises_no_memory_alarm(tmp_path: Path, tiny_model_dir: Path) -> None:
    spec = tiny_spec(train={"steps": 40, "checkpoint_every": 50}, tripwires={"on_alarm": "warn"})
    made = Composition(spec, tiny_model_dir, new_run(tmp_path), task=SpellTask(max_reply_tokens=4))
    made.run()
    assert "memory_growth" not in made.notes.causes("tripwire")
    assert all(line["memory_bytes"] > 0 for line in made.notes.steps)


def test_prc_8_memory_is_compared_with_what_is_free_in_this_container(tmp_path: Path) -> None:
    """Incident: a run was planned with the memory of the host, and ended by its container's limit."""
    limit, used, stat = (tmp_path / name for name in ("memory.max", "memory.current", "memory.stat"))
    dirs = [tmp_path / "absent", tmp_path]
    limit.write_text("1000000\n")
    used.write_text("900000\n")
    assert read_cgroup_memory(dirs) == (1_000_000, 100_000)
    # Files read lately can be dropped at any time.
    stat.write_text("anon 600000\ninactive_file 250000\n")
    assert read_cgroup_memory(dirs) == (1_000_000, 350_000)
    limit.write_text("max\n")
    assert read_cgroup_memory(dirs) == (None, None)


def test_prc_8_the_gate_refuses_a_run_whose_checkpoints_do_not_fit(
    tmp_path: Path, tiny_model_dir: Path
) -> None:
    """Incident: the disk filled hours into a run whose needs were known before its start."""
    with tiny_disk(tmp_path / "disk") as disk:
        made = Composition(tiny_spec(), tiny_model_dir, new_run(disk))
        with pytest.raises(CheckRefused, match=r"room: memory .* checkpoints 0\.0 of 0\.0 GiB free at "):
            made.run()
        assert made.run_dir.metrics.read() == []


@pytest.mark.slow
def test_prc_1_an_engine_that_never_answers_ends_the_run_naming_the_stage(
    tmp_path: Path, tiny_model_dir: Path
) -> None:
    """Incident: trainers waited for ever for an engine whose process was alive and idle."""
    log_path = tmp_path / "log.txt"
    code = wait_for_end(fork(train_until_silence, tmp_path / "runs", tiny_model_dir, log_path))
    assert code == 1, log_path.read_text()
    (path,) = (tmp_path / "runs").iterdir()
    with RunDir.open(path) as run:
        stall = run.events.read()[-1]
        assert (stall.kind, stall.step, stall.cause) == ("tripwire", 1, "stall")
        assert "stage generate has not moved for" in stall.detail
        assert run.checkpoint_steps() == [1]
    assert "Thread 0x" in log_path.read_text()


@pytest.mark.slow
@pytest.mark.parametrize("is_whole_disk", [False, True], ids=["one file", "the whole disk"])
def test_prc_1_a_write_that_never_ends_ends_the_run_naming_the_stage(
    tmp_path: Path, tiny_model_dir: Path, is_whole_disk: bool
) -> None:
    """Incident: saving a tokenizer to a file server that had gone blocked for ever, and nobody was told."""
    log_path = tmp_path / "log.txt"
    code = wait_for_end(
        fork(train_until_a_write_blocks, tmp_path / "runs", tiny_model_dir, log_path, is_whole_disk)
    )
    assert code == 1, log_path.read_text()
    (path,) = (tmp_path / "runs").iterdir()
    with RunDir.open(path) as run:
        stalls = [event for event in run.events.read() if event.cause == "stall"]
        # Of a disk on which nothing can be written only standard error tells.
        assert [stall.step for stall in stalls] == ([] if is_whole_disk else [2])
        assert all("stage checkpoint has not moved for" in stall.detail for stall in stalls)
        assert run.checkpoint_steps() == []
    # The stack says what it waited for.
    assert "in save_checkpoint" in log_path.read_text()


# Loaded by Python before the engine's program: says its last words and ends, at once or once a file is there.
LAST_WORDS = """
import os, sys, threading, time
def end():
    os.write(2, b"cannot go on: libgpu.so is gone\\n")
    os._exit({status})
def wait():
    while not os.path.exists({trigger!r}):
        time.sleep(0.01)
    end()
if "strop.engine.server" in sys.orig_argv:
    end() if {is_at_import} else threading.Thread(target=wait, daemon=True).start()
"""


@dataclass(frozen=True)
class DoomedEngine:
    """Engine processes that are made to end, and runs over them."""

    folder: Path
    model_dir: Path

    @property
    def trigger(self) -> Path:
        return self.folder / "end-now"

    def doom(self, monkeypatch: pytest.MonkeyPatch, *, status: int, is_at_import: bool) -> None:
        text = LAST_WORDS.format(status=status, trigger=str(self.trigger), is_at_import=is_at_import)
        (self.folder / "sitecustomize.py").write_text(text)
        monkeypatch.setenv("PYTHONPATH", str(self.folder), prepend=os.pathsep)

    def compose(self, spec: RunSpec, run_dir: RunDir) -> Composition:
        source = ModelHandle(path=self.model_dir, digest="unused")
        placement = ProcessPlacement(spec, source, run_dir.path / "roles")
        return Composition(spec, self.model_dir, run_dir, placement=placement)

    def end_at(
        self, made: Composition, num_requests: int, *, is_evaluated: bool = False
    ) -> Callable[[Roles], Roles]:
        """Let the engine end before it answers request `num_requests + 1`."""

        def change(roles: Roles) -> Roles:
            engine = EndedEngine(roles.engine, made.placement, self.trigger, num_requests)
            changed = replace(roles, engine=engine)
            if is_evaluated:
                made.evaluate = Evaluation(
                    made.spec, made.task, InlineJudge(made.task), changed, "digest", made.run_dir
                )
            return changed

        return change


class EndedEngine:
    """Hands everything on; at the n-th request its process ends by itself."""

    def __init__(self, engine: Any, placement: Any, trigger: Path, num_left: int) -> None:
        self._engine, self._placement = engine, placement
        self._trigger, self._num_left = trigger, num_left

    async def generate(self, request: GenerationRequest) -> Completion:
        self._num_left -= 1
        if self._num_left < 0 and not self._trigger.exists():
            self._trigger.touch()
            wait_until_ended(self._placement.engine_pid)
        completion: Completion = await self._engine.generate(request)
        return completion

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)


def wait_until_ended(pid: int) -> None:
    stat = Path(f"/proc/{pid}/stat")
    # Whoever waits for it may do so between a look and the next.
    with suppress(OSError):
        while stat.read_text().split(") ")[1][0] != "Z":
            time.sleep(0.01)


@pytest.fixture
def doomed(tmp_path: Path, tiny_model_dir: Path) -> DoomedEngine:
    (tmp_path / "hook").mkdir()
    return DoomedEngine(tmp_path / "hook", tiny_model_dir)


@pytest.mark.slow
@pytest.mark.parametrize("status", [0, 3])
def test_prc_5_a_role_that_ends_at_import_is_told_with_status_and_last_words(
    tmp_path: Path, doomed: DoomedEngine, monkeypatch: pytest.MonkeyPatch, status: int
) -> None:
    """Incident: a worker ended before it had logged anything, and its partner idled for 12 hours."""
    doomed.doom(monkeypatch, status=status, is_at_import=True)
    made = doomed.compose(tiny_spec(), new_run(tmp_path / "runs"))
    with pytest.raises(EngineError, match="the engine did not start") as caught:
        made.run()
    assert f"ended with exit code {status}\nIts last log lines:\ncannot go on: libgpu.so is gone" in str(
        caught.value
    )
    assert made.run_dir.metrics.read() == []


@pytest.mark.slow
@pytest.mark.parametrize("status", [0, 3])
def test_prc_5_a_role_that_ends_in_mid_run_is_told_with_status_and_last_words(
    tmp_path: Path, doomed: DoomedEngine, monkeypatch: pytest.MonkeyPatch, status: int
) -> None:
    """Incident: an engine that exited with status 0 was not missed by anyone."""
    doomed.doom(monkeypatch, status=status, is_at_import=False)
    spec = tiny_spec(train={"steps": 4, "checkpoint_every": 1})
    made = doomed.compose(spec, new_run(tmp_path / "runs"))
    # Each step asks 12 times.
    with pytest.raises(RunStopped, match="all 12 rollouts of step 3 failed: engine") as caught:
        made.run(doomed.end_at(made, NUM_GATE_REQUESTS + 24))
    assert f"ended with exit code {status}" in str(caught.value)
    assert "cannot go on: libgpu.so is gone" in str(caught.value)
    assert "goes on from checkpoint step-000002" in str(caught.value)
    assert [line["step"] for line in made.run_dir.metrics.read()] == [1, 2]


@pytest.mark.slow
@pytest.mark.parametrize("num_answered", [0, 5], ids=["none", "some"])
def test_prc_5_an_evaluation_that_was_cut_off_is_repeated(
    tmp_path: Path, doomed: DoomedEngine, monkeypatch: pytest.MonkeyPatch, num_answered: int
) -> None:
    """Incident: a checkpoint was marked as evaluated before its evaluation had ended."""
    doomed.doom(monkeypatch, status=0, is_at_import=False)
    spec = tiny_spec(train={"steps": 4, "checkpoint_every": 1}, eval={"every": 2, "num_samples": 1})
    made = doomed.compose(spec, new_run(tmp_path / "runs"))
    # 12 held-out examples, each once greedily and once sampled; then two steps.
    num_before = NUM_GATE_REQUESTS + 24 + 24
    with pytest.raises(EngineError, match="ended with exit code 0") as caught:
        made.run(doomed.end_at(made, num_before + num_answered, is_evaluated=True))
    assert "cannot go on: libgpu.so is gone" in str(caught.value)
    # Step 2 is trained, and has no checkpoint before it is evaluated.
    assert [line["step"] for line in made.run_dir.metrics.read()] == [1, 2]
    assert made.run_dir.checkpoint_steps() == [1]
    doomed.trigger.unlink()
    run_dir = RunDir.open(made.run_dir.path)
    run_dir.acquire()
    again = doomed.compose(spec, run_dir)
    again.run(doomed.end_at(again, 10**6, is_evaluated=True))
    assert [summary.step for summary in again.notes.summaries] == [2, 4]
    results = [read_result(run_dir.eval_path(again.task.name, step)) for step in (0, 2, 4)]
    assert all(result.is_valid and result.greedy.num_unscored == 0 for result in results)
