"""Tools: plain typed methods of an environment, their schemas, and their calls.

A tool's result becomes text within a budget of characters. A malformed call (an unknown tool, or arguments of
another type) and a `ToolError` are reported to the model and counted. Any other exception is a fault of the
tool, and the attempt has no score.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import typing
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeVar

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError, create_model
from pydantic.errors import PydanticSchemaGenerationError, PydanticUserError

from strop.errors import ConfigError
from strop.rollout import FailureOwner, ToolCall
from strop.tasks.failures import AttemptFailed

Returned = TypeVar("Returned")
RESERVED = frozenset(
    {
        *("examples", "reset", "step", "score", "close", "gold_replies", "problem_of", "limits", "max_turns"),
        # Of a suite of tasks, TRL's name of `score`, and of a `Workspace`.
        *("part_of", "get_reward"),
        *("opening", "sandbox_for", "prepare", "grade", "run_program", "forgeries", "explain_error"),
    }
)
"""Public methods of an environment that are no tools."""


class ToolError(Exception):
    """A tool raises this to report an error to the model; the attempt goes on."""


class CallRefused(Exception):
    """Raised for a malformed call; the message is for the model."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Tool:
    """A method that the model may call."""

    name: str
    schema: str
    """The function in the form of OpenAI's chat API, as JSON."""
    check: TypeAdapter[Any]
    """A pydantic model with a field for each argument."""

    def read_arguments(self, call: ToolCall) -> dict[str, Any]:
        """Return the arguments of a call. Raises: CallRefused if they do not fit the tool."""
        try:
            # Not strict: models write 3 as "3".
            checked = self.check.validate_json(call.arguments)
        except ValidationError as error:
            faults = "; ".join(
                f"{'.'.join(map(str, fault['loc'])) or 'arguments'}: {fault['msg']}"
                for fault in error.errors()
            )
            raise CallRefused(f"{self.name} was called with wrong arguments: {faults}") from error
        return {name: getattr(checked, name) for name in type(checked).model_fields}


def _find_tools(kind: type) -> dict[str, Tool]:
    """Return the tools of an environment's class: its public methods that are not `RESERVED`.

    Raises: ConfigError if one has a parameter without a type, or of a type that JSON cannot express.
    """
    names = [name for name in dir(kind) if not name.startswith("_") and name not in RESERVED]
    members = {name: inspect.getattr_static(kind, name) for name in names}
    return {
        name: _read_method(kind, name, member)
        for name, member in members.items()
        if inspect.isfunction(member)
    }


find_tools: Callable[[type], dict[str, Tool]] = cache(_find_tools)


def _read_method(kind: type, name: str, method: Callable[..., Any]) -> Tool:
    where = f"{kind.__name__}.{name}"
    try:
        hints = typing.get_type_hints(method, include_extras=True)
    except NameError as error:
        raise _refuse(f"{where}: {error}", "types that the file can name") from error
    fields: dict[str, Any] = {}
    for parameter in list(inspect.signature(method).parameters.values())[1:]:
        is_named = parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
        if parameter.name not in hints or not is_named:
            raise _refuse(f"{where} has the parameter {parameter} without a type or name", "typed parameters")
        default = ... if parameter.default is parameter.empty else parameter.default
        fields[parameter.name] = (hints[parameter.name], Field(default=default))
    try:
        model = create_model(name, __config__=ConfigDict(extra="forbid"), **fields)
        schema = model.model_json_schema()
    except (PydanticSchemaGenerationError, PydanticUserError) as error:
        raise _refuse(f"{where} takes what JSON has no form for", "texts, numbers, lists, tables") from error
    for titled in (schema, *schema.get("properties", {}).values()):
        titled.pop("title", None)
    parameters = {"type": "object", "properties": {}, **schema}
    function = {"name": name, "description": inspect.getdoc(method) or "", "parameters": parameters}
    text = json.dumps({"type": "function", "function": function}, ensure_ascii=False)
    return Tool(name=name, schema=text, check=TypeAdapter(model))


def _refuse(problem: str, allowed: str) -> ConfigError:
    return ConfigError(
        problem,
        allowed=f"a tool with {allowed}",
        next_step="correct it, or begin its name with _ if it is no tool",
    )


def run_here(work: Coroutine[Any, Any, Returned]) -> Returned:
    """Run a coroutine to its end, in a thread: an event loop may be running here."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, work).result()


def to_text(returned: Any, name: str) -> str:
    """Convert the result of a tool or a step to text; binary data becomes a note of its size.

    Raises: AttemptFailed if it has no text form.
    """
    if isinstance(returned, str):
        # No tokenizer accepts a lone surrogate.
        return returned.encode("utf-8", "replace").decode("utf-8")
    if isinstance(returned, bytes | bytearray | memoryview):
        return f"({len(returned)} bytes of binary data)"
    if returned is None:
        return ""
    try:
        return json.dumps(returned, ensure_ascii=False)
    except (TypeError, ValueError) as error:
        detail = f"{name} returned a {type(returned).__name__}, which has no form as text"
        raise AttemptFailed(FailureOwner.TASK, "no_text", detail) from error


def read_objects(text: str) -> Iterator[dict[str, Any]]:
    """Yield the JSON objects in a text in order; skip everything else."""
    place, decoder = 0, json.JSONDecoder()
    while (start := text.find("{", place)) >= 0:
        try:
            value, place = decoder.raw_decode(text, start)
        except (ValueError, RecursionError):
            place = start + 1
            continue
        yield value


def cut_text(text: str, max_chars: int) -> str:
    """Shorten a text to a budget: keep its beginning and its end, with a note of the omission between."""
    if len(text) <= max_chars:
        return text
    note = f"\n[... {len(text) - max_chars} characters left out ...]\n"
    kept = max(0, max_chars - len(note))
    return text[: kept - kept // 2] + note + text[len(text) - kept // 2 :]


def read_facts(own: Any) -> dict[str, Any]:
    """Return the facts of a class as JSON values: the schemas of its `tools`, `has_step`, `max_turns`.

    Raises: ConfigError like `find_tools`.
    """
    return {
        "tools": {name: tool.schema for name, tool in find_tools(type(own)).items()},
        "has_step": callable(getattr(own, "step", None)),
        "max_turns": getattr(own, "max_turns", None),
    }
