"""SIGTERM and Ctrl-C: a checkpoint of the step under way, exit code 75, the same command goes on."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from strop.cluster import Roles
from strop.cluster.local import ProcessPlacement
from strop.engine import Completion, GenerationRequest
from strop.errors import RunStopped
from strop.io import verify_directory
from strop.record import RunDir
from strop.rollout import Split
from strop.spec import RunSpec
from strop.store import ModelHandle
from strop.tasks import build_task
from strop.tasks.generated.reverse_text import ReverseTextSpec
from strop.train.watch.ending import StopFlag
from tests.fixtures.attempts import Bench, describe_run
from tests.fixtures.tiny_run import NUM_GATE_REQUESTS, Composition, new_run, read_curve, reopen, tiny_spec
from tests.fixtures.train_here import Moment

NUM_STEPS = 8
SIGNALLED_AT = r"open .*/rollouts/step-000003\.parquet"
TWICE_AT = r"(open|os\.rename) .*/rollouts/step-000003\.parquet"
RUN_FILE = """
name = "stopped"
[model]
uri = "{model}"
dtype = "float32"
[task]
name = "reverse-text"
partial_marks = "any-order"
num_train = 20
num_held_out = 2
max_words = 1
max_reply_tokens = 40
[train]
steps = {steps}
prompts_per_step = 4
group_size = 4
checkpoint_every = 100
accept = "weights: a random model for a test; audit: it earns something"
[eval]
num_samples = "none"
[placement]
threads = 1
"""


def make_bench(folder: Path, model_dir: Path) -> Bench:
    return Bench(folder, RUN_FILE.format(model=model_dir, steps=NUM_STEPS))


def steps_of(run: RunDir) -> list[int]:
    return [int(line["step"]) for line in run.metrics.read()]


@pytest.mark.slow
def test_a_signal_ends_the_run_with_a_checkpoint_and_the_same_command_goes_on(
    tmp_path: Path, tiny_model_dir: Path
) -> None:
    whole = make_bench(tmp_path / "whole", tiny_model_dir).finish()
    bench = make_bench(tmp_path / "run", tiny_model_dir)
    # Sent by itself, at a moment that no other load of the machine moves.
    assert bench.end(Moment(SIGNALLED_AT, signal.SIGTERM)) == 75, bench.log_path.read_text()
    run = bench.only_run()
    done = steps_of(run)
    assert 2 <= len(done) < NUM_STEPS
    # No checkpoint was due: this one is the signal's, and of the last step on record.
    assert run.checkpoint_steps() == [done[-1]]
    message = bench.log_path.read_text()
    assert f"stopped by sigterm after step {done[-1]}. Allowed: " in message
    assert f"checkpoint step-{done[-1]:06d}. Next: give the same command again." in message
    attempt = json.loads((run.path / "attempts" / "1" / "attempt.json").read_text())
    assert (attempt["cause"], attempt["exit_code"], attempt["step"]) == ("Interrupted", 75, done[-1])
    assert bench.end() == 0, bench.log_path.read_text()
    assert steps_of(run) == list(range(1, NUM_STEPS + 1))
    assert read_curve(run.path) == whole


@pytest.mark.slow
def test_a_second_ctrl_c_ends_at_once_without_a_checkpoint(tmp_path: Path, tiny_model_dir: Path) -> None:
    bench = make_bench(tmp_path / "run", tiny_model_dir)
    # Both in step 3: as a file is begun, and as it gets its name.
    assert bench.end(Moment(TWICE_AT, signal.SIGINT, times=2)) in {1, -signal.SIGINT}, (
        bench.log_path.read_text()
    )
    run = bench.only_run()
    attempt = json.loads((run.path / "attempts" / "1" / "attempt.json").read_text())
    assert (attempt["cause"], attempt["exit_code"]) == ("KeyboardInterrupt", 1)
    assert run.checkpoint_steps() == []
    # The lock is free and the run can be taken up.
    with RunDir.open(run.path) as taken:
        assert taken.is_locked_here


@pytest.mark.parametrize("first", [signal.SIGTERM, signal.SIGINT])
def test_the_flag_is_set_while_code_runs_and_the_handlers_come_back(first: signal.Signals) -> None:
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    with StopFlag() as flag:
        causes = [flag.cause]
        # No event loop runs here, as none does during an optimizer step.
        signal.raise_signal(first)
        causes.append(flag.cause)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        assert [*causes, flag.cause] == [None, *[first.name.lower()] * 2]
    assert {number: signal.getsignal(number) for number in before} == before


def test_in_a_job_sigterm_may_come_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """LAU-2: Slurm sends it to every process of a step, some of them twice; an agent passes it on besides."""
    monkeypatch.setenv("STROP_ATTEMPT", "7-0")
    with StopFlag() as flag:
        for _ in range(3):
            signal.raise_signal(signal.SIGTERM)
        assert flag.cause == "sigterm"
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


# kill -9 in the middle of runs that imitate, then the same command again: the same curve, bit for bit.

DEATHS = (
    r"os\.rename .*/checkpoints/step-000002\.partial-[^/]*/COMPLETE",
    r"os\.rename .*/eval/reverse-text-step-000003\.json",  # right after the metrics of step 3
    r"os\.rename .*/checkpoints/step-000005\.partial-[^/]*$",  # complete, and not in its place
)


def make_sft_bench(folder: Path, model_dir: Path) -> Bench:
    task = build_task(ReverseTextSpec(name="reverse-text", num_train=20, num_held_out=4, max_words=1))
    rows = [
        {"prompt": task.render(example)[0].text, "completion": example.answer}
        for example in task.examples(Split.TRAIN)
        if example.answer is not None and len(example.answer) < 12
    ]
    text = describe_run("killed", model_dir).replace("[train]", '[train]\nterms = "rl+sft"')
    bench = Bench(folder, f'{text}[sft]\nsource = "rows.jsonl"\nrows_per_step = 6\n')
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return bench


@pytest.mark.slow
def test_a_killed_run_goes_on_to_the_same_curve(tmp_path: Path, tiny_model_dir: Path) -> None:
    whole = make_sft_bench(tmp_path / "whole", tiny_model_dir).finish()
    # Before, between and after; the loss is that of 6 rows beside 12 rollouts.
    assert len(whole.evals) == 3
    assert [line["num_sft_rows"] for line in whole.metrics] == [6.0] * 5
    bench = make_sft_bench(tmp_path / "killed", tiny_model_dir)
    for death in DEATHS:
        assert bench.end(Moment(death)) == -signal.SIGKILL, bench.log_path.read_text()
    assert bench.finish() == whole


# A loop whose engine is another process, which dies. Its curve is compared where placements are tested.

SIZES = {"steps": 4, "checkpoint_every": 2}


def over_processes(spec: RunSpec, model_dir: Path, run_dir: RunDir) -> Composition:
    source = ModelHandle(path=model_dir, digest="unused")
    placement = ProcessPlacement(spec, source, run_dir.path / "roles")
    return Composition(spec, model_dir, run_dir, placement=placement)


class DyingEngine:
    """Hands everything on; its process is killed at the n-th request."""

    def __init__(self, engine: Any, pid: int, num_requests: int) -> None:
        self._engine = engine
        self._pid = pid
        self._num_left = num_requests

    async def generate(self, request: GenerationRequest) -> Completion:
        if self._num_left == 0:
            os.kill(self._pid, signal.SIGKILL)
        self._num_left -= 1
        completion: Completion = await self._engine.generate(request)
        return completion

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)


def kill_at(placement: ProcessPlacement, num_requests: int) -> Callable[[Roles], Roles]:
    def change(roles: Roles) -> Roles:
        assert placement.engine_pid is not None
        return replace(roles, engine=DyingEngine(roles.engine, placement.engine_pid, num_requests))

    return change


@pytest.mark.slow
def test_a_killed_engine_ends_the_run_with_its_cause_and_the_run_goes_on_later(
    tmp_path: Path, tiny_model_dir: Path
) -> None:
    spec = tiny_spec(train=SIZES)
    whole = Composition(spec, tiny_model_dir, new_run(tmp_path / "whole"))
    whole.run()
    made = over_processes(spec, tiny_model_dir, new_run(tmp_path / "killed"))
    assert isinstance(made.placement, ProcessPlacement)
    # A step asks for 3 groups of 4: this is the first request of step 4.
    with pytest.raises(RunStopped) as caught:
        made.run(kill_at(made.placement, NUM_GATE_REQUESTS + 3 * 12))
    message = str(caught.value)
    assert "all 12 rollouts of step 4 failed: engine, EngineLost" in message
    assert "ended with signal 9" in message
    assert "the same command goes on from checkpoint step-000002" in message
    assert made.placement.engine_pid is None
    assert made.notes.events[-1].kind == "stop"
    assert [line["step"] for line in made.run_dir.metrics.read()] == [1, 2, 3]
    verify_directory(made.run_dir.checkpoint_path(2))
    over_processes(spec, tiny_model_dir, reopen(made.run_dir.path)).run()
    assert read_curve(made.run_dir.path) == read_curve(whole.run_dir.path)
