"""Which attempt of a run may write: the highest that has begun.

A node that was lost may go on computing while its job already lives again elsewhere; locks of shared file
systems may not see it. So every attempt raises the fence to its own number, and one that finds a higher
number writes nothing more.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

from strop.errors import CheckRefused, explain_refusal
from strop.store.atomic import write_bytes_atomically

ATTEMPT_VARIABLE = "STROP_ATTEMPT"
"""Name of the attempt's folder, set by a launcher."""
NUMBER_VARIABLE = "STROP_ATTEMPT_NUMBER"
"""Its number, from 0, set by a launcher."""
_NAME = "fence.json"


def raise_fence(run_path: Path, number: int, attempt: str) -> None:
    """Claim a run for an attempt.

    Raises: CheckRefused if a later one has begun; StoreError if the disk fails.
    """
    require_unfenced(run_path, number)
    path = run_path / "attempts" / _NAME
    path.parent.mkdir(parents=True, exist_ok=True)
    write_bytes_atomically(path, json.dumps({"number": number, "attempt": attempt}).encode())


def read_fence(run_path: Path) -> tuple[int, str] | None:
    """Return number and name of the attempt that may write; None where no launcher has begun one."""
    try:
        content = json.loads((run_path / "attempts" / _NAME).read_bytes())
        return int(content["number"]), str(content["attempt"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def require_unfenced(run_path: Path, number: int | None = None) -> None:
    """Refuse to go on where a later attempt has begun. None: the attempt that a launcher said this is.

    Raises: CheckRefused.
    """
    mine = _own_number() if number is None else number
    found = read_fence(run_path)
    if found is None or mine is None or found[0] <= mine:
        return
    raise CheckRefused(
        explain_refusal(
            f"attempt {mine} of {run_path} was overtaken by attempt {found[0]} ({found[1]})",
            allowed="one living attempt; the later one goes on from the last checkpoint",
            next_step="nothing is to be done: this attempt ends, and wrote nothing since",
        )
    )


def _own_number() -> int | None:
    text = os.environ.get(NUMBER_VARIABLE, "")
    return int(text) if text.isdigit() else None
