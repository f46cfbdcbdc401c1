"""strop's side of an exported environment: `python -m strop.environments.export.playing`, served as a guest.

Attempts use the seed of the self-test, so that one example is one task, with one opening. A reply arrives as
an OpenAI-compatible server returns it: a text and parsed calls, or a text with calls still in it.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass, field, replace
from functools import wraps
from typing import Any, ParamSpec

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
from strop.tasks.tool_calls import CallFormat, Spoken, guess_format, read_reply
from strop.tasks.user.posing import OPENING_SEED

P = ParamSpec("P")

_JSON = TypeAdapter(dict[str, Any])


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


def _attributed(
    work: Callable[P, Awaitable[dict[str, Any]]],
) -> Callable[P, Awaitable[dict[str, Any]]]:
    """Return, in place of an exception, the failure that leaves the attempt without a score."""

    @wraps(work)
    async def attribute(*args: P.args, **kwargs: P.kwargs) -> dict[str, Any]:
        with catch_failure(FailureOwner.TASK) as caught:
            return await work(*args, **kwargs)
        assert caught.failure is not None
        return {"failure": asdict(caught.failure)}

    return attribute


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
        """Start the judge."""
        judge = open_judge(self._task, task_builder(self._spec))
        self._make_environment = choose_environment(self._task, judge)

    async def tasks(self, split: str) -> list[dict[str, Any]]:
        """Return all examples of a split, as data of verifiers' tasks."""

        def pose(index: int, example: Example) -> dict[str, Any]:
            messages = self._task.render(example)
            first, *rest = messages
            system = first.text if first.role == "system" and rest else None
            prompt = messages if system is None else rest
            is_text = len(prompt) == 1 and prompt[0].role == "user"
            return {
                "id": example.example_id,
                "name": self._task.name,
                "system_prompt": system,
                "prompt": prompt[0].text if is_text else [message.to_json() for message in prompt],
                "tools": [_JSON.validate_json(schema) for schema in tools_of(messages)],
                "split": split,
                "example": index,
            }

        # In a thread: most tasks read their data now.
        return await asyncio.to_thread(
            lambda: [pose(*pair) for pair in enumerate(self._task.examples(Split(split)))]
        )

    @_attributed
    async def open(self, split: str, example: int) -> dict[str, Any]:
        """Begin an attempt; return its number."""
        environment = self._make_environment()
        async with AsyncExitStack() as stack:
            stack.push_async_callback(environment.close)
            messages = await environment.reset(self._task.examples(Split(split))[example], OPENING_SEED)
            # From now on `close` closes it.
            stack.pop_all()
        number = next(self._numbers)
        functions = [_JSON.validate_json(schema)["function"] for schema in tools_of(messages)]
        tools = {function["name"]: function["parameters"] for function in functions}
        self._attempts[number] = _Attempt(environment=environment, tools=tools)
        return {"number": number}

    @_attributed
    async def step(self, number: int, text: str, calls: Sequence[Any], is_cut: bool) -> dict[str, Any]:
        """Take a reply; return the messages to the model, and whether the attempt is over."""
        attempt = self._attempts[number]
        stops = [place for stop in attempt.environment.stop_strings if (place := text.find(stop)) >= 0]
        reply = text[: min(stops)] if stops else text
        reason = FinishReason.STOP_STRING if stops else FinishReason.LENGTH if is_cut else FinishReason.EOS
        spoken, unread = _take_apart(reply, calls, attempt.tools)
        result = await attempt.environment.step(Action(text=reply, finish_reason=reason, spoken=spoken))
        is_done = result.done or reason is FinishReason.LENGTH or attempt.is_late
        messages = [message if calls else _as_user(message) for message in result.messages]
        # A server wants an answer to each call's id, also to a call that could not be read.
        first = len(messages) - len(unread)
        for place, call_id in enumerate(unread, first):
            if not is_done:
                messages[place] = replace(messages[place], role="tool", tool_call_id=call_id)
        return {"messages": [message.to_json() for message in messages], "is_done": is_done}

    @_attributed
    async def score(self, number: int) -> dict[str, Any]:
        """Score the attempt in its current state."""
        outcome = await self._attempts[number].environment.score()
        if outcome.failure is not None:
            return {"failure": asdict(outcome.failure)}
        correct = {} if outcome.is_correct is None else {"is_correct": float(outcome.is_correct)}
        return {"parts": dict(outcome.parts), "metrics": {**outcome.metrics, **correct}}

    @_attributed
    async def close(self, number: int) -> dict[str, Any]:
        """Close the attempt."""
        await self._attempts.pop(number).environment.close()
        return {}


def _take_apart(
    text: str, calls: Sequence[Any], tools: dict[str, Any]
) -> tuple[Spoken | None, tuple[str, ...]]:
    """Return the parsed reply, or None if the environment parses it, and the ids of unreadable calls."""
    if not tools:
        return None, ()
    if not calls:
        # Calls that the server left in the text; fences are the environment's own format.
        form = guess_format(text)
        return None if form in (None, CallFormat.FENCE) else read_reply(text, form, tools), ()
    read, mistakes, unread = [], [], []
    for call_id, name, arguments in calls:
        try:
            read.append(ToolCall(name=name, arguments=arguments or "{}", call_id=call_id))
        except DataError as error:
            mistakes.append(f"a tool call that cannot be read: {given_of(error)}")
            unread.append(call_id)
    return Spoken(content=text.strip(), calls=tuple(read), mistakes=tuple(mistakes)), tuple(unread)


def _as_user(message: Message) -> Message:
    """Convert a tool's reply to a user message, if the server did not parse the call."""
    if message.role != "tool":
        return message
    return Message(role="user", content=f"{message.name} returned:\n{message.text}")


if __name__ == "__main__":
    asyncio.run(serve(Guest))
