"""Watches of the process: a stalled stage, a blocked event loop, slow stages, memory and disk.

A hung wait is worse than a crash: it costs the night. So a stall ends the process at once, and its children
die with it. A waste of time or memory raises an alarm.
"""

from __future__ import annotations

import asyncio
import faulthandler
import gc
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from statistics import median

from strop.errors import EXIT_FAILED
from strop.hardware import free_disk_bytes, free_memory_bytes
from strop.hardware.process import show_stacks_of_children
from strop.io.atomic import walk_files
from strop.io.exits import end_process
from strop.policy.footprint import checkpoint_bytes, count_trained, read_model_size
from strop.record import Event, EventKind, RunDir
from strop.record.prediction import NUM_WARM_UP, Prediction, scale_to_work
from strop.spec.run import RunSpec

TELL_LIMIT_S = 10.0
"""How long the report of a stall may take: longer than `CHILDREN_LIMIT_S`."""
CHILDREN_LIMIT_S = 3.0
"""How long children may take to write their stacks."""


class Watchdog:
    """Ends the process where `progress` was not called for too long."""

    def __init__(
        self,
        max_stall_s: float | None,
        on_stall: Callable[[str, float], None],
        *,
        log_path: Path | None = None,
    ) -> None:
        self._log_path = log_path
        self._max_stall_s = max_stall_s
        self._on_stall = on_stall
        self._stage = "start"
        self._moved_at = time.monotonic()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def __enter__(self) -> Watchdog:
        """Begin to watch, where a bound is set."""
        self.progress("start")
        if self._max_stall_s is not None:
            self._thread.start()
        return self

    def __exit__(self, *details: object) -> None:
        """Stop watching."""
        self._stopped.set()
        if self._thread.is_alive():
            self._thread.join()

    def progress(self, stage: str) -> None:
        """Note that work goes on, and which stage it is in."""
        self._stage = stage
        self._moved_at = time.monotonic()

    def _watch(self) -> None:
        assert self._max_stall_s is not None
        while not self._stopped.wait(min(1.0, self._max_stall_s / 4)):
            stalled_s = time.monotonic() - self._moved_at
            if stalled_s > self._max_stall_s:
                faulthandler.dump_traceback(file=sys.__stderr__ or sys.stderr, all_threads=True)
                # The report may hang or fail too, on the very disk that everything waits for.
                report = threading.Thread(target=self._report, args=(self._stage, stalled_s), daemon=True)
                report.start()
                report.join(TELL_LIMIT_S)
                # Not sys.exit: the main thread is the one that hangs.
                end_process(EXIT_FAILED)

    def _report(self, stage: str, stalled_s: float) -> None:
        """Report the stall; write all threads' stacks to the run's log, and have children write theirs."""
        try:
            self._on_stall(stage, stalled_s)
        finally:
            if self._log_path is not None and self._log_path.parent.is_dir():
                with self._log_path.open("a") as log:
                    faulthandler.dump_traceback(file=log, all_threads=True)
            # The stalled wait may be for a child: an engine, a judge.
            show_stacks_of_children(CHILDREN_LIMIT_S)


# While one long call blocks the event loop, engines wait and deadlines pass unseen, as in a hang. A thread
# pings the loop at short intervals and reports the stack of the call that blocks it.

ASK_S = 0.05
_NEVER = 1 << 30
LIMIT_S = 2.0
"""A ping that takes longer raises an alarm."""


class LoopLagWatch:
    """Watches the event loop that is running when it is entered."""

    def __init__(self, on_lag: Callable[[float, str], None], *, limit_s: float = LIMIT_S) -> None:
        """`on_lag(seconds, stack)` is called in the watching thread, with the stack of the loop's thread."""
        self._on_lag = on_lag
        self._limit_s = limit_s
        self._stopped = threading.Event()
        self._answered = threading.Event()
        self._lock = threading.Lock()
        self._max_s = 0.0
        self._late_s = 0.0
        self._taken_at = time.monotonic()

    def __enter__(self) -> LoopLagWatch:
        """Begin to watch. Called in the loop's thread."""
        self._loop = asyncio.get_running_loop()
        self._loop_thread = threading.get_ident()
        self._thread = threading.Thread(target=self._watch, name="loop-lag", daemon=True)
        self._taken_at = time.monotonic()
        self._thread.start()
        return self

    def __exit__(self, *details: object) -> None:
        """Stop watching."""
        self._stopped.set()
        self._answered.set()
        self._thread.join()

    def take(self) -> dict[str, float]:
        """Return the lag since the last call, as metrics of a step.

        `loop_lag_s` is the longest time that a ping took, `loop_late_frac` the share of the time that was
        spent in pings longer than `ASK_S`.
        """
        now = time.monotonic()
        with self._lock:
            # A call that began before the last look may have ended after it.
            late_frac = min(1.0, self._late_s / max(now - self._taken_at, 1e-9))
            lag = {"loop_lag_s": self._max_s, "loop_late_frac": late_frac}
            self._max_s = self._late_s = 0.0
            self._taken_at = now
        return lag

    def _watch(self) -> None:
        while True:
            # Before `_stopped` is read: `__exit__` sets both events, `_answered` last.
            self._answered.clear()
            if self._stopped.wait(ASK_S):
                return
            asked_at = time.monotonic()
            try:
                self._loop.call_soon_threadsafe(self._answered.set)
            except RuntimeError:
                return  # The loop is closed.
            if not self._answered.wait(self._limit_s):
                frame = sys._current_frames().get(self._loop_thread)
                stack = "".join(traceback.format_stack(frame)) if frame is not None else ""
                self._on_lag(time.monotonic() - asked_at, stack)
                self._answered.wait()
            waited_s = time.monotonic() - asked_at
            with self._lock:
                self._max_s = max(self._max_s, waited_s)
                self._late_s += waited_s if waited_s > ASK_S else 0.0


@contextmanager
def full_collections_by_hand() -> Iterator[None]:
    """Leave full garbage collections to the caller (`gc.collect`).

    By itself Python walks through every rollout in flight, again and again: with 40,000 of them that took
    half of the orchestrator's processor time, in pauses of up to 1.7 s, and found nothing, because completed
    rollouts leave no cycles. The youngest generation is collected as ever, so that a cycle that holds a
    tensor does not survive a whole step. Objects that exist at the beginning are never walked through.
    """
    before = gc.get_threshold()
    gc.freeze()
    gc.set_threshold(before[0], _NEVER, _NEVER)
    try:
        yield
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()


# A model on the wrong device, a wait for the device at every token, or ranks that all do the whole work cost
# only time: no other watch shows them. Stages are compared one by one (PRC-9).

NUM_STEPS = 3
"""Steps whose median is compared: one slow step may be the machine's fault."""
MAX_SLOWDOWN_RATIO = 5.0
"""How many times longer than planned a stage may take."""
MIN_EXCESS_S = 2.0
"""A smaller excess over the plan raises no alarm: the stage is too short to be compared."""
ASSUMED_FACTOR = 2.0
"""Multiplies the bound where the machine's speed was assumed and not measured."""
_STAGES = ("generate", "learn", "sync")
"""Without judging: the plan does not predict a judge's time, it assumes one."""
_CAUSES = {
    "generate": "look on which device the engine computes, and how many rows it decodes",
    "learn": "look on which device the learner computes, and whether each rank is given its own share",
    "sync": "look at the disk or link that the weights go over",
}


class PaceWatch:
    """Compares the stages of each step with the plan. Without a prediction it raises no alarm."""

    def __init__(self, prediction: Prediction | None) -> None:
        self._prediction = prediction
        self._num_seen = 0
        self._seconds: dict[str, deque[tuple[float, float]]] = {
            stage: deque(maxlen=NUM_STEPS) for stage in _STAGES
        }
        """Measured and planned seconds of the last steps."""

    def find_slow(self, step: int, metrics: Mapping[str, float]) -> list[Event]:
        """Take the metrics of a step; return an alarm for each stage that keeps being slower than planned."""
        self._num_seen += 1
        plan = self._prediction
        if plan is None or self._num_seen <= NUM_WARM_UP:
            return []
        bound = MAX_SLOWDOWN_RATIO * (1.0 if plan.is_measured else ASSUMED_FACTOR)
        planned = scale_to_work(plan, metrics)
        alarms = []
        for stage, seen in self._seconds.items():
            if f"seconds_{stage}" not in metrics or stage not in planned:
                continue
            seen.append((metrics[f"seconds_{stage}"], planned[stage]))
            if len(seen) < NUM_STEPS:
                continue
            took_s, planned_s = (median(values) for values in zip(*seen, strict=True))
            if took_s > bound * planned_s and took_s > planned_s + MIN_EXCESS_S:
                basis = "" if plan.is_measured else f" (twice, because its speed is {plan.basis})"
                detail = (
                    f"{stage} took {took_s:.3g} s in the last {NUM_STEPS} steps, and {planned_s:.3g} s were"
                    f" planned on {plan.hardware}: more than {MAX_SLOWDOWN_RATIO:g} times as long{basis};"
                    f" {_CAUSES[stage]}, and whether others use the machine"
                )
                alarms.append(
                    Event(kind=EventKind.TRIPWIRE, step=step, cause="slower_than_plan", detail=detail)
                )
        return alarms


# The gate compares the plan with the free memory and disk; no plan foresees leaks and other users of the
# disk.

NUM_MEMORY_WARM_UP = 8
"""First steps of a process whose growth is ignored: caches and pools fill in them."""
NUM_BLOCKS = 6
BLOCK_STEPS = 4
"""A leak shows in each of `NUM_BLOCKS` blocks of `BLOCK_STEPS` steps; a pool that fills up does not."""
_MAX_GROWTH_BYTES = 1 << 20
"""By which resident memory may grow per step; less is no leak."""
LOW_DISK_FACTOR = 1.25
"""Checkpoints that must fit on the disk, or the run ends while one more can still be written."""


class MemoryWatch:
    """Tells a leak from memory that fills up and stays."""

    def __init__(self) -> None:
        self._num_seen = 0
        self._sizes: list[float] = []

    def find_growth(self, step: int, memory_bytes: float) -> list[Event]:
        """Take the resident memory after a step; return an alarm where it grows without end.

        A leak is named `NUM_MEMORY_WARM_UP + NUM_BLOCKS * BLOCK_STEPS + 1` steps after the start of the
        process, and again in every step that follows.
        """
        self._num_seen += 1
        if self._num_seen <= NUM_MEMORY_WARM_UP:
            return []
        window = NUM_BLOCKS * BLOCK_STEPS + 1
        self._sizes = [*self._sizes, memory_bytes][-window:]
        if len(self._sizes) < window or not is_steady_growth(self._sizes):
            return []
        growth = (self._sizes[-1] - self._sizes[0]) / (window - 1)
        if growth <= _MAX_GROWTH_BYTES:
            return []
        free_bytes = free_memory_bytes()
        left = "" if free_bytes is None else f", {free_bytes / growth:.0f} steps before memory is full"
        detail = (
            f"resident memory grew by {growth / 2**20:.1f} MiB in each of the last {window - 1} steps, to"
            f" {memory_bytes / 2**20:.0f} MiB{left}: something is kept that should be dropped, most often by"
            " the task's verifier"
        )
        return [Event(kind=EventKind.TRIPWIRE, step=step, cause="memory_growth", detail=detail)]


def is_steady_growth(sizes: Sequence[float]) -> bool:
    """Whether sizes after each of `NUM_BLOCKS * BLOCK_STEPS` steps, and before, grow in every block.

    Memory that was given back later is no growth: each size is replaced by the smallest from there on. Each
    block must grow at least half as much as blocks do on average, so one big jump is no leak.
    """
    floors = [min(sizes[index:]) for index in range(0, len(sizes), BLOCK_STEPS)]
    growths = [after - before for before, after in pairwise(floors)]
    return min(growths) > 0 and min(growths) >= 0.5 * sum(growths) / len(growths)


class DiskWatch:
    """Checks whether the next checkpoint still fits."""

    def __init__(self, run_dir: RunDir, expected_bytes: int) -> None:
        """`expected_bytes` is the size of a checkpoint for as long as none was written."""
        self._run_dir = run_dir
        self._expected_bytes = expected_bytes

    @classmethod
    def of_run(cls, spec: RunSpec, run_dir: RunDir, model_dir: Path) -> DiskWatch:
        """Return the watch of a run that trains this model."""
        size = read_model_size(model_dir)
        return cls(run_dir, checkpoint_bytes(size, spec.model.dtype, count_trained(size, spec.lora)))

    def find_low(self, step: int) -> tuple[Event, bool] | None:
        """Return an alarm where the disk is nearly full, and whether one more checkpoint fits."""
        free_bytes, latest = free_disk_bytes(self._run_dir.path), self._run_dir.latest_checkpoint()
        needed_bytes = self._expected_bytes if latest is None else directory_bytes(latest[1])
        if free_bytes >= LOW_DISK_FACTOR * needed_bytes:
            return None
        detail = (
            f"{free_bytes / 1e6:.1f} MB are free at {self._run_dir.path} and a checkpoint takes"
            f" {needed_bytes / 1e6:.1f} MB; free space there, or keep fewer checkpoints"
        )
        event = Event(kind=EventKind.TRIPWIRE, step=step, cause="disk_low", detail=detail)
        return event, free_bytes >= needed_bytes


def directory_bytes(path: Path) -> int:
    """Return the size of all files below a directory."""
    return sum(file.st_size for _, file in walk_files(path))
