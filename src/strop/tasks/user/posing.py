"""The process in which a user's class makes its examples: `python -m strop.tasks.user.posing FD`.

It writes the examples as JSON, so the training process holds no code of the user's.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Mapping
from functools import partial
from importlib import import_module
from typing import Any

from strop.errors import ConfigError, DataError
from strop.rollout import Example, Message, Split, make_example
from strop.tasks.contract import TURN, TaskLimits
from strop.tasks.user.rewards import await_if_needed
from strop.user_code import CodeRef, blaming
from strop.user_code.probe import Shape, answer_order, settings_class, shape_of

OPENING_SEED = 0
"""Of the openings that a plan and the gate measure; rollouts have seeds of their own."""
_LIMITS = frozenset(field.name for field in dataclasses.fields(TaskLimits)) - {"verify_limit_s"}


def make_task(found: Any, values: Mapping[str, Any]) -> Any:
    """Return the user's object, made with its settings; one that was written for others in strop's form."""
    if shape_of(found) in (Shape.GYMNASIUM, Shape.TRL):
        # A room above this one.
        found = import_module("strop.environments.shapes").adapt(found)
        return found()
    kind = settings_class(found)
    if kind is None:
        return found()
    from pydantic import TypeAdapter

    return found(TypeAdapter(kind).validate_python(dict(values)))


def main(descriptor: int) -> None:
    """Answer one order: the settings, as the class completed them."""
    answer_order(descriptor, pose)


def pose(found: Any, order: Mapping[str, Any]) -> dict[str, Any]:
    """Return the limits of a class and its examples with prompts, as JSON values.

    Raises: ConfigError naming file and line if it cannot give them.
    """
    ref = CodeRef(**order["ref"])
    with blaming(ref, "be made with its settings"):
        task = make_task(found, order["values"])
    render = task.render if callable(getattr(task, "render", None)) else partial(_open, found, order, ref)
    limits, splits = _limits_of(task, ref), {}
    for split in Split:
        with blaming(ref, f"give its examples of {split.value}"):
            made = list(task.examples(split))
        if not made:
            raise _refuse(ref, f"has no examples of {split.value}", "at least one in each split")
        splits[split.value] = [_pose_one(task, render, ref, one) for one in made]
    return {
        "limits": limits,
        "knows_gold": callable(getattr(task, "gold_replies", None)),
        "splits": splits,
    }


def _open(found: Any, order: Mapping[str, Any], ref: CodeRef, example: Example) -> Any:
    """Return how an environment opens an example. Raises: ConfigError if equal seeds open it in two ways."""
    opened = [make_task(found, order["values"]) for _ in range(2)]
    first, second = [await_if_needed(opening_of(one)(example, OPENING_SEED)) for one in opened]
    if first != second:
        raise _refuse(
            ref,
            f"opens {dict(example.fields)!r:.80} for the same seed with {first!r:.80}, then {second!r:.80}",
            "a reset that draws from its seed alone",
        )
    return first


def opening_of(world: Any) -> Callable[[Example, int], Any]:
    """Return the method that says how an attempt opens, and no more than that where there is one."""
    method: Callable[[Example, int], Any] = getattr(world, "opening", world.reset)
    return method


def _limits_of(task: Any, ref: CodeRef) -> dict[str, Any]:
    """Return the limits that the class sets to other values than the defaults."""
    limits = getattr(task, "limits", None)
    if limits is None:
        return {}
    if not isinstance(limits, TaskLimits):
        raise _refuse(ref, f"has limits of type {type(limits).__name__}", "a TaskLimits of strop.tasks")
    given = {name: getattr(limits, name) for name in _LIMITS}
    defaults = TaskLimits(max_reply_tokens=limits.max_reply_tokens)
    return {
        name: value
        for name, value in given.items()
        if name == "max_reply_tokens" or value != getattr(defaults, name)
    }


def _pose_one(task: Any, render: Callable[[Example], Any], ref: CodeRef, made: Any) -> dict[str, Any]:
    if isinstance(made, Mapping):
        fields = {name: value for name, value in made.items() if name != "answer"}
        answer = made.get("answer")
        with blaming(ref, f"give the example {made!r:.80}"):
            example = make_example(ref.name, fields, None if answer is None else str(answer))
    elif isinstance(made, Example):
        example = made
    else:
        raise _refuse(ref, f"gives an example {made!r:.80}", "tables of fields, perhaps with an answer")
    with blaming(ref, f"write the prompt of {dict(example.fields)!r:.80}"):
        asked = render(example)
    gold: list[str] = []
    if callable(getattr(task, "gold_replies", None)):
        with blaming(ref, f"say a right reply to {dict(example.fields)!r:.80}"):
            gold = [
                reply if isinstance(reply, str) else TURN.join(reply) for reply in task.gold_replies(example)
            ]
    problem = None
    if callable(getattr(task, "problem_of", None)):
        with blaming(ref, f"name the problem of {dict(example.fields)!r:.80}"):
            problem = str(task.problem_of(example))
    return {
        "fields": dict(example.fields),
        "answer": example.answer,
        "messages": _to_messages(asked, ref),
        "gold": gold,
        "problem": problem,
    }


def _to_messages(asked: Any, ref: CodeRef) -> list[Any]:
    """Return a prompt's messages: pairs of role and text, or tables where a message is more than that."""
    if isinstance(asked, str | Message):
        asked = [Message(role="user", content=asked) if isinstance(asked, str) else asked]
    allowed = "a text, or messages with role and content"
    try:
        messages = [
            one if isinstance(one, Message) else Message.from_json(one)
            for one in asked or ()
            if isinstance(one, Message | Mapping)
        ]
    except DataError as error:
        raise _refuse(ref, f"asks {asked!r:.80} ({error})", allowed) from error
    if not messages or not all(one.role and (one.text or one.tool_calls) for one in messages):
        raise _refuse(ref, f"asks {asked!r:.80}", allowed)
    tables = [one.to_json() for one in messages]
    return [[*one.values()] if one.keys() == {"role", "content"} else one for one in tables]


def _refuse(ref: CodeRef, what: str, allowed: str) -> ConfigError:
    return ConfigError(
        f"{ref} {what}", allowed=allowed, next_step=f"correct {ref.path if ref.is_file else ref}"
    )


if __name__ == "__main__":
    main(int(sys.argv[1]))
