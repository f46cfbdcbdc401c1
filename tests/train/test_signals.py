"""SIGTERM and Ctrl-C: a checkpoint of the step under way, exit code 75, the same command goes on."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

from strop.record import RunDir
from strop.train.watch.ending import StopFlag
from tests.fixtures.attempts import Bench
from tests.fixtures.tiny_run import read_curve
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
name = "arithmetic"
max_value = 5
num_held_out = 2
max_reply_tokens = 32
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
