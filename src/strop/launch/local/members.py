"""The members of a sweep where they live one after the other below one supervisor: here and in containers.

A signal to the supervisor would end all, so an order to end one of them is a file in the job's folder, which
the supervisor reads and confirms. A member that has not begun is passed over; of one that lives, the agent
gets the signal.
"""

from __future__ import annotations

import re
import signal
from dataclasses import replace
from pathlib import Path

from strop.errors import EXIT_DONE
from strop.io.atomic import write_bytes_atomically
from strop.launch.attempts import read_attempts
from strop.launch.contract import Answer, JobRef, JobState, MemberPlan
from strop.launch.home import job_path_of, read_plan
from strop.record.files import DirectoryRecord

_ORDER = re.compile(r"end-member-(\d+)-(SIG(?:TERM|KILL))")
_CONFIRMED = re.compile(r"ended-member-(\d+)")


def order_end(job_path: Path, member: int, *, grace_s: float) -> None:
    """Ask for the end of a member by TERM; with no grace by KILL. Raises: StoreError."""
    order = signal.SIGTERM if grace_s > 0.0 else signal.SIGKILL
    write_bytes_atomically(job_path / f"end-member-{member}-{order.name}", b"")


def read_orders(job_path: Path) -> list[tuple[int, signal.Signals]]:
    """Return which members are to end, and by which signals."""
    return [(int(found[1]), signal.Signals[found[2]]) for found in _find(job_path, _ORDER)]


def confirm_end(job_path: Path, member: int) -> None:
    """Note that a member has ended by its order, or will never begin. Raises: StoreError."""
    write_bytes_atomically(job_path / f"ended-member-{member}", b"")


def read_confirmed(job_path: Path) -> set[int]:
    """Return the members that ended by an order, or will never begin."""
    return {int(found[1]) for found in _find(job_path, _CONFIRMED)}


def forget_orders(job_path: Path) -> None:
    """Remove what was meant for an earlier life of the job."""
    for found in (*_find(job_path, _ORDER), *_find(job_path, _CONFIRMED)):
        (job_path / found[0]).unlink(missing_ok=True)


def answer_members(ref: JobRef, answer: Answer) -> dict[tuple[str, int], Answer]:
    """Return what is said of a job for each of its members, as `Backend.ask` does.

    A cancellation does not concern members that had succeeded before, and the end of one alone no others.
    Raises: StoreError.
    """
    job_path = job_path_of(ref.home)
    confirmed = read_confirmed(job_path)
    alone = replace(answer, state=JobState.CANCELLED, raw="ended alone", reason="cancelled")
    done = Answer(state=JobState.SUCCEEDED, raw="done", nodes=answer.nodes)
    answers = {}
    for member in read_plan(job_path).members:
        said = alone if member.index in confirmed else answer
        is_over = said.state is JobState.CANCELLED and said is answer and _has_succeeded(member)
        answers[ref.job_id, member.index] = done if is_over else said
    return answers


def _has_succeeded(member: MemberPlan) -> bool:
    attempts = read_attempts(DirectoryRecord(Path(member.path)))
    return bool(attempts) and attempts[-1].exit_code == EXIT_DONE and not attempts[-1].signal


def _find(job_path: Path, pattern: re.Pattern[str]) -> list[re.Match[str]]:
    names = sorted(path.name for path in job_path.glob("end*-member-*"))
    return [found for name in names if (found := pattern.fullmatch(name))]
