"""Wait for the end of a job's container, record it, and remove the container. One process per job.

    python -m strop.launch.container.watch --job DIR

The watcher also ends the job at its time limit: by TERM one grace period before it, so that the job saves its
state, then by KILL. If the watcher itself is killed the job goes on without a time limit. A killed container
cannot report its own end: the watcher or the next command, whichever comes first, writes the engine's report
(exit code, lack of memory) into the job's folder and removes the container. `settle` is idempotent.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, TypeVar

from strop.errors import EXIT_DONE, EXIT_FAILED, StoreError
from strop.hardware.process import start_detached
from strop.io import write_bytes_atomically
from strop.io.atomic import explain_write_failure
from strop.io.redaction import redact
from strop.launch.attempts import SIGNAL_BASE, describe_exit, read_attempts, write_verdict
from strop.launch.container.engine import Engine, engine_from_json
from strop.launch.container.image import strop_folder
from strop.launch.contract import JobState, SchedulerStatus
from strop.launch.environment import clean_inherited
from strop.launch.job_dir import ATTEMPTS_FOLDER, read_plan
from strop.launch.local.supervisor_files import read_identity
from strop.launch.secrets import SECRETS_NAME, remove_secrets, secret_values
from strop.record.files import DirectoryRecord

START_NAME = "container.json"
"""Engine, container and time; written before the start."""
END_NAME = "container-end.json"
"""The engine's report; written after the end."""
STOP_NAME = "container-stop.json"
"""Why the job is ended; written before the signal."""
LOG_NAME = "supervisor.log"
"""Standard output and error of the container, whose process 1 is the supervisor."""
_MAX_LOG_BYTES = 4 << 20
_KILLED = SIGNAL_BASE + signal.SIGKILL
_LIVING = {
    "created": JobState.STARTING,
    "configured": JobState.STARTING,
    "initialized": JobState.STARTING,
    "running": JobState.RUNNING,
    "paused": JobState.RUNNING,
    "restarting": JobState.RUNNING,
    "stopping": JobState.RUNNING,
}
_ENDED = {"exited", "stopped", "dead"}
RETRY_S = 5.0
_POLL_S = 0.1
T = TypeVar("T")


def watch(job_path: Path, *, retry_s: float = RETRY_S) -> int:
    """Wait for the container of a job, then settle it. Returns 0, or 1 if there is none.

    `retry_s`: the pause after a failure of the engine or the disk.

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
    """Start the watcher of a job, detached from this process and its terminal.

    Raises: CheckRefused if this machine cannot start another process; StoreError if the disk fails.
    """
    # A checkout on a relative path would not be found from another folder.
    python_path = os.pathsep.join(filter(None, [strop_folder(), os.environ.get("PYTHONPATH", "")]))
    environ = {**clean_inherited(os.environ), "PYTHONPATH": python_path}
    argv = [sys.executable, "-m", "strop.launch.container.watch", "--job", str(job_path)]
    start_detached(argv, job_path / "watch.log", environ, cwd=Path("/"))


def _wait(engine: Engine, name: str, limit_s: float, retry_s: float) -> bool:
    """Return whether a container has ended, or is gone, within the limit; retry if the engine fails."""
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
    """Run an action; log a StoreError and return None, because a watcher must outlive its container."""
    try:
        return action()
    except StoreError as error:
        # The log's disk may be full.
        with suppress(OSError):
            sys.stderr.write(f"{error}\n")
            sys.stderr.flush()
        return None


@dataclass(frozen=True, kw_only=True, slots=True)
class ContainerEnd:
    """The engine's report of a container's end."""

    exit_code: int
    is_out_of_memory: bool
    started_at: float
    ended_at: float

    @property
    def reason(self) -> str:
        """The reason, for the user."""
        if self.is_out_of_memory:
            return "the container had more memory than it was allowed, and was killed"
        return f"the container ended with {describe_exit(self.exit_code)}"


def read_container_file(job_path: Path, name: str) -> dict[str, Any] | None:
    """Return a JSON file of the container in the job's folder; None if it is missing or damaged."""
    try:
        content = json.loads((job_path / name).read_bytes())
    except (OSError, ValueError):
        return None
    return content if isinstance(content, dict) else None


def write_container_file(job_path: Path, name: str, content: Mapping[str, Any]) -> None:
    """Write a JSON file of the container. Raises: StoreError."""
    write_bytes_atomically(job_path / name, json.dumps(content, indent=1).encode())


def secrets_mtime_ns(job_path: Path) -> int | None:
    """Return the time of the secrets, which identifies their attempt; None without a file."""
    try:
        return (job_path / SECRETS_NAME).stat().st_mtime_ns
    except OSError:
        return None


def note_stop(job_path: Path, state: JobState) -> None:
    """Record why the job is about to be ended, unless a reason is recorded. Raises: StoreError."""
    if read_container_file(job_path, STOP_NAME) is None:
        write_container_file(job_path, STOP_NAME, {"state": state.value, "at": time.time()})


def inspect_containers(engine: Engine, names: list[str]) -> dict[str, dict[str, Any]]:
    """Return the engine's facts about containers by name; unknown ones are missing.

    Raises: StoreError if the engine does not answer.
    """
    if not names:
        return {}
    inspected = engine.read_json("container", "inspect", *names)
    return {str(facts["Name"]).lstrip("/"): facts for facts in inspected or ()}


def is_over(facts: Mapping[str, Any] | None) -> bool:
    """Whether a container has ended. `facts` None: the engine no longer knows it."""
    return facts is None or str(facts["State"]["Status"]) in _ENDED


def answer_for(job_path: Path, facts: Mapping[str, Any] | None) -> SchedulerStatus | None:
    """Return a job's status from the engine's facts, else from the record of its end; None without both.

    `facts` None: the engine does not know the container.
    """
    if facts is None:
        kept = read_container_file(job_path, END_NAME)
        return None if kept is None else _answer_ended(job_path, ContainerEnd(**kept), "gone")
    word = str(facts["State"]["Status"])
    if word in _ENDED:
        return _answer_ended(job_path, read_end(facts), word)
    since = _parse_time(facts["State"].get("StartedAt"))
    return SchedulerStatus(
        state=_LIVING.get(word, JobState.UNKNOWN),
        raw=word,
        nodes=socket.gethostname(),
        since=since or None,
    )


def read_end(facts: Mapping[str, Any]) -> ContainerEnd:
    """Return the end of a container from the engine's facts."""
    state = facts["State"]
    return ContainerEnd(
        exit_code=int(state.get("ExitCode", EXIT_FAILED)),
        is_out_of_memory=bool(state.get("OOMKilled", False)),
        started_at=_parse_time(state.get("StartedAt")),
        ended_at=_parse_time(state.get("FinishedAt")) or time.time(),
    )


def settle(job_path: Path) -> bool:
    """Complete the record of a job whose container has ended, and remove the container.

    Returns whether it has ended, which is true without a container file.

    Raises: StoreError if the engine or the disk fails; then nothing has been removed.
    """
    start = read_container_file(job_path, START_NAME)
    if start is None:
        return True
    engine, name = engine_from_json(start["engine"]), str(start["container"])
    facts = inspect_containers(engine, [name]).get(name)
    if not is_over(facts):
        return False
    if facts is not None:
        end = read_end(facts)
        done = engine.ask("logs", name)
        text = redact((done.stdout + done.stderr)[-_MAX_LOG_BYTES:], secret_values(job_path))
        log_path = job_path / LOG_NAME
        if text:
            try:
                with log_path.open("a", encoding="utf-8", errors="backslashreplace") as log:
                    log.write(text)
            except OSError as error:
                raise explain_write_failure(error, log_path) from error
        _complete_record(job_path, end)
        write_container_file(job_path, END_NAME, asdict(end))
    # Secrets with another time belong to a later attempt, whose folder may be filled already.
    if start.get("secrets_mtime_ns") == secrets_mtime_ns(job_path):
        remove_secrets(job_path)
    if facts is not None:
        # Last: until everything is written, only the engine knows of the end.
        engine.ask("rm", "--force", "--volumes", name)
    return True


def _complete_record(job_path: Path, end: ContainerEnd) -> None:
    """Write the verdicts of attempts that ended with their container before they could."""
    for trial in read_plan(job_path).trials:
        trial_path = Path(trial.path)
        for attempt in read_attempts(DirectoryRecord(trial_path)):
            if attempt.exit_code is not None:
                continue
            # A supervisor that exits normally writes a verdict, so this attempt did not succeed.
            exit_code = end.exit_code if end.exit_code != EXIT_DONE else EXIT_FAILED
            write_verdict(
                trial_path / ATTEMPTS_FOLDER / attempt.name,
                number=attempt.number,
                exit_code=exit_code,
                signal="SIGKILL" if exit_code == _KILLED else "",
                started_at=attempt.started_at or end.started_at,
                ended_at=end.ended_at,
                nodes=attempt.nodes,
            )


def _answer_ended(job_path: Path, end: ContainerEnd, word: str) -> SchedulerStatus:
    stop, supervisor = read_container_file(job_path, STOP_NAME), read_identity(job_path)
    state, reason = JobState.FAILED, end.reason
    if end.exit_code == EXIT_DONE:
        state, reason = JobState.SUCCEEDED, ""
    elif stop is not None:
        state = JobState(stop["state"])
        reason = "its time limit ended it" if state is JobState.TIMEOUT else "cancelled"
    elif supervisor is not None and supervisor.cancelled_by:
        state, reason = JobState.CANCELLED, f"cancelled by {supervisor.cancelled_by}"
    return SchedulerStatus(
        state=state, raw=word, reason=reason, nodes=socket.gethostname(), since=end.ended_at
    )


def _parse_time(text: str | None) -> float:
    """Return an engine's time in Unix seconds; 0 for its zero time, meaning never."""
    if not text or text.startswith("0001-"):
        return 0.0
    try:
        return datetime.fromisoformat(text).timestamp()
    except ValueError as error:
        raise StoreError(f"the engine's time {text!r} is not understood") from error


def main(arguments: list[str] | None = None) -> int:
    """Watch one job; return the exit code."""
    # The submitting terminal may close, and its shell may send this signal.
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    parser = argparse.ArgumentParser(prog="strop.launch.container.watch", description=__doc__)
    parser.add_argument("--job", type=Path, required=True, help="the folder of what was submitted")
    return watch(parser.parse_args(arguments).job)


if __name__ == "__main__":
    sys.exit(main())
