"""A request on its way through an engine: refused, waiting, ended by a stop string.

What no engine can serve is refused in the same words by all of them. The engine in this process and the
client of one in another process wait by one rule for requests that belong together (`settle`), so they form
the same batches, and with them every rounded value is the same in each run and in either place.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from strop.engine.contract import Completion, GenerationRequest, ReplyScore
from strop.errors import EngineError, StropError
from strop.rollout import IntArray

if TYPE_CHECKING:
    from strop.tokenizer import Tokenizer

Answer = TypeVar("Answer", Completion, ReplyScore)

_CYCLES = 4
"""Turns of the event loop without a new request, after which a batch is complete."""


def check_room(num_prompt: int, num_reply: int, how: str, max_positions: int) -> None:
    """Refuse a prompt and a reply that the model has no positions for.

    Raises: EngineError.
    """
    if num_prompt == 0 or num_reply < 1 or num_prompt + num_reply > max_positions:
        raise EngineError(
            f"a request has {num_prompt} prompt tokens and {how} {num_reply}",
            allowed=f"at least one of each, and together at most {max_positions} positions",
            next_step="shorten the prompt or lower task.max_reply_tokens",
        )


def check_ids(token_ids: IntArray, vocab_size: int) -> None:
    """Refuse token ids that the model has no row for.

    Raises: EngineError.
    """
    lowest, highest = int(token_ids.min()), int(token_ids.max())
    if lowest < 0 or highest >= vocab_size:
        raise EngineError(
            f"a prompt holds token ids from {lowest} to {highest}",
            allowed=f"ids from 0 to {vocab_size - 1}",
            next_step="check that the tokenizer is the model's own",
        )


def closed() -> EngineError:
    """Return the refusal of an engine that is closed."""
    return EngineError("a request to an engine that is closed")


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
    """Deliver a result, unless the caller was cancelled."""
    if not future.done():
        future.set_result(found)


def fail(
    waiting: Iterable[asyncio.Future[Completion] | asyncio.Future[ReplyScore]], error: StropError
) -> None:
    """Fail all futures that are still pending."""
    for future in waiting:
        if not future.done():
            future.set_exception(error)


class StopStrings:
    """The stop strings of one request: found while a reply grows, and cut off its text."""

    def __init__(self, tokenizer: Tokenizer, strings: Sequence[str]) -> None:
        self._tokenizer = tokenizer
        self._strings = tuple(strings)
        # Every token of a byte-level vocabulary adds at least one byte, so a stop string lies
        # within the last tokens as many as it has bytes, plus a few for characters cut in half.
        self._window = max(len(string.encode()) for string in self._strings) + 4

    def is_completed(self, token_ids: IntArray) -> bool:
        """Whether the newest token completed a stop string."""
        tail = self._tokenizer.decode(token_ids[-self._window :])
        return any(string in tail for string in self._strings)

    def cut(self, text: str) -> str:
        """Return the text before its first stop string."""
        starts = [start for string in self._strings if (start := text.find(string)) >= 0]
        return text[: min(starts)] if starts else text
