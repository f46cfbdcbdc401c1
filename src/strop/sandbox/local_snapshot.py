"""The client's handle of a local snapshot. A layer is removed with its last user."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Self

from strop.errors import SandboxRefused
from strop.sandbox.contract import SandboxSpec
from strop.sandbox.daemon_handle import daemon_of


@dataclass(slots=True)
class Layer:
    """A directory of the daemon, and the number of open snapshots and running sandboxes that use it."""

    path: str
    num_users: int = 0


@dataclass(kw_only=True, slots=True)
class LocalSnapshot:
    """A snapshot; see `Snapshot`."""

    backend: str
    image: str | None
    has_users: bool
    """Whether its sandbox had `SandboxSpec.user`, so files may belong to several users."""
    layers: tuple[Layer, ...]
    uid: int
    num_bytes: int
    source: str = field(default="", repr=False)
    """The Python source of its sandbox, which identifies the daemon that has the layers (`daemon_of`)."""
    _release: Callable[[], None] | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        self._release = self.hold()

    def hold(self) -> Callable[[], None]:
        """Keep the layers until the returned function is called, once."""
        for layer in self.layers:
            layer.num_users += 1

        def release() -> None:
            for layer in self.layers:
                layer.num_users -= 1
                if layer.num_users == 0:
                    daemon_of(os.getpid(), self.source).drop_layer(layer.path)

        return release

    @property
    def is_open(self) -> bool:
        """Whether sandboxes may start from it."""
        return self._release is not None

    async def close(self) -> None:
        """Close it; see `Snapshot.close`."""
        self.drop()

    def drop(self) -> None:
        """Close it, like `close`, from synchronous code."""
        release, self._release = self._release, None
        if release is not None:
            release()

    async def __aenter__(self) -> Self:
        """Return the snapshot."""
        return self

    async def __aexit__(self, *_: object) -> None:
        """Close it."""
        await self.close()


def require_snapshot(spec: SandboxSpec, backend: str, source: str) -> LocalSnapshot | None:
    """Return the snapshot of a spec, if it has one.

    Raises: SandboxRefused with kind snapshot if this sandbox cannot start from it.
    """
    snapshot = spec.snapshot
    if snapshot is None:
        return None
    if not isinstance(snapshot, LocalSnapshot):
        wrong = "a snapshot of a sandbox elsewhere"
    elif snapshot.backend != backend:
        wrong = f"a snapshot of backend {snapshot.backend}"
    elif snapshot.image != spec.image:
        wrong = f"a snapshot of image {snapshot.image!r}"
    elif snapshot.has_users is not (spec.user is not None):
        wrong = "a snapshot with a user of the image" if snapshot.has_users else "one without"
    elif snapshot.source != source:
        wrong = "a snapshot of a sandbox that runs another main"
    elif not snapshot.is_open:
        wrong = "a snapshot that was closed"
    else:
        return snapshot
    raise SandboxRefused(
        f"a {backend} sandbox with image {spec.image!r} cannot begin with {wrong}",
        allowed="an open snapshot of the same backend and image, with a user or without as it was",
        next_step="take one of a sandbox that was made like this one",
        kind="snapshot",
    )
