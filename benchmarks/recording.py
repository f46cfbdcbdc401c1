"""What recording costs: rollouts, numbers, events and timeline of a step, as a share of its time.

On the demo, the files of rollouts as they were written in the run, and its logs written once more.
On steps of 512 rollouts that are invented, all of it, beside the time that such a step takes at
`TOKENS_PER_S`.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from random import Random
from statistics import median

from benchmarks.demo import read_metrics, train_demo
from benchmarks.figures import Figure, Measured
from strop.record import Event, EventKind, RunDir
from strop.record.rows import find_rows, list_rows, read_row
from strop.record.timeline import ENVIRONMENTS, LEARNER
from strop.testing.records import RecordSize, make_metrics, make_rollouts, train_group
from strop.train.recording import SampledStep

TOKENS_PER_S = 20_000
"""At which a step of 512 rollouts of 200 tokens takes 5 s, and its record may take 51 ms."""
MAX_SHARE = 0.01
NUM_DEMO_STEPS = 6
NUM_ROUNDS = 9
_SEED = 0


def time_call(work: Callable[[], object]) -> float:
    """Return how long a call takes, in seconds."""
    begun_at = time.perf_counter()
    work()
    return time.perf_counter() - begun_at


def share_of_steps(run_path: Path) -> list[float]:
    """Return the share of each step of a run that went into its record."""
    written_s: dict[int, float] = {}
    found = RunDir.open(run_path)
    timeline = found.timeline.read_lines()
    for line in timeline:
        for span in line["spans"]:
            if (span["lane"], span["name"]) == (LEARNER, "record"):
                written_s[line["step"]] = span["end"] - span["start"]
    shares = []
    with (
        tempfile.TemporaryDirectory(prefix="strop-bench-", dir=run_path.parent) as folder,
        RunDir.create(Path(folder), "again", "", "digest", {}) as again,
    ):
        for values in read_metrics(run_path):
            step = int(values["step"])
            numbers = {name: value for name, value in values.items() if name != "step"}

            def write_logs(step: int = step, numbers: dict[str, float] = numbers) -> None:
                again.metrics.append(step, numbers)
                for event in found.events.read():
                    if event.step == step:
                        again.events.append(event)
                for line in timeline:
                    if line["step"] == step:
                        again.timeline.append_line(line)

            shares.append((written_s[step] + time_call(write_logs)) / values["seconds_step"])
    return shares


def record_invented(size: RecordSize, root: Path) -> tuple[list[float], Path]:
    """Return the seconds that each round takes to record one step, and a file of rollouts."""
    rng = Random(_SEED)
    rollouts = make_rollouts(1, size, rng)
    groups = [rollouts[at : at + size.group_size] for at in range(0, len(rollouts), size.group_size)]
    stored = tuple(one for group in groups for one in train_group(group, 1))
    numbers = make_metrics(1, size, rng)
    run = RunDir.create(root, "invented", "", "digest", {})

    def record(step: int) -> None:
        SampledStep(trained=stored).write(run, step)
        for name in ("wait", "learn", "sync", "record"):
            run.timeline.add(LEARNER, name, 0.0, 1.0)
        for number, group in enumerate(groups):
            detail = {"number": number, "example": group[0].example.example_id, "status": "trained"}
            run.timeline.add(ENVIRONMENTS, "group", 0.0, 1.0, detail)
        run.timeline.write(step)
        run.metrics.append(step, numbers)
        run.events.append(Event(kind=EventKind.ROLLOUT_LOST, step=step, cause="timeout"))

    with run:
        return [time_call(partial(record, step)) for step in range(1, NUM_ROUNDS + 1)], run.rollouts_path(1)


def measure_invented(num_tokens: int, *, is_quick: bool) -> list[Figure]:
    """Record and read steps of 512 rollouts of so many tokens."""
    size = RecordSize(num_steps=100, num_rollouts=64 if is_quick else 512, num_reply_tokens=num_tokens)
    with tempfile.TemporaryDirectory(prefix="strop-bench-") as folder:
        seconds, file = record_invented(size, Path(folder))
        data = file.read_bytes()
    step_s = size.num_rollouts * num_tokens / TOKENS_PER_S
    name = f"{size.num_rollouts} x {num_tokens} tokens"
    figures = [
        figure(f"{name}: recorded", "ms", [1000 * one for one in seconds]),
        figure(f"{name}: share of a step", "share", [one / step_s for one in seconds], at_most=MAX_SHARE),
        figure(f"{name}: file of rollouts", "MB", [len(data) / 1e6]),
    ]
    for what, work, at_most in (
        ("all rows listed", lambda: list_rows(data, file.name), 15.0 if num_tokens == 200 else None),
        ("a text found", lambda: find_rows(data, file.name, "carry one"), None),
        ("one rollout read", lambda: read_row(data, file.name, size.num_rollouts // 2), None),
    ):
        times = [1000 * time_call(work) for _ in range(NUM_ROUNDS)]
        figures.append(figure(f"{name}: {what}", "ms", times, at_most=at_most))
    return figures


def figure(name: str, unit: str, values: list[float], *, at_most: float | None = None) -> Figure:
    """Return the least of some values: what others take of a shared machine is no part of it."""
    return Figure(name=name, unit=unit, value=min(values), measured=tuple(values), at_most=at_most)


def measure_recording(*, is_quick: bool) -> Measured:
    """Measure recording on the demo and on invented steps."""
    invented = [one for tokens in (200, 1000) for one in measure_invented(tokens, is_quick=is_quick)]
    shares: list[float] = []
    steps = 2 if is_quick else NUM_DEMO_STEPS
    demo = train_demo(
        f"train.steps={steps}",
        "eval.num_examples=8",
        look=lambda run_dir: shares.extend(share_of_steps(run_dir)),
    )
    of_demo = Figure(
        name="demo: share of a step",
        unit="share",
        value=median(shares),
        measured=tuple(shares),
        at_most=MAX_SHARE,
    )
    return Measured(
        figures=[of_demo, *invented],
        details={"tokens_per_s": TOKENS_PER_S, "demo": asdict(demo)},
    )
