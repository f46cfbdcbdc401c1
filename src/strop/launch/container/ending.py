"""What is done when a job's container has ended: its own words kept, its record completed, the rest removed.

A container that was killed cannot say so itself. Whoever comes first after its end, the watcher or the next
command, writes what the engine still knows (exit code, lack of memory) into the job's home, and removes the
container with everything of it. Done twice it changes nothing.
"""

from __future__ import annotations

import json
import signal
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from strop.errors import EXIT_DONE, EXIT_FAILED, StoreError, explain_refusal
from strop.io import write_bytes_atomically
from strop.io.atomic import explain_write_failure
from strop.launch.attempts import read_attempts, write_verdict
from strop.launch.container.engine import Engine, engine_from_json
from strop.launch.contract import Answer, JobState
from strop.launch.exit_codes import SIGNAL_BASE, describe_exit
from strop.launch.home import ATTEMPTS_FOLDER, read_plan
from strop.launch.local.identity import read_identity
from strop.launch.secrets import SECRETS_NAME, redact, remove_secrets, secret_values
from strop.record.files import DirectoryRecord

START_NAME = "container.json"
"""Written before the start: which engine, which container, since when."""
END_NAME = "container-end.json"
"""Written after the end: what the engine knew of it."""
STOP_NAME = "container-stop.json"
"""Written before a signal: who wanted the end."""
LOG_NAME = "supervisor.log"
"""What the container said on its standard output and error: its process 1 is the supervisor."""
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


@dataclass(frozen=True, kw_only=True, slots=True)
class ContainerEnd:
    """How a container ended, as the engine tells it."""

    exit_code: int
    is_out_of_memory: bool
    started_at: float
    ended_at: float

    @property
    def reason(self) -> str:
        """For a person."""
        if self.is_out_of_memory:
            return "the container had more memory than it was allowed, and was killed"
        return f"the container ended with {describe_exit(self.exit_code)}"


def read_container_file(job_path: Path, name: str) -> dict[str, Any] | None:
    """Return one of the files that are kept about a container, None if it is not there or damaged."""
    try:
        content = json.loads((job_path / name).read_bytes())
    except (OSError, ValueError):
        return None
    return content if isinstance(content, dict) else None


def write_container_file(job_path: Path, name: str, content: Mapping[str, Any]) -> None:
    """Keep something about a container. Raises: StoreError."""
    write_bytes_atomically(job_path / name, json.dumps(content, indent=1).encode())


def secrets_mtime_ns(job_path: Path) -> int | None:
    """Return when the file of secrets was written: which life it is for. None without one."""
    try:
        return (job_path / SECRETS_NAME).stat().st_mtime_ns
    except OSError:
        return None


def note_stop(job_path: Path, state: JobState) -> None:
    """Write why the job is about to be ended, unless that is known. Raises: StoreError."""
    if read_container_file(job_path, STOP_NAME) is None:
        write_container_file(job_path, STOP_NAME, {"state": state.value, "at": time.time()})


def inspect_containers(engine: Engine, names: list[str]) -> dict[str, dict[str, Any]]:
    """Return what the engine knows of containers, by name; those that it does not know are missing.

    Raises: StoreError if the engine does not answer.
    """
    if not names:
        return {}
    found = engine.read_json("container", "inspect", *names)
    return {str(one["Name"]).lstrip("/"): one for one in found or ()}


def is_over(facts: Mapping[str, Any] | None) -> bool:
    """Whether a container has ended, by what the engine knows of it; None: it does not know it any more."""
    return facts is None or str(facts["State"]["Status"]) in _ENDED


def answer_for(job_path: Path, facts: Mapping[str, Any] | None) -> Answer | None:
    """Return where a job stands by what the engine says now, or by what was kept of its end.

    `facts` None: the engine does not know it. None: nothing is known at all.
    """
    if facts is None:
        return _recall_end(job_path)
    word = str(facts["State"]["Status"])
    if word in _ENDED:
        return _answer_ended(job_path, read_end(facts), word)
    since = _parse_time(facts["State"].get("StartedAt"))
    return Answer(
        state=_LIVING.get(word, JobState.UNKNOWN),
        raw=word,
        nodes=socket.gethostname(),
        since=since or None,
    )


def read_end(facts: Mapping[str, Any]) -> ContainerEnd:
    """Return how an ended container ended."""
    state = facts["State"]
    return ContainerEnd(
        exit_code=int(state.get("ExitCode", EXIT_FAILED)),
        is_out_of_memory=bool(state.get("OOMKilled", False)),
        started_at=_parse_time(state.get("StartedAt")),
        ended_at=_parse_time(state.get("FinishedAt")) or time.time(),
    )


def settle(job_path: Path) -> bool:
    """Complete the record of a job whose container has ended, and remove the container.

    Returns whether it has ended; False while it lives. Of a home without a container nothing is done.

    Raises: StoreError if the engine or the disk does not answer: then everything is still there.
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
        _keep_log(engine, name, job_path)
        _complete_record(job_path, end)
        write_container_file(
            job_path,
            END_NAME,
            {
                "exit_code": end.exit_code,
                "is_out_of_memory": end.is_out_of_memory,
                "started_at": end.started_at,
                "ended_at": end.ended_at,
            },
        )
    # Not those of a next life, for which the home may be filled again already.
    if start.get("secrets_mtime_ns") == secrets_mtime_ns(job_path):
        remove_secrets(job_path)
    if facts is not None:
        # Last: until everything is written, the engine is the only one that knows.
        engine.ask("rm", "--force", "--volumes", name)
    return True


def _complete_record(job_path: Path, end: ContainerEnd) -> None:
    """Write the verdict of attempts that were ended with their container, and could write none."""
    for member in read_plan(job_path).members:
        member_path = Path(member.path)
        for attempt in read_attempts(DirectoryRecord(member_path)):
            if attempt.exit_code is not None:
                continue
            # A supervisor that ends well leaves a verdict; so this attempt did not.
            exit_code = end.exit_code if end.exit_code != EXIT_DONE else EXIT_FAILED
            write_verdict(
                member_path / ATTEMPTS_FOLDER / attempt.name,
                number=attempt.number,
                exit_code=exit_code,
                signal="SIGKILL" if exit_code == _KILLED else "",
                started_at=attempt.started_at or end.started_at,
                ended_at=end.ended_at,
                nodes=attempt.nodes,
            )


def _keep_log(engine: Engine, name: str, job_path: Path) -> None:
    """Append what the container said to the job's log, without secrets. Raises: StoreError."""
    done = engine.ask("logs", name)
    text = redact((done.stdout + done.stderr)[-_MAX_LOG_BYTES:], secret_values(job_path))
    if not text:
        return
    try:
        with (job_path / LOG_NAME).open("a", encoding="utf-8", errors="backslashreplace") as log:
            log.write(text)
    except OSError as error:
        raise explain_write_failure(error, job_path / LOG_NAME) from error


def _recall_end(job_path: Path) -> Answer | None:
    kept = read_container_file(job_path, END_NAME)
    if kept is None:
        return None
    end = ContainerEnd(
        exit_code=int(kept["exit_code"]),
        is_out_of_memory=bool(kept["is_out_of_memory"]),
        started_at=float(kept["started_at"]),
        ended_at=float(kept["ended_at"]),
    )
    return _answer_ended(job_path, end, "gone")


def _answer_ended(job_path: Path, end: ContainerEnd, word: str) -> Answer:
    stop, supervisor = read_container_file(job_path, STOP_NAME), read_identity(job_path)
    state, reason = JobState.FAILED, end.reason
    if end.exit_code == EXIT_DONE:
        state, reason = JobState.SUCCEEDED, ""
    elif stop is not None:
        state = JobState(stop["state"])
        reason = "its time limit ended it" if state is JobState.TIMEOUT else "cancelled"
    elif supervisor is not None and supervisor.cancelled_by:
        state, reason = JobState.CANCELLED, f"cancelled by {supervisor.cancelled_by}"
    return Answer(state=state, raw=word, reason=reason, nodes=socket.gethostname(), since=end.ended_at)


def _parse_time(text: str | None) -> float:
    """Return an engine's time in Unix seconds; 0 for the zero time of what never happened."""
    if not text or text.startswith("0001-"):
        return 0.0
    # Nanoseconds are more than Python reads.
    head, _, tail = text.partition(".")
    digits = "".join(character for character in tail[:9] if character.isdigit())
    zone = tail.lstrip("0123456789") if tail else head[19:]
    try:
        moment = datetime.fromisoformat(f"{head[:19]}.{digits[:6] or '0':0<6}{zone.replace('Z', '+00:00')}")
    except ValueError as error:
        raise StoreError(
            explain_refusal(
                f"the engine's time {text!r} is not understood",
                allowed="a time such as 2026-01-31T23:59:59.5Z",
                next_step="report the engine's version",
            )
        ) from error
    return moment.timestamp()
