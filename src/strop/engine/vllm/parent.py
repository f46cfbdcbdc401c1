"""Processes that vLLM starts die with the process that started them."""

from __future__ import annotations

import ctypes
import signal
import sys


def follow_parent() -> None:
    """Have the kernel end this process with the one that started it; only on Linux."""
    if sys.platform == "linux":
        # 1 is PR_SET_PDEATHSIG.
        ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)
