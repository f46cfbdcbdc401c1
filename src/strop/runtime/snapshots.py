"""The snapshots that a node keeps for the owners of its sandboxes.

Each has a key that only its owner gets. The owner then opens a connection with the key, and the snapshot
lasts as long as that connection; without one it is dropped. Its files last until the last sandbox that
started from it has ended.
"""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from strop.errors import SandboxError, SandboxRefused
from strop.runtime.http_server import HttpError, Request, Upgrade
from strop.runtime.keys import new_key
from strop.runtime.ports import CHUNK_BYTES
from strop.sandbox.local import LocalSandbox
from strop.sandbox.local_snapshot import LocalSnapshot
from strop.sandbox.wire import PROTOCOL, SANDBOX_KEY_HEADER, keep_alive

MAX_SNAPSHOTS = 256
"""Open snapshots on one node, of all owners."""
_OWNER_LIMIT_S = 60.0
"""For the owner to connect after its snapshot was taken."""


@dataclass(kw_only=True, slots=True, eq=False)
class _Kept:
    key: str
    snapshot: LocalSnapshot
    waiting: asyncio.TimerHandle | None = None
    """Drops the snapshot if its owner does not connect."""
    owner: asyncio.StreamWriter | None = None


class KeptSnapshots:
    """The snapshots of one node."""

    def __init__(self, node_id: str, count_free: Callable[[], int], changed: Callable[[], None]) -> None:
        """`count_free` returns the bytes of this node's disk that are promised to no sandbox."""
        self.url = ""
        """The address of this node, once it listens."""
        self._node_id = node_id
        self._count_free = count_free
        self._changed = changed
        self._open: set[_Kept] = set()
        self._all: list[LocalSnapshot] = []
        """All snapshots with files: open ones, and closed ones that sandboxes still use."""
        self._taking: list[int] = []
        """Largest sizes of the snapshots that are being taken, in bytes."""

    @property
    def num_bytes(self) -> int:
        """Disk that the snapshots take."""
        self._all = [snapshot for snapshot in self._all if snapshot.layers[0].num_users]
        return sum(snapshot.num_bytes for snapshot in self._all)

    async def take(self, sandbox: LocalSandbox, max_bytes: int) -> dict[str, Any]:
        """Take a snapshot of at most `max_bytes`; return its node, address, key and size for the owner.

        Raises: SandboxError as `LocalSandbox.snapshot`, and with kind no_space if the node has no room.
        """
        free_bytes = self._count_free() - self.num_bytes - sum(self._taking)
        if max_bytes > free_bytes or len(self._open) + len(self._taking) >= MAX_SNAPSHOTS:
            raise SandboxError(
                f"its node has {max(0, free_bytes)} bytes for one that may need {max_bytes},"
                f" and {len(self._open)} of {MAX_SNAPSHOTS} snapshots",
                allowed="as much as the sandbox may write",
                next_step="close snapshots, or wait until sandboxes have ended",
                kind="no_space",
            )
        self._taking.append(max_bytes)
        try:
            snapshot = await sandbox.snapshot()
        finally:
            self._taking.remove(max_bytes)
        kept = _Kept(key=new_key(), snapshot=snapshot)
        kept.waiting = asyncio.get_running_loop().call_later(_OWNER_LIMIT_S, self._drop, kept)
        self._open.add(kept)
        self._all.append(snapshot)
        self._changed()
        return {
            "node_id": self._node_id,
            "url": self.url,
            "key": kept.key,
            "num_bytes": snapshot.num_bytes,
        }

    def require(self, key: str) -> LocalSnapshot:
        """Return the snapshot of a key. Raises: SandboxRefused with kind snapshot if there is none."""
        kept = self._find(key)
        if kept is None:
            raise SandboxRefused(
                "a snapshot that this node does not have",
                allowed="one that is open, and was taken here",
                next_step="take a new one",
                kind="snapshot",
            )
        return kept.snapshot

    def admit(self, headers: Mapping[str, str]) -> None:
        """Refuse a request without a snapshot's key. Raises: HttpError 401."""
        if self._find(headers.get(SANDBOX_KEY_HEADER.lower(), "")) is None:
            raise HttpError(401, "Unauthorized")

    def answer(self, request: Request) -> Upgrade:
        """Answer an owner's connection, which keeps its snapshot. Raises: HttpError."""
        kept = self._find(request.headers[SANDBOX_KEY_HEADER.lower()])
        if kept is None or kept.owner is not None:
            raise HttpError(409, "this snapshot has an owner, or is gone")
        return Upgrade(protocol=PROTOCOL, serve=partial(self._serve_owner, kept))

    def close(self) -> None:
        """Drop all snapshots."""
        for kept in list(self._open):
            self._drop(kept)

    async def _serve_owner(
        self, kept: _Kept, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        if kept.waiting is not None:
            kept.waiting.cancel()
        kept.owner = writer
        try:
            keep_alive(writer.get_extra_info("socket"))
            while await reader.read(CHUNK_BYTES):
                pass
        finally:
            self._drop(kept)

    def _find(self, key: str) -> _Kept | None:
        # All are compared, in constant time: the time must not depend on the key.
        data = key.encode()
        matches = [kept for kept in self._open if hmac.compare_digest(data, kept.key.encode())]
        return matches[0] if matches else None

    def _drop(self, kept: _Kept) -> None:
        if kept not in self._open:
            return
        self._open.remove(kept)
        if kept.waiting is not None:
            kept.waiting.cancel()
        if kept.owner is not None:
            kept.owner.close()
        kept.snapshot.drop()
        self._changed()
