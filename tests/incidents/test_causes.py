"""Incidents of the kind "everything failed and nothing said why": what is shown leads with the cause.

On a processor that lacked an instruction, the engine failed in every probe of the gate. After three minutes a
run ended with "the engine gave no reply to compare ... mend the cause named above", and nothing was named.
"""

from __future__ import annotations

import functools
import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from strop.engine.native import NativeEngine
from strop.environments import AttemptFailed, SingleTurn
from strop.record import EventKind, RunDir
from strop.rollout import FailureOwner
from strop.tasks.generated import Arithmetic
from strop.train.loop import TrainLoop
from tests.fixtures.commands import Run, finished_run, folder, run, trained_runs
from tests.fixtures.places import line_of

__all__ = ["finished_run", "folder", "run", "trained_runs"]


pytestmark = pytest.mark.usefixtures("folder")


def fail_in_engine() -> None:
    raise RuntimeError("bf16 path needs avx512bw")


def fail_in_verifier() -> None:
    raise TypeError("unsupported operand")


def fail_in_environment() -> None:
    raise OSError("the world is gone")


def fail_in_machine() -> None:
    raise AttemptFailed(FailureOwner.INFRA, "disk_full", "no room for the workspace")


PARTS: dict[str, tuple[Any, str, Callable[[], None]]] = {
    "engine": (NativeEngine, "_admit", fail_in_engine),
    "verifier": (Arithmetic, "verify", fail_in_verifier),
    "environment": (SingleTurn, "step", fail_in_environment),
    "machine": (SingleTurn, "step", fail_in_machine),
}
SAID = {
    "engine": "engine, EngineError: generation failed: RuntimeError: bf16 path needs avx512bw",
    "verifier": "task, TypeError: unsupported operand",
    "environment": "task, OSError: the world is gone",
    "machine": "infra, disk_full: no room for the workspace",
}
CAUSES = {
    part: f"{cause} (test_causes.py:{line_of(PARTS[part][2], 'raise')})" for part, cause in SAID.items()
}


@pytest.fixture
def break_part(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Break the engine, the verifier or the environment: now, or once the loop begins a stage."""

    def break_part(part: str, stage: str | None = None, every: int = 1) -> None:
        owner, name, fail = PARTS[part]
        work, is_broken, calls = getattr(owner, name), stage is None, itertools.count()

        @functools.wraps(work)
        def work_or_fail(*arguments: Any) -> Any:
            if is_broken and next(calls) % every == 0:
                fail()
            return work(*arguments)

        monkeypatch.setattr(owner, name, work_or_fail)
        if stage is None:
            return
        act = getattr(TrainLoop, stage)

        async def act_broken(loop: TrainLoop) -> None:
            nonlocal is_broken
            is_broken = True
            await act(loop)

        monkeypatch.setattr(TrainLoop, stage, act_broken)

    return break_part


@pytest.mark.parametrize(
    ("part", "stage", "code"),
    [
        *((part, "_pass_gate", 76) for part in ("engine", "verifier")),
        *((part, stage, 1) for stage in ("_evaluate", "_step") for part in PARTS),
    ],
)
def test_rew_9_a_run_in_which_everything_fails_says_why_and_keeps_the_traceback(
    part: str, stage: str, code: int, folder: Path, run: Run, break_part: Callable[..., None]
) -> None:
    break_part(part, stage)
    ended = run("train", "run.toml", "output.dir=here")
    assert ended.code == code
    assert CAUSES[part] in ended.err.splitlines()[-1]
    fail = PARTS[part][2]
    raised = next(
        line.strip() for line in Path(__file__).read_text().splitlines()[line_of(fail, "raise") - 1 :]
    )
    lines = (folder / "here" / "events.jsonl").read_text().splitlines()
    # Once for the cause, not once for each rollout.
    (trace,) = [event["trace"] for event in map(json.loads, lines) if event["trace"]]
    assert trace.startswith("Traceback (most recent call last):")
    assert trace.count(raised) == 1
    assert trace.splitlines()[-1].endswith(CAUSES[part].partition(": ")[2])
    log = (folder / "here" / "latest" / "train.log").read_text()
    assert log.count(trace) == 1


def test_failures_of_some_rollouts_are_told_once_in_a_run_that_goes_on(
    folder: Path, run: Run, break_part: Callable[..., None]
) -> None:
    break_part("verifier", "_step", every=2)
    ended = run("train", "run.toml", "output.dir=here")
    assert ended.code == 0
    events = RunDir.open(folder / "here").events.read()
    (lost,) = [event for event in events if event.kind is EventKind.ROLLOUT_LOST]
    # 4 rollouts a step, of which every second one failed.
    assert lost.detail == f"{CAUSES['verifier']}; 2 times until now"
    assert "in fail_in_verifier" in lost.trace
    assert f"alarm: step 0: TypeError: {lost.detail}\n{lost.trace}\n" in ended.err


ASK = ("--task", "arithmetic", "--split", "held_out")


def test_an_evaluation_without_a_reply_says_why(
    run: Run, tiny_model_dir: Path, break_part: Callable[..., None]
) -> None:
    break_part("engine")
    ended = run("eval", tiny_model_dir, *ASK, "--num-examples", "3")
    assert ended.code == 1
    *before, last = ended.err.splitlines()
    assert last.startswith(f"strop: all 3 rollouts failed: {CAUSES['engine']}; none of 3 rollouts")
    # There is no log to look into.
    assert "Traceback (most recent call last):" in before


def test_an_evaluation_that_nobody_judged_says_why_and_keeps_it(
    run: Run, tiny_model_dir: Path, break_part: Callable[..., None]
) -> None:
    break_part("verifier")
    ended = run("eval", tiny_model_dir, *ASK, "--num-examples", "3", "--json")
    assert ended.code == 76
    assert f"strop: all 3 rollouts failed: {CAUSES['verifier']}; the result of" in ended.err
    (cause,) = json.loads(ended.out)["causes"]
    assert cause["num"] == 3
    assert "in fail_in_verifier" in cause["failure"]["detail"]


@pytest.mark.parametrize("part", PARTS)
def test_a_sample_that_failed_says_why(
    part: str, run: Run, tiny_model_dir: Path, break_part: Callable[..., None]
) -> None:
    break_part(part)
    ended = run("sample", tiny_model_dir, "--task", "arithmetic", "num=2")
    assert ended.err.splitlines()[-1] == f"strop: all 2 rollouts failed: {CAUSES[part]}"
    assert ended.out.count(CAUSES[part]) == 2
    assert "Traceback" not in ended.out


def test_an_audit_of_a_broken_verifier_says_why(run: Run, break_part: Callable[..., None]) -> None:
    break_part("verifier")
    ended = run("audit", "arithmetic", "num=4")
    assert ended.code == 76
    assert ended.err.splitlines()[-1].startswith("strop: all ")
    assert f"replies failed: {CAUSES['verifier']}; task arithmetic is red: " in ended.err
    assert f"reward None, reply ''; {CAUSES['verifier']}" in ended.out


def test_replies_that_nobody_can_judge_anew_say_why(
    run: Run, tiny_model_dir: Path, break_part: Callable[..., None]
) -> None:
    run("eval", tiny_model_dir, *ASK, "--num-examples", "3", "--out", "kept")
    break_part("verifier")
    ended = run("eval", "kept", "--rescore")
    assert f"all 3 rollouts failed: {CAUSES['verifier']}; invalid: verifier errors" in ended.out.splitlines()
