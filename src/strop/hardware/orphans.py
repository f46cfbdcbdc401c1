"""Children of this process, its own and adopted ones: buried, and asked where they hang.

A program that answers for others must see what they leave, and in a container, where it is process 1 itself,
nobody else would bury the dead. Linux; elsewhere nothing is adopted.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from collections.abc import Collection, Iterator
from contextlib import suppress
from pathlib import Path

from strop.hardware.identity import identify

_PR_SET_CHILD_SUBREAPER = 36  # From <linux/prctl.h>.


def adopt_orphans() -> None:
    """Become the parent of every descendant whose own parent dies."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def bury_orphans(own_pids: Collection[int]) -> int:
    """Wait for adopted children that have ended; return how many.

    `own_pids`: children that somebody here waits for. Their exit codes are not ours to take.
    """
    num_buried = 0
    for pid in _children():
        if pid not in own_pids:
            # Waits for nothing: of a child that runs the answer is 0.
            with suppress(ChildProcessError):
                num_buried += os.waitpid(pid, os.WNOHANG)[0] == pid
    return num_buried


def show_stacks_of_children(limit_s: float) -> list[int]:
    """Let every Python child write the stacks of its threads to its standard error, and end; return them.

    SIGABRT does that where PYTHONFAULTHANDLER is set, or `faulthandler.enable` was called. What was stopped
    is continued first. Waits until they have ended, at most `limit_s`.
    """
    running = [child for pid in _children() if (child := identify(pid)) is not None]
    for number in (signal.SIGCONT, signal.SIGABRT):
        for child in running:
            child.send(number)
    deadline = time.monotonic() + limit_s
    while any(child.is_alive() for child in running) and time.monotonic() < deadline:
        time.sleep(0.02)
    return [child.pid for child in running]


def end_descendants(limit_s: float) -> list[int]:
    """Kill everything that this process started and that they started; return what is left after `limit_s`.

    For a process that has adopted orphans: then whoever lost its own parent is among them.
    """
    deadline = time.monotonic() + limit_s
    while (found := _list_descendants()) and time.monotonic() < deadline:
        for pid in found:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        bury_orphans(())
        time.sleep(0.02)
    return found


def _list_descendants() -> list[int]:
    """Return all descendants; a number cannot be used again as long as its parent has not buried it."""
    found, new = [], list(_children())
    while new:
        found += new
        new = [child for pid in new for child in _children(pid)]
    return found


def _children(of: int | str = "self") -> Iterator[int]:
    for path in Path(f"/proc/{of}/task").glob("*/children"):
        with suppress(OSError):
            yield from map(int, path.read_text().split())
