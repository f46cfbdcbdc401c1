"""Settings of the C library and of OpenMP, for processes that compute on the CPU.

Freed memory is kept. A training step frees and takes the same gigabyte of activations again and again; by
default glibc gives it back to the kernel in between, which then zeroes every page anew: hundreds of thousands
of page faults per step. Kept memory stays part of this process; its peak does not grow.

Waiting threads spin for a bounded time. A thread of OpenMP that has done its share spins until its partner
has; where the partner waits for a core that another program has, spinning keeps that core from it. GNU's
OpenMP counts turns of a loop around the instruction PAUSE, 300,000 by default. A turn takes 24 ns on an AMD
EPYC (Zen 3) and 60 ns on an Intel Xeon, so that is 7 or 18 ms, many times the length of most parallel loops.
Here a turn is timed, and the count set that takes `SPIN_S`. A decode step of 64 rows in float32 by AVX2 on
two cores, by that of 300,000 turns alone; beside one busy loop its share is 2:

    spinning, us            60    97   240   480   600   960  1,200  3,000
    Xeon, alone           1.06        1.02        0.97         0.96   1.00
    Xeon, beside a loop   1.84        2.00        2.29         2.68   3.87
    EPYC, alone                 1.13  1.09  1.03        1.06
    EPYC, beside a loop         2.08  2.45  2.95        3.86

Alone, medians of six to ten steps differ by 2 or 3 % by themselves. `benchmarks/busy.py` measures a step of
training.

Covered: Linux with glibc, and GNU's OpenMP on x86, which PyTorch's builds bring. Elsewhere nothing changes.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import mmap
import os
import platform
import sys
import timeit
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import copy_context
from functools import partial
from typing import TypeVar

GNU_SPIN_COUNT = 300_000
"""What GNU's OpenMP takes where neither GOMP_SPINCOUNT nor OMP_WAIT_POLICY is set (libgomp, env.c)."""
SPIN_S = 300e-6
"""How long a thread that waits spins before it sleeps."""
_UNTIMED_TURN_S = 60e-9
"""The longest that was seen: spinning stays bounded where a turn cannot be timed."""
_TIMED_TURNS, _TIMINGS = 1000, 5
_TURNS = bytes.fromhex("f390 48ffcf 75f9 c3")
"""x86-64: `1: pause; dec rdi; jnz 1b; ret`, a function of the number of turns."""
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_NEVER_BYTES = 2**31 - 1
_MAX_MMAP_THRESHOLD_BYTES = 32 * 2**20
"""glibc accepts no larger one: blocks above it always come from the kernel."""


def spin_count() -> int:
    """Return how many turns of GNU's waiting loop take `SPIN_S` on x86; elsewhere OpenMP's own number."""
    return max(1, round(SPIN_S / _time_turn())) if platform.machine() == "x86_64" else GNU_SPIN_COUNT


def _time_turn() -> float:
    """Return the seconds of a turn on x86, the shortest of a few: others may have the core meanwhile."""
    try:
        page = mmap.mmap(-1, mmap.PAGESIZE, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
    except OSError:
        # A system that executes nothing that was written.
        return _UNTIMED_TURN_S
    page.write(_TURNS)
    take_turns = ctypes.CFUNCTYPE(None, ctypes.c_uint64)(ctypes.addressof(ctypes.c_char.from_buffer(page)))
    timings = timeit.repeat(partial(take_turns, _TIMED_TURNS), number=1, repeat=_TIMINGS)
    return min(timings) / _TIMED_TURNS


def tune_process() -> None:
    """Bound spinning, keep freed heap memory, let PyTorch ask for huge pages. Before torch is imported.

    Child processes inherit the variables. What the user has set stays.
    """
    if {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"}.isdisjoint(os.environ):
        os.environ["GOMP_SPINCOUNT"] = str(spin_count())
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return
    mallopt(_M_MMAP_THRESHOLD, _MAX_MMAP_THRESHOLD_BYTES)
    mallopt(_M_TRIM_THRESHOLD, _NEVER_BYTES)


@contextmanager
def importing() -> Iterator[None]:
    """Import large modules without Python's cyclic garbage collector, which never walks over them later.

    Nothing of a module is garbage, and torch and transformers make a million objects. Walks over them were
    1.1 of 4.9 s of processor time of their import, and another 0.7 s at the interpreter's end (AMD EPYC).
    """
    num_before, was_enabled = len(sys.modules), gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if len(sys.modules) > num_before:
            gc.freeze()
            # Whoever thaws them meanwhile does not see the end.
            atexit.unregister(gc.freeze)
            atexit.register(gc.freeze)
        if was_enabled:
            gc.enable()


Answer = TypeVar("Answer")


async def compute_in_thread(work: Callable[[], Answer]) -> Answer:
    """Run work that computes with torch in a thread of its own, which ends with the work.

    Each thread that computes keeps its OpenMP threads for as long as it lives. While all of these together
    outnumber the cores, GNU's OpenMP spins for less than 3 us, whatever is set above. A pool's thread that
    had hashed tensors made every later step 7 to 9 % longer (AMD EPYC, Zen 4, two cores, bfloat16).
    """
    # Here: commands that compute nothing load no event loop.
    import asyncio

    executor = ThreadPoolExecutor(1, thread_name_prefix="strop-compute")
    try:
        return await asyncio.get_running_loop().run_in_executor(executor, copy_context().run, work)
    finally:
        # Not waited for: a caller that is cancelled goes on, and the thread ends after its work.
        executor.shutdown(wait=False)
