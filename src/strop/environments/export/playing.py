"""strop's side of an exported environment: `python -m strop.environments.export.playing SOCKET`.

It plays whole attempts on the model of an OpenAI-compatible server, which may read tool calls or leave them
in the text. Attempts use the seed of the self-test, so that one example is one task, with one opening.
"""

from __future__ import annotations

import asyncio
import json
from contextlib import suppress
from dataclasses import asdict
from typing import Any

import httpx
from pydantic import TypeAdapter

from strop.environments.contract import Action, Environment
from strop.environments.guests.host import serve
from strop.environments.single_turn import choose_environment
from strop.errors import ConfigError, DataError
from strop.rollout import Example, FailureOwner, FinishReason, Message, Split, ToolCall
from strop.spec.task import TaskSpec
from strop.tasks import build_task, task_builder
from strop.tasks.failures import catch_failure
from strop.tasks.judging import Judge
from strop.tasks.prompt import tools_of
from strop.tasks.tool_calls import CallFormat, Spoken, guess_format, list_schemas, read_reply
from strop.tasks.user.posing import OPENING_SEED


class Player:
    """Plays one exported task."""

    def __init__(self, section: dict[str, Any], version: str) -> None:
        spec = TypeAdapter[Any](TaskSpec).validate_python(section)
        self._task = build_task(spec)
        if self._task.version != version:
            raise ConfigError(
                f"{self._task.name} has the version {self._task.version} here, and was exported as {version}",
                allowed="the release of strop, and the data, that it was exported with",
                next_step="name the Python of that release (--env.taskset.python), or export it anew",
            )
        self._make_environment = choose_environment(self._task, Judge(self._task, task_builder(spec)))

    async def tasks(self, split: str) -> list[dict[str, Any]]:
        """Return all examples of a split, as data of verifiers' tasks."""
        # In a thread: most tasks read their data now.
        examples = await asyncio.to_thread(self._task.examples, Split(split))
        return [
            {
                "id": example.example_id,
                "name": self._task.name,
                "prompt": [message.to_json() for message in self._task.render(example)],
                "split": split,
                "example": index,
            }
            for index, example in enumerate(examples)
        ]

    async def play(self, split: str, example: int, model: str, base_url: str, key: str) -> dict[str, Any]:
        """Play and score an attempt; return its parts and metrics, or the failure."""
        headers = {"authorization": f"Bearer {key}"}
        client = httpx.AsyncClient(base_url=base_url, headers=headers, timeout=None)
        environment = self._make_environment()
        with catch_failure(FailureOwner.TASK) as caught:
            try:
                posed = self._task.examples(Split(split))[example]
                async with client:
                    await _converse(environment, posed, client, model)
                outcome = await environment.score()
            finally:
                await environment.close()
        failure = caught.failure or outcome.failure
        if failure is not None:
            return {"failure": asdict(failure)}
        correct = {} if outcome.is_correct is None else {"is_correct": float(outcome.is_correct)}
        return {"parts": dict(outcome.parts), "metrics": {**outcome.metrics, **correct}}


async def _converse(
    environment: Environment, example: Example, client: httpx.AsyncClient, model: str
) -> None:
    """Let the model and the environment take turns, until one of them or a limit of the server's ends it."""
    opening = await environment.reset(example, OPENING_SEED)
    tools = list_schemas(tools_of(opening))
    asked: dict[str, Any] = {"model": model, "messages": [message.to_json() for message in opening]}
    asked |= {"tools": [json.loads(schema) for schema in tools_of(opening)]} if tools else {}
    for _ in range(environment.max_turns):
        answer = await client.post("chat/completions", json=asked)
        if answer.is_client_error:
            # A limit of the attempt's agent: it is scored as it is.
            return
        choice = answer.raise_for_status().json()["choices"][0]
        reply = {name: value for name, value in choice["message"].items() if value is not None}
        text, calls = reply.get("content") or "", [*map(_to_call, reply.get("tool_calls") or ())]
        stops = [place for stop in environment.stop_strings if (place := text.find(stop)) >= 0]
        is_cut = choice["finish_reason"] == "length"
        reason = FinishReason.STOP_STRING if stops else FinishReason.LENGTH if is_cut else FinishReason.EOS
        text = text[: min(stops)] if stops else text
        spoken = Spoken(content=text.strip(), calls=tuple(calls)) if calls else None
        form = guess_format(text) if tools and not calls else None
        if form is not None and form is not CallFormat.FENCE:
            # Calls that the server left in the text; fences are the environment's own format.
            spoken = read_reply(text, form, tools)
        result = await environment.step(Action(text=text, finish_reason=reason, spoken=spoken))
        if result.done or reason is FinishReason.LENGTH:
            return
        # A server wants an answer of a tool to those calls alone that it has read.
        messages = result.messages if calls else map(_as_user, result.messages)
        asked["messages"] += [reply, *(message.to_json() for message in messages)]


def _to_call(call: dict[str, Any]) -> ToolCall:
    """Read a call; arguments that cannot be read become one that every tool refuses."""
    name, text = call["function"]["name"], call["function"].get("arguments") or "{}"
    with suppress(DataError):
        return ToolCall(name=name, arguments=text, call_id=call["id"])
    return ToolCall(name=name, arguments=json.dumps({"unreadable": text}), call_id=call["id"])


def _as_user(message: Message) -> Message:
    if message.role != "tool":
        return message
    return Message(role="user", content=f"{message.name} returned:\n{message.text}")


async def _make(section: dict[str, Any], version: str) -> Player:
    return Player(section, version)


if __name__ == "__main__":
    asyncio.run(serve(_make))
