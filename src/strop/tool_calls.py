"""How models write that they call a tool, by family: found from the chat template, read from the reply.

A reply holds thinking, prose and calls. What looks like a call and is none is a mistake of the model's: it
is named, and never dropped. Arguments stay to the letter as they were written. Forms as vLLM 0.32's parsers
take them (`hermes`, `qwen3_coder`, `llama3_json`, `mistral`); a model whose template knows no tools is told
in words to write a fenced block.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import partial
from typing import Any

from strop.errors import DataError
from strop.rollout import ToolCall

_DECODER = json.JSONDecoder()
_SPACE = re.compile(r"\s*")
_FENCE = re.compile(r"```[ \t]*(?P<label>tool_call|tool|json)?[ \t]*\n")
_FUNCTION = re.compile(r"\s*<function=(?P<name>[^>\n]+)>\n?")
_PARAMETER = re.compile(
    r"\s*<parameter=(?P<name>[^>\n]+)>\n?(?P<value>.*?)\n?</parameter>(?=\s*(?:<parameter=|</function>))",
    re.DOTALL,
)
_FUNCTION_END = re.compile(r"\s*</function>")
_OPEN, _CLOSED = "<think>", "</think>"
_MISTRAL, _MISTRAL_ARGUMENTS = "[TOOL_CALLS]", "[ARGS]"
_PYTHON_TAG = "<|python_tag|>"


class CallFormat(StrEnum):
    """How a family of models writes a call; the values of `environment.tool_format`, beside 'auto'."""

    HERMES = "hermes"
    """`<tool_call>{"name", "arguments"}</tool_call>`, any number: Hermes, Qwen 2.5 and 3."""
    QWEN_XML = "qwen-xml"
    """`<tool_call><function=NAME><parameter=KEY>`: Qwen3-Coder, Qwen 3.5. Values are typed by the schema."""
    LLAMA = "llama"
    """`{"name", "parameters"}` as the reply, perhaps behind `<|python_tag|>`: Llama 3."""
    MISTRAL = "mistral"
    """`[TOOL_CALLS]` and a list, or from version 11 on `NAME[ARGS]{...}` behind it."""
    FENCE = "fence"
    """A fenced block with `{"name", "arguments"}`, for models whose template knows no tools."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Spoken:
    """A reply, taken apart."""

    content: str
    """The prose before and between calls; all of it where there are none."""
    reasoning: str | None = None
    calls: tuple[ToolCall, ...] = ()
    mistakes: tuple[str, ...] = ()
    """What was to be a call and is none, and why; in words for the model."""
    source: str = ""
    """The text behind the thinking, calls included."""


def find_format(chat_template: str | None) -> CallFormat:
    """Return how the model of a chat template writes calls; `FENCE` where the template takes no tools."""
    source = chat_template or ""
    if not re.search(r"\btools\b", source):
        return CallFormat.FENCE
    marks = (
        (CallFormat.QWEN_XML, "<function="),
        (CallFormat.HERMES, "<tool_call>"),
        (CallFormat.MISTRAL, _MISTRAL),
        (CallFormat.LLAMA, '"parameters"'),
    )
    return next((form for form, mark in marks if mark in source), CallFormat.HERMES)


_MARKS = (
    ("<function=", CallFormat.QWEN_XML),
    ("<tool_call>", CallFormat.HERMES),
    (_MISTRAL, CallFormat.MISTRAL),
    (_PYTHON_TAG, CallFormat.LLAMA),
    ("```tool", CallFormat.FENCE),
)


def guess_format(text: str) -> CallFormat | None:
    """Return the format of the calls in a reply of an unknown model; None if it has no call's mark."""
    return next((form for mark, form in _MARKS if mark in text), None)


def read_reply(text: str, form: CallFormat, schemas: Mapping[str, Mapping[str, Any]]) -> Spoken:
    """Take a reply apart.

    `text` has the tokenizer's special tokens in it, but for the terminator. `schemas`: the JSON Schema of
    each tool's arguments, by its name; without tools there are no calls. Thinking that is not closed is all
    of the reply.
    """
    before, is_closed, behind = text.partition(_CLOSED)
    if not is_closed and _OPEN in text:
        return Spoken(content="", reasoning=text.partition(_OPEN)[2])
    reasoning = before.partition(_OPEN)[2] or before if is_closed else None
    rest = behind if is_closed else text
    found = _READERS[form](rest, schemas) if schemas else Spoken(content=rest)
    return replace(found, content=found.content.strip(), reasoning=reasoning, source=rest.strip())


def name_calls(calls: Sequence[ToolCall], turn: int) -> tuple[ToolCall, ...]:
    """Give calls ids that equal rollouts share: nine digits, as Mistral's template demands them."""
    return tuple(replace(call, call_id=f"{turn:05d}{index:04d}") for index, call in enumerate(calls))


def write_call(call: ToolCall) -> str:
    """Return a call as a fenced block, its arguments to the letter."""
    return f'```tool\n{{"name": {json.dumps(call.name)}, "arguments": {call.arguments}}}\n```'


def describe_tools(schemas: Sequence[str]) -> str:
    """Tell a model whose template knows no tools which there are, and how one is called.

    `schemas` are functions in the form of OpenAI's chat API, as JSON.
    """
    listed = "\n".join(json.dumps(json.loads(schema)["function"], ensure_ascii=False) for schema in schemas)
    example = write_call(ToolCall(name="NAME"))
    return f"You can call these tools:\n{listed}\n\nTo call one, write:\n{example}"


def _read_object(text: str, start: int) -> tuple[Any, int]:
    """Return the JSON value at `start`, and where it ends. Raises: ValueError."""
    try:
        return _DECODER.raw_decode(text, _skip(text, start))
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def _skip(text: str, start: int) -> int:
    match = _SPACE.match(text, start)
    assert match is not None
    return match.end()


def _to_call(value: Any, source: str) -> ToolCall:
    """Return the call that a JSON value is; `source` is its text. Raises: ValueError saying what it lacks."""
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        raise ValueError('it is no object with "name" and "arguments"')
    key = next((key for key in ("arguments", "parameters") if key in value), None)
    arguments = "{}" if key is None else _source_of(source, key)
    if key is not None and isinstance(value[key], str):
        # Some write the object as a text, as OpenAI's API has it.
        arguments = value[key]
    try:
        return ToolCall(name=value["name"], arguments=arguments)
    except DataError as error:
        raise ValueError("its arguments are no JSON object") from error


def _source_of(source: str, wanted: str) -> str:
    """Return the text of a key's value in the text of a JSON object that has it; of several, the last."""
    found, place = "", source.index("{") + 1
    while source[_skip(source, place)] != "}":
        key, place = _read_object(source, place)
        start = _skip(source, source.index(":", place) + 1)
        _, end = _read_object(source, start)
        found = source[start:end] if key == wanted else found
        place = _skip(source, end)
        place += source[place] == ","
    return found


def _read_tagged(text: str, read: Callable[[str, int], tuple[ToolCall, int]]) -> Spoken:
    """Read what stands between `<tool_call>` and its end, by what is in it; a missing end is forgiven."""
    prose, calls, mistakes = [], [], []
    place = 0
    while (start := text.find("<tool_call>", place)) >= 0:
        prose.append(text[place:start])
        start += len("<tool_call>")
        try:
            call, place = read(text, start)
            calls.append(call)
            after = _skip(text, place)
            place = after + len("</tool_call>") if text.startswith("</tool_call>", after) else place
        except ValueError as error:
            end = text.find("</tool_call>", start)
            mistakes.append(_mistake(text[start : end if end >= 0 else None], error))
            place = len(text) if end < 0 else end + len("</tool_call>")
    prose.append(text[place:])
    return Spoken(content="".join(prose), calls=tuple(calls), mistakes=tuple(mistakes))


def _json_call(text: str, start: int) -> tuple[ToolCall, int]:
    value, end = _read_object(text, start)
    return _to_call(value, text[start:end]), end


def _xml_call(text: str, start: int, schemas: Mapping[str, Mapping[str, Any]]) -> tuple[ToolCall, int]:
    function = _FUNCTION.match(text, start)
    if function is None:
        raise ValueError("it does not begin with <function=NAME>")
    name, place = function["name"].strip(), function.end()
    properties = schemas.get(name, {}).get("properties", {})
    arguments = {}
    while (parameter := _PARAMETER.match(text, place)) is not None:
        key = parameter["name"].strip()
        arguments[key] = _typed(parameter["value"], properties.get(key, {}))
        place = parameter.end()
    end = _FUNCTION_END.match(text, place)
    if end is None:
        raise ValueError("its parameters, or </function>, are not whole")
    return ToolCall(name=name, arguments=json.dumps(arguments, ensure_ascii=False)), end.end()


def _typed(value: str, schema: Mapping[str, Any]) -> Any:
    """Return a parameter's text as the schema's type; as it stands where it is a text or cannot be read."""
    if schema.get("type", "string") == "string" and "anyOf" not in schema:
        return value
    try:
        return json.loads({"True": "true", "False": "false", "None": "null"}.get(value.strip(), value))
    except (ValueError, RecursionError):
        return value


def _read_llama(text: str, schemas: Mapping[str, Mapping[str, Any]]) -> Spoken:
    """Read calls from the first object on that names a function; without the tag, prose may hold others."""
    prose, is_tagged, behind = text.rpartition(_PYTHON_TAG)
    source = behind if is_tagged else text
    calls, place, first = [], 0, None
    mistakes: tuple[str, ...] = ()
    while (start := source.find("{", place)) >= 0:
        try:
            call, place = _json_call(source, start)
            first = start if first is None else first
            calls.append(call)
        except ValueError as error:
            if is_tagged or (not calls and source.strip().startswith('{"name"')):
                mistakes = (_mistake(source[start:], error),)
                break
            place = start + 1
    if not is_tagged:
        prose = source if first is None and not mistakes else source[: first or 0]
    return Spoken(content=prose, calls=tuple(calls), mistakes=mistakes)


def _read_mistral(text: str, schemas: Mapping[str, Mapping[str, Any]]) -> Spoken:
    prose, *pieces = text.split(_MISTRAL)
    calls, mistakes = [], []
    for piece in pieces:
        try:
            calls += _mistral_calls(piece)
        except ValueError as error:
            mistakes.append(_mistake(piece, error))
    return Spoken(content=prose, calls=tuple(calls), mistakes=tuple(mistakes))


def _mistral_calls(piece: str) -> list[ToolCall]:
    name, is_new, rest = piece.partition(_MISTRAL_ARGUMENTS)
    if not is_new and re.match(r"\s*[\w.-]+\s*{", piece):
        place = piece.index("{")
        name, is_new, rest = piece[:place], "{", piece[place:]
    if is_new:
        value, end = _read_object(rest, 0)
        return [_to_call({"name": name.strip(), "arguments": value}, f'{{"arguments": {rest[:end]}}}')]
    start = piece.find("[")
    if start < 0:
        raise ValueError("it is no list of calls")
    calls, place = [], _skip(piece, start + 1)
    while not piece.startswith("]", place):
        call, place = _json_call(piece, place)
        calls.append(call)
        place = _skip(piece, place)
        if piece.startswith(",", place):
            place = _skip(piece, place + 1)
        elif not piece.startswith("]", place):
            raise ValueError("its list has no end")
    return calls


def _read_fences(text: str, schemas: Mapping[str, Mapping[str, Any]]) -> Spoken:
    """Read fenced blocks that hold a call; one of JSON that does not name a tool is prose."""
    calls, mistakes, prose, place = [], [], [], 0
    for fence, source, end in _fences(text):
        try:
            call, _ = _json_call(source, 0)
        except ValueError as error:
            if fence["label"] in ("tool", "tool_call"):
                mistakes.append(_mistake(source, error))
            continue
        calls.append(call)
        prose.append(text[place : fence.start()])
        place = end
    prose.append(text[place:])
    return Spoken(content="".join(prose), calls=tuple(calls), mistakes=tuple(mistakes))


def _fences(text: str) -> Iterator[tuple[re.Match[str], str, int]]:
    """Yield each fence with what stands in it, and where it ends; the last may have no end."""
    place = 0
    while (fence := _FENCE.search(text, place)) is not None:
        try:
            # A fence in an argument is none of ours.
            _, inside = _read_object(text, fence.end())
        except ValueError:
            inside = fence.end()
        end = text.find("```", inside)
        place = len(text) if end < 0 else end + 3
        yield fence, text[fence.end() : end if end >= 0 else None], place


def _mistake(source: str, error: ValueError) -> str:
    why = "it is no JSON" if isinstance(error, json.JSONDecodeError) else str(error)
    return f"a tool call that cannot be read: {why}: {source.strip():.200}"


_READERS: Mapping[CallFormat, Callable[[str, Mapping[str, Mapping[str, Any]]], Spoken]] = {
    CallFormat.HERMES: lambda text, schemas: _read_tagged(text, _json_call),
    CallFormat.QWEN_XML: lambda text, schemas: _read_tagged(text, partial(_xml_call, schemas=schemas)),
    CallFormat.LLAMA: _read_llama,
    CallFormat.MISTRAL: _read_mistral,
    CallFormat.FENCE: _read_fences,
}
