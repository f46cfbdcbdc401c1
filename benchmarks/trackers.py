"""What trackers cost a run: time of the process that trains, and processor time of the followers.

A run of invented steps is followed by each tracker alone and by all four, offline. The processor time of a
step is what more steps add; the rest of it is the start of a follower and its end.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from random import Random
from statistics import median

from benchmarks.figures import Figure, Measured
from benchmarks.harness import ROOT
from benchmarks.recording import MAX_SHARE, TOKENS_PER_S
from strop.record import RunDir
from strop.record.rollouts import write_rollouts
from strop.spec import TrackersSpec
from strop.spec.output import TRACKERS
from strop.store.python_environment import KEEP_BYTECODE
from strop.testing.records import RecordSize, make_metrics, make_rollouts
from strop.train.observer import SilentObserver
from strop.view.tracking import TrackingObserver

SIZE = RecordSize(num_steps=60, num_rollouts=512)
STEP_S = SIZE.num_rollouts * SIZE.num_reply_tokens / TOKENS_PER_S


def follow(names: tuple[str, ...], num_steps: int, folder: Path) -> dict[str, float]:
    """Record invented steps under the eyes of trackers; return the costs in seconds.

    `on_step_s`: what the observer takes of the process that trains, a step. `cpu_s`: of all followers.
    """
    rng = Random(0)
    rollouts = make_rollouts(1, SIZE, rng)
    observer = TrackingObserver(TrackersSpec(use=names, offline=True, finish_limit_s=600.0), SilentObserver())
    seconds = []
    with RunDir.create(folder, "invented", "", "digest", {}) as run:
        observer.open_run(run)
        attempt = run.begin_attempt()
        observer.on_start(run=str(run.path), first_step=0, num_steps=num_steps)
        for step in range(1, num_steps + 1):
            numbers = make_metrics(step, SIZE, rng)
            if step % 10 == 0:
                write_rollouts(run.rollouts_path(step), rollouts)
            run.metrics.append(step, numbers)
            begun_at = time.perf_counter()
            observer.on_step({"step": step, **numbers})
            seconds.append(time.perf_counter() - begun_at)
        run.end_attempt(attempt, cause="done", exit_code=0, step=num_steps)
        observer.on_end(cause="done")
        lost = [event.detail for event in run.events.read()]
    if lost:
        raise RuntimeError(lost[0])
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return {"on_step_s": median(seconds or [0.0]), "cpu_s": used.ru_utime + used.ru_stime}


def ask(python: Path, names: tuple[str, ...], num_steps: int) -> dict[str, float]:
    """Let an interpreter that has the trackers follow a run, in a process of its own."""
    with tempfile.TemporaryDirectory(prefix="strop-bench-") as folder:
        command = [str(python), "-m", "benchmarks.trackers", folder, str(num_steps), *names]
        said = subprocess.run(command, cwd=ROOT, env=KEEP_BYTECODE, stdout=subprocess.PIPE, check=True).stdout
    found: dict[str, float] = json.loads(said.splitlines()[-1])
    return found


def measure_trackers(*, is_quick: bool) -> Measured:
    """Measure each tracker alone, and all four together."""
    from tests.fixtures.real_trackers import make_python

    num_steps = 10 if is_quick else SIZE.num_steps
    figures = []
    with tempfile.TemporaryDirectory(prefix="strop-bench-") as folder:
        python = make_python(Path(folder) / "venv")
        for names in (*((name,) for name in TRACKERS), TRACKERS):
            label = names[0] if len(names) == 1 else "all four"
            idle, busy = ask(python, names, 0), ask(python, names, num_steps)
            cpu_s = (busy["cpu_s"] - idle["cpu_s"]) / num_steps
            values = (
                ("training waits, a step", "ms", 1000 * busy["on_step_s"], None),
                ("processor time, a step", "ms", 1000 * cpu_s, None),
                ("processor time, share of a step", "share", cpu_s / STEP_S, MAX_SHARE),
                ("processor time, start and end", "s", idle["cpu_s"], None),
            )
            figures += [
                Figure(name=f"{label}: {what}", unit=unit, value=value, measured=(value,), at_most=at_most)
                for what, unit, value, at_most in values
            ]
    return Measured(figures=figures, details={"step_s": STEP_S, "num_steps": num_steps})


if __name__ == "__main__":
    place, number, *trackers = sys.argv[1:]
    print(json.dumps(follow(tuple(trackers), int(number), Path(place))))
