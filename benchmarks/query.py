"""How long `strop query` and `strop report` take over a run of 1,000 steps x 512 rollouts.

Files of rollouts are few and linked many times, so the page cache flatters what reads all of them. A question
is timed from the opening of the database to its last row; the command with its process, as a user waits.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median

from benchmarks.figures import Figure, Measured
from strop.record.files import DirectoryRecord
from strop.testing.records import RecordSize, make_record
from strop.view.query import RunsDatabase
from strop.view.report import write_report

SIZE = RecordSize(num_steps=1000, num_rollouts=512)
SMALL = RecordSize(num_steps=20, num_rollouts=32, num_reply_tokens=20)
NUM_ROUNDS = 7
QUESTIONS = {
    "mean reward of each step": "SELECT step, avg(reward) FROM rollouts GROUP BY step ORDER BY step",
    "the same of the first 10 steps": "SELECT step, avg(reward) FROM rollouts WHERE step <= 10"
    " GROUP BY step ORDER BY step",
    "accuracy of all steps, from the metrics": "SELECT step, accuracy FROM metrics ORDER BY step",
    "examples solved, by evaluation": "SELECT step, avg(solved_frac) FROM evals GROUP BY step ORDER BY step",
}
GOALS = {"mean reward of each step": 2.0}


def measure_query(*, is_quick: bool) -> Measured:
    """Ask each question some times, and write the report some times."""
    size, num_rounds = (SMALL, 2) if is_quick else (SIZE, NUM_ROUNDS)
    with tempfile.TemporaryDirectory() as folder:
        run = make_record(Path(folder), size)
        found = {name: _time(num_rounds, partial(_ask, run.path, sql)) for name, sql in QUESTIONS.items()}
        (name, sql), *_ = QUESTIONS.items()
        command = [str(Path(sys.executable).parent / "strop"), "query", sql, str(run.path), "--json"]
        found[f"{name}, the command"] = _time(
            num_rounds, lambda: subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        )
        found["the report"] = _time(num_rounds, lambda: write_report(run.path))
    figures = [
        Figure(
            name=name,
            unit="s",
            value=median(times),
            measured=tuple(times),
            at_most=GOALS.get(name),
        )
        for name, times in found.items()
    ]
    return Measured(figures=figures, details={"num_steps": size.num_steps, "num_rollouts": size.num_rollouts})


def _ask(path: Path, sql: str) -> list[object]:
    return list(RunsDatabase({path.name: DirectoryRecord(path)}).ask(sql).rows)


def _time(num_rounds: int, action: Callable[[], object]) -> list[float]:
    """Return the seconds of each round behind a first one, in which modules are imported and files cached."""
    seconds = []
    for _ in range(num_rounds + 1):
        begun_at = time.perf_counter()
        action()
        seconds.append(time.perf_counter() - begun_at)
    return seconds[1:]
