"""The files between a job's supervisor and the commands about the job, on this machine and in containers.

`supervisor.json` says which process supervises. The trials of a sweep run one after the other below it,
and a signal to it would end all of them: so the order to end one is a file, which the supervisor reads and
confirms. It skips a trial that has not begun, and sends the signal to the agent of one that runs.
"""

from __future__ import annotations

import json
import re
import signal
import socket
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from strop.errors import EXIT_DONE
from strop.hardware.identity import ProcessIdentity, identify_self
from strop.io.atomic import write_bytes_atomically
from strop.launch.attempts import read_attempts
from strop.launch.contract import JobRef, JobState, SchedulerStatus
from strop.launch.job_dir import job_path_of, read_plan
from strop.record.files import DirectoryRecord

_NAME = "supervisor.json"
_ORDER = re.compile(r"end-member-(\d+)-(SIG(?:TERM|KILL))")
_CONFIRMED = re.compile(r"ended-member-(\d+)")


@dataclass(frozen=True, kw_only=True, slots=True)
class Supervisor:
    """The process above a job's agents."""

    host: str
    process: ProcessIdentity
    job_id: str
    cancelled_by: str = ""
    """The signal that cancelled the job, once it has ended for that reason."""

    @property
    def is_here(self) -> bool:
        """Whether it runs, or ran, on this machine: processes of others cannot be seen."""
        return self.host == socket.gethostname()


def write_identity(job_path: Path, job_id: str, *, cancelled_by: str = "") -> None:
    """Write that this process supervises. Raises: StoreError."""
    content = {
        "host": socket.gethostname(),
        "process": asdict(identify_self()),
        "job_id": job_id,
        "cancelled_by": cancelled_by,
    }
    write_bytes_atomically(job_path / _NAME, json.dumps(content).encode())


def read_identity(job_path: Path) -> Supervisor | None:
    """Return the supervisor; None where none has begun."""
    try:
        content = json.loads((job_path / _NAME).read_bytes())
        process = ProcessIdentity(**content["process"])
        rest = {name: str(content[name]) for name in ("host", "job_id", "cancelled_by")}
        return Supervisor(process=process, **rest)
    except (OSError, ValueError, KeyError, TypeError):
        return None


def order_end(job_path: Path, trial: int, *, grace_s: float) -> None:
    """Ask for the end of a trial by TERM; with no grace by KILL. Raises: StoreError."""
    order = signal.SIGTERM if grace_s > 0.0 else signal.SIGKILL
    write_bytes_atomically(job_path / f"end-member-{trial}-{order.name}", b"")


def read_orders(job_path: Path) -> list[tuple[int, signal.Signals]]:
    """Return the trials that are to end, with the signals."""
    return [(int(found[1]), signal.Signals[found[2]]) for found in _find(job_path, _ORDER)]


def confirm_end(job_path: Path, trial: int) -> None:
    """Confirm that a trial has ended by an order, or will never begin. Raises: StoreError."""
    write_bytes_atomically(job_path / f"ended-member-{trial}", b"")


def read_confirmed(job_path: Path) -> set[int]:
    """Return the trials that ended by an order, or will never begin."""
    return {int(found[1]) for found in _find(job_path, _CONFIRMED)}


def forget_orders(job_path: Path) -> None:
    """Remove the orders that were meant for an earlier start of the job."""
    for found in (*_find(job_path, _ORDER), *_find(job_path, _CONFIRMED)):
        (job_path / found[0]).unlink(missing_ok=True)


def answer_trials(ref: JobRef, answer: SchedulerStatus) -> dict[tuple[str, int], SchedulerStatus]:
    """Return the status of each trial from that of the whole job, in the form of `Backend.poll`.

    A cancellation does not apply to trials that had succeeded before, nor the end of one trial to the
    others. Raises: StoreError.
    """
    job_path = job_path_of(ref.home)
    confirmed = read_confirmed(job_path)
    answers = {}
    for trial in read_plan(job_path).trials:
        mine = answer
        if trial.index in confirmed:
            mine = replace(answer, state=JobState.CANCELLED, raw="ended alone", reason="cancelled")
        elif answer.state is JobState.CANCELLED:
            attempts = read_attempts(DirectoryRecord(Path(trial.path)))
            if attempts and attempts[-1].exit_code == EXIT_DONE and not attempts[-1].signal:
                mine = SchedulerStatus(state=JobState.SUCCEEDED, raw="done", nodes=answer.nodes)
        answers[ref.job_id, trial.index] = mine
    return answers


def _find(job_path: Path, pattern: re.Pattern[str]) -> list[re.Match[str]]:
    names = sorted(path.name for path in job_path.glob("end*-member-*"))
    return [found for name in names if (found := pattern.fullmatch(name))]
