"""Starting the roles of a placement, all of them or none."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack

from strop.cluster.contract import Roles


async def start_all(start: Callable[[], Awaitable[Roles]], stop: Callable[[], Awaitable[None]]) -> Roles:
    """Return what `start` started. Where it fails or is cancelled, what it left is stopped first."""
    async with AsyncExitStack() as undo:
        undo.push_async_callback(stop)
        roles = await start()
        undo.pop_all()
    return roles
