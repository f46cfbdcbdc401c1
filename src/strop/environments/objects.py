"""The object of an author's class behind one attempt, and the facts of its class.

`WorldObject` is the interface of an attempt to it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol

from strop.environments.contract import Done
from strop.environments.tools import Tool, call_tool, cut_text, find_tools, to_text
from strop.errors import DataError
from strop.rollout import Example, Message, Outcome, ToolCall


@dataclass(frozen=True, kw_only=True, slots=True)
class ObjectLimits:
    """Limits of one request to an object."""

    tool_limit_s: float
    max_observation_chars: int


class WorldObject(Protocol):
    """One attempt, as its author's class plays it. An exception of the class is the task's failure."""

    async def reset(self, example: Example, seed: int) -> tuple[Message, ...]:
        """Make the object, and open the attempt."""
        ...

    async def step(self, text: str) -> tuple[tuple[Message, ...], bool]:
        """Return the messages to the policy, and whether the attempt is over."""
        ...

    async def call(self, call: ToolCall) -> tuple[str, bool]:
        """Call a tool. Raises: as `call_tool`."""
        ...

    async def score(self) -> Outcome:
        """Score the attempt."""
        ...

    async def close(self) -> None:
        """Release its resources. May be called twice, and before `reset`."""
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

    async def reset(self, example: Example, seed: int) -> tuple[Message, ...]:
        """Make a new object, and open the attempt."""
        self._own = self._make_own()
        return to_messages(await _finished(self._own.reset(example, seed)))

    async def step(self, text: str) -> tuple[tuple[Message, ...], bool]:
        """Pass a reply to the object."""
        returned = await _finished(self._own.step(text))
        is_over = isinstance(returned, Done)
        if isinstance(returned, Message | list | tuple):
            return to_messages(returned), False
        shown = returned.text if is_over else to_text(returned, "step")
        return (Message(role="user", content=cut_text(shown, self._limits.max_observation_chars)),), is_over

    async def call(self, call: ToolCall) -> tuple[str, bool]:
        """Call a tool; its result is a text within the budget."""
        limits = self._limits
        return await call_tool(
            self._own,
            _tools_of(type(self._own)),
            call,
            # A workspace ends slow commands itself.
            limit_s=limits.tool_limit_s + getattr(self._own, "spare_limit_s", 0.0),
            max_chars=limits.max_observation_chars,
        )

    async def score(self) -> Outcome:
        """Score the attempt."""
        return self._to_outcome(await _finished(self._own.score()))

    async def close(self) -> None:
        """Close the object, if it has `close`."""
        own, self._own = self._own, None
        if own is not None and callable(getattr(own, "close", None)):
            await _finished(own.close())


_tools_of: Callable[[type], dict[str, Tool]] = cache(find_tools)


def read_facts(own: Any) -> dict[str, Any]:
    """Return the facts of a class as JSON values: the schemas of its `tools`, `has_step`, `max_turns`.

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


def to_messages(returned: Any) -> tuple[Message, ...]:
    """Convert an author's text or messages to messages. Raises: DataError for anything else."""
    parts = [returned] if isinstance(returned, str | Message) else [*(returned or ())]
    messages = [
        Message(role="user", content=part)
        if isinstance(part, str)
        else part
        if isinstance(part, Message)
        else Message.from_json(part)
        for part in parts
    ]
    if not messages:
        raise DataError(
            f"an environment says {returned!r:.80}",
            allowed="a text, or messages with role and content",
            next_step="correct its reset or step",
        )
    return tuple(messages)
