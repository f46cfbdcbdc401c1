"""The watches of the process: stalls, a blocked event loop, slow stages, memory and disk."""

from __future__ import annotations

import asyncio
import gc
import subprocess
import sys
import threading
import time
import weakref
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from strop.record import RunDir
from strop.record.prediction import Prediction
from strop.train.watch.process import (
    LoopLagWatch,
    MemoryWatch,
    PaceWatch,
    Watchdog,
    full_collections_by_hand,
)
from tests.record.test_prediction import PLANNED

# The main thread hangs in a wait that no signal handler, exception or event loop would end.
HANG = """
import sys, threading
from pathlib import Path
import strop.train.watch.process as module
module.TELL_LIMIT_S = 0.5
from strop.record import Event, EventKind, RunDir
from strop.train.watch.process import Watchdog
run = RunDir.create(Path(sys.argv[1]), "hung", "", "d1", {})
def tell(stage, stalled_s):
    run.events.append(Event(kind=EventKind.TRIPWIRE, step=3, cause="stall", detail=f"stage {stage}"))
    if sys.argv[2] == "raise":
        raise OSError("the disk is gone too")
    if sys.argv[2] == "hang":
        threading.Event().wait()
def wait_for_the_engine():
    # From here on it hangs; how long it took to come here is nobody's stall.
    watchdog._max_stall_s = 0.3
    threading.Event().wait()
with Watchdog(3600.0, tell) as watchdog:
    watchdog.progress("generate")
    wait_for_the_engine()
"""


@pytest.mark.parametrize("listener", ["return", "raise", "hang"])
def test_prc_1_a_hung_stage_ends_the_process(tmp_path: Path, listener: str) -> None:
    """Incident: a wait without deadline kept a machine busy for twelve hours."""
    ended = subprocess.run(
        [sys.executable, "-c", HANG, str(tmp_path), listener],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert ended.returncode == 1, ended.stderr
    # Where everything hung.
    assert "wait_for_the_engine" in ended.stderr
    (path,) = tmp_path.iterdir()
    (event,) = RunDir.open(path).events.read()
    assert (event.kind, event.cause, event.detail) == ("tripwire", "stall", "stage generate")
    # The lock went with the process.
    with RunDir.open(path) as taken:
        assert taken.is_locked_here


CHILD = (
    "import time\\ndef serves_no_more():\\n    print('up', flush=True); time.sleep(600)\\nserves_no_more()"
)
HANG_WITH_CHILD = f"""
import os, signal, subprocess, sys, threading, time
from strop.train.watch.process import Watchdog
os.environ["PYTHONFAULTHANDLER"] = "1"
child = subprocess.Popen([sys.executable, "-c", "{CHILD}"], stdout=subprocess.PIPE)
child.stdout.readline()
time.sleep(0.1)  # From its word to its sleep.
os.kill(child.pid, signal.SIGSTOP)
with Watchdog(0.3, lambda stage, stalled_s: None):
    threading.Event().wait()
"""


def test_the_stacks_of_children_are_shown_too() -> None:
    """Incident PRC-1: the engine was stopped, and only the trainer said where it waited."""
    ended = subprocess.run(
        [sys.executable, "-c", HANG_WITH_CHILD], capture_output=True, text=True, timeout=300, check=False
    )
    assert ended.returncode == 1
    assert "serves_no_more" in ended.stderr


def test_a_stage_that_moves_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock that only this test moves: a pause of the machine would end the tests themselves."""
    now_s = 0.0
    monkeypatch.setattr("strop.train.watch.process.time", SimpleNamespace(monotonic=lambda: now_s))
    stalls: list[str] = []
    with Watchdog(0.4, lambda stage, stalled_s: stalls.append(stage)) as watchdog:
        for _ in range(6):
            now_s += 0.3
            time.sleep(0.2)  # It looks every 0.1 s.
            watchdog.progress("learn")
    assert stalls == []


MORE_S = 0.5


def hold_the_loop(told: list[tuple[float, str]]) -> None:
    """Block until that is told, and then for a while more: for so long it could be told again."""
    until = time.monotonic() + 60.0
    while not about_the_call(told) and time.monotonic() < until:
        time.sleep(0.02)
    time.sleep(MORE_S)


def about_the_call(told: list[tuple[float, str]]) -> list[tuple[float, str]]:
    """Return what is told of the blocking call; a machine that pauses keeps the loop too."""
    return [(lag_s, stack) for lag_s, stack in told if "hold_the_loop(told)" in stack]


def test_a_blocking_call_is_measured_and_its_stack_told_once() -> None:
    told: list[tuple[float, str]] = []

    async def act() -> tuple[float, float]:
        with LoopLagWatch(lambda lag_s, stack: told.append((lag_s, stack)), limit_s=0.2) as watch:
            await asyncio.sleep(0.2)
            watch.take()
            hold_the_loop(told)
            late = {"loop_lag_s": 0.0}
            async with asyncio.timeout(60.0):
                # The thread hears the answer to its question.
                while late["loop_lag_s"] < MORE_S:
                    await asyncio.sleep(0.1)
                    late = watch.take()
            return late["loop_lag_s"], late["loop_late_frac"]

    max_s, late_frac = asyncio.run(act())
    ((lag_s, stack),) = about_the_call(told)
    assert 0.2 <= lag_s < max_s < 120.0
    # What it is told within, and what comes after.
    assert max_s >= lag_s + 0.9 * MORE_S
    assert "time.sleep(0.02)" in stack
    # 0.7 of 0.85 s at least, were the machine idle.
    assert 0.3 < late_frac <= 1.0


def test_full_collections_are_left_to_the_caller_inside_and_as_before_outside() -> None:
    class Node:
        pass

    def churn() -> None:
        # More than enough for a full collection, were it not put off.
        kept: list[list[int]] = [[] for _ in range(400_000)]
        assert kept

    before = gc.get_threshold()
    with full_collections_by_hand():
        assert gc.get_freeze_count() > 1000
        node = Node()
        node.self = node  # type: ignore[attr-defined]
        died = weakref.ref(node)
        # It has become old.
        gc.collect(1)
        del node
        churn()
        assert died() is not None
        gc.collect()
        assert died() is None
        young = Node()
        young.self = young  # type: ignore[attr-defined]
        died = weakref.ref(young)
        del young
        churn()
        assert died() is None
    assert gc.get_threshold() == before
    assert gc.get_freeze_count() == 0


class LateStop(threading.Event):
    """Set right after somebody has seen that it is not."""

    def wait(self, timeout: float | None = None) -> bool:
        was_set = self.is_set()
        super().wait(None)
        return was_set


async def test_a_watch_that_is_stopped_between_two_looks_ends() -> None:
    """Incident: its thread asked a loop that waited for its end, and a run hung after its last step."""
    watch = LoopLagWatch(lambda lag_s, stack: None, limit_s=0.1)
    watch._stopped = LateStop()
    watch.__enter__()
    watch._stopped.set()
    watch._answered.set()
    watch._thread.join(60.0)
    assert not watch._thread.is_alive()


def steps_of(learn_s: float, num_steps: int = 6, **more: float) -> list[dict[str, float]]:
    return [{"seconds_generate": 2.0, "seconds_learn": learn_s, "seconds_sync": 0.0, **more}] * num_steps


ASSUMED = replace(PLANNED, is_measured=False, basis="assumed: 1 GFLOP/s")
QUICK = replace(PLANNED, seconds={"learn": 0.01})


@pytest.mark.parametrize(
    ("plan", "steps", "numbers"),
    [
        # 4 s were planned, five times as long is 20 s. The first step warms up, then three make a median.
        (PLANNED, steps_of(20.0), []),
        (PLANNED, steps_of(20.5), [4, 5, 6]),
        # One slow step is no sign.
        (PLANNED, [*steps_of(4.0, 3), *steps_of(400.0, 1), *steps_of(4.0, 2)], []),
        # Speeds that were assumed count twice.
        (ASSUMED, steps_of(39.0), []),
        (ASSUMED, steps_of(41.0), [4, 5, 6]),
        # Twice the positions: 8 s are planned.
        (PLANNED, steps_of(39.0, num_positions=1400.0), []),
        (PLANNED, steps_of(41.0, num_positions=1400.0), [4, 5, 6]),
        # Milliseconds are not compared.
        (QUICK, steps_of(1.9), []),
        (QUICK, steps_of(2.1), [4, 5, 6]),
        (None, steps_of(1e6), []),
        # A run that only imitates has no such stage.
        (PLANNED, [{"seconds_learn": 4.0}] * 6, []),
    ],
)
def test_a_stage_that_is_slower_than_planned_is_named(
    plan: Prediction | None, steps: list[dict[str, float]], numbers: list[int]
) -> None:
    watch = PaceWatch(plan)
    found = [
        (number, event)
        for number, metrics in enumerate(steps, start=1)
        for event in watch.find_slow(number, metrics)
    ]
    assert [number for number, _ in found] == numbers
    for _, event in found:
        assert event.cause == "slower_than_plan"
        assert event.detail.startswith(f"learn took {steps[-1]['seconds_learn']:.3g} s")


MIB = 1 << 20
# Peak memory (MiB) of 40 steps of recipes/arithmetic.toml, as measured: pools fill up, in jumps.
PLATEAU = (
    *(3417, 4164, 4656, 4660, 4877, 4925, 4926, 5072, 5073, 5074, 5076, 5348, 5349, 5350, 5504, 5558),
    *(5558, 5651, 5655, 5876, *[6116] * 20),
)


def first_alarm(sizes: list[float]) -> int | None:
    watch = MemoryWatch()
    for step, size in enumerate(sizes, start=1):
        for alarm in watch.find_growth(step, size):
            assert alarm.cause == "memory_growth"
            return step
    return None


def test_a_leak_is_named_in_step_33_and_a_plateau_never() -> None:
    assert first_alarm([float(size * MIB) for size in PLATEAU]) is None
    leak = [1e9 + step * 2.0 * MIB for step in range(60)]
    # 8 steps of warm-up, then 24 steps and the one before them.
    assert first_alarm(leak) == 33
    # Every other step needs 500 MiB that it gives back.
    noisy = [size + 500 * MIB * (step % 2) for step, size in enumerate(leak)]
    assert first_alarm(noisy) is not None
    # A leak below the bound.
    assert first_alarm([1e9 + step * 0.9 * MIB for step in range(60)]) is None
