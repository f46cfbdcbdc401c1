"""Letting others go first, also where Linux shares processors among sessions before processes."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

MAX_NICENESS = 19
_PROC = Path("/proc")


def step_back(pid: int, *, by: int) -> bool:
    """Let the process group that `pid` leads step behind us by a niceness, and its session if it leads one.

    A process's niceness counts only within its session where sessions share first: see sched(7), 'The
    autogroup feature'. Return False if nothing was done because Linux wants to be asked less often.
    """
    try:
        if os.getsid(pid) == pid:
            own = _session_niceness((_PROC / "self/autogroup").read_text())
            (_PROC / str(pid) / "autogroup").write_text(str(min(own + by, MAX_NICENESS)))
    except BlockingIOError:
        return False  # Ten a second are allowed.
    except (OSError, ValueError):
        pass  # Not this system.
    # Some container kernels know no priority of a group.
    with suppress(OSError):
        os.setpriority(os.PRIO_PGRP, pid, min(os.getpriority(os.PRIO_PROCESS, 0) + by, MAX_NICENESS))
    return True


def _session_niceness(autogroup: str) -> int:
    """Return the niceness in a text such as '/autogroup-12 nice 0'.

    It is empty for a session that is in no group of its own, as those that began before Linux was told
    to make groups, or in a container: such a session's share is the usual one.
    """
    words = autogroup.split()
    return int(words[-1]) if words else 0
