"""The fence of a run: only the attempt with the highest number may write.

The hole that Ray and the schedulers leave: each knows the nodes of its own cluster and job only. A lost node
may go on computing after its job was requeued elsewhere, with another Ray cluster on the same shared disk,
whose locks may not exclude it. So every attempt makes an empty file that has its number and name, and stops
writing when it sees a higher one.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from strop.errors import CheckRefused, StoreError
from strop.io.atomic import explain_write_failure, make_directory

ATTEMPT_VARIABLE = "STROP_ATTEMPT"
"""Name of the attempt's folder, set by a launcher."""
NUMBER_VARIABLE = "STROP_ATTEMPT_NUMBER"
"""Its number, from 0, set by a launcher."""
GRACE_VARIABLE = "STROP_TERM_GRACE_S"
"""Seconds that a role has from SIGTERM until it is killed, set by a launcher."""
RAY_ADDRESS = "RAY_ADDRESS"
"""Ray's own: host and port of the head of a job's Ray cluster, set by a launcher on every node."""
RAY_TOKEN_PATH = "RAY_AUTH_TOKEN_PATH"
"""Ray's own: the file with the token that every connection of that cluster carries, likewise."""
_MARK = re.compile(r"fence-(\d+)-([^/]+)")


def raise_fence(run_path: Path, number: int, attempt: str) -> None:
    """Claim a run for an attempt.

    Raises: CheckRefused if a later attempt has begun; StoreError if the disk fails.
    """
    require_unfenced(run_path, number)
    path = run_path / "attempts" / f"fence-{number}-{attempt}"
    make_directory(path.parent)
    try:
        path.touch()
    except OSError as error:
        raise explain_write_failure(error, path) from error
    # The disk may have answered late: an attempt that began meanwhile must not be disturbed.
    require_unfenced(run_path, number)


def read_fence(run_path: Path) -> tuple[int, str] | None:
    """Return number and name of the attempt that may write; None if no launcher has begun one.

    Raises: StoreError if the run directory does not answer.
    """
    folder = run_path / "attempts"
    try:
        matches = filter(None, map(_MARK.fullmatch, os.listdir(folder)))
        return max(((int(match[1]), match[2]) for match in matches), default=None)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise StoreError(
            f"{folder} cannot be listed ({error.strerror})",
            allowed="a run directory that answers: it says whether a later attempt has begun",
            next_step="check the disk or the file server; the run goes on from its last checkpoint",
        ) from error


def require_unfenced(run_path: Path, number: int | None = None) -> None:
    """Refuse to go on where a later attempt has begun. None: the attempt number that a launcher set.

    Raises: CheckRefused; StoreError if the run directory does not answer.
    """
    text = os.environ.get(NUMBER_VARIABLE, "")
    mine = int(text) if number is None and text.isdigit() else number
    found = read_fence(run_path)
    if found is None or mine is None or found[0] <= mine:
        return
    raise CheckRefused(
        f"attempt {mine} of {run_path} was overtaken by attempt {found[0]} ({found[1]})",
        allowed="one living attempt; the later one goes on from the last checkpoint",
        next_step="nothing is to be done: this attempt ends, and wrote nothing since",
    )
