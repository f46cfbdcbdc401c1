"""Training and evaluating in one real local job: results are complete, and nothing is made twice."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from strop.evaluate import read_result
from strop.launch.build_request import SubmitOptions, read_request
from strop.launch.contract import JobState
from strop.launch.launcher import Launcher
from strop.launch.local.backend import LocalBackend
from strop.launch.submit import Submitted
from strop.record import RunDir
from strop.run.runs import read_results
from tests.fixtures.jobs import find_process, hold_until_told, project, read_verdicts, wait_for

__all__ = ["project"]
pytestmark = pytest.mark.slow

RUN_TEXT = """name = "both"
model.uri = "{model}"
model.dtype = "float32"
task.name = "arithmetic"
train.steps = {steps}
train.prompts_per_step = 2
train.group_size = 2
train.checkpoint_every = {every}
train.keep_checkpoints = 100
train.accept = "weights: a random model for a test"
eval.num_examples = 2
eval.num_samples = "none"
placement.threads = 1
job.eval_config = "held-out.toml"
"""
EVAL_TEXT = """name = "held-out"
task.name = "arithmetic"
eval.num_examples = 64
eval.num_samples = "none"
placement.threads = 1
"""
LIMIT_S = 300.0
"""A process of Python that loads torch takes seconds, more of them where other work goes on."""


def submit(project: Path, model: Path, *, steps: int, every: int) -> Submitted:
    (project / "run.toml").write_text(RUN_TEXT.format(model=model, steps=steps, every=every))
    (project / "held-out.toml").write_text(EVAL_TEXT)
    options = SubmitOptions(
        site="local",
        overrides=(f"output.root={project.parent / 'runs'}",),
        project_path=project,
        has_snapshot=False,
    )
    request = read_request(str(project / "run.toml"), options, environ=os.environ, now=time.time())
    return Launcher(LocalBackend()).submit(request)


def evaluator_log(home: Path) -> str:
    return "".join(path.read_text() for path in sorted(home.glob("attempts/*/0/evaluator.log")))


def evaluated_steps(home: Path) -> list[int]:
    return [read_result(path).step for path in sorted(home.glob("eval/held-out.arithmetic-step-*.json"))]


def has_saved(home: Path, *, after: int) -> bool:
    """Whether there is a checkpoint of a later step."""
    is_there = (home / "run.json").is_file()
    return is_there and max(RunDir.open(home).checkpoint_steps(), default=0) > after


def test_checkpoints_are_evaluated_while_training_goes_on_and_the_last_one_after_it(
    project: Path, tiny_model_dir: Path
) -> None:
    submitted = submit(project, tiny_model_dir, steps=400, every=40)
    home = Path(submitted.ref.home)
    launcher = Launcher(LocalBackend())
    child = ("strop.cli eval", str(home / "checkpoints"), "--out")

    # It trains no further until the first evaluation is killed, however long that one takes to begin.
    wait_for(lambda: has_saved(home, after=0) or read_verdicts(home), limit_s=LIMIT_S)
    trainer = find_process("strop.cli train", str(home))
    assert trainer is not None
    os.kill(trainer, signal.SIGSTOP)
    # In its midst: it is the one that is made again.
    wait_for(lambda: find_process(*child) or read_verdicts(home), limit_s=LIMIT_S)
    pid = find_process(*child)
    assert pid is not None
    command = Path(f"/proc/{pid}/cmdline").read_bytes().decode()
    killed_step = int(command.partition("checkpoints/step-")[2][:6])
    os.kill(pid, signal.SIGKILL)
    os.kill(trainer, signal.SIGCONT)
    # Nor until two are evaluated, however slow these are, and one of them twice.
    wait_for(lambda: has_saved(home, after=killed_step), limit_s=LIMIT_S)
    os.kill(trainer, signal.SIGSTOP)
    wait_for(lambda: len(evaluated_steps(home)) >= 2 or read_verdicts(home), limit_s=LIMIT_S)
    assert not RunDir.open(home).is_finished
    os.kill(trainer, signal.SIGCONT)
    wait_for(lambda: read_verdicts(home), limit_s=LIMIT_S)
    (status,) = launcher.status([submitted.ref])
    assert (status.state, status.reason) == (JobState.SUCCEEDED, "")
    log = evaluator_log(home)
    found = evaluated_steps(home)
    # Two while it trained, and the last.
    assert found[-1] == 400, log
    assert len(found) >= 3, log
    begun = [int(line.split()[1][:-1]) for line in log.splitlines() if "evaluation begins" in line]
    twice = [step for step in set(begun) if begun.count(step) > 1]
    assert twice == [killed_step]
    assert sorted(set(begun)) == found
    assert f"alarm: step {killed_step}: the evaluation ended with -9 and no result; it is evaluated" in log
    result = read_result(home / "eval" / "held-out.arithmetic-step-000400.json")
    assert (result.num_examples, result.split.value) == (64, "held_out")
    # The run's own evaluations stay apart: before the first step, and after the last.
    assert [(own.step, own.num_examples) for own in read_results(home)] == [(0, 2), (400, 2)]
    assert [verdict["exit_code"] for verdict in read_verdicts(home)] == [0]


def test_stopped_after_training_the_next_attempt_makes_the_last_result_alone(
    project: Path, tiny_model_dir: Path
) -> None:
    submitted = submit(project, tiny_model_dir, steps=4, every=2)
    home = Path(submitted.ref.home)
    backend = LocalBackend()
    # It evaluates nothing more until the job is told, however long training takes to end.
    wait_for(lambda: find_process("strop.cli eval", str(home), "--follow"), limit_s=LIMIT_S)
    evaluator = find_process("strop.cli eval", str(home), "--follow")
    assert evaluator is not None
    os.kill(evaluator, signal.SIGSTOP)
    wait_for(lambda: (home / "run.json").is_file() and RunDir.open(home).is_finished, limit_s=LIMIT_S)
    wait_for(lambda: not find_process("strop.cli train", str(home)), limit_s=LIMIT_S)
    assert evaluated_steps(home) in ([], [2])
    held = hold_until_told(evaluator)
    backend.preempt(submitted.ref, 0)
    held.join()
    wait_for(lambda: len(read_verdicts(home)) == 2, limit_s=LIMIT_S)
    assert [verdict["exit_code"] for verdict in read_verdicts(home)] == [75, 0]
    assert evaluated_steps(home)[-1] == 4
    logs = {path.parents[1].name: path for path in home.glob("attempts/*/0/train.log")}
    assert len(logs) == 1, "the second life has nothing to train"
    assert RunDir.open(home).state.num_attempts == 1
