"""Incidents of the checkpoint group in whole runs: deaths, lost disks and the same command again.

What a resumed run must have in common with an uninterrupted one: everything, bit for bit. Attempts
that are killed are processes of their own, forked from a server that has imported what they need.
R1, R2 and R4 are the contracts on resume: trainer, synchronous run, completion.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import shutil
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from transformers.models.auto.modeling_auto import AutoModelForCausalLM

from strop.algorithm import build_algorithm
from strop.cluster import Roles
from strop.cluster.local import LocalLearner, build_learner
from strop.engine import Completion, Engine, GenerationRequest
from strop.errors import CheckRefused, RemoteUnreachable
from strop.io import verify_directory
from strop.record import RunDir
from strop.record.mirror import restore_run
from strop.record.rollouts import read_rollouts
from strop.rollout import Group
from strop.run.mirroring import continue_from
from strop.run.training import train_here
from strop.spec import load_spec
from strop.store import ModelHandle
from strop.store.record_store import Objects
from strop.train.batch import build_batch
from strop.train.recording import load_checkpoint
from tests.fixtures.attempts import LIMIT_S, Bench, describe_run
from tests.fixtures.mirrored import PlayedRun, WatchedObjects
from tests.fixtures.silent_observer import SilentObserver
from tests.fixtures.tiny_run import (
    NUM_GATE_REQUESTS,
    Composition,
    Curve,
    new_run,
    read_curve,
    take_up,
    tiny_spec,
)
from tests.fixtures.train_here import Moment

NUM_STEPS = 5
NUM_KILLS = 6
MAX_ROUNDS = 6
# In the order in which a run comes by. The end of a line is the moment before it happens.
DEATHS = (
    r"os\.rename .*/run\.json\.partial-",  # all is there that makes a directory a run, but for this
    r"os\.mkdir .*/attempts/1$",
    r"open .*/eval/arithmetic-step-000000\.json",
    r"os\.rename .*/rollouts/step-000001\.parquet",
    r"open .*/rollouts/step-000002\.parquet",  # right after the metrics of step 1
    r"open .*/checkpoints/step-000002\.partial-[^/]*/state/trainer\.json",
    r"os\.rename .*/checkpoints/step-000002\.partial-[^/]*/COMPLETE",
    r"os\.rename .*/checkpoints/step-000002\.partial-[^/]*$",  # complete, and not in its place
    r"os\.rename .*/eval/arithmetic-step-000003\.json",  # right after the metrics of step 3
    r"os\.rename .*/eval/arithmetic-step-000005\.json",
    r"os\.rename .*/checkpoints/step-000005\.partial-[^/]*/COMPLETE",
    r"os\.rename .*/checkpoints/step-000002$",  # all is trained, and the run not marked as done
)


def finish(bench: Bench) -> Curve:
    """Give the command until the run is done; every checkpoint that is left is whole."""
    curve = bench.finish()
    run = bench.only_run()
    for step in run.checkpoint_steps():
        verify_directory(run.checkpoint_path(step))
    return curve


@dataclass(frozen=True)
class Whole:
    """A run that nobody disturbed."""

    curve: Curve
    cpu_s: float
    """Processor time from its lock to its end."""


@pytest.fixture(scope="module")
def dtype(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def whole(dtype: str, tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Whole:
    bench = Bench(
        tmp_path_factory.mktemp("whole") / dtype,
        describe_run("killed", tiny_model_dir, NUM_STEPS, dtype=dtype),
    )
    curve = finish(bench)
    assert [line["step"] for line in curve.metrics] == list(range(1, NUM_STEPS + 1))
    assert sorted(curve.evals) == [f"arithmetic-step-00000{step}.json" for step in (0, 3, 5)]
    # Most steps learn something, or equality would say little.
    assert sum(line["num_signal_tokens"] > 0 for line in curve.metrics) > NUM_STEPS / 2
    took = re.search(r"^took (.*) s of processor time$", bench.log_path.read_text(), re.MULTILINE)
    assert took is not None
    return Whole(curve, float(took[1]))


@pytest.fixture
def new_bench(dtype: str, tmp_path: Path, tiny_model_dir: Path) -> Callable[[str], Bench]:
    return lambda name: Bench(tmp_path / name, describe_run("killed", tiny_model_dir, NUM_STEPS, dtype=dtype))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16"], indirect=True)
def test_ckp_3_kills_at_random_moments_do_not_change_the_curve(
    new_bench: Callable[[str], Bench], whole: Whole
) -> None:
    """Incident: resume restored a counter only, and curves bent where runs were taken up again."""
    stream = random.Random(11)
    num_killed = 0
    for round_index in range(MAX_ROUNDS):
        bench = new_bench(f"round-{round_index}")
        # A run that was killed after its last word is finished: the same command would begin another.
        while num_killed < NUM_KILLS and not bench.is_finished:
            # SIGPROF ends a process as SIGKILL does, without a word.
            code = bench.end(Moment(cpu_s=stream.uniform(0.0, whole.cpu_s)))
            assert code in {0, -signal.SIGPROF}, bench.log_path.read_text()
            num_killed += code != 0
        assert finish(bench) == whole.curve
        if num_killed == NUM_KILLS:
            return
    pytest.fail(f"only {num_killed} of {NUM_KILLS} attempts were still running when they were to be killed")


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32"], indirect=True)
def test_ckp_4_kills_between_two_writes_do_not_change_the_curve(
    new_bench: Callable[[str], Bench], whole: Whole
) -> None:
    """Incident: a torn save looked complete, and what was recorded twice was counted twice."""
    bench = new_bench("writes")
    for die_at in DEATHS:
        assert bench.end(Moment(die_at)) == -signal.SIGKILL, (die_at, bench.log_path.read_text())
    curve = finish(bench)
    assert curve == whole.curve
    run = bench.only_run()
    # The first death left no run behind.
    assert run.state.num_attempts == len(DEATHS)
    assert run.checkpoint_steps()[-2:] == [4, 5]


class Death(BaseException):
    """The end of a process, as far as one process can play it."""


class DyingEngine:
    """Hands requests on, and dies at the n-th with all others of the step under way."""

    def __init__(self, engine: Engine, num_requests: int) -> None:
        self._engine = engine
        self._num_left = num_requests

    async def generate(self, request: GenerationRequest) -> Completion:
        self._num_left -= 1
        if self._num_left < 0:
            raise Death
        return await self._engine.generate(request)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)


def die_after(num_requests: int) -> Callable[[Roles], Roles]:
    return lambda roles: replace(roles, engine=DyingEngine(roles.engine, NUM_GATE_REQUESTS + num_requests))


def trained_ids(run_path: Path) -> list[str]:
    """Return the id of every rollout that was trained on, in order."""
    files = sorted((run_path / "rollouts").iterdir())
    return [rollout.example.example_id for path in files for rollout in read_rollouts(path)]


# 12 examples, 5 a step: steps 3 and 5 span two epochs. A step asks for 5 groups of 4.
EPOCHS = {"steps": 5, "prompts_per_step": 5, "checkpoint_every": 2}


@pytest.mark.parametrize(
    "num_requests", [2 * 20 + 7, 4 * 20 + 1], ids=["mid-epoch", "right after a checkpoint at a seam"]
)
def test_ckp_5_groups_in_flight_are_trained_as_in_an_uninterrupted_run(
    tmp_path: Path, tiny_model_dir: Path, num_requests: int
) -> None:
    """Incident: rollouts in flight were dropped while the data cursor had advanced."""
    spec = tiny_spec(train=EPOCHS)
    whole = Composition(spec, tiny_model_dir, new_run(tmp_path / "whole"))
    whole.run()
    made = Composition(spec, tiny_model_dir, new_run(tmp_path / "dying"))
    with pytest.raises(Death):
        made.run(die_after(num_requests))
    assert not made.run_dir.is_finished
    take_up(made).run()
    expected = trained_ids(whole.run_dir.path)
    assert len(expected) == 5 * 5 * 4
    assert trained_ids(made.run_dir.path) == expected
    assert read_curve(made.run_dir.path) == read_curve(whole.run_dir.path)


def test_r1_equal_rollouts_give_equal_parameters_and_moments(tmp_path: Path, tiny_model_dir: Path) -> None:
    """R1: the trainer alone, from a checkpoint, over rollouts that were read back from the record."""
    spec = tiny_spec(train={"steps": 4, "checkpoint_every": 1, "keep_checkpoints": 4})
    made = Composition(spec, tiny_model_dir, new_run(tmp_path))
    made.run()
    learner = build_learner(spec, ModelHandle(path=tiny_model_dir, digest="unused"))
    asyncio.run(load_checkpoint(made.run_dir.checkpoint_path(2), LocalLearner(learner), num_threads=1))
    algorithm = build_algorithm(spec.algorithm)

    for step in (3, 4):
        rollouts = read_rollouts(made.run_dir.rollouts_path(step))
        groups = [
            Group(example=rollouts[start].example, rollouts=tuple(rollouts[start : start + 4]))
            for start in range(0, len(rollouts), 4)
        ]
        batch = build_batch(algorithm, groups, made.task.limits.max_reply_tokens)
        learner.step(batch.groups, temperature=1.0, token_terms=algorithm)
        folder = tmp_path / f"state-{step}"
        folder.mkdir()
        learner.save_state(folder)
        stored = made.run_dir.checkpoint_path(step) / "state" / "optimizer.safetensors"
        assert (folder / "optimizer.safetensors").read_bytes() == stored.read_bytes()


@pytest.mark.parametrize("num_steps", [1, 2, 3])
def test_r2_n_steps_and_n_more_are_2_n_steps(tmp_path: Path, tiny_model_dir: Path, num_steps: int) -> None:
    """R2: a synchronous run that dies after n of 2 n steps."""
    spec = tiny_spec(train={"steps": 2 * num_steps, "checkpoint_every": num_steps})
    whole = Composition(spec, tiny_model_dir, new_run(tmp_path / "whole"))
    whole.run()
    half = Composition(spec, tiny_model_dir, new_run(tmp_path / "half"))
    with pytest.raises(Death):
        half.run(die_after(num_steps * 12))
    assert half.run_dir.checkpoint_steps() == [num_steps]
    take_up(half).run()
    assert read_curve(half.run_dir.path) == read_curve(whole.run_dir.path)


def test_r4_a_run_whose_every_step_is_trained_only_becomes_finished(
    tmp_path: Path, tiny_model_dir: Path
) -> None:
    """R4: killed between the last checkpoint and the mark; nothing is trained twice.

    That a finished run is refused with exit code 76 is tested where run files are taken up.
    """
    made = Composition(tiny_spec(), tiny_model_dir, new_run(tmp_path))
    made.run()
    expected = read_curve(made.run_dir.path)
    state_path = made.run_dir.path / "run.json"
    content = json.loads(state_path.read_text())
    state_path.write_text(json.dumps(content | {"finished_at": None}))
    again = take_up(made)
    marks = [again.run_dir.is_finished]
    again.run()
    assert [*marks, again.run_dir.is_finished] == [False, True]
    assert again.notes.steps == []
    assert read_curve(made.run_dir.path) == expected


def make_unwritable(folder: Path, kind: str) -> Path:
    """Return a place for runs at which nothing can be written. Root passes permissions, so none is used."""
    if kind == "file":
        (folder / "taken").write_text("a file where the directory of runs should be")
        return folder / "taken" / "runs"
    return Path("/proc/runs")  # a disk on which nobody makes files


@pytest.mark.parametrize("kind", ["file", "disk"])
@pytest.mark.parametrize("setting", ["output.root", "output.dir"])
def test_ckp_6_a_run_directory_that_cannot_be_written_is_refused_by_name(
    tmp_path: Path, setting: str, kind: str
) -> None:
    """Incident: results reached storage only at the end, where it turned out that they could not."""
    place = make_unwritable(tmp_path, kind)
    run_file = tmp_path / "run.toml"
    # The model does not exist either: the refusal comes before it is looked for.
    run_file.write_text(describe_run("killed", tmp_path / "absent", 2))
    resolved = load_spec(run_file, [f"{setting}={place}"])
    with pytest.raises(CheckRefused, match="the run's directory cannot be written to ") as caught:
        train_here(resolved, SilentObserver(), on_run=lambda run_dir: None)
    assert str(place) in str(caught.value)
    assert caught.value.exit_code == 76
    assert not place.exists()


@pytest.mark.slow
def test_ckp_6_a_run_that_is_killed_holds_a_usable_checkpoint_at_every_moment(
    tmp_path: Path, tiny_model_dir: Path
) -> None:
    """Incident: three of four sweep jobs left traces only; results were copied at a successful end."""
    bench = Bench(tmp_path / "killed", describe_run("killed", tiny_model_dir, 500))
    process = bench.start()
    bench.wait_until_begun(process)
    run = bench.only_run()
    assert process.pid is not None
    seen: set[int] = set()
    deadline = time.monotonic() + LIMIT_S
    while len(seen) < 4:
        assert process.is_alive(), bench.log_path.read_text()
        assert time.monotonic() < deadline
        time.sleep(0.01)
        # Held still, wherever it is: in the middle of a write as well.
        os.kill(process.pid, signal.SIGSTOP)
        for step in run.checkpoint_steps():
            verify_directory(run.checkpoint_path(step))
            seen.add(step)
        os.kill(process.pid, signal.SIGCONT)
    process.kill()
    process.join()
    latest = run.latest_checkpoint()
    assert latest is not None
    assert latest[0] >= max(seen)
    verify_directory(latest[1])
    # It serves without strop, and a run goes on from it.
    served: Any = AutoModelForCausalLM.from_pretrained(latest[1] / "model")
    learner = build_learner(tiny_spec(), ModelHandle(path=tiny_model_dir, digest="unused"))
    restored = asyncio.run(load_checkpoint(latest[1], LocalLearner(learner), num_threads=1))
    assert restored.step == latest[0]
    assert torch.equal(served.get_input_embeddings().weight, learner.model.head_weight)


# In the order in which a run comes by: before, in the middle of and after its checkpoints.
DEATHS_BEFORE_A_LOSS = (
    r"open .*/rollouts/step-000004\.parquet",
    r"os\.rename .*/checkpoints/step-000004\.partial-[^/]*/COMPLETE",
    r"os\.rename .*/eval/arithmetic-step-000005\.json",
    r"os\.remove .*/\.reserve",  # all is trained, and nothing was waited for
)


@pytest.fixture(scope="module")
def undisturbed(tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Curve:
    """A run that nobody disturbed."""
    return Bench(tmp_path_factory.mktemp("whole") / "bench", describe_run("remote", tiny_model_dir)).finish()


@pytest.mark.slow
def test_ckp_6_the_disk_is_lost_again_and_again_and_the_curve_stays_the_same(
    tmp_path: Path, tiny_model_dir: Path, undisturbed: Curve
) -> None:
    """Incident: three of four sweep jobs left traces only; a restarted instance had an empty disk.

    Every attempt is killed with all that belongs to it, and its directory is lost. The next one has the
    store. A checkpoint that had not arrived is trained again.
    """
    store = tmp_path / "store"
    text = describe_run("remote", tiny_model_dir) + f'[store]\nuri = "{store}"\nmirror = true\n'
    bench = Bench(tmp_path / "0", text)
    # The first one may end when its first checkpoint is there.
    assert bench.end(Moment(r"os\.rename .*/rollouts/step-000003\.parquet", signal.SIGTERM)) == 75
    (mirror,) = (store / "checkpoints").iterdir()
    reached = [3]
    for number, die_at in enumerate(DEATHS_BEFORE_A_LOSS, start=1):
        shutil.rmtree(bench.folder)
        bench = Bench(tmp_path / str(number), text)
        restored = restore_run(str(mirror), bench.runs_path)
        reached.append(RunDir.open(restored).checkpoint_steps()[-1])
        assert bench.end(Moment(die_at)) == -signal.SIGKILL, (die_at, bench.log_path.read_text())
    assert reached == sorted(reached)
    shutil.rmtree(bench.folder)
    bench = Bench(tmp_path / "last", text)
    resolved = load_spec(bench.run_file, [f"output.root={bench.runs_path}"])
    assert continue_from(str(mirror), resolved).run_path == bench.runs_path / mirror.name
    assert bench.finish() == undisturbed
    verify_directory(mirror / "final")


def test_prc_8_a_mirror_that_is_behind_holds_one_checkpoint_at_most(tmp_path: Path) -> None:
    """Incident: the disk filled up with what waited to be sent."""
    played, num_kept = PlayedRun.create(tmp_path / "runs"), list[int]()

    def train_on(method: str, uri: str) -> None:
        """Train four steps and prune whenever a checkpoint is about to be sent, which then fails."""
        if method == "upload" and "/checkpoints/step-" in uri:
            step = played.run.checkpoint_steps()[-1]
            played.train(*range(step + 1, step + 5))
            played.run.keep_checkpoints(2)
            num_kept.append(len(played.run.checkpoint_steps()))
            raise RemoteUnreachable("no answer")

    mirror = played.train(1, 2, 3, 4).mirror(str(tmp_path / "store"), cast(Objects, WatchedObjects(train_on)))
    for _ in range(10):
        with pytest.raises(RemoteUnreachable):
            mirror.look()
        played.run.keep_checkpoints(2)
        assert len(played.run.checkpoint_steps()) == 2
    assert len(num_kept) >= 10
    assert set(num_kept) == {3}
