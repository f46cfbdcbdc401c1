"""The object of an author's class that an attempt is made on, and what its class shows from outside.

`WorldObject` is what an attempt asks of it, wherever it lives: `ObjectHere` in this process, the process
inside a sandbox among them; `sandboxed` in a sandbox.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, Protocol

from strop.environments.contract import Done, Kept
from strop.environments.printed import Heard, are_prints_kept, hearing
from strop.environments.tools import Tool, call_tool, cut_text, find_tools, to_text
from strop.errors import DataError
from strop.rollout import Example, Message, Outcome, ToolCall


@dataclass(frozen=True, kw_only=True, slots=True)
class ObjectLimits:
    """What one request to an object may take, and may give."""

    tool_limit_s: float
    max_observation_chars: int


class WorldObject(Protocol):
    """One attempt, as its author's class plays it. Whatever the class raises is the task's failure."""

    async def reset(self, example: Example, seed: int) -> tuple[Message, ...]:
        """Make the object, and have it open the attempt."""
        ...

    async def step(self, text: str) -> tuple[tuple[Message, ...], bool]:
        """Return what the policy is told, and whether the attempt is over."""
        ...

    async def call(self, call: ToolCall) -> tuple[str, bool]:
        """Call a tool. Raises: as `call_tool`."""
        ...

    async def score(self) -> Outcome:
        """Have the attempt scored."""
        ...

    async def close(self) -> None:
        """Release what it holds. May be called twice, and before `reset`."""
        ...


class ObjectHere:
    """An object in this process."""

    def __init__(
        self, make_own: Callable[[], Any], to_outcome: Callable[[Any], Outcome], limits: ObjectLimits
    ) -> None:
        self._make_own = make_own
        self._to_outcome = to_outcome
        self._limits = limits
        self._own: Any = None
        self._heard: Heard | None = None

    async def reset(self, example: Example, seed: int) -> tuple[Message, ...]:
        """Make a new object, and have it open the attempt."""
        if are_prints_kept():
            self._heard = Heard(f"{example.task} {example.example_id} seed {seed}")
        with hearing(self._heard):
            self._own = self._make_own()
            return to_messages(await _finished(self._own.reset(example, seed)))

    async def step(self, text: str) -> tuple[tuple[Message, ...], bool]:
        """Give a reply to the object."""
        with hearing(self._heard):
            returned = await _finished(self._own.step(text))
        is_over = isinstance(returned, Done)
        if isinstance(returned, Message | list | tuple):
            return to_messages(returned), False
        shown = returned.text if is_over else to_text(returned, "step")
        return (Message(role="user", content=cut_text(shown, self._limits.max_observation_chars)),), is_over

    async def call(self, call: ToolCall) -> tuple[str, bool]:
        """Call a tool; what it returns is a text within the budget."""
        limits = self._limits
        with hearing(self._heard):
            return await call_tool(
                self._own,
                _tools_of(type(self._own)),
                call,
                # A workspace ends by itself what takes too long.
                limit_s=limits.tool_limit_s + getattr(self._own, "spare_limit_s", 0.0),
                max_chars=limits.max_observation_chars,
            )

    async def score(self) -> Outcome:
        """Have the object score the attempt."""
        with hearing(self._heard):
            return self._to_outcome(await _finished(self._own.score()))

    @property
    def snapshot(self) -> Callable[[], Awaitable[Kept[ObjectHere] | None]] | None:
        """What keeps where a workspace stands. None for any other object: what it shares is unknown."""
        # Private, as public methods are tools.
        take = getattr(self._own, "_snapshot", None)
        return None if take is None else partial(self._keep, take)

    async def _keep(self, take: Callable[[], Awaitable[Kept[Any] | None]]) -> Kept[ObjectHere] | None:
        kept = await take()
        return None if kept is None else kept.then(self._copy(None)._copy)

    def _copy(self, own: Any) -> ObjectHere:
        other = copy.copy(self)
        other._own, other._heard = own, copy.deepcopy(self._heard)
        return other

    async def close(self) -> None:
        """Close the object, where it has `close`."""
        own, self._own = self._own, None
        try:
            if own is not None and callable(getattr(own, "close", None)):
                with hearing(self._heard):
                    await _finished(own.close())
        finally:
            heard, self._heard = self._heard, None
            if heard is not None:
                heard.tell()


_tools_of: Callable[[type], dict[str, Tool]] = cache(find_tools)


def read_facts(own: Any) -> dict[str, Any]:
    """Return what a class shows of itself, as JSON: the schemas of its `tools`, `has_step`, `max_turns`.

    Raises: ConfigError like `find_tools`.
    """
    kind = type(own)
    return {
        "tools": {name: tool.schema for name, tool in _tools_of(kind).items()},
        "has_step": callable(getattr(kind, "step", None)),
        "max_turns": getattr(own, "max_turns", None),
    }


async def _finished(returned: Any) -> Any:
    return await returned if inspect.isawaitable(returned) else returned


def to_messages(asked: Any) -> tuple[Message, ...]:
    """Return an author's words as messages. Raises: DataError for another form."""
    parts = [asked] if isinstance(asked, str | Message) else [*(asked or ())]
    found = [
        Message(role="user", content=one)
        if isinstance(one, str)
        else one
        if isinstance(one, Message)
        else Message.from_json(one)
        for one in parts
    ]
    if not found:
        raise DataError(
            f"an environment says {asked!r:.80}",
            allowed="a text, or messages with role and content",
            next_step="correct its reset or step",
        )
    return tuple(found)
