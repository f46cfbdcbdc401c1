"""What a node does to start a sandbox: the image, the sandbox, and who serves its address."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from strop.errors import SandboxError
from strop.runtime.contract import FailureKind, NodeOrder
from strop.runtime.held import Made
from strop.runtime.making import Maker, MakeSettings
from strop.runtime.owner_plane import OwnerPlane
from strop.runtime.planes import DataPlane, OwnPlane, Plane, SandboxFailed, has_program, is_agent_server
from strop.runtime.pulling import Images
from strop.runtime.server_plane import ServerPlane, find_working_dir, injected_argv, injected_mounts
from strop.runtime.snapshots import KeptSnapshots
from strop.sandbox.local import LocalSandbox
from strop.sandbox.local_snapshot import LocalSnapshot


class NodeMaking:
    """`held.Making` for real."""

    def __init__(
        self, settings: MakeSettings, policy: DataPlane, images: Images, snapshots: KeptSnapshots
    ) -> None:
        self._maker = Maker(settings)
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

    async def make(self, order: NodeOrder, note_use: Callable[[], None], say: Callable[[str], None]) -> Made:
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
        sandbox = await self._maker.make(kind, self._maker.count_warm(order.request.image), snapshot)
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
            is_there = not is_agent_server(request) or await has_program(sandbox, request)
            policy = DataPlane.IMAGE if is_there else DataPlane.OWN
        if policy is DataPlane.OWN:
            cwd = await find_working_dir(sandbox, request)
            return OwnPlane(sandbox, order, cwd, note_use)
        argv, env = list(request.command), dict[str, str]()
        if self._is_injected(order):
            argv, env = injected_argv(request, sandbox.find_mount)
        return await ServerPlane.start(sandbox, order, argv, env)

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
