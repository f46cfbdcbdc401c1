"""A person in the model's place: an environment, or a task, played in the terminal or by piped text."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Sequence

from strop.environments import Environment, choose_environment
from strop.environments.contract import Action
from strop.errors import ConfigError
from strop.rollout import FinishReason, Message, Outcome, Split, ToolCall
from strop.spec.task import TaskSection
from strop.tasks import build_task, task_builder
from strop.tasks.judging import open_judge
from strop.tasks.prompt import tools_of
from strop.tool_calls import write_call

_CALL = re.compile(r"/(?P<name>\w+)(?:\s+(?P<arguments>.*))?")
_FENCE = "```"

Read = Callable[[], str | None]
"""Returns a line without its end; None where there is none any more."""
Tell = Callable[[str], None]


def play_here(spec: TaskSection, seed: int, read: Read, tell: Tell) -> Outcome:
    """Play one held-out example: tell what the model would be told, read its replies, return the score.

    A reply is a line; a fenced block goes on to its end; `/NAME key=value` calls a tool. `seed` picks the
    example, and its draws come from it. Where nothing is left to read, the attempt is scored as it stands.
    Raises: ConfigError if a program conducts the attempts; as the task does.
    """
    if spec.agent is not None:
        raise ConfigError(
            f"task.agent={spec.agent}: a program conducts the attempts, and no reply is asked of a person",
            allowed="the task without its agent",
            next_step="set task.agent=none",
        )
    task = build_task(spec)
    examples = task.examples(Split.HELD_OUT)
    example = examples[seed % len(examples)]

    async def play() -> Outcome:
        judge = open_judge(task, task_builder(spec))
        environment = choose_environment(task, judge)()
        try:
            await _converse(environment, await environment.reset(example, seed), read, tell)
            return await environment.score()
        finally:
            await environment.close()
            await judge.close()

    return asyncio.run(play())


async def _converse(environment: Environment, opening: Sequence[Message], read: Read, tell: Tell) -> None:
    for message in opening:
        tell(f"{message.role}: {message.text}")
    tools = [json.loads(schema)["function"] for schema in tools_of(opening)]
    for tool in tools:
        names = " ".join(f"{name}=" for name in tool["parameters"].get("properties", {}))
        tell(f"tool: /{tool['name']} {names}".rstrip() + f"  {tool['description']}".rstrip())
    for _ in range(environment.max_turns):
        reply = await asyncio.to_thread(_read_reply, read)
        if reply is None:
            return
        result = await environment.step(Action(text=reply, finish_reason=FinishReason.EOS))
        for message in result.messages:
            tell(f"{message.name or message.role}: {message.text}")
        if result.done:
            return


def _read_reply(read: Read) -> str | None:
    """Read a reply; lines behind an open fence belong to it."""
    lines = [read()]
    while lines[-1] is not None and sum(line.lstrip().startswith(_FENCE) for line in lines if line) % 2:
        lines.append(read())
    found = [line for line in lines if line is not None]
    if not found:
        return None
    call = _CALL.fullmatch(found[0])
    return "\n".join(found) if call is None else _to_call(call["name"], call["arguments"] or "")


def _to_call(name: str, words: str) -> str:
    """Return a call that was written as words, `key=value` or one JSON object, as a fenced block."""
    if words.lstrip().startswith("{"):
        return f'{_FENCE}tool\n{{"name": {json.dumps(name)}, "arguments": {words}}}\n{_FENCE}'
    parts = re.split(r"(?:^|\s+)(\w+)=", words)[1:]
    pairs = zip(parts[::2], parts[1::2], strict=True)
    arguments = {key: value.strip() for key, value in pairs}
    return write_call(ToolCall(name=name, arguments=json.dumps(arguments, ensure_ascii=False)))
