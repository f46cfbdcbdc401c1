"""Makes the sandbox of an order: fetches its image, chooses backend and limits, and serves its address.

Some sandboxes are made ahead of their orders (`warm`).
"""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from strop.errors import ConfigError, SandboxError, SandboxRefused
from strop.runtime.contract import FailureKind, Order, Slot, StartRequest
from strop.runtime.planes import Plane, SandboxFailed
from strop.runtime.pulling import Images
from strop.runtime.server_plane import (
    OPENHANDS,
    ServerPlane,
    injected_argv,
    injected_mounts,
    is_agent_server,
)
from strop.sandbox import IsolationLevel, Limits, Mount, SandboxSpec
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
_STARTS, _ENGINE_STARTS = 8, 2
"""Concurrent starts for each processor. Making namespaces is mostly waiting for the kernel; a container is
work for its engine."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MakeSettings:
    """How a host makes sandboxes."""

    backends: tuple[str, ...] = ()
    """The allowed backends; the first that fits an image is taken. None: all that work there."""
    network: str = "none"
    image_dirs: tuple[str, ...] = ()
    """Real paths of the folders with the directory trees that clients may name as images."""
    warm: Mapping[str, int] = field(default_factory=dict)
    """How many sandboxes of an image are kept ready, once one has been started."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Kind:
    """The properties of a sandbox. Two sandboxes of equal kind are interchangeable."""

    backend: str
    image: str | None
    limits: Limits
    user: int | None
    """A hint: it is made without where this host cannot provide that user."""
    has_workspace: bool
    network: str
    mounts: tuple[Mount, ...] = ()


class Maker:
    """Makes sandboxes, just as many at once as keep the processors busy."""

    def __init__(self, settings: MakeSettings, backends: tuple[str, ...]) -> None:
        """`backends` are those that work here, of the allowed ones."""
        self._settings = settings
        self._backends = backends
        num_cpus = len(os.sched_getaffinity(0))
        self._turns = {
            name: asyncio.Semaphore((_ENGINE_STARTS if name in ENGINES else _STARTS) * num_cpus)
            for name in backends
        }
        self._spare: dict[Kind, list[LocalSandbox]] = {}
        self._filling: dict[Kind, asyncio.Task[None]] = {}
        self.num_warm = 0
        """Starts that were served by a sandbox made ahead."""

    def kind_of(self, order: Order) -> Kind:
        """Return the kind of sandbox that an order needs.

        Raises: ConfigError if no backend here has such images; SandboxFailed for a path that is no client's
            image.
        """
        request = order.request
        names = self._backends_for(request)
        user = request.run_as_user
        has_user = names[0] in ENGINES and os.geteuid() == 0 and user is not None and user < NUM_IDS
        return Kind(
            backend=names[0],
            image=None if request.image == HOST_IMAGE else self._find_image(request.image),
            limits=limits_of(order.slot),
            user=user if has_user else None,
            has_workspace=names[0] != "process",
            network=self._settings.network,
        )

    def _backends_for(self, request: StartRequest) -> tuple[str, ...]:
        allowed = self._backends
        if request.image == HOST_IMAGE:
            fitting = allowed
        else:
            # One engine only: images are in the store of the node's first engine.
            fitting = tuple(name for name in allowed if name in ENGINES)[:1]
        if not fitting:
            raise ConfigError(
                f"image {request.image!r} on a node that makes sandboxes by {', '.join(allowed)}",
                allowed=f"{HOST_IMAGE!r}, whose programs are the node's own",
                next_step="name it, or start the node with --backend podman, or docker",
            )
        return fitting

    def _find_image(self, image: str) -> str:
        """Return an image's name, or the real path of a tree below one of the operator's folders."""
        if not image.startswith("/"):
            return image
        with suppress(OSError):
            path = os.path.realpath(image, strict=True)
            if any(Path(path).parent.is_relative_to(folder) for folder in self._settings.image_dirs):
                return path
        raise SandboxFailed(
            FailureKind.IMAGE_ERROR, f"{image} is in no folder of images that this node lists (--image-dir)"
        )

    async def make(self, kind: Kind, num_warm: int = 0) -> LocalSandbox:
        """Return a fresh sandbox, made ahead if there is one, and keep `num_warm` more of its kind ready.

        Raises: SandboxRefused.
        """
        while spares := self._spare.get(kind):
            sandbox = spares.pop()
            if not sandbox.is_lost:
                self.num_warm += 1
                break
        else:
            sandbox = await self._make_new(kind)
        if num_warm and kind not in self._filling:
            task = asyncio.create_task(self._fill(kind, num_warm))
            self._filling[kind] = task
            task.add_done_callback(lambda _: self._filling.pop(kind, None))
        return sandbox

    async def close(self) -> None:
        """Stop the sandboxes that were made ahead."""
        for task in list(self._filling.values()):
            task.cancel()
        await asyncio.gather(*self._filling.values(), return_exceptions=True)
        sandboxes = [sandbox for spares in self._spare.values() for sandbox in spares]
        self._spare.clear()
        await asyncio.gather(*(sandbox.stop() for sandbox in sandboxes), return_exceptions=True)

    @property
    def num_spare(self) -> int:
        """Sandboxes that were made ahead and wait for an order."""
        return sum(map(len, self._spare.values()))

    async def _fill(self, kind: Kind, wanted: int) -> None:
        spares = self._spare.setdefault(kind, [])
        # A refusal may be temporary; the next start tries again.
        with suppress(SandboxError):
            while len(spares) < wanted:
                spares.append(await self._make_new(kind))

    async def _make_new(self, kind: Kind) -> LocalSandbox:
        async with self._turns[kind.backend]:
            spec = SandboxSpec(
                limits=kind.limits,
                image=kind.image,
                user=kind.user,
                mounts=kind.mounts,
                has_workspace=kind.has_workspace,
                network=kind.network,
                min_level=IsolationLevel.RLIMIT,
            )
            backend = LocalBackend(kind.backend)
            try:
                return await backend.create(spec)
            except SandboxRefused as refusal:
                # Only a start tells whether the file system and kernel can map the image's users.
                if spec.user is None or refusal.kind != kind.backend:
                    raise
            return await backend.create(replace(spec, user=None))


@dataclass(frozen=True, kw_only=True, slots=True)
class Made:
    """A sandbox and the plane that serves its address."""

    sandbox: LocalSandbox
    plane: Plane


class Starter:
    """Starts sandboxes on a node: fetches the image, makes the sandbox and starts its plane."""

    def __init__(self, settings: MakeSettings, backends: tuple[str, ...], images: Images) -> None:
        self._maker = Maker(settings, backends)
        self._warm = settings.warm
        self._images = images
        self._ids: dict[str, str] = {}
        """Ids of images by name, as last fetched. A sandbox is made from the id: a name may be moved."""
        self._counts: Counter[str] = Counter()

    async def fetch_image(self, order: Order, say: Callable[[str], None]) -> None:
        """Fetch the image of an order if it is not here.

        Raises: SandboxFailed; ConfigError if no backend has such images; SandboxRefused as `Maker.kind_of`.
        """
        kind = self._maker.kind_of(order)
        if kind.image is not None and not kind.image.startswith("/"):
            policy = order.request.image_pull_policy
            self._ids[kind.image] = await self._images.fetch(kind.image, policy, say)

    async def make(self, order: Order, note_use: Callable[[], None]) -> Made:
        """Make the sandbox and start its plane. Raises: SandboxFailed, StropError."""
        kind = self._maker.kind_of(order)
        kind = replace(kind, image=self._ids.get(kind.image, kind.image) if kind.image else None)
        if is_agent_server(order.request) and OPENHANDS.is_ready():
            kind = replace(kind, mounts=await asyncio.to_thread(injected_mounts, kind.backend, kind.image))
        sandbox = await self._maker.make(kind, self._warm.get(order.request.image, 0))
        try:
            plane = await self._serve(order, sandbox, note_use)
        except (SandboxFailed, SandboxError):
            await sandbox.stop()
            raise
        self._counts[f'node_starts_total{{backend="{kind.backend}"}}'] += 1
        return Made(sandbox=sandbox, plane=plane)

    async def _serve(self, order: Order, sandbox: LocalSandbox, note_use: Callable[[], None]) -> Plane:
        request = order.request
        argv, env = list(request.command), dict[str, str]()
        if is_agent_server(order.request) and not await _has_program(sandbox, request.command[0]):
            if not OPENHANDS.is_ready():
                raise SandboxFailed(
                    FailureKind.IMAGE_ERROR,
                    f"the image has no {request.command[0]}, and no agent server can be injected: run `make"
                    " openhands-deps` on the node",
                )
            argv, env = injected_argv(request, sandbox.find_mount)
        return await ServerPlane.start(sandbox, order, argv, env, note_use)

    def metrics(self) -> dict[str, float]:
        """Return the counters of starts, image pulls and sandboxes made ahead."""
        return {
            **self._counts,
            "node_image_pulls_total": float(self._images.num_pulls),
            "node_warm_hits_total": float(self._maker.num_warm),
            "node_warm_sandboxes": float(self._maker.num_spare),
        }

    async def close(self) -> None:
        """Cancel image pulls and stop the sandboxes that were made ahead."""
        await self._images.close()
        await self._maker.close()


async def _has_program(sandbox: LocalSandbox, path: str) -> bool:
    """Whether a program is in a sandbox; True for a bare name, which the sandbox's PATH resolves."""
    if not path.startswith("/"):
        return True
    try:
        await sandbox.read(path, max_bytes=0)
    except SandboxError as error:
        # With any other error the file exists.
        return error.kind != "missing"
    return True


def limits_of(slot: Slot) -> Limits:
    """Return the limits of a sandbox whose client names none: its slot, and defaults for the rest."""
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
