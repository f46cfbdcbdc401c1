"""A host: owns the sandboxes of one machine.

The service holds one itself, or asks Ray for one on each node (`cluster`). A host's sandboxes end with it,
however it ends (`sandbox.daemon`).
"""

from __future__ import annotations

import asyncio
import logging
import os
import platform
import socket
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from strop.errors import SandboxError, SandboxLost, SandboxRefused, given_of
from strop.hardware.ports import find_host_address
from strop.runtime.capacity import find_end, measure_capacity
from strop.runtime.contract import HostFacts, Order, SandboxReport, Slot
from strop.runtime.gate import Gate
from strop.runtime.held import HeldSandbox
from strop.runtime.making import Maker, MakeSettings
from strop.sandbox import IsolationLevel, SandboxSpec, make_backend
from strop.sandbox.choose import BACKENDS
from strop.sandbox.janitor import clear_abandoned

_SETTLE_S = 0.02
"""Changes within this time are told together."""
_STOPS_AT_ONCE = 32
_NUM_TRIES = 3
_log = logging.getLogger("strop.runtime.host")


class HostFailed(Exception):
    """A host did not answer; it, or its machine, is gone."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HostSettings:
    """Settings of a host."""

    make: MakeSettings
    """Without backends: all that can make a sandbox there."""
    capacity: Slot | None = None
    """None: as `measure_capacity` finds."""


class Host(Protocol):
    """What the service asks of a host: a `SandboxHost`, here or on another node. Raises: HostFailed."""

    async def start(self, order: Order) -> None:
        """Begin to make a sandbox."""
        ...

    async def connect(self, runtime_id: str) -> socket.socket:
        """Return a connection to the server in a sandbox."""
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

    Plain values go in and out, except for `connect`, so that it can be an actor on another node.
    """

    def __init__(self, settings: HostSettings) -> None:
        self._settings = settings
        self._held: dict[str, HeldSandbox] = {}
        self._gates: dict[str, Gate] = {}
        self._changed: set[str] = set()
        """Runtime ids of the sandboxes that changed since the last `states`."""
        self._news = asyncio.Event()
        self._stop_turn = asyncio.Semaphore(_STOPS_AT_ONCE)

    async def open(self) -> HostFacts:
        """Find the backends and clear what a killed host left; return the facts.

        Raises: SandboxRefused if a wanted backend does not work here, or none does; ConfigError if there is
            no memory for sandboxes.
        """
        for line in await asyncio.to_thread(clear_abandoned):
            _log.warning("a host that was killed had left: %s", line)
        backends = await find_backends(self._settings.make.backends, _log.warning)
        self._maker = Maker(self._settings.make, backends)
        return HostFacts(
            name=platform.node(),
            pid=os.getpid(),
            capacity=self._settings.capacity or measure_capacity(),
            backends=backends,
            ends_in_s=find_end(),
        )

    async def start(self, order: Order) -> None:
        """Begin to make a sandbox. A repeated order changes nothing."""
        if order.runtime_id not in self._held:
            changed = partial(self._note_change, order.runtime_id)
            self._held[order.runtime_id] = HeldSandbox(order, self._maker, changed)

    async def listen(self, runtime_id: str) -> str:
        """Hold a port for a sandbox, by which other nodes reach its server; return its address.

        Raises: CheckRefused if none can be held.
        """
        address = find_host_address(2, os.environ.get("GLOO_SOCKET_IFNAME"))
        self._gates[runtime_id] = gate = Gate(partial(self.connect, runtime_id), address)
        await gate.open()
        return gate.url

    async def connect(self, runtime_id: str) -> socket.socket:
        """Return a connection to the server in a sandbox. Raises: ConnectionError."""
        held = self._held.get(runtime_id)
        if held is None:
            raise ConnectionError("the sandbox has ended")
        return await held.connect()

    async def stop(self, runtime_id: str, cause: str) -> None:
        """End a sandbox; nothing is left of it. No-op if it is not here."""
        if (gate := self._gates.pop(runtime_id, None)) is not None:
            await gate.close()
        if (held := self._held.get(runtime_id)) is not None:
            async with self._stop_turn:
                await held.stop(cause)

    async def pause(self, runtime_id: str) -> SandboxReport:
        """Freeze a sandbox. Raises: SandboxError if it is not ready or cannot be frozen."""
        held = self._find(runtime_id)
        await held.pause()
        return held.report()

    async def resume(self, runtime_id: str) -> SandboxReport:
        """Continue a sandbox. Raises: SandboxError if it cannot be."""
        held = self._find(runtime_id)
        await held.resume()
        return held.report()

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
        held = [self._held[name] for name in changed if name in self._held]
        for one in held:
            if one.is_over:
                del self._held[one.order.runtime_id]
        return [one.report() for one in held]

    async def close(self) -> None:
        """End all sandboxes. May be called twice."""
        await asyncio.gather(*(self.stop(name, "its host ends") for name in list(self._held)))
        await asyncio.to_thread(clear_abandoned)

    def _find(self, runtime_id: str) -> HeldSandbox:
        if runtime_id not in self._held:
            raise SandboxError(f"there is no sandbox {runtime_id!r} here", kind="state")
        return self._held[runtime_id]

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
