"""What it costs that an environment's class lives in a sandbox, beside the process of the rollouts.

A class whose tool runs a command, `true`, as a shell's tool would: the time of a turn in both lanes, whose
difference is the overhead over the bare command; and what an attempt's start and end take there, one after
the other. Goal: 15 ms a turn.
"""

from __future__ import annotations

import asyncio
import itertools
import statistics
import tempfile
import time
from pathlib import Path

from benchmarks.figures import Figure, Measured
from strop.environments.worlds import OwnWorld
from strop.rollout import Split, ToolCall
from strop.spec.reader import load_spec
from strop.tasks import build_task

NUM_ATTEMPTS = 30
NUM_TURNS = 20
_CLASS = '''
import subprocess

class Runs:
    """A tool that runs a command."""

    max_turns = 20

    def examples(self, split):
        return [{"split": split}]

    def reset(self, example, seed):
        return "Go."

    def run(self, command: str) -> str:
        """Run a command."""
        return subprocess.run([command], capture_output=True, text=True).stdout

    def score(self):
        return 1.0
'''


async def _time_attempts(task: OwnWorld, num_attempts: int, num_turns: int) -> dict[str, float]:
    """Return the medians, in ms, of a turn and of an attempt's start and end."""
    turns, ends = [], []
    example = task.examples(Split.TRAIN)[0]
    call = ToolCall(name="run", arguments='{"command": "/bin/true"}')
    # The first loads what all others begin with.
    for index in range(num_attempts + 1):
        begun_at = time.perf_counter()
        made = task.make_object()
        await made.reset(example, index)
        between = [time.perf_counter()]
        for _ in range(num_turns):
            await made.call(call)
            between.append(time.perf_counter())
        await made.score()
        await made.close()
        if index:
            turns += [after - before for before, after in itertools.pairwise(between)]
            ends.append(time.perf_counter() - begun_at - (between[-1] - between[0]))
    return {"turn_ms": 1000 * statistics.median(turns), "rest_ms": 1000 * statistics.median(ends)}


def measure_lanes(*, is_quick: bool) -> Measured:
    """Measure both lanes, one after the other."""
    size = (2, 3) if is_quick else (NUM_ATTEMPTS, NUM_TURNS)
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "runs.py")
        path.write_text(_CLASS)
        for lane in ("process", "sandbox"):
            words = ["name=x", f"environment.name={path}:Runs", f"environment.lane={lane}"]
            task = build_task(load_spec(None, words).spec.task)
            assert isinstance(task, OwnWorld)
            found[lane] = asyncio.run(_time_attempts(task, *size))
    here, inside = found["process"], found["sandbox"]

    def figure(name: str, value: float, **goal: float) -> Figure:
        return Figure(name=name, unit="ms, median", value=value, measured=(value,), **goal)

    return Measured(
        figures=[
            figure("a turn that runs a command, in the process", here["turn_ms"]),
            figure("a turn that runs a command, in a sandbox", inside["turn_ms"]),
            figure("what the sandbox adds to a turn", inside["turn_ms"] - here["turn_ms"], at_most=15.0),
            figure("an attempt's start, score and end in a sandbox", inside["rest_ms"]),
        ],
        details={"found": found},
    )
