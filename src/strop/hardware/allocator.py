"""Telling the C library to keep freed memory, for processes that compute on the CPU.

A training step frees and takes the same gigabyte of activations again and again. By default glibc
gives it back to the kernel in between, which then zeroes every page anew: hundreds of thousands of
page faults per step. Kept memory stays part of this process; its peak does not grow.

Covered: Linux with glibc. Elsewhere nothing is changed.
"""

from __future__ import annotations

import ctypes
import os

_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_NEVER_BYTES = 2**31 - 1
_MAX_MMAP_THRESHOLD_BYTES = 32 * 2**20
"""glibc accepts no larger one: blocks above it always come from the kernel."""


def keep_freed_memory() -> bool:
    """Keep freed heap memory, and let PyTorch ask for huge pages. Call it before torch is imported.

    Returns whether the C library took the setting.
    """
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    took_mmap = mallopt(_M_MMAP_THRESHOLD, _MAX_MMAP_THRESHOLD_BYTES)
    return bool(took_mmap and mallopt(_M_TRIM_THRESHOLD, _NEVER_BYTES))
