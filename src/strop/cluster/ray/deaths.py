"""Names the end of any role, and fails every pending call.

Of replicas (roles that do the same work) all but the last may end: that is reported, and the others continue.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from functools import partial
from typing import Any, TypeVar

from strop.errors import EngineLost, StropError, describe_error

CALL_LIMIT_S = 3600.0
"""Limit of any call: to fetch and load a model, a step, a group, an update."""
VERDICT_LIMIT_S = 25.0
"""A call may fail before Ray reports the death behind it, which takes 20 s at most for a silent node."""
T = TypeVar("T")


def lost(event: str) -> EngineLost:
    """Return the error of a role that is of no use any more."""
    return EngineLost(
        event,
        allowed="roles that live as long as the run",
        next_step="mend the cause and start the run again: it goes on from its last checkpoint",
    )


async def answer_of(call: Awaitable[T]) -> T:
    """Return the answer of an actor.

    Raises: the StropError that it raised; EngineLost caused by Ray's error or TimeoutError if it failed
        otherwise or took too long.
    """
    from ray.exceptions import RayError

    try:
        return await asyncio.wait_for(call, CALL_LIMIT_S)
    except (RayError, TimeoutError) as error:
        cause = getattr(error, "cause", error)
        if isinstance(cause, StropError):
            raise cause from error
        raise lost(f"a role failed: {describe_error(cause)}") from error


class DeathWatch:
    """Watches all roles of a run, and keeps how they ended."""

    def __init__(self) -> None:
        self._over: asyncio.Future[EngineLost] = asyncio.get_running_loop().create_future()
        """The death that ended the run."""
        self._ends: dict[str, asyncio.Task[EngineLost]] = {}
        self._replicas: set[str] = set()
        self.on_lost: Callable[[str, str], None] = lambda name, message: None
        """Called with name and end of a replica that ended while others are alive."""

    def follow(self, name: str, ending: Coroutine[Any, Any, EngineLost], *, is_replica: bool = False) -> None:
        """Watch a role, whose `ending` returns once it has ended."""
        if is_replica:
            self._replicas.add(name)
        self._ends[name] = task = asyncio.create_task(ending)
        task.add_done_callback(partial(self._note, name))

    def stop(self) -> None:
        """Expect every role to end from now on."""
        for task in self._ends.values():
            task.cancel()

    async def guard(self, call: Awaitable[T], role: str = "") -> T:
        """Return the answer of a role; `role` names one whose end does not end the run.

        Raises: EngineLost naming the role that ended, this one or any other; the StropError that the role
            raised.
        """
        task = asyncio.ensure_future(answer_of(call))
        ends: set[asyncio.Future[Any]] = {self._over, *filter(None, [self._ends.get(role)])}
        try:
            await asyncio.wait({task, *ends}, return_when=asyncio.FIRST_COMPLETED)
            error = task.exception() if task.done() else None
            # What a role raised itself is in Ray's error.
            if task.done() and (error is None or error is getattr(error.__cause__, "cause", None)):
                return task.result()
            # A call that failed did so with its role, or with the connection of another one.
            told, _ = await asyncio.wait(ends, timeout=VERDICT_LIMIT_S, return_when=asyncio.FIRST_COMPLETED)
            if told:
                raise told.pop().result()
            return await task
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    def _note(self, name: str, task: asyncio.Task[EngineLost]) -> None:
        if task.cancelled():
            return
        others = [one for one in self._replicas if not self._ends[one].done()]
        if name in self._replicas and others:
            self.on_lost(name, str(task.result()))
        elif not self._over.done():
            self._over.set_result(task.result())
