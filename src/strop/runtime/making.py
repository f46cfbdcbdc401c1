"""Makes the sandbox of an order: chooses its backend, image, limits and user."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from dataclasses import dataclass, replace

from strop.errors import SandboxRefused
from strop.runtime.agent_server import OPENHANDS, injected_mounts, is_agent_server
from strop.runtime.contract import FailureKind, Order, SandboxFailed, Slot
from strop.runtime.images import Images, engine_of
from strop.sandbox import IsolationLevel, Limits, SandboxSpec
from strop.sandbox.contract import MIB
from strop.sandbox.engine import ENGINES
from strop.sandbox.idmap import NUM_IDS
from strop.sandbox.local import LocalBackend, LocalSandbox

HOST_IMAGE = "host"
"""The name for no image: the programs see the node's /usr."""
_OUTPUT_BYTES = 4 * MIB
_FLOOD_BYTES = 1 << 30
_MAX_FILES = 200_000
_MAX_OPEN_FILES = 4096
_STARTS_PER_CPU = 4
"""Concurrent starts: making namespaces is mostly waiting for the kernel."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MakeSettings:
    """How a host makes sandboxes."""

    backends: tuple[str, ...] = ()
    """The allowed backends; the first that fits an image is taken. None: all that work there."""
    network: str = "none"
    registries: tuple[str, ...] = ()
    """Where clients' images may be pulled from, as HOST or HOST:PORT."""


class Maker:
    """Makes the sandboxes of one host, just as many at once as keep the processors busy."""

    def __init__(self, settings: MakeSettings, backends: tuple[str, ...]) -> None:
        """`backends` are those that work here, of the allowed ones."""
        self._settings = settings
        self._backends = backends
        self._images = Images(engine_of(backends), registries=settings.registries)
        self._turn = asyncio.Semaphore(_STARTS_PER_CPU * len(os.sched_getaffinity(0)))

    async def find_image(self, order: Order, say: Callable[[str], None]) -> str | None:
        """Return the id of an order's image, fetched if it is not here; None for none.

        Raises: SandboxFailed, also where no backend has images.
        """
        image = order.request.image
        if image == HOST_IMAGE:
            return None
        if not any(name in ENGINES for name in self._backends):
            raise SandboxFailed(
                FailureKind.IMAGE_ERROR,
                f"image {image!r} on a node that makes sandboxes by {', '.join(self._backends)}: without"
                f" podman or docker there is {HOST_IMAGE!r} alone",
            )
        # The id, because a name may be moved.
        return await self._images.fetch(image, order.request.image_pull_policy, say)

    async def make(self, order: Order, image: str | None) -> LocalSandbox:
        """Return a fresh sandbox. Raises: SandboxRefused, SandboxLost."""
        name = self._backends[0] if image is None else engine_of(self._backends)
        user = order.request.run_as_user
        has_user = name in ENGINES and os.geteuid() == 0 and user is not None and user < NUM_IDS
        spec = SandboxSpec(
            limits=limits_of(order.slot),
            image=image,
            user=user if has_user else None,
            has_workspace=name != "process",
            network=self._settings.network,
            min_level=IsolationLevel.RLIMIT,
        )
        if is_agent_server(order.request) and OPENHANDS.is_ready():
            spec = replace(spec, mounts=await asyncio.to_thread(injected_mounts, name, image))
        backend = LocalBackend(name)
        async with self._turn:
            try:
                return await backend.create(spec)
            except SandboxRefused as refusal:
                # Only a start tells whether the file system and kernel can map the image's users.
                if spec.user is None or refusal.kind != name:
                    raise
            return await backend.create(replace(spec, user=None))


def limits_of(slot: Slot) -> Limits:
    """Return the limits of a sandbox: its slot, and constants for the rest."""
    return Limits(
        memory_bytes=slot.memory_bytes,
        has_address_limit=False,
        max_processes=slot.processes,
        file_bytes=slot.disk_bytes,
        scratch_bytes=slot.disk_bytes,
        max_scratch_files=_MAX_FILES,
        max_open_files=_MAX_OPEN_FILES,
        cpus=slot.cpus,
        output_head_bytes=_OUTPUT_BYTES,
        output_tail_bytes=_OUTPUT_BYTES,
        flood_bytes=_FLOOD_BYTES,
    )
