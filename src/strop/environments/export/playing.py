"""strop's side of an exported environment: `python -m strop.environments.export.playing`, asked as a guest.

Attempts begin by the seed of the self-test, so that one example is one task, with one opening. A reply comes
as a server of OpenAI's protocol gives it: a text and the calls that it read, or with calls still in the text.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Awaitable, Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from pydantic import TypeAdapter

from strop.environments.contract import Action, Environment
from strop.environments.guests.host import main as serve
from strop.environments.single_turn import choose_environment
from strop.errors import ConfigError, DataError, given_of
from strop.rollout import Example, FailureOwner, FinishReason, Message, Split, ToolCall
from strop.spec.task import TaskSpec
from strop.tasks import build_task, task_builder
from strop.tasks.failures import catch_failure
from strop.tasks.judging import open_judge
from strop.tasks.prompt import tools_of
from strop.tasks.user.posing import OPENING_SEED
from strop.tool_calls import CallFormat, Spoken, read_reply


@dataclass(kw_only=True, slots=True)
class _Attempt:
    environment: Environment
    tools: dict[str, Any]
    """The JSON Schema of each tool's arguments."""
    started_at: float = field(default_factory=time.monotonic)

    @property
    def is_late(self) -> bool:
        """Whether its time is used up; see `Environment`."""
        limit_s: float | None = getattr(self.environment, "max_attempt_s", None)
        return limit_s is not None and time.monotonic() - self.started_at >= limit_s


class Guest:
    """All attempts of one process of verifiers."""

    def __init__(self, section: dict[str, Any], version: str) -> None:
        self._spec = TypeAdapter[Any](TaskSpec).validate_python(section)
        self._task = build_task(self._spec)
        if self._task.version != version:
            raise ConfigError(
                f"{self._task.name} has the version {self._task.version} here, and was exported as {version}",
                allowed="the release of strop, and the data, that it was exported with",
                next_step="name the Python of that release (--env.taskset.python), or export it anew",
            )
        self._attempts: dict[int, _Attempt] = {}
        self._numbers = itertools.count()

    async def start(self) -> None:
        """Start what judges replies."""
        judge = open_judge(self._task, task_builder(self._spec))
        self._make_environment = choose_environment(self._task, judge)

    async def tasks(self, split: str) -> list[dict[str, Any]]:
        """Return all examples of a split, as data of verifiers' tasks."""
        # In a thread: most tasks read their data now.
        return await asyncio.to_thread(self._list, split)

    async def open(self, split: str, example: int) -> dict[str, Any]:
        """Begin an attempt; return its number."""
        return await _attributed(self._open(self._task.examples(Split(split))[example]))

    async def step(self, number: int, text: str, calls: Sequence[Any], is_cut: bool) -> dict[str, Any]:
        """Take a reply; return what the model is told, and whether the attempt is over."""
        return await _attributed(_step(self._attempts[number], text, calls, is_cut))

    async def score(self, number: int) -> dict[str, Any]:
        """Have the attempt scored as it stands."""
        return await _attributed(_score(self._attempts[number]))

    async def close(self, number: int) -> dict[str, Any]:
        """Release what the attempt holds."""
        attempt = self._attempts.pop(number)
        return await _attributed(_close(attempt))

    def _list(self, split: str) -> list[dict[str, Any]]:
        examples = self._task.examples(Split(split))
        return [{**self._pose(one), "split": split, "example": index} for index, one in enumerate(examples)]

    def _pose(self, example: Example) -> dict[str, Any]:
        messages = self._task.render(example)
        first, *rest = messages
        system = first.text if first.role == "system" and rest else None
        asked = messages if system is None else rest
        is_text = len(asked) == 1 and asked[0].role == "user"
        return {
            "id": example.example_id,
            "name": self._task.name,
            "system_prompt": system,
            "prompt": asked[0].text if is_text else [one.to_json() for one in asked],
            "tools": [_JSON.validate_json(schema) for schema in tools_of(messages)],
        }

    async def _open(self, example: Example) -> dict[str, Any]:
        environment = self._make_environment()
        async with AsyncExitStack() as stack:
            stack.push_async_callback(environment.close)
            messages = await environment.reset(example, OPENING_SEED)
            # It is closed when it is asked to be.
            stack.pop_all()
        number = next(self._numbers)
        functions = [_JSON.validate_json(schema)["function"] for schema in tools_of(messages)]
        tools = {one["name"]: one["parameters"] for one in functions}
        self._attempts[number] = _Attempt(environment=environment, tools=tools)
        return {"number": number}


_JSON = TypeAdapter(dict[str, Any])


async def _attributed(doing: Awaitable[dict[str, Any]]) -> dict[str, Any]:
    """Return what is found, or the failure that leaves the attempt without a score."""
    with catch_failure(FailureOwner.TASK) as caught:
        return await doing
    assert caught.failure is not None
    return {"failure": asdict(caught.failure)}


async def _step(attempt: _Attempt, text: str, calls: Sequence[Any], is_cut: bool) -> dict[str, Any]:
    stops = [place for one in attempt.environment.stop_strings if (place := text.find(one)) >= 0]
    said = text[: min(stops)] if stops else text
    reason = FinishReason.STOP_STRING if stops else FinishReason.LENGTH if is_cut else FinishReason.EOS
    spoken, unread = _take_apart(said, calls, attempt.tools)
    result = await attempt.environment.step(Action(text=said, finish_reason=reason, spoken=spoken))
    is_done = result.done or reason is FinishReason.LENGTH or attempt.is_late
    messages = [one if calls else _as_user(one) for one in result.messages]
    # To a server each call is answered by its id, also one that could not be read.
    first = len(messages) - len(unread)
    for place, call_id in enumerate(unread, first):
        if not is_done:
            messages[place] = replace(messages[place], role="tool", tool_call_id=call_id)
    return {"messages": [one.to_json() for one in messages], "is_done": is_done}


def _take_apart(
    text: str, calls: Sequence[Any], tools: dict[str, Any]
) -> tuple[Spoken | None, tuple[str, ...]]:
    """Return a reply taken apart, and the ids of calls that are none; no reply where it is read as fences."""
    if not tools:
        return None, ()
    if not calls:
        form = next((form for mark, form in _MARKS if mark in text), None)
        return None if form is None else read_reply(text, form, tools), ()
    read, mistakes, unread = [], [], []
    for call_id, name, arguments in calls:
        try:
            read.append(ToolCall(name=name, arguments=arguments or "{}", call_id=call_id))
        except DataError as error:
            mistakes.append(f"a tool call that cannot be read: {given_of(error)}")
            unread.append(call_id)
    return Spoken(content=text.strip(), calls=tuple(read), mistakes=tuple(mistakes)), tuple(unread)


_MARKS = (
    ("<function=", CallFormat.QWEN_XML),
    ("<tool_call>", CallFormat.HERMES),
    ("[TOOL_CALLS]", CallFormat.MISTRAL),
    ("<|python_tag|>", CallFormat.LLAMA),
)
"""Of calls that the server left in the text."""


def _as_user(message: Message) -> Message:
    """Return a tool's reply to a call that no server read as the user's words."""
    if message.role != "tool":
        return message
    return Message(role="user", content=f"{message.name} returned:\n{message.text}")


async def _score(attempt: _Attempt) -> dict[str, Any]:
    outcome = await attempt.environment.score()
    if outcome.failure is not None:
        return {"failure": asdict(outcome.failure)}
    right = {} if outcome.is_correct is None else {"is_correct": float(outcome.is_correct)}
    return {"parts": dict(outcome.parts), "metrics": {**outcome.metrics, **right}}


async def _close(attempt: _Attempt) -> dict[str, Any]:
    await attempt.environment.close()
    return {}


if __name__ == "__main__":
    asyncio.run(serve(Guest))
