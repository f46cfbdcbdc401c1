"""The end of this process, which only strop decides, not the code that it runs for a user."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

end_process = os._exit
"""Ends this process at once, also inside `guarding_exit`."""


@contextmanager
def guarding_exit() -> Iterator[None]:
    """Make `os._exit` raise SystemExit in this process during the block, so that the caller's name is known.

    Otherwise a tool or a step that calls it would end a run with an exit code of its own choice. Forked
    processes end as they like. C code that exits is not seen here; a job's agent compares with the record.
    """
    own_pid = os.getpid()

    def refuse(status: int) -> None:
        if os.getpid() != own_pid:
            end_process(status)
        caller = sys._getframe(1)
        place = f"{os.path.basename(caller.f_code.co_filename)}:{caller.f_lineno}"
        raise SystemExit(f"os._exit({status}) ({place})")

    os._exit = refuse  # type: ignore[assignment]
    try:
        yield
    finally:
        os._exit = end_process
