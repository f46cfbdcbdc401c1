"""Orders to end one member of a sweep, kept in the job's folder: its supervisor reads and confirms them.

The members of a job live one after the other below one supervisor, here and in a container, so a signal to
it would end all. A member that has not begun is passed over; of one that lives, the agent gets the signal.
"""

from __future__ import annotations

import re
import signal
from pathlib import Path

from strop.store.atomic import write_bytes_atomically

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


def _find(job_path: Path, pattern: re.Pattern[str]) -> list[re.Match[str]]:
    names = sorted(path.name for path in job_path.glob("end*-member-*"))
    return [found for name in names if (found := pattern.fullmatch(name))]
