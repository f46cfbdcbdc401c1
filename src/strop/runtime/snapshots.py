"""The snapshots that a node keeps for the owners of its sandboxes.

Each has a key, which its owner alone is told. It lasts as long as the connection that its owner then opens
with that key, or ends if none comes; its files last until no sandbox that began with it lives.
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
"""Open at once on one node, of all owners."""
_OWNER_LIMIT_S = 60.0
"""For the owner to come, once its snapshot is there."""


@dataclass(kw_only=True, slots=True, eq=False)
class _Kept:
    key: str
    snapshot: LocalSnapshot
    waiting: asyncio.TimerHandle | None = None
    """Ends it if its owner does not come."""
    owner: asyncio.StreamWriter | None = None


class KeptSnapshots:
    """The snapshots of one node."""

    def __init__(self, node_id: str, count_free: Callable[[], int], changed: Callable[[], None]) -> None:
        """`count_free` returns the bytes of this node's disk that no sandbox may use."""
        self.url = ""
        """Where this node answers, once it does."""
        self._node_id = node_id
        self._count_free = count_free
        self._changed = changed
        self._open: set[_Kept] = set()
        self._all: list[LocalSnapshot] = []
        """Those that are closed, but were begun with, too."""
        self._taking: list[int] = []
        """Bytes that those that are being taken may have."""

    @property
    def num_bytes(self) -> int:
        """What they take of the disk."""
        self._all = [one for one in self._all if one.layers[0].num_users]
        return sum(one.num_bytes for one in self._all)

    async def take(self, sandbox: LocalSandbox, max_bytes: int) -> dict[str, Any]:
        """Keep what a sandbox's programs have written, `max_bytes` at most; return what its owner is told.

        Raises: SandboxError as `LocalSandbox.snapshot`; with kind no_space too if there is no room here.
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
        """Return the snapshot that a key opens. Raises: SandboxRefused with kind snapshot."""
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
        """Refuse a request without the key of a snapshot. Raises: HttpError 401."""
        if self._find(headers.get(SANDBOX_KEY_HEADER.lower(), "")) is None:
            raise HttpError(401, "Unauthorized")

    def answer(self, request: Request) -> Upgrade:
        """Let its owner have a snapshot by a connection. Raises: HttpError."""
        kept = self._find(request.headers[SANDBOX_KEY_HEADER.lower()])
        if kept is None or kept.owner is not None:
            raise HttpError(409, "this snapshot has an owner, or is gone")
        return Upgrade(protocol=PROTOCOL, serve=partial(self._serve_owner, kept))

    def close(self) -> None:
        """End all."""
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
        # All are looked at: the time that it takes says nothing of a key.
        given = key.encode()
        found = [one for one in self._open if hmac.compare_digest(given, one.key.encode())]
        return found[0] if found else None

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
