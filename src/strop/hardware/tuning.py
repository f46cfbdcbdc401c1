"""Settings of the C library and of OpenMP, for processes that compute on the CPU.

Freed memory is kept. A training step frees and takes the same gigabyte of activations again and again; by
default glibc gives it back to the kernel in between, which then zeroes every page anew: hundreds of thousands
of page faults per step. Kept memory stays part of this process; its peak does not grow.

Waiting threads spin for a bounded time. A thread of OpenMP that has done its share spins until its partner
has; where the partner waits for a core that another program has, spinning keeps that core from it. GNU's
OpenMP spins for 18 ms by default (300,000 turns of 60 ns on an Intel Xeon with two cores), many times the
length of most parallel loops. There a decode step of 64 rows in float32 by AVX2, alone by that of 300,000
turns and beside one busy loop by that of 10,000 alone:

    turns       0     1,000  4,000  10,000  20,000  50,000  300,000
    alone       1.10  1.06   1.02   0.97    0.96    1.00    1
    beside            1.84   2.00   2.29    2.68    3.87

Alone, medians of ten steps differ by 2 or 3 % by themselves; the loop takes the share of 2. The bound is what
costs 2 % of this where nothing is beside a run; `benchmarks/busy.py` measures a whole step with it.

Covered: Linux with glibc, and GNU's OpenMP, which PyTorch's builds bring. Elsewhere nothing changes.
"""

from __future__ import annotations

import ctypes
import os

SPIN_COUNT = 4000
"""Turns of GNU's waiting loop before a thread sleeps; a quarter of a millisecond."""
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_NEVER_BYTES = 2**31 - 1
_MAX_MMAP_THRESHOLD_BYTES = 32 * 2**20
"""glibc accepts no larger one: blocks above it always come from the kernel."""


def tune_process() -> None:
    """Bound spinning, keep freed heap memory, let PyTorch ask for huge pages. Before torch is imported.

    Child processes inherit the variables. What the user has set stays.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", str(SPIN_COUNT))
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return
    mallopt(_M_MMAP_THRESHOLD, _MAX_MMAP_THRESHOLD_BYTES)
    mallopt(_M_TRIM_THRESHOLD, _NEVER_BYTES)
