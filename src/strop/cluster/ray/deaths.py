"""Names the end of any role, and fails every pending call.

Of replicas (roles that do the same work) all but the last may end: that is reported, and the others continue.
A role is watched by a call to it that never returns: when its process or node dies, Ray fails that call.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from strop.cluster.ray.roles import RoleFacts
from strop.errors import EngineLost, StropError, describe_error, format_error
from strop.hardware.process import tail
from strop.spec.layout import RoleKind, RoleSlot

VERDICT_LIMIT_S = 25.0
"""A call may fail before Ray reports the death behind it, which takes 20 s at most for a silent node."""
_LOOK_EVERY_S = 1.0
T = TypeVar("T")


@dataclass(kw_only=True, slots=True, eq=False)
class RunningRole:
    """A role that was started."""

    slot: RoleSlot
    log_path: Path
    actor: Any = None
    facts: RoleFacts | None = None
    """None until it has begun."""

    @property
    def is_replica(self) -> bool:
        """Whether others do the same work, so that the run continues while one of them is alive."""
        return self.slot.kind is RoleKind.ENGINE


async def answer_of(call: Awaitable[T], limit_s: float) -> T:
    """Return the answer of an actor.

    Raises: the StropError that it raised; EngineLost if it failed otherwise, or does not answer in `limit_s`.
    """
    from ray.exceptions import RayError, RayTaskError

    try:
        return await asyncio.wait_for(call, limit_s)
    except RayTaskError as error:
        if isinstance(error.cause, StropError):
            raise error.cause from error
        raise EngineLost(_explain("a role failed", describe_error(error.cause))) from error
    except RayError as error:
        raise EngineLost(_explain("a role failed", str(error))) from error
    except TimeoutError as error:
        raise EngineLost(_explain("a role has not answered", f"not within {limit_s:g} s")) from error


class DeathWatch:
    """Watches all roles of a run, and keeps how they ended and which death ended the run."""

    def __init__(self, find_head_death: Callable[[], str | None]) -> None:
        """Begin to watch. `find_head_death` returns how Ray ended on this machine, None while it runs."""
        self._find_head_death = find_head_death
        self._roles: list[RunningRole] = []
        self._death: asyncio.Future[EngineLost] = asyncio.get_running_loop().create_future()
        self._ends: dict[str, str] = {}
        self._news = asyncio.Event()
        self._on_lost: Callable[[str, str], None] = lambda name, message: None
        self._is_stopping = False
        self._tasks = {asyncio.create_task(self._look_at_head())}

    def follow(self, role: RunningRole, ending: Awaitable[str]) -> None:
        """Wait for the end of a role from now on."""
        self._roles.append(role)
        self._tasks.add(asyncio.create_task(self._follow(role, ending)))

    def stop(self) -> None:
        """Expect every role to end from now on."""
        self._is_stopping = True
        for task in self._tasks:
            task.cancel()

    def report_to(self, on_lost: Callable[[str, str], None]) -> None:
        """Set the callback for a replica that ended while others are alive: its name, and how."""
        self._on_lost = on_lost

    def find(self, name: str) -> str | None:
        """Return how a role or else the run ended; None while they are alive."""
        if name in self._ends:
            return self._ends[name]
        return str(self._death.result()) if self._death.done() else None

    async def guard(self, call: Awaitable[T], limit_s: float, *, role: str = "") -> T:
        """Return the answer of a role; `role` names one whose end does not end the run.

        Raises: EngineLost naming the role that ended, this one or any other, or that no answer came in
            `limit_s`; the StropError that the role raised.
        """
        task = asyncio.create_task(answer_of(call, limit_s))
        both: set[asyncio.Future[Any]] = {task, self._death}
        try:
            await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        finally:
            task.cancel()
        if not task.done():
            raise self._death.result()
        try:
            return task.result()
        except EngineLost as error:
            if error is getattr(error.__cause__, "cause", None):
                # The role itself raised it.
                raise
            # The call may have failed with its role, or with the connection of another one.
            with suppress(TimeoutError):
                async with asyncio.timeout(VERDICT_LIMIT_S):
                    while self.find(role) is None:
                        await self._news.wait()
                        self._news.clear()
            if (end := self.find(role)) is None:
                raise
            raise EngineLost(end) from error

    async def _follow(self, role: RunningRole, ending: Awaitable[str]) -> None:
        """Note how a role ended; the run ends too, unless replicas do its work."""
        from ray.exceptions import RayError

        try:
            cause = await ending
        except RayError as error:
            cause = str(error).strip()
        if self._is_stopping:
            return
        name, host = role.slot.name, role.facts.host if role.facts else "unknown"
        lines = tail(role.log_path) if role.log_path.exists() else f"(they are on {host})"
        where = f"role {name} on node {role.slot.node} ({host})"
        where += f", process {role.facts.pid}, ended" if role.facts else " ended"
        message = _explain(where, f"{cause}\nIts last log lines ({role.log_path}):\n{lines}\n")
        self._ends[name] = message
        self._news.set()
        if role.is_replica and any(one.is_replica and one.slot.name not in self._ends for one in self._roles):
            self._on_lost(name, message)
        else:
            self._settle(message)

    async def _look_at_head(self) -> None:
        while True:
            if death := self._find_head_death():
                self._settle(_explain("the head of Ray was lost", death))
            await asyncio.sleep(_LOOK_EVERY_S)

    def _settle(self, message: str) -> None:
        if not self._is_stopping and not self._death.done():
            self._death.set_result(EngineLost(message))
            self._news.set()


def _explain(event: str, cause: str) -> str:
    return format_error(
        f"{event}: {cause}",
        allowed="roles that live as long as the run",
        next_step="mend the cause and start the run again: it goes on from its last checkpoint",
    )
