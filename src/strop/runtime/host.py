"""A host: owns the sandboxes of one machine.

The service holds one itself, or asks Ray for one on each node (`cluster`). A host's sandboxes end with it,
however it ends (`sandbox.daemon`).
"""

from __future__ import annotations

import asyncio
import logging
import os
import platform
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from strop.errors import SandboxError, SandboxLost, SandboxRefused, given_of
from strop.hardware.ports import find_host_address
from strop.runtime.capacity import find_end, measure_capacity
from strop.runtime.contract import HostFacts, Order, SandboxReport, Slot
from strop.runtime.held import HeldSandbox
from strop.runtime.making import MakeSettings, Starter
from strop.runtime.ports import Gate
from strop.runtime.pulling import Images, engine_of
from strop.sandbox import IsolationLevel, SandboxSpec, make_backend
from strop.sandbox.choose import BACKENDS
from strop.sandbox.janitor import clear_abandoned

DRAIN_BEFORE_END_S = 120.0
_SETTLE_S = 0.02
"""Changes within this time are told together."""
_STOPS_AT_ONCE = 32
_NUM_TRIES = 3
_log = logging.getLogger("strop.runtime.host")


@dataclass(frozen=True, kw_only=True, slots=True)
class HostSettings:
    """Settings of a host."""

    make: MakeSettings
    """Without backends: all that can make a sandbox there."""
    address: str = ""
    """The one address of its machine on which its sandboxes listen; empty: that by which other nodes reach
    it."""
    registries: tuple[str, ...] = ()
    """Where clients' images may be pulled from, as HOST or HOST:PORT."""
    capacity: Slot | None = None
    """None: as `measure_capacity` finds."""


class Host(Protocol):
    """What the service asks of a host: a `SandboxHost`, here or on another node."""

    async def open(self) -> HostFacts:
        """Prepare it."""
        ...

    async def facts(self) -> HostFacts:
        """Return its facts."""
        ...

    async def start(self, order: Order, gate: Gate | None = None) -> str:
        """Begin to make a sandbox; return its address."""
        ...

    async def stop(self, runtime_id: str, cause: str) -> None:
        """End a sandbox."""
        ...

    async def pause(self, runtime_id: str) -> SandboxReport:
        """Freeze a sandbox."""
        ...

    async def resume(self, runtime_id: str) -> SandboxReport:
        """Continue a sandbox."""
        ...

    async def states(self, wait_s: float) -> list[SandboxReport]:
        """Return what has changed."""
        ...

    async def close(self) -> None:
        """End all sandboxes."""
        ...


class SandboxHost:
    """The sandboxes of this machine. `open` it once, then `close` it.

    Plain values go in and out, so that it can be an actor on another node.
    """

    def __init__(self, settings: HostSettings) -> None:
        self._settings = settings
        self._address = settings.address
        self._held: dict[str, HeldSandbox] = {}
        self._changed: set[str] = set()
        """Runtime ids of the sandboxes that changed since the last `states`."""
        self._news = asyncio.Event()
        self._counts: Counter[str] = Counter()
        self._stop_turn = asyncio.Semaphore(_STOPS_AT_ONCE)
        self._is_closing = False
        ends_in_s = find_end()
        # Read once, so that the time left does not jump with the wall clock.
        self._ends_at = None if ends_in_s is None else time.monotonic() + ends_in_s

    async def open(self) -> HostFacts:
        """Find the backends and clear what a killed host left; return the first facts.

        Raises: SandboxRefused if a wanted backend does not work here, or none does; ConfigError if there is
            no memory for sandboxes.
        """
        for line in await asyncio.to_thread(clear_abandoned):
            _log.warning("a host that was killed had left: %s", line)
        make = self._settings.make
        self.backends = await find_backends(make.backends, _log.warning)
        self._capacity = self._settings.capacity or measure_capacity()
        self._address = self._address or find_host_address(2, os.environ.get("GLOO_SOCKET_IFNAME"))
        images = Images(engine_of(self.backends), registries=self._settings.registries)
        self._starter = Starter(make, self.backends, images)
        return await self.facts()

    async def facts(self) -> HostFacts:
        """Return what the host has and how long it lasts."""
        left_s = None if self._ends_at is None else max(0.0, self._ends_at - time.monotonic())
        is_ending = self._is_closing or (left_s is not None and left_s < DRAIN_BEFORE_END_S)
        return HostFacts(
            name=platform.node(),
            pid=os.getpid(),
            capacity=self._capacity,
            backends=self.backends,
            is_draining=is_ending,
            ends_in_s=left_s,
            last_used_s={name: held.last_used_s for name, held in self._held.items()},
            metrics={name: float(n) for name, n in self._counts.items()} | self._starter.metrics(),
        )

    async def start(self, order: Order, gate: Gate | None = None) -> str:
        """Begin to make a sandbox; return its address, which is final. A repeated order changes nothing.

        `gate`: a port that is held for it already, in this process.

        Raises: CheckRefused if its address cannot be listened on.
        """
        held = self._held.get(order.runtime_id)
        if held is None:
            held = HeldSandbox(order, self._starter, partial(self._note_change, order.runtime_id))
            self._held[order.runtime_id] = held
            self._counts["node_orders_total"] += 1
            await held.start(self._address, gate)
        return held.url

    async def stop(self, runtime_id: str, cause: str) -> None:
        """End a sandbox; nothing is left of it. No-op if it is not here."""
        held = self._held.get(runtime_id)
        if held is not None:
            async with self._stop_turn:
                await held.stop(cause)
            self._counts["node_stops_total"] += 1

    async def pause(self, runtime_id: str) -> SandboxReport:
        """Freeze a sandbox. Raises: SandboxError if it is not ready or cannot be frozen."""
        return await self._operate(runtime_id, HeldSandbox.pause)

    async def resume(self, runtime_id: str) -> SandboxReport:
        """Continue a sandbox. Raises: SandboxError if it cannot be."""
        return await self._operate(runtime_id, HeldSandbox.resume)

    async def states(self, wait_s: float) -> list[SandboxReport]:
        """Return the reports of the sandboxes that changed since the last call, once there are some.

        Waits for `wait_s` at most. A sandbox that has ended is in one list, and forgotten.
        """
        try:
            async with asyncio.timeout(wait_s):
                await self._news.wait()
            await asyncio.sleep(_SETTLE_S)
        except TimeoutError:
            pass
        self._news.clear()
        changed, self._changed = self._changed, set()
        reports = [self._held[name].report() for name in changed if name in self._held]
        for name in changed:
            if name in self._held and self._held[name].is_over:
                del self._held[name]
        return reports

    async def close(self) -> None:
        """End all sandboxes. May be called twice."""
        self._is_closing = True
        await asyncio.gather(*(self.stop(name, "its host ends") for name in list(self._held)))
        if hasattr(self, "_starter"):
            await self._starter.close()
            await asyncio.to_thread(clear_abandoned)

    async def _operate(
        self, runtime_id: str, operation: Callable[[HeldSandbox], Awaitable[Any]]
    ) -> SandboxReport:
        held = self._held.get(runtime_id)
        if held is None:
            raise SandboxError(f"there is no sandbox {runtime_id!r} here", kind="state")
        await operation(held)
        return held.report()

    def _note_change(self, runtime_id: str) -> None:
        self._changed.add(runtime_id)
        self._news.set()


async def find_backends(wanted: tuple[str, ...], say: Callable[[str], None]) -> tuple[str, ...]:
    """Return the backends that work here. Each is tried by starting a sandbox.

    With none wanted, only those whose programs cannot read the service's keys.

    Raises: SandboxRefused if a wanted backend does not work, or none does; ConfigError for an unknown name.
    """
    working, refusals = [], []
    # Programs of `process` are this user, who may read the service's keys, unless it is root.
    shielding = BACKENDS if os.geteuid() == 0 else tuple(name for name in BACKENDS if name != "process")
    for name in wanted or shielding:
        try:
            await _try_backend(name)
            working.append(name)
        except SandboxRefused as refusal:
            if wanted:
                raise
            refusals.append(refusal)
            say(f"no sandboxes by {name}: {given_of(refusal)}")
    if not working:
        raise refusals[0]
    return tuple(working)


async def _try_backend(name: str) -> None:
    for num_left in reversed(range(_NUM_TRIES)):
        try:
            async with await make_backend(name).create(SandboxSpec(min_level=IsolationLevel.RLIMIT)):
                return
        except SandboxLost:
            # It was killed from outside, which says nothing about the backend.
            if not num_left:
                raise
