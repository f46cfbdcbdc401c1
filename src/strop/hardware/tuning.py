"""Settings of the C library and of OpenMP, for processes that compute on the CPU.

Freed memory is kept. A training step frees and allocates the same gigabyte of activations again and again; by
default glibc returns it to the kernel in between, which zeroes every page again: hundreds of thousands of
page faults per step. Kept memory stays part of this process; its peak does not grow.

Waiting threads spin for a bounded time. An OpenMP thread that has finished its share spins until the others
have; if one of them waits for a core, spinning withholds that core. GNU's OpenMP counts turns of a loop
around the instruction PAUSE, 300,000 by default: 7 to 18 ms, many times the length of most parallel loops.
Here it is 10,000 turns. Beside one busy loop a decode step then takes 2.3 to 2.5 times as long instead of
3.9, where its fair share is 2; alone it takes up to 9 % more (EPYC and Xeon, two cores, in float32).
`benchmarks/busy.py` measures a training step.

Covered: Linux with glibc, and GNU's OpenMP on x86, which PyTorch's builds contain. Elsewhere nothing changes.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import os
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import copy_context
from typing import TypeVar

SPIN_COUNT = 10_000
"""Turns before a waiting thread sleeps: 240 us on an AMD EPYC (Zen 3), 600 us on an Intel Xeon."""
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_NEVER_BYTES = 2**31 - 1
_MAX_MMAP_THRESHOLD_BYTES = 32 * 2**20
"""glibc's maximum: larger blocks always come from the kernel."""


def tune_process() -> None:
    """Bound spinning, keep freed heap memory, let PyTorch use huge pages. Call it before importing torch.

    Child processes inherit the variables. The user's own values stay.
    """
    if {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"}.isdisjoint(os.environ):
        os.environ["GOMP_SPINCOUNT"] = str(SPIN_COUNT)
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return
    mallopt(_M_MMAP_THRESHOLD, _MAX_MMAP_THRESHOLD_BYTES)
    mallopt(_M_TRIM_THRESHOLD, _NEVER_BYTES)


@contextmanager
def importing() -> Iterator[None]:
    """Import large modules with the cyclic garbage collector off, and freeze their objects.

    Modules are no garbage, and torch and transformers create a million objects. Collections took 1.1 of 4.9 s
    of CPU time of their import, and another 0.7 s at the interpreter's end (AMD EPYC).
    """
    num_before, was_enabled = len(sys.modules), gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if len(sys.modules) > num_before:
            gc.freeze()
            # Once, and again at exit, in case something unfreezes them meanwhile.
            atexit.unregister(gc.freeze)
            atexit.register(gc.freeze)
        if was_enabled:
            gc.enable()


Answer = TypeVar("Answer")


async def compute_in_thread(work: Callable[[], Answer]) -> Answer:
    """Run work that computes with torch in a new thread, which ends with the work.

    Each computing thread keeps its OpenMP threads until it ends. While these outnumber the cores, GNU's
    OpenMP spins for less than 3 us, whatever is set above. A pool thread that had hashed tensors made every
    later step 7 to 9 % longer (AMD EPYC, Zen 4, two cores, bfloat16).
    """
    # Imported here, because commands that compute nothing need no event loop.
    import asyncio

    executor = ThreadPoolExecutor(1, thread_name_prefix="strop-compute")
    try:
        return await asyncio.get_running_loop().run_in_executor(executor, copy_context().run, work)
    finally:
        # Without waiting, so that a cancelled caller goes on; the thread ends after its work.
        executor.shutdown(wait=False)
