"""The files between a job's supervisor and the commands about the job.

`supervisor.json` identifies the supervising process. It runs the trials of a sweep one after the other, and a
signal to it would end all of them: so the order to end one trial is a file, which the supervisor reads and
confirms. It skips a trial that has not begun, and sends the signal to the agent of the running one.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from strop.errors import EXIT_DONE
from strop.hardware.process import ProcessIdentity, identify
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
    """The parent process of a job's agents."""

    host: str
    process: ProcessIdentity
    job_id: str
    cancelled_by: str = ""
    """The signal that cancelled the job, set after its end."""

    @property
    def is_here(self) -> bool:
        """Whether it runs, or ran, on this machine; processes of other machines are not visible."""
        return self.host == socket.gethostname()


def write_identity(job_path: Path, job_id: str, *, cancelled_by: str = "") -> None:
    """Write this process as the supervisor. Raises: StoreError."""
    own = identify(os.getpid())
    assert own is not None, "supervisors run on Linux, with /proc"
    content = {
        "host": socket.gethostname(),
        "process": asdict(own),
        "job_id": job_id,
        "cancelled_by": cancelled_by,
    }
    write_bytes_atomically(job_path / _NAME, json.dumps(content).encode())


def read_identity(job_path: Path) -> Supervisor | None:
    """Return the supervisor; None if none has started."""
    try:
        content = json.loads((job_path / _NAME).read_bytes())
        process = ProcessIdentity(**content["process"])
        rest = {name: str(content[name]) for name in ("host", "job_id", "cancelled_by")}
        return Supervisor(process=process, **rest)
    except (OSError, ValueError, KeyError, TypeError):
        return None


def order_end(job_path: Path, trial: int, *, grace_s: float) -> None:
    """Order the end of a trial by TERM, or without a grace by KILL. Raises: StoreError."""
    order = signal.SIGTERM if grace_s > 0.0 else signal.SIGKILL
    write_bytes_atomically(job_path / f"end-member-{trial}-{order.name}", b"")


def read_orders(job_path: Path) -> list[tuple[int, signal.Signals]]:
    """Return the trials that must end, with the signals."""
    return [(int(match[1]), signal.Signals[match[2]]) for match in _find(job_path, _ORDER)]


def confirm_end(job_path: Path, trial: int) -> None:
    """Confirm that a trial has ended by an order, or will never begin. Raises: StoreError."""
    write_bytes_atomically(job_path / f"ended-member-{trial}", b"")


def read_confirmed(job_path: Path) -> set[int]:
    """Return the trials that ended by an order, or will never begin."""
    return {int(match[1]) for match in _find(job_path, _CONFIRMED)}


def forget_orders(job_path: Path) -> None:
    """Remove the orders for an earlier start of the job."""
    for match in (*_find(job_path, _ORDER), *_find(job_path, _CONFIRMED)):
        (job_path / match[0]).unlink(missing_ok=True)


def answer_trials(ref: JobRef, answer: SchedulerStatus) -> dict[tuple[str, int], SchedulerStatus]:
    """Return the status of each trial from that of the whole job, in the form of `Backend.poll`.

    A cancellation does not apply to trials that succeeded before it, nor the end of one trial to the others.
    Raises: StoreError.
    """
    job_path = job_path_of(ref.home)
    confirmed = read_confirmed(job_path)
    answers = {}
    for trial in read_plan(job_path).trials:
        status = answer
        if trial.index in confirmed:
            status = replace(answer, state=JobState.CANCELLED, raw="ended alone", reason="cancelled")
        elif answer.state is JobState.CANCELLED:
            attempts = read_attempts(DirectoryRecord(Path(trial.path)))
            if attempts and attempts[-1].exit_code == EXIT_DONE and not attempts[-1].signal:
                status = SchedulerStatus(state=JobState.SUCCEEDED, raw="done", nodes=answer.nodes)
        answers[ref.job_id, trial.index] = status
    return answers


def _find(job_path: Path, pattern: re.Pattern[str]) -> list[re.Match[str]]:
    names = sorted(path.name for path in job_path.glob("end*-member-*"))
    return [match for name in names if (match := pattern.fullmatch(name))]
