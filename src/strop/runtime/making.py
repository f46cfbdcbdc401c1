"""From an order to a sandbox: its image, its backend, its limits, and who serves its address.

Some sandboxes are made before they are asked for.
"""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial

from strop.errors import ConfigError, SandboxError, SandboxRefused
from strop.runtime.contract import FailureKind, NodeOrder, Slot, StartRequest
from strop.runtime.owner_plane import OwnerPlane
from strop.runtime.planes import DataPlane, Plane, SandboxFailed, is_agent_server
from strop.runtime.pulling import Images
from strop.runtime.server_plane import ServerPlane, find_working_dir, injected_argv, injected_mounts
from strop.runtime.snapshots import KeptSnapshots
from strop.runtime.workspace import Workspace
from strop.sandbox import IsolationLevel, Limits, Mount, SandboxSpec
from strop.sandbox.allowlist import parse_network
from strop.sandbox.choose import choose_among
from strop.sandbox.contract import MIB
from strop.sandbox.engine import ENGINES
from strop.sandbox.idmap import NUM_IDS
from strop.sandbox.local import LocalBackend, LocalSandbox
from strop.sandbox.local_snapshot import LocalSnapshot

HOST_IMAGE = "host"
"""What a client names to get no image: its programs see the node's /usr."""
_OUTPUT_BYTES = 4 * MIB
_FLOOD_BYTES = 1 << 30
_MAX_FILES = 200_000
_MAX_OPEN_FILES = 4096
_STARTS, _ENGINE_STARTS = 8, 2
"""At once, for each processor. Most of the time of making namespaces is waiting for the kernel; a container's
is work of its engine."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MakeSettings:
    """How sandboxes are made on a node."""

    backends: tuple[str, ...]
    """Those that may be used, the first that fits an image first."""
    network: str = "none"
    warm: Mapping[str, int] = field(default_factory=dict)
    """How many sandboxes of an image are kept ready, from its first start on."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Kind:
    """What is equal in two sandboxes that can be exchanged for each other."""

    backend: str
    image: str | None
    limits: Limits
    user: int | None
    has_workspace: bool
    network: str
    min_level: IsolationLevel
    mounts: tuple[Mount, ...] = ()
    module: str | None = None
    """What it is prepared for; see `LocalBackend.create_prepared`."""
    is_user_hint: bool = False
    """Whether it is made without `user` where this host cannot give that."""


class Maker:
    """Makes sandboxes, as many at once as keep the processors busy."""

    def __init__(self, settings: MakeSettings) -> None:
        self._settings = settings
        num_cpus = len(os.sched_getaffinity(0))
        self._turns = {
            name: asyncio.Semaphore((_ENGINE_STARTS if name in ENGINES else _STARTS) * num_cpus)
            for name in settings.backends
        }
        self._spare: dict[Kind, list[LocalSandbox]] = {}
        self._filling: dict[Kind, asyncio.Task[None]] = {}
        self.num_warm = 0
        """Sandboxes that were there before they were asked for."""

    async def kind_of(
        self, order: NodeOrder, mounts: Sequence[Mount] = (), snapshot: LocalSnapshot | None = None
    ) -> Kind:
        """Return what an order needs; one that begins with a snapshot, the backend of that.

        Raises: ConfigError if no backend here has such images; SandboxRefused with kind network, or for a
        level that none of them reaches.
        """
        request, terms = order.request, order.request.sandbox
        names = self._backends_for(request)
        if snapshot is not None and snapshot.backend in names:
            names = (snapshot.backend,)
        kind = Kind(
            backend=names[0],
            image=None if request.image == HOST_IMAGE else request.image,
            limits=limits_of(order.slot),
            user=_user_of(request, names[0]),
            is_user_hint=True,
            has_workspace=names[0] != "process",
            network=self._settings.network,
            min_level=IsolationLevel.RLIMIT,
            mounts=tuple(mounts),
        )
        if terms is None:
            return kind
        _require_network(kind.network, terms.network)
        chosen = await choose_among(names, terms.min_level)
        return replace(
            kind,
            backend=chosen.name,
            limits=replace(terms.limits, cpus=order.slot.cpus),
            user=terms.user,
            is_user_hint=False,
            has_workspace=terms.has_workspace,
            network=terms.network,
            min_level=terms.min_level,
            module=terms.module,
        )

    def _backends_for(self, request: StartRequest) -> tuple[str, ...]:
        allowed = self._settings.backends
        if request.image == HOST_IMAGE:
            fitting = allowed
        else:
            # Those of one store, which is the node's.
            fitting = tuple(name for name in allowed if name in ENGINES)[:1]
        if not fitting:
            raise ConfigError(
                f"image {request.image!r} on a node that makes sandboxes by {', '.join(allowed)}",
                allowed=f"{HOST_IMAGE!r}, whose programs are the node's own",
                next_step="name it, or start the node with --backend podman, or docker",
            )
        return fitting

    async def make(
        self, kind: Kind, num_warm: int = 0, snapshot: LocalSnapshot | None = None
    ) -> LocalSandbox:
        """Return a fresh sandbox; one that was made ahead, if there is one. Keeps `num_warm` more ready.

        One that begins with a snapshot is made for itself.

        Raises: SandboxRefused.
        """
        if snapshot is not None:
            return await self._make_new(kind, snapshot)
        while spare := self._spare.get(kind):
            made = spare.pop()
            if not made.is_lost:
                self.num_warm += 1
                break
        else:
            made = await self._make_new(kind)
        if num_warm and kind not in self._filling:
            task = asyncio.create_task(self._fill(kind, num_warm))
            self._filling[kind] = task
            task.add_done_callback(lambda _: self._filling.pop(kind, None))
        return made

    async def close(self) -> None:
        """End all that was made ahead."""
        for task in list(self._filling.values()):
            task.cancel()
        await asyncio.gather(*self._filling.values(), return_exceptions=True)
        spares = [one for spares in self._spare.values() for one in spares]
        self._spare.clear()
        await asyncio.gather(*(one.stop() for one in spares), return_exceptions=True)

    @property
    def num_spare(self) -> int:
        """Sandboxes that are ready and not yet given out."""
        return sum(map(len, self._spare.values()))

    async def _fill(self, kind: Kind, wanted: int) -> None:
        spares = self._spare.setdefault(kind, [])
        # What the host refuses now it may give later, to the next start.
        with suppress(SandboxError):
            while len(spares) < wanted:
                spares.append(await self._make_new(kind))

    async def _make_new(self, kind: Kind, snapshot: LocalSnapshot | None = None) -> LocalSandbox:
        async with self._turns[kind.backend]:
            spec = SandboxSpec(
                limits=kind.limits,
                image=kind.image,
                user=kind.user,
                mounts=kind.mounts,
                has_workspace=kind.has_workspace,
                network=kind.network,
                min_level=kind.min_level,
                snapshot=snapshot,
            )
            backend = LocalBackend(kind.backend)
            if kind.module is not None:
                return await backend.create_prepared(spec, kind.module)
            try:
                return await backend.create(spec)
            except SandboxRefused as refusal:
                # Which file systems and kernels can show an image to its own users, only a start tells.
                if spec.user is None or not kind.is_user_hint or refusal.kind != kind.backend:
                    raise
            return await backend.create(replace(spec, user=None))


@dataclass(frozen=True, kw_only=True, slots=True)
class Made:
    """A sandbox and what serves its address."""

    sandbox: LocalSandbox
    plane: Plane


class Starter:
    """Starts sandboxes on a node: fetches the image, makes the sandbox, and has its address served."""

    def __init__(
        self, settings: MakeSettings, policy: DataPlane, images: Images, snapshots: KeptSnapshots
    ) -> None:
        self._maker = Maker(settings)
        self._warm = settings.warm
        self._images = images
        self._snapshots = snapshots
        self._ids: dict[str, str] = {}
        """Of images by name, as they were fetched last. A sandbox is made of the content, not of the name."""
        self._policy = policy
        self._counts: Counter[str] = Counter()

    async def fetch_image(self, order: NodeOrder, say: Callable[[str], None]) -> None:
        """Have the image here.

        Raises: SandboxFailed; ConfigError if no backend has such images; SandboxRefused as `make`.
        """
        kind = await self._maker.kind_of(order, (), self._find_snapshot(order))
        if kind.image is not None and not kind.image.startswith("/"):
            policy = order.request.image_pull_policy
            self._ids[kind.image] = await self._images.fetch(kind.image, policy, say)

    async def make(self, order: NodeOrder, note_use: Callable[[], None]) -> Made:
        """Make the sandbox, and start what serves it. Raises: SandboxFailed, StropError."""
        is_owners = order.request.sandbox is not None
        if self._policy is DataPlane.OWN and not is_owners and not is_agent_server(order.request):
            raise SandboxFailed(
                FailureKind.IMAGE_ERROR,
                f"command {order.request.command[:1]} is not OpenHands' agent server, whose routes alone this"
                " node serves itself (data plane `own`)",
            )
        mounts = injected_mounts() if self._is_injected(order) else ()
        snapshot = self._find_snapshot(order)
        kind = await self._maker.kind_of(order, mounts, snapshot)
        kind = replace(kind, image=self._ids.get(kind.image, kind.image) if kind.image else None)
        sandbox = await self._maker.make(kind, self._warm.get(order.request.image, 0), snapshot)
        try:
            plane = await self._serve(order, sandbox, note_use)
        except (SandboxFailed, SandboxError):
            await sandbox.stop()
            raise
        self._counts[f'node_starts_total{{backend="{kind.backend}"}}'] += 1
        return Made(sandbox=sandbox, plane=plane)

    def _find_snapshot(self, order: NodeOrder) -> LocalSnapshot | None:
        terms = order.request.sandbox
        if terms is None or terms.snapshot is None:
            return None
        return self._snapshots.require(terms.snapshot.key)

    async def _serve(self, order: NodeOrder, sandbox: LocalSandbox, note_use: Callable[[], None]) -> Plane:
        policy = self._policy
        request = order.request
        if request.sandbox is not None:
            keep = partial(self._snapshots.take, sandbox, order.slot.disk_bytes)
            return OwnerPlane(sandbox, order.session_api_key, note_use, keep)
        if policy is DataPlane.AUTO:
            is_there = not is_agent_server(request) or await _has_program(sandbox, request.command[0])
            policy = DataPlane.IMAGE if is_there else DataPlane.OWN
        if policy is DataPlane.OWN:
            cwd = await find_working_dir(sandbox, request)
            key, env = order.session_api_key, request.environment
            return Workspace(sandbox, key=key, env=env, working_dir=cwd, note_use=note_use)
        argv, more = list(request.command), dict[str, str]()
        if self._is_injected(order):
            argv, more = injected_argv(request, sandbox.find_mount)
        return await ServerPlane.start(sandbox, order, argv, more)

    def _is_injected(self, order: NodeOrder) -> bool:
        is_theirs = order.request.sandbox is None and is_agent_server(order.request)
        return self._policy is DataPlane.INJECT and is_theirs

    def metrics(self) -> dict[str, float]:
        """Return what has been counted."""
        return {
            **self._counts,
            "node_image_pulls_total": float(self._images.num_pulls),
            "node_warm_hits_total": float(self._maker.num_warm),
            "node_warm_sandboxes": float(self._maker.num_spare),
        }

    async def close(self) -> None:
        """End what was made ahead."""
        await self._images.close()
        await self._maker.close()


async def _has_program(sandbox: LocalSandbox, path: str) -> bool:
    """Whether a program is in a sandbox, as far as a path tells."""
    if not path.startswith("/"):
        return True
    try:
        await sandbox.read(path, max_bytes=0)
    except SandboxError as error:
        # Whatever else is wrong with it: it is there.
        return error.kind != "missing"
    return True


def _user_of(request: StartRequest, backend: str) -> int | None:
    """Return the user of the image that programs can be as whom a client wants them; None: there is none."""
    user = request.run_as_user
    can_map = backend in ENGINES and os.geteuid() == 0 and user is not None and user < NUM_IDS
    return user if can_map else None


def _require_network(given: str, wanted: str) -> None:
    """Refuse what a node's own network does not have. Raises: SandboxRefused with kind network."""
    all_given, all_wanted = parse_network(given), parse_network(wanted)
    is_part = all_given and all_wanted and all_wanted.endpoints <= all_given.endpoints
    if not (wanted == "none" or given == "host" or is_part):
        raise SandboxRefused(
            f"network {wanted!r} on a node whose sandboxes have {given!r}",
            allowed="none, or a part of what the node's --network says",
            next_step="leave the network out, or start the node with another one",
            kind="network",
        )


def limits_of(slot: Slot) -> Limits:
    """Return the limits of a sandbox for a client that names none: what a slot has."""
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
