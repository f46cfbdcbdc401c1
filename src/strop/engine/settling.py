"""When a batch is complete: the rule by which engines wait for requests that belong together.

Both the engine in this process and the client of one in another process follow it, so they form the
same batches, and with them every rounded value is the same in each run and in either place.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TypeVar

from strop.engine.contract import Completion, GenerationRequest, ReplyScore
from strop.errors import StropError
from strop.rollout import IntArray

Answer = TypeVar("Answer", Completion, ReplyScore)

_CYCLES = 4
"""Turns of the event loop without a new request, after which nobody is about to ask."""


@dataclass(slots=True, eq=False)
class Waiting:
    """A request and the coroutine that waits for it."""

    request: GenerationRequest
    reply: asyncio.Future[Completion]


@dataclass(slots=True, eq=False)
class WaitingScore:
    """A reply to score and the coroutine that waits for it."""

    prompt_ids: IntArray
    reply_ids: IntArray
    score: asyncio.Future[ReplyScore]


async def settle(count_waiting: Callable[[], int]) -> None:
    """Give way to the event loop until the number of waiting requests stays the same."""
    previous = -1
    while previous != (current := count_waiting()):
        previous = current
        for _ in range(_CYCLES):
            await asyncio.sleep(0)


def deliver(future: asyncio.Future[Answer], found: Answer) -> None:
    """Deliver what was asked for, unless the one who asked has gone."""
    if not future.done():
        future.set_result(found)


def fail(
    waiting: Iterable[asyncio.Future[Completion] | asyncio.Future[ReplyScore]], error: StropError
) -> None:
    """Tell all who still wait that nothing will come."""
    for future in waiting:
        if not future.done():
            future.set_exception(error)
