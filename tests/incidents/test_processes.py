"""Incidents of processes, disks and leftovers, with real processes."""

from __future__ import annotations

import asyncio
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from strop.cluster import Roles
from strop.cluster.ray.placement import RayPlacement
from strop.engine import Completion, GenerationRequest
from strop.errors import EngineError, RunStopped
from strop.evaluate import read_result
from strop.hardware import clear_leftovers
from strop.hardware.leases import leases_dir
from strop.io import verify_directory
from strop.policy.footprint import checkpoint_bytes, read_model_size
from strop.record import RunDir, list_runs
from strop.rollout import Example, Outcome
from strop.run.held_out import Evaluation
from strop.spec import RunSpec
from strop.spec.layout import RoleKind
from strop.store import ModelHandle
from strop.tasks.judging import Judge
from tests.fixtures.attempts import fork, wait_for_end
from tests.fixtures.dying_runs import NUM_PROLIFIC, STORM, find_marked, prolific_run
from tests.fixtures.ray_traces import is_alive, wait_until
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
        async def verify(self, example: Example, text: str) -> Outcome:
            kept.append(b"x" * 1_000_000)
            return await super().verify(example, text)

    # 12 judgements of 1 MB a step, well above what the heap breathes. Short replies: a step is quick.
    spec = tiny_spec(train={"steps": 40, "checkpoint_every": 50}, tripwires={"on_alarm": "warn"})
    task = Leaking(max_reply_tokens=4)
    made = Composition(spec, tiny_model_dir, new_run(tmp_path), task=task)
    made.run()
    alarm = next(event for event in made.notes.events if event.cause == "memory_growth")
    assert re.match(r"resident memory grew by 1[0-3]\.\d MiB in each of the last 24 steps", alarm.detail)


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


def end_with_last_words(role: object) -> None:
    """End the process of an actor as a library that gives up does."""
    os.write(2, b"cannot go on: libgpu.so is gone\n")
    os._exit(0)


@dataclass(frozen=True)
class DoomedEngine:
    """Engine processes that are made to end, and runs over them."""

    model_dir: Path

    def compose(self, spec: RunSpec, run_dir: RunDir) -> Composition:
        source = ModelHandle(path=self.model_dir, digest="unused")
        placement = RayPlacement(spec, source, run_dir.path / "roles")
        return Composition(spec, self.model_dir, run_dir, placement=placement)

    def end_at(
        self, made: Composition, num_requests: int, *, is_evaluated: bool = False
    ) -> Callable[[Roles], Roles]:
        """Let the engine end before it answers request `num_requests + 1`."""

        def change(roles: Roles) -> Roles:
            engine = EndedEngine(roles.engine, made.placement, num_requests)
            changed = replace(roles, engine=engine)
            if is_evaluated:
                made.evaluate = Evaluation(
                    made.spec, made.task, Judge(made.task), changed, "digest", made.run_dir
                )
            return changed

        return change


class EndedEngine:
    """Hands everything on; at the n-th request its process ends by itself."""

    def __init__(self, engine: Any, placement: Any, num_left: int) -> None:
        self._engine, self._placement = engine, placement
        self._num_left = num_left

    async def generate(self, request: GenerationRequest) -> Completion:
        self._num_left -= 1
        if self._num_left == -1:
            (role,) = self._placement._of(RoleKind.ENGINE)
            role.actor.__ray_call__.remote(end_with_last_words)
            await asyncio.to_thread(wait_until, lambda: not is_alive(role.facts.pid), 60.0)
        completion: Completion = await self._engine.generate(request)
        return completion

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)


@pytest.fixture
def doomed(tiny_model_dir: Path) -> DoomedEngine:
    return DoomedEngine(tiny_model_dir)


@pytest.mark.slow
def test_prc_5_a_role_that_ends_in_mid_run_is_told_with_status_and_last_words(
    tmp_path: Path, doomed: DoomedEngine
) -> None:
    """Incident: an engine that exited with status 0 was not missed by anyone."""
    spec = tiny_spec(train={"steps": 4, "checkpoint_every": 1})
    made = doomed.compose(spec, new_run(tmp_path / "runs"))
    # Each step asks 12 times.
    with pytest.raises(RunStopped, match="all 12 rollouts of step 3 failed: engine") as caught:
        made.run(doomed.end_at(made, NUM_GATE_REQUESTS + 24))
    assert "role engine-0 on node 0" in str(caught.value)
    assert "cannot go on: libgpu.so is gone" in str(caught.value)
    assert "goes on from checkpoint step-000002" in str(caught.value)
    assert [line["step"] for line in made.run_dir.metrics.read()] == [1, 2]


@pytest.mark.slow
def test_prc_5_an_evaluation_that_was_cut_off_is_repeated(tmp_path: Path, doomed: DoomedEngine) -> None:
    """Incident: a checkpoint was marked as evaluated before its evaluation had ended."""
    spec = tiny_spec(train={"steps": 4, "checkpoint_every": 1}, eval={"every": 2, "num_samples": 1})
    made = doomed.compose(spec, new_run(tmp_path / "runs"))
    # 12 held-out examples, each once greedily and once sampled; then two steps, and 5 of the next evaluation.
    num_before = NUM_GATE_REQUESTS + 24 + 24 + 5
    with pytest.raises(EngineError, match="role engine-0 on node 0") as caught:
        made.run(doomed.end_at(made, num_before, is_evaluated=True))
    assert "cannot go on: libgpu.so is gone" in str(caught.value)
    # Step 2 is trained, and has no checkpoint before it is evaluated.
    assert [line["step"] for line in made.run_dir.metrics.read()] == [1, 2]
    assert made.run_dir.checkpoint_steps() == [1]
    run_dir = RunDir.open(made.run_dir.path)
    run_dir.acquire()
    again = doomed.compose(spec, run_dir)
    again.run(doomed.end_at(again, 10**6, is_evaluated=True))
    assert [summary.step for summary in again.notes.summaries] == [2, 4]
    results = [read_result(run_dir.eval_path(again.task.name, step)) for step in (0, 2, 4)]
    assert all(result.is_valid and result.greedy.num_unscored == 0 for result in results)


@pytest.fixture
def leases(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Leases of this test alone, for its processes too."""
    (tmp_path / "runtime").mkdir(mode=0o700)
    monkeypatch.setenv("STROP_RUNTIME_DIR", str(tmp_path / "runtime"))
    # Whoever was killed may be slow to go where other work keeps the machine busy.
    monkeypatch.setattr("strop.hardware.leases._END_LIMIT_S", 60.0)


@pytest.mark.slow
@pytest.mark.usefixtures("leases")
def test_prc_4_twenty_kills_at_random_leave_nothing_and_touch_no_stranger() -> None:
    """Incident: old engines held the memory of a GPU; clean-up by name ended the jobs of others."""
    chance = random.Random(20)
    # The same program with the same name, of nobody's run.
    words = [sys.executable, "-S", "-c", "import time; time.sleep(600)  # stranger"]
    with subprocess.Popen(words, start_new_session=True) as stranger, ExitStack() as undo:
        undo.callback(stranger.kill)
        num_ended = 0
        for number in range(20):
            mark = f"kill-{os.getpid()}-{number}"
            with prolific_run(mark) as run:
                assert run.stdout is not None
                num_started = chance.randrange(0, NUM_PROLIFIC)
                for _ in range(num_started):
                    assert run.stdout.readline() == "started\n"
                # Somewhere in the next one.
                time.sleep(chance.uniform(0.0, 0.02))
                os.kill(run.pid, signal.SIGKILL)
                run.wait()
                ended = clear_leftovers()
                assert len(ended) >= num_started
                num_ended += len(ended)
                # What had just been forked would show by now.
                time.sleep(0.3)
                assert find_marked(mark) == []
        assert [path.name for path in leases_dir().iterdir()] == ["lock"]
        # Some were killed before they had started anything, most were not.
        assert num_ended > 40
        assert stranger.poll() is None


@pytest.mark.slow
@pytest.mark.usefixtures("leases")
def test_prc_4_a_storm_of_processes_without_environment_is_ended_to_the_last() -> None:
    """Incident: orphans kept a GPU: what was started while its parents were ended was never found.

    Killing one by one left 30 to 90 of about 500 behind.
    """
    for number in range(3):
        mark = f"storm-{os.getpid()}-{number}"
        with prolific_run(mark, STORM) as run:
            assert run.stdout is not None
            # In its midst: each of two shells has started a dozen, and has more to start.
            for _ in range(2):
                assert run.stdout.readline() == "started\n"
            time.sleep(number * 0.03)
            run.kill()
            run.wait()
            assert len(clear_leftovers()) > 20
            time.sleep(0.5)
            assert find_marked(mark) == []
