"""A role of a job in tests: it counts steps, saves at TERM and ends with 75, as a trainer does.

    role.py RUN [--steps N[,N]] [--held] [--codes C[,C]] [--special PLACE=C[,C]] [--ignore-signals]

A step takes 0.1 s. Of several numbers the first is for attempt 0, the next for attempt 1, the last for all
further ones. `--held`: steps without end until there is `RUN/go`. `--special`: other codes on one node, or
for one trial of a sweep. It says what it sees as JSON in `RUN/seen-<attempt>-<node>.json`, and makes
`RUN/counts-<attempt>-<node>` after its second step: then it hears signals, and has steps to save.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import signal
import sys
import time
from pathlib import Path

from strop.train.watch.ending import StopFlag

SHOWN = (
    *("CUDA_VISIBLE_DEVICES", "TMPDIR", "XDG_CACHE_HOME", "STROP_NODE_ADDRESS", "MASTER_ADDR", "RANK"),
    *("API_KEY", "MODE"),
)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("run", type=Path)
    parser.add_argument("--steps", default="0")
    parser.add_argument("--held", action="store_true")
    parser.add_argument("--codes", default="0")
    parser.add_argument("--special", default="")
    parser.add_argument("--ignore-signals", action="store_true")
    given = parser.parse_args()
    attempt, node = os.environ["STROP_ATTEMPT"], os.environ["STROP_NODE"]
    number = int(attempt.rpartition("-")[2])
    told = StopFlag()
    if given.ignore_signals:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    else:
        told.__enter__()
    saved_path = given.run / "saved"
    begin = int(saved_path.read_text()) if saved_path.exists() else 0
    slurm = {name: value for name, value in os.environ.items() if name.startswith(("SLURM_", "SBATCH_"))}
    seen = {name: os.environ.get(name) for name in SHOWN} | {
        "begin": begin,
        "slurm": slurm,
        "cwd": os.getcwd(),
    }
    (given.run / f"seen-{attempt}-{node}.json").write_text(json.dumps(seen))
    say(f"attempt {attempt} node {node} begins at step {begin}")
    steps = itertools.count(begin) if given.held else range(begin, pick(given.steps, number))
    for step in steps:
        if given.held and (given.run / "go").exists():
            break
        time.sleep(0.1)
        if step == begin + 2:
            (given.run / f"counts-{attempt}-{node}").touch()
        if told.cause:
            saved_path.write_text(str(step))
            say(f"saved at step {step}")
            return 75
    place, _, special = given.special.partition("=")
    is_there = place and place in {os.environ.get("SLURMD_NODENAME"), given.run.name}
    return pick(special if is_there else given.codes, number)


def say(line: str) -> None:
    """Write a line into the role's log."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def pick(texts: str, number: int) -> int:
    """Return what is written for an attempt: the last one counts for all further ones."""
    values = [int(text) for text in texts.split(",")]
    return values[min(number, len(values) - 1)]


if __name__ == "__main__":
    sys.exit(main())
