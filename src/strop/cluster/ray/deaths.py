"""Detects the end of any role within seconds, names it, and fails every pending call.

Of replicas (roles that do the same work) all but the last may end: that is reported, and the others continue.
A role's process is watched by a call to it that never returns: when it dies, Ray fails that call.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from strop.cluster.ray.runtime import JoinedNode
from strop.errors import EngineLost, StropError, describe_error, format_error
from strop.hardware.process import tail

VERDICT_LIMIT_S = 25.0
"""A call may fail before Ray reports the death behind it, which takes 20 s at most for a silent node."""
_LOOK_EVERY_S = 1.0
_DETAIL = re.compile(r"Worker exit detail: (.*?)(?: There are some potential root causes|$)", re.DOTALL)
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class FollowedRole:
    """A started role."""

    name: str
    node: int
    pid: int
    host: str
    log_path: Path
    is_replica: bool = False
    """Whether others do the same work, so that the run continues while one of them is alive."""


class DeathWatch:
    """Watches all roles of a run, and keeps how they ended and which death ended the run."""

    def __init__(
        self, read_nodes: Callable[[], list[JoinedNode]], find_head_death: Callable[[], str | None]
    ) -> None:
        self._read_nodes = read_nodes
        self._find_head_death = find_head_death
        self._roles: dict[str, FollowedRole] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._death: asyncio.Future[EngineLost] | None = None
        self._ends: dict[str, str] = {}
        self._news = asyncio.Event()
        self._on_lost: Callable[[str, str], None] = lambda name, message: None
        self._is_stopping = False

    def follow(self, role: FollowedRole, ending: Awaitable[str]) -> None:
        """Wait for the end of a role from now on."""
        self._roles[role.name] = role
        self._keep(self._follow(role, ending))

    def start(self) -> None:
        """Begin to watch nodes and the head."""
        self._death = asyncio.get_running_loop().create_future()
        self._keep(self._look_at_nodes())

    def stop(self) -> None:
        """Expect every role to end from now on."""
        self._is_stopping = True
        for task in self._tasks:
            task.cancel()

    def report_to(self, on_lost: Callable[[str, str], None]) -> None:
        """Set the callback for a replica that ended while others are alive: its name, and how."""
        self._on_lost = on_lost

    def find_end(self, name: str) -> str | None:
        """Return how a role itself ended; None while it is alive."""
        return self._ends.get(name)

    def find(self, name: str) -> str | None:
        """Return how a role or else the run ended; None while they are alive."""
        if name in self._ends:
            return self._ends[name]
        if self._death is None or not self._death.done():
            return None
        return str(self._death.result())

    async def guard(self, call: Awaitable[T], limit_s: float, *, role: str = "") -> T:
        """Return the answer of a role; `role` names one whose end does not end the run.

        Raises: EngineLost naming the role that ended, this one or any other, or that no answer came in
            `limit_s`; the StropError that the role raised.
        """
        from ray.exceptions import RayError, RayTaskError

        assert self._death is not None, "start comes first"
        # Within a coroutine: cancelling gathered calls directly would log errors.
        task = asyncio.create_task(asyncio.wait_for(call, None))
        both: set[asyncio.Future[Any]] = {task, self._death}
        await asyncio.wait(both, timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            task.cancel()
            if self._death.done():
                raise self._death.result()
            raise EngineLost(
                f"a role has not answered for {limit_s:g} s",
                allowed="an answer, or an end that is noticed",
                next_step="read the logs of the roles in the attempt's folder",
            )
        try:
            return task.result()
        except RayTaskError as error:
            if isinstance(error.cause, StropError):
                raise error.cause from error
            failure: Exception = error
            cause = describe_error(error.cause)
        except RayError as error:
            failure, cause = error, str(error)
        # Without a StropError the call failed with its role, or with the connection of another one.
        with suppress(TimeoutError):
            async with asyncio.timeout(VERDICT_LIMIT_S):
                while self.find(role) is None:
                    await self._news.wait()
                    self._news.clear()
        end = self.find(role)
        raise EngineLost(_explain("a role failed", cause) if end is None else end) from failure

    async def _follow(self, role: FollowedRole, ending: Awaitable[str]) -> None:
        from ray.exceptions import RayError

        try:
            cause = await ending
        except RayError as error:
            cause = await self._explain_loss(error)
        lines = read_log(role.log_path, role.host)
        where = f"role {role.name} on node {role.node} ({role.host}), process {role.pid}, ended"
        self._end([role], _explain(where, f"{cause}\nIts last log lines ({role.log_path}):\n{lines}\n"))

    async def _explain_loss(self, error: Exception) -> str:
        """Return why a process ended, as far as Ray knows, with the cause of its node's death, if any."""
        detail = _DETAIL.search(str(error))
        cause = detail[1].strip() if detail else str(error).strip()
        if "node" not in cause.lower():
            return cause
        nodes = await asyncio.to_thread(self._read_nodes)
        dead = [node for node in nodes if not node.is_alive]
        return "; ".join(
            [cause, *(f"node {node.name} ({node.address}) was lost: {node.why}" for node in dead)]
        )

    async def _look_at_nodes(self) -> None:
        from ray.exceptions import RayError

        known: set[str] = set()
        while True:
            head = self._find_head_death()
            try:
                dead = (
                    [] if head else [n for n in await asyncio.to_thread(self._read_nodes) if not n.is_alive]
                )
            except RayError as error:
                head = str(error)
                dead = []
            if head:
                self._settle(_explain("the head of Ray was lost", head))
            for node in dead:
                if node.ray_id not in known:
                    known.add(node.ray_id)
                    lost = [
                        role for role in self._roles.values() if str(role.node) == node.name.split("@")[0]
                    ]
                    names = ", ".join(role.name for role in lost) or "no role"
                    event = f"node {node.name} ({node.address}) was lost, and with it {names}"
                    self._end(lost, _explain(event, node.why))
            await asyncio.sleep(_LOOK_EVERY_S)

    def _end(self, roles: Sequence[FollowedRole], message: str) -> None:
        """Note roles that ended; the run ends too, unless replicas do their work."""
        if self._is_stopping:
            return
        new = [role for role in roles if role.name not in self._ends]
        self._ends.update({role.name: message for role in new})
        self._news.set()
        has_replica = any(role.is_replica and role.name not in self._ends for role in self._roles.values())
        if not roles or not has_replica or not all(role.is_replica for role in roles):
            self._settle(message)
            return
        for role in new:
            self._on_lost(role.name, message)

    def _settle(self, message: str) -> None:
        if not self._is_stopping and self._death is not None and not self._death.done():
            self._death.set_result(EngineLost(message))
            self._news.set()

    def _keep(self, work: Any) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def read_log(path: Path, host: str) -> str:
    """Return the last lines of a role's log, or where they are if that is another machine's disk."""
    return tail(path) if path.exists() else f"(they are on {host})"


def _explain(event: str, cause: str) -> str:
    return format_error(
        f"{event}: {cause}",
        allowed="roles that live as long as the run",
        next_step="mend the cause and start the run again: it goes on from its last checkpoint",
    )
