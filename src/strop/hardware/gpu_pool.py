"""A pool of GPUs for attempts whose sandboxes compute on them.

Requests are served strictly in order, so an attempt that needs two GPUs is not starved by those that need
one. Fractional requests share a GPU. Usable from several event loops.
"""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Self

from strop.errors import CheckRefused
from strop.hardware.visible_devices import SANDBOX_DEVICES, count_gpus


def share_of(num_gpus: float) -> Fraction:
    """Return the share of an attempt: whole GPUs, or 1/n of a GPU that n attempts share."""
    return Fraction(int(num_gpus)) if num_gpus >= 1 else Fraction(1, math.floor(1 / num_gpus + 1e-9))


@dataclass(kw_only=True, slots=True)
class GpuLease:
    """The GPUs of an attempt, until `release` or the end of its `with` block."""

    pool: GpuPool
    share: Fraction
    names: tuple[str, ...]
    waited_s: float

    @property
    def metrics(self) -> dict[str, float]:
        """Metrics of the attempt; none without GPUs."""
        return {"gpu_wait_s": self.waited_s} if self.share else {}

    def __enter__(self) -> Self:
        """Return the lease."""
        return self

    def __exit__(self, *error: object) -> None:
        """Release it."""
        self.release()

    def release(self) -> None:
        """Return the GPUs to the pool. May be called twice."""
        names, self.names = self.names, ()
        self.pool.give_back(names, self.share)


@dataclass(kw_only=True, slots=True, eq=False)
class _Waiter:
    share: Fraction
    loop: asyncio.AbstractEventLoop
    is_served: asyncio.Event = field(default_factory=asyncio.Event)
    names: tuple[str, ...] = ()


class GpuPool:
    """GPUs or MIG slices, and the queue of waiting requests."""

    def __init__(self, names: Sequence[str], *, has_slices: bool = False) -> None:
        """`names` are as in CUDA_VISIBLE_DEVICES."""
        self._free = dict.fromkeys(names, Fraction(1))
        self._has_slices = has_slices
        self._lock = threading.Lock()
        self._waiting: deque[_Waiter] = deque()

    @property
    def num_waiting(self) -> int:
        """Number of waiting requests."""
        return len(self._waiting)

    def require(self, num_gpus: float) -> None:
        """Refuse a request that can never be served. Raises: CheckRefused."""
        needed = math.ceil(num_gpus)
        if needed > len(self._free):
            raise CheckRefused(
                f"{count_gpus(needed)} asked for by each attempt, and this process has for sandboxes"
                f" {', '.join(self._free) or 'none'}",
                allowed="as many GPUs for sandboxes as one attempt needs",
                next_step="give the run job.env_gpus; outside of a run, name GPUs that nothing else uses:"
                f" {SANDBOX_DEVICES}=0,1",
            )
        if needed > 1 and self._has_slices:
            raise CheckRefused(
                f"{count_gpus(needed)} asked for by each attempt, and sandboxes have MIG slices here",
                allowed="one slice, or a part of one: a program sees one at most",
                next_step="set task.sandbox_gpus to 1 or less, or ask for whole GPUs",
            )

    async def lease(self, num_gpus: float, *, limit_s: float) -> GpuLease:
        """Return GPUs once they are free; earlier requests come first.

        Raises: CheckRefused as `require` does; TimeoutError after `limit_s`.
        """
        self.require(num_gpus)
        began_at = time.monotonic()
        waiter = _Waiter(share=share_of(num_gpus), loop=asyncio.get_running_loop())
        with self._lock:
            self._waiting.append(waiter)
            self._serve()
        is_served = False
        try:
            async with asyncio.timeout(limit_s):
                is_served = await waiter.is_served.wait()
        finally:
            if not is_served:
                with self._lock:
                    if waiter in self._waiting:
                        self._waiting.remove(waiter)
                    # It may have been served just now, or have blocked smaller requests behind it.
                    self._put_back(waiter.names, waiter.share)
        waited_s = time.monotonic() - began_at
        return GpuLease(pool=self, share=waiter.share, names=waiter.names, waited_s=waited_s)

    def give_back(self, names: Sequence[str], share: Fraction) -> None:
        """Return GPUs to the pool, and serve waiting requests."""
        with self._lock:
            self._put_back(names, share)

    def _put_back(self, names: Sequence[str], share: Fraction) -> None:
        for name in names:
            self._free[name] += min(share, Fraction(1))
        self._serve()

    def _serve(self) -> None:
        while self._waiting and (names := self._take(self._waiting[0].share)):
            waiter = self._waiting.popleft()
            waiter.names = names
            waiter.loop.call_soon_threadsafe(waiter.is_served.set)

    def _take(self, share: Fraction) -> tuple[str, ...]:
        """Take a share of the emptiest GPUs and return them; none if there are too few."""
        part = min(share, Fraction(1))
        fitting = [name for name, free in self._free.items() if free >= part]
        chosen = sorted(fitting, key=lambda name: -self._free[name])[: math.ceil(share)]
        if len(chosen) < math.ceil(share):
            return ()
        for name in chosen:
            self._free[name] -= part
        return tuple(chosen)
