"""Computing with torch beside the event loop.

Every thread that computes keeps a team of OpenMP's threads for as long as it lives, and while the threads of
all teams together are more than the cores, GNU's OpenMP spins for less than 3 us, whatever is set
(`hardware.tuning`). A pool's thread stays: tensors that were hashed in one, before the first step, made every
later step longer by 7 to 9 % (AMD EPYC, Zen 4, two cores, bfloat16). So this thread ends with its work.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from typing import TypeVar

Answer = TypeVar("Answer")


async def compute_in_thread(work: Callable[[], Answer]) -> Answer:
    """Run what computes with torch in a thread that ends with it, and its team with the thread."""
    executor = ThreadPoolExecutor(1, thread_name_prefix="strop-compute")
    try:
        return await asyncio.get_running_loop().run_in_executor(executor, copy_context().run, work)
    finally:
        # Not waited for: a caller that is cancelled goes on, and the thread ends after its work.
        executor.shutdown(wait=False)
