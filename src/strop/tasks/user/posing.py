"""The process in which a user's class makes its examples: `python -m strop.tasks.user.posing FD`.

It writes the examples as JSON, so the training process holds no user code.
"""

from __future__ import annotations

import asyncio
import dataclasses
import sys
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from strop.errors import ConfigError, DataError
from strop.rollout import Example, Message, Split, make_example
from strop.tasks.task import TURN, TaskLimits
from strop.tasks.user.rewards import call_foreign
from strop.user_code import CodeRef, blaming
from strop.user_code.probe import answer_order, settings_class

OPENING_SEED = 0
"""Seed of the openings that a plan and the gate measure; rollouts have other seeds."""


def make_task(kind: Any, values: Mapping[str, Any]) -> Any:
    """Instantiate the user's class with its settings."""
    settings = settings_class(kind)
    if settings is None:
        return kind()
    from pydantic import TypeAdapter

    return kind(TypeAdapter(settings).validate_python(dict(values)))


def pose(kind: Any, order: Mapping[str, Any]) -> dict[str, Any]:
    """Return the limits of a class and its examples with prompts, as JSON values.

    Raises: ConfigError naming file and line if the class fails.
    """
    ref = CodeRef(**order["ref"])
    with blaming(ref, "be made with its settings"):
        task = make_task(kind, order["values"])
    render = task.render if callable(getattr(task, "render", None)) else partial(_open, kind, order, ref)
    limits, splits = getattr(task, "limits", None), {}
    if not isinstance(limits, TaskLimits | None):
        raise _refuse(ref, f"has limits of type {type(limits).__name__}", "a TaskLimits of strop.tasks")
    for split in Split:
        with blaming(ref, f"give its examples of {split.value}"):
            examples = list(task.examples(split))
        if not examples:
            raise _refuse(ref, f"has no examples of {split.value}", "at least one in each split")
        splits[split.value] = [_pose_one(task, render, ref, example) for example in examples]
    return {
        "limits": {} if limits is None else dataclasses.asdict(limits),
        "knows_gold": callable(getattr(task, "gold_replies", None)),
        "splits": splits,
    }


def _open(kind: Any, order: Mapping[str, Any], ref: CodeRef, example: Example) -> Any:
    """Return an environment's opening of an example. Raises: ConfigError if it varies with equal seeds."""
    worlds = [make_task(kind, order["values"]) for _ in range(2)]
    first, second = [asyncio.run(call_foreign(opening_of(one), example, OPENING_SEED)) for one in worlds]
    if first != second:
        raise _refuse(
            ref,
            f"opens {dict(example.fields)!r:.80} for the same seed with {first!r:.80}, then {second!r:.80}",
            "a reset that draws from its seed alone",
        )
    return first


def opening_of(world: Any) -> Callable[[Example, int], Any]:
    """Return the method that opens an attempt: `opening`, which has no other effect, else `reset`."""
    method: Callable[[Example, int], Any] = getattr(world, "opening", world.reset)
    return method


def _pose_one(task: Any, render: Callable[[Example], Any], ref: CodeRef, value: Any) -> dict[str, Any]:
    """Ask the class about one of its examples: a table of fields, or an `Example`."""
    if isinstance(value, Mapping):
        fields = {name: field for name, field in value.items() if name != "answer"}
        answer = value.get("answer")
        with blaming(ref, f"give the example {value!r:.80}"):
            value = make_example(ref.name, fields, None if answer is None else str(answer))
    if not isinstance(value, Example):
        raise _refuse(ref, f"gives an example {value!r:.80}", "tables of fields, perhaps with an answer")
    shown = f"{dict(value.fields)!r:.80}"
    with blaming(ref, f"write the prompt of {shown}"):
        prompt = render(value)
    with blaming(ref, f"say a right reply to {shown}"):
        gold = task.gold_replies(value) if callable(getattr(task, "gold_replies", None)) else ()
        gold = [reply if isinstance(reply, str) else TURN.join(reply) for reply in gold]
    with blaming(ref, f"name the problem of {shown}"):
        named = task.problem_of(value) if callable(getattr(task, "problem_of", None)) else None
        problem = None if named is None else str(named)
    return {
        "fields": dict(value.fields),
        "answer": value.answer,
        "messages": _to_messages(prompt, ref),
        "gold": gold,
        "problem": problem,
    }


def _to_messages(prompt: Any, ref: CodeRef) -> list[dict[str, Any]]:
    """Return a prompt's messages as JSON. Raises: ConfigError for what is none."""
    if isinstance(prompt, str | Message):
        prompt = [Message(role="user", content=prompt) if isinstance(prompt, str) else prompt]
    try:
        messages = [one if isinstance(one, Message) else Message.from_json(one) for one in prompt or ()]
    except (DataError, TypeError) as error:
        messages, prompt = [], f"{prompt!r:.80} ({error})"
    if not messages or not all(message.role and (message.text or message.tool_calls) for message in messages):
        raise _refuse(ref, f"asks {prompt!s:.400}", "a text, or messages with role and content")
    return [message.to_json() for message in messages]


def _refuse(ref: CodeRef, fault: str, allowed: str) -> ConfigError:
    return ConfigError(
        f"{ref} {fault}", allowed=allowed, next_step=f"correct {ref.path if ref.is_file else ref}"
    )


if __name__ == "__main__":
    answer_order(int(sys.argv[1]), pose)
