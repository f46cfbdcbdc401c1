"""The process that inspects user code: `python -m strop.user_code.probe FD`.

It reads one order from standard input, imports the code, and writes one JSON answer to a file descriptor.
The code's output is discarded; the parent ends this process and its forks.
"""

from __future__ import annotations

import inspect
import json
import os
import resource
import sys
import typing
from collections.abc import Mapping
from typing import Any

from strop.errors import ConfigError
from strop.user_code.loading import load_code
from strop.user_code.reference import CodeRef

MAX_BYTES = 1 << 34
"""Limit of RLIMIT_DATA for inspecting code; not of addresses, which libraries reserve."""
TASK_METHODS = ("examples", "render", "verify")
ENVIRONMENT_METHODS = ("examples", "reset", "score")


def main(descriptor: int) -> None:
    """Answer one order with a description of the code, or an error."""
    order = json.load(sys.stdin)
    _, hard_bytes = resource.getrlimit(resource.RLIMIT_DATA)
    bound = MAX_BYTES if hard_bytes == resource.RLIM_INFINITY else min(MAX_BYTES, hard_bytes)
    resource.setrlimit(resource.RLIMIT_DATA, (bound, hard_bytes))
    try:
        answer = _inspect(load_code(CodeRef(**order["ref"]), order["digest"]), order)
    except ConfigError as error:
        answer = {"refused": str(error)}
    with os.fdopen(descriptor, "w") as file:
        json.dump(answer, file)
    # Skip the user's threads and exit handlers.
    os._exit(0)


def _inspect(loaded: Any, order: Mapping[str, Any]) -> dict[str, Any]:
    if order["kind"] == "object":
        return {}
    return _inspect_task(loaded, order["settings"]) if order["kind"] == "task" else _inspect_function(loaded)


def _inspect_function(loaded: Any) -> dict[str, Any]:
    if not callable(loaded) or inspect.isclass(loaded):
        return {"fault": f"is {_kind_of(loaded)}, not a function"}
    parameters = inspect.signature(loaded).parameters.values()
    by_name = [each for each in parameters if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)]
    return {
        "parameters": [parameter.name for parameter in by_name],
        "required": [parameter.name for parameter in by_name if parameter.default is parameter.empty],
        "unnamed": [each.name for each in parameters if each.kind == each.POSITIONAL_ONLY],
        "takes_others": any(each.kind == each.VAR_KEYWORD for each in parameters),
        "line": _line_of(loaded),
    }


def _inspect_task(loaded: Any, settings: Mapping[str, Any]) -> dict[str, Any]:
    if not inspect.isclass(loaded):
        return {"fault": f"is {_kind_of(loaded)}, not a class"}
    line = _line_of(loaded)
    is_environment = callable(getattr(loaded, "reset", None))
    required = ENVIRONMENT_METHODS if is_environment else TASK_METHODS
    missing = [name for name in required if not callable(getattr(loaded, name, None))]
    if missing:
        return {"fault": f"has no {' and no '.join(missing)}", "line": line}
    answer: dict[str, Any] = {"line": line, "meaning": inspect.getdoc(loaded) or ""}
    answer |= {"path": inspect.getfile(loaded), "is_environment": is_environment}
    answer["has_sandbox"] = callable(getattr(loaded, "sandbox_for", None))
    kind = settings_class(loaded)
    if kind is None:
        return {**answer, "schema": {}, "values": {}, "mistakes": [[name, ""] for name in settings]}
    from pydantic import TypeAdapter, ValidationError

    adapter: TypeAdapter[Any] = TypeAdapter(kind)
    answer["schema"] = adapter.json_schema()
    names = answer["schema"].get("properties", {})
    mistakes = [[name, ""] for name in settings if name not in names]
    try:
        # From JSON and strict, so that '8' is not accepted as 8.
        value = adapter.validate_json(json.dumps(settings), strict=True)
    except ValidationError as error:
        mistakes += [[".".join(map(str, item["loc"])), item["msg"]] for item in error.errors()]
        return {**answer, "values": {}, "mistakes": mistakes}
    return {**answer, "values": adapter.dump_python(value, mode="json"), "mistakes": mistakes}


def settings_class(cls: type) -> type | None:
    """Return the class of the settings that a task's `__init__` takes; None if it takes none."""
    parameters = list(inspect.signature(cls).parameters)
    if not parameters:
        return None
    kind = typing.get_type_hints(cls.__init__).get(parameters[0])  # type: ignore[misc]
    return kind if isinstance(kind, type) else None


def _kind_of(loaded: Any) -> str:
    return "a class" if inspect.isclass(loaded) else f"a {type(loaded).__name__}"


def _line_of(loaded: Any) -> int | None:
    try:
        return inspect.getsourcelines(loaded)[1]
    except (OSError, TypeError):
        return None


if __name__ == "__main__":
    main(int(sys.argv[1]))
