"""Waits for the end of a job's container, and puts everything in order then. One small process per job.

    python -m strop.launch.container.watch --job DIR

Also ends the job at its time limit: the grace before it by TERM, so that it saves its state, then by KILL. If
the watcher itself is killed the job goes on, without a time limit; the next command finds the ended container
by its label.
"""

from __future__ import annotations

import argparse
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from strop.errors import StoreError
from strop.hardware.detached import start_detached
from strop.launch.container.ending import (
    START_NAME,
    inspect_containers,
    is_over,
    note_stop,
    read_container_file,
    settle,
)
from strop.launch.container.engine import Engine, engine_from_json
from strop.launch.container.image import strop_folder
from strop.launch.contract import JobState
from strop.launch.home import read_plan
from strop.launch.owned import clean_inherited

RETRY_S = 5.0
_POLL_S = 0.1
T = TypeVar("T")


def watch(job_path: Path, *, retry_s: float = RETRY_S) -> int:
    """Wait for the container of a job, and settle. Returns 0, or 1 where there is none.

    `retry_s`: how long after an engine or a disk that failed it is asked again.

    Raises: StoreError if the job's folder cannot be read.
    """
    start = read_container_file(job_path, START_NAME)
    if start is None:
        return 1
    engine, name = engine_from_json(start["engine"]), str(start["container"])
    plan = read_plan(job_path)
    if plan.resources.time_limit_s is not None:
        left_s = float(start["started_at"]) + plan.resources.time_limit_s - time.time()
        if not _wait(engine, name, left_s - plan.grace_s, retry_s):
            _try(lambda: note_stop(job_path, JobState.TIMEOUT))
            _try(lambda: engine.ask("kill", "--signal", "TERM", name))
            grace_s = min(plan.grace_s, max(1.0, left_s))
            while not _wait(engine, name, grace_s, retry_s):
                _try(lambda: engine.ask("kill", "--signal", "KILL", name))
                grace_s = retry_s
    while True:
        _wait(engine, name, math.inf, retry_s)
        if _try(lambda: settle(job_path)):
            return 0
        time.sleep(retry_s)


def start_watcher(job_path: Path) -> None:
    """Start the watcher of a job, apart from this process and its terminal.

    Raises: CheckRefused if this machine has no room for one more process; StoreError if the disk fails.
    """
    # A checkout that was found by a relative path would not be found from another folder.
    found = os.pathsep.join(filter(None, [strop_folder(), os.environ.get("PYTHONPATH", "")]))
    environ = {**clean_inherited(os.environ), "PYTHONPATH": found}
    argv = [sys.executable, "-m", "strop.launch.container.watch", "--job", str(job_path)]
    start_detached(argv, job_path / "watch.log", environ, cwd=Path("/"))


def _wait(engine: Engine, name: str, limit_s: float, retry_s: float) -> bool:
    """Return whether a container has ended, or is gone, in time. An engine that fails has told neither."""
    deadline = time.monotonic() + limit_s
    while not _try(lambda: is_over(inspect_containers(engine, [name]).get(name))):
        left_s = deadline - time.monotonic()
        if left_s <= 0.0:
            return False
        waiting = subprocess.Popen(
            engine.argv("wait", name),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            exit_code = waiting.wait(None if left_s == math.inf else left_s)
        except subprocess.TimeoutExpired:
            waiting.kill()
            waiting.wait()
            continue
        time.sleep(min(left_s, retry_s if exit_code else _POLL_S))
    return True


def _try(action: Callable[[], T]) -> T | None:
    """Do something, or say why it failed: a watcher does not end before what it watches."""
    try:
        return action()
    except StoreError as error:
        # Its words go to the disk that may be full.
        with suppress(OSError):
            sys.stderr.write(f"{error}\n")
            sys.stderr.flush()
        return None


def main(arguments: list[str] | None = None) -> int:
    """Watch one job; return the exit code."""
    # The terminal that submitted may close, and its shell may send this.
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    parser = argparse.ArgumentParser(prog="strop.launch.container.watch", description=__doc__)
    parser.add_argument("--job", type=Path, required=True, help="the folder of what was submitted")
    return watch(parser.parse_args(arguments).job)


if __name__ == "__main__":
    sys.exit(main())
