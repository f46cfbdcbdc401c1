"""The process that looks at user code: `python -m strop.user_code.probe FD`.

It reads one order from standard input, imports the code, and writes one JSON answer to a file descriptor.
What the code prints is discarded; the parent ends this process and all that it forked.
"""

from __future__ import annotations

import inspect
import json
import os
import resource
import sys
import typing
from collections.abc import Callable, Mapping
from enum import StrEnum
from typing import Any

from strop.errors import ConfigError
from strop.user_code.loading import load_code
from strop.user_code.reference import CodeRef

MAX_BYTES = 1 << 34
"""Memory that looking at code, and making examples, may take. Of data: libraries reserve addresses freely."""
TASK_METHODS = ("examples", "render", "verify")
ENVIRONMENT_METHODS = ("examples", "reset", "score")


class Shape(StrEnum):
    """What a class was written for."""

    TASK = "task"
    ENVIRONMENT = "environment"
    """strop's own form: `examples`, `reset(example, seed)`, `step` or tools, `score`."""
    GYMNASIUM = "gymnasium"
    """`reset(seed=...)` and `step(action)`, which returns five things."""
    TRL = "trl"
    """`reset(**row)`, tools, and `get_reward`: what TRL takes as `environment_factory`."""


def main(descriptor: int) -> None:
    """Answer one order: what the code is, or why it cannot be used."""
    answer_order(descriptor, _look)


def answer_order(descriptor: int, work: Callable[[Any, Mapping[str, Any]], dict[str, Any]]) -> None:
    """Read an order, load the code in it, and write what `work` makes of both, or why there is nothing."""
    order = json.load(sys.stdin)
    _, hard_bytes = resource.getrlimit(resource.RLIMIT_DATA)
    bound = MAX_BYTES if hard_bytes == resource.RLIM_INFINITY else min(MAX_BYTES, hard_bytes)
    resource.setrlimit(resource.RLIMIT_DATA, (bound, hard_bytes))
    try:
        answer = work(load_code(CodeRef(**order["ref"]), order["digest"]), order)
    except ConfigError as error:
        answer = {"refused": str(error)}
    with os.fdopen(descriptor, "w") as file:
        json.dump(answer, file)
    # Threads and exit handlers of the user's have nothing to say any more.
    os._exit(0)


def _look(found: Any, order: Mapping[str, Any]) -> dict[str, Any]:
    if order["kind"] == "object":
        return {}
    return _look_at_task(found, order["settings"]) if order["kind"] == "task" else _look_at_function(found)


def _look_at_function(found: Any) -> dict[str, Any]:
    if not callable(found) or inspect.isclass(found):
        return {"fault": f"is {_kind_of(found)}, not a function"}
    parameters = inspect.signature(found).parameters.values()
    named = [one for one in parameters if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)]
    return {
        "parameters": [one.name for one in named],
        "required": [one.name for one in named if one.default is one.empty],
        "unnamed": [one.name for one in parameters if one.kind == one.POSITIONAL_ONLY],
        "takes_others": any(one.kind == one.VAR_KEYWORD for one in parameters),
        "line": _line_of(found),
    }


def _look_at_task(found: Any, settings: Mapping[str, Any]) -> dict[str, Any]:
    if not inspect.isclass(found):
        return {"fault": f"is {_kind_of(found)}, not a class"}
    line = _line_of(found)
    shape = shape_of(found)
    missing = [name for name in _WANTED[shape] if not callable(getattr(found, name, None))]
    if missing:
        return {"fault": f"has no {' and no '.join(missing)}", "line": line}
    answer: dict[str, Any] = {"line": line, "meaning": inspect.getdoc(found) or ""}
    answer |= {"path": inspect.getfile(found), "is_environment": shape is not Shape.TASK}
    answer["has_sandbox"] = callable(getattr(found, "sandbox_for", None))
    kind = settings_class(found)
    if kind is None:
        return {**answer, "schema": {}, "values": {}, "mistakes": [[name, ""] for name in settings]}
    from pydantic import TypeAdapter, ValidationError

    adapter: TypeAdapter[Any] = TypeAdapter(kind)
    answer["schema"] = adapter.json_schema()
    names = answer["schema"].get("properties", {})
    mistakes = [[name, ""] for name in settings if name not in names]
    try:
        # As JSON, so that a dataclass may be strict: '8' is not 8 here either.
        value = adapter.validate_json(json.dumps(settings), strict=True)
    except ValidationError as error:
        mistakes += [[".".join(map(str, one["loc"])), one["msg"]] for one in error.errors()]
        return {**answer, "values": {}, "mistakes": mistakes}
    return {**answer, "values": adapter.dump_python(value, mode="json"), "mistakes": mistakes}


_WANTED = {
    Shape.TASK: TASK_METHODS,
    Shape.ENVIRONMENT: ENVIRONMENT_METHODS,
    Shape.GYMNASIUM: (),
    Shape.TRL: (),
}


def shape_of(found: type) -> Shape:
    """Return what a class was written for, as its methods say."""
    reset = getattr(found, "reset", None)
    if not callable(reset):
        return Shape.TASK
    parameters = list(inspect.signature(reset).parameters.values())[1:]
    names = {one.name for one in parameters}
    if "example" in names:
        return Shape.ENVIRONMENT
    is_row_whole = any(one.kind is one.VAR_KEYWORD for one in parameters)
    if {"seed"} <= names <= {"seed", "options"} and callable(getattr(found, "step", None)):
        return Shape.GYMNASIUM
    is_trl = is_row_whole or callable(getattr(found, "get_reward", None))
    return Shape.TRL if is_trl else Shape.ENVIRONMENT


def settings_class(found: type) -> type | None:
    """Return the class of the settings that a task's `__init__` takes; None where it takes none.

    A class that was written for others is made without arguments.
    """
    if shape_of(found) in (Shape.GYMNASIUM, Shape.TRL):
        return None
    parameters = list(inspect.signature(found).parameters)
    if not parameters:
        return None
    kind = typing.get_type_hints(found.__init__).get(parameters[0])  # type: ignore[misc]
    return kind if isinstance(kind, type) else None


def _kind_of(found: Any) -> str:
    return "a class" if inspect.isclass(found) else f"a {type(found).__name__}"


def _line_of(found: Any) -> int | None:
    try:
        return inspect.getsourcelines(found)[1]
    except (OSError, TypeError):
        return None


if __name__ == "__main__":
    main(int(sys.argv[1]))
