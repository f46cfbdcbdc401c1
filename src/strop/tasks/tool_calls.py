"""Take replies apart: thoughts, prose, and calls of tools as each family of models writes them.

What looks like a call and is none is a mistake of the model's: it is named, and never dropped. Arguments stay
to the letter. Families with tokens of their own for calls are read by the package `renderers`, by ids. A
model whose template writes no calls is told in words to write a fenced block.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import numpy as np

from strop.errors import DataError
from strop.rollout import ToolCall
from strop.thoughts import first_thought, split_thought

if TYPE_CHECKING:
    from strop.rollout import IntArray
    from strop.tokenizer import Tokenizer

Schemas = Mapping[str, Mapping[str, Any]]
"""The JSON Schema of each tool's arguments, by its name."""


def list_schemas(tools: Sequence[str]) -> Schemas:
    """Return the schemas of functions in the form of OpenAI's chat API, as JSON."""
    functions = (json.loads(tool)["function"] for tool in tools)
    return {one["name"]: one.get("parameters") or {} for one in functions}


class CallFormat(StrEnum):
    """How a family of models writes a call."""

    HERMES = "hermes"
    """`<tool_call>` with `{"name", "arguments"}` objects or a list of them: Hermes, Qwen 3, Granite."""
    QWEN_XML = "qwen-xml"
    """`<tool_call><function=NAME><parameter=KEY>`: Qwen3-Coder, Qwen 3.5. Values are typed by the schema."""
    LLAMA = "llama"
    """`{"name", "parameters"}` as the reply, perhaps behind `<|python_tag|>`: Llama 3."""
    MISTRAL = "mistral"
    """`[TOOL_CALLS]` and a list, or from version 11 on `NAME[ARGS]{...}` behind it."""
    PYTHON = "python"
    """`[NAME(KEY=VALUE)]` in tags of its own: OLMo 3, LFM2; or as the whole reply: Llama 4."""
    HARMONY = "harmony"
    """A message to `functions.NAME`, in a channel of its own: gpt-oss."""
    FENCE = "fence"
    """A fenced block with `{"name", "arguments"}`, for models whose template knows no tools."""
    RENDERER = "renderer"
    """Marked by tokens of the family, and read by the package `renderers`."""


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


_MARKS = (
    ("<function=", CallFormat.QWEN_XML),
    ("<tool_call>", CallFormat.HERMES),
    ("<|tool_call|>", CallFormat.HERMES),
    ("[TOOL_CALLS]", CallFormat.MISTRAL),
    ("<|python_tag|>", CallFormat.LLAMA),
    ("<function_calls>", CallFormat.PYTHON),
    ("<|tool_call_start|>", CallFormat.PYTHON),
    ("to=functions.", CallFormat.HARMONY),
    ("```tool", CallFormat.FENCE),
)


def guess_format(text: str) -> CallFormat | None:
    """Return the format of the calls in a reply of an unknown model; None if it has no call's mark."""
    return next((form for mark, form in _MARKS if mark in text), None)


def find_format(written: str, call: ToolCall, schemas: Schemas) -> CallFormat | None:
    """Return the format in which a template's own text of a call reads as that call; None if in none."""
    return next((form for form, read in _READERS.items() if is_one(read(written, schemas).calls, call)), None)


def is_one(calls: Sequence[ToolCall], call: ToolCall) -> bool:
    """Whether calls are one alone, but for its id and how its arguments are spelled."""
    return [(one.name, json.loads(one.arguments)) for one in calls] == [
        (call.name, json.loads(call.arguments))
    ]


def read_reply(text: str, form: CallFormat, schemas: Schemas) -> Spoken:
    """Take a reply apart.

    `text` has the tokenizer's special tokens in it, but for the terminator. Without tools there are no calls.
    Thinking that is not closed is all of the reply. Calls in another form than the model's are mistakes.
    """

    def read(text: str) -> Spoken:
        return _READERS[form](text, schemas) if schemas else Spoken(content=text)

    if form is CallFormat.HARMONY and schemas:
        return _read_harmony(text, schemas)
    reasoning, said = first_thought(text, lambda mark: any(mark in one.arguments for one in read(text).calls))
    if said is None:
        return Spoken(content="", reasoning=reasoning)
    found = read(said)
    if schemas and not found.calls and not found.mistakes and guess_format(said) not in (None, form):
        found = replace(found, mistakes=(_mistake(said, ValueError("calls are written in another form")),))
    return replace(found, content=found.content.strip(), reasoning=reasoning, source=said.strip())


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


_DECODER = json.JSONDecoder()
_SPACE = re.compile(r"\s*")


def _skip(text: str, start: int) -> int:
    match = _SPACE.match(text, start)
    assert match is not None
    return match.end()


def _read_value(text: str, start: int) -> tuple[Any, int]:
    """Return the JSON value at `start`, and where it ends. Raises: ValueError."""
    try:
        return _DECODER.raw_decode(text, _skip(text, start))
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def _read_call(text: str, start: int) -> tuple[ToolCall, int]:
    """Return the call at `start`, and where it ends. Raises: ValueError saying what it lacks."""
    start = _skip(text, start)
    value, end = _read_value(text, start)
    source = text[start:end]
    function = value.get("function") if isinstance(value, dict) else None
    if isinstance(function, dict):
        value, source = function, _source_of(source, "function")
    name = value.get("name", value.get("function")) if isinstance(value, dict) else None
    if not isinstance(name, str):
        raise ValueError('it is no object with "name" and "arguments"')
    key = next((key for key in ("arguments", "parameters") if key in value), None)
    arguments = "{}" if key is None else _source_of(source, key)
    if key is not None and isinstance(value[key], str):
        # Some write the object as a text, as OpenAI's API has it.
        arguments = value[key]
    return _to_call(name, arguments), end


def _to_call(name: str, arguments: str) -> ToolCall:
    try:
        return ToolCall(name=name, arguments=arguments)
    except DataError as error:
        raise ValueError("its arguments are no JSON object") from error


def _source_of(source: str, wanted: str) -> str:
    """Return the text of a key's value in the text of a JSON object that has it; of several, the last."""
    found, place = "", source.index("{") + 1
    while source[_skip(source, place)] != "}":
        key, place = _read_value(source, place)
        start = _skip(source, source.index(":", place) + 1)
        _, end = _read_value(source, start)
        found = source[start:end] if key == wanted else found
        place = _skip(source, end)
        place += source[place] == ","
    return found


def _read_calls(text: str, start: int) -> tuple[list[ToolCall], int]:
    """Return the calls at `start`, objects one behind the other or a list of them, and where they end."""
    calls: list[ToolCall] = []
    place = _skip(text, start)
    if is_list := text.startswith("[", place):
        place = _skip(text, place + 1)
    while text.startswith("{", place) or not (calls or is_list):
        call, place = _read_call(text, place)
        calls.append(call)
        end, place = place, _skip(text, place)
        if text[place : place + 1] in (",", ";") and (is_list or text[_skip(text, place + 1) :][:1] == "{"):
            place = _skip(text, place + 1)
        elif not is_list and not text.startswith("{", place):
            place = end
    if is_list:
        if not text.startswith("]", place):
            raise ValueError("its list has no end")
        place += 1
    return calls, place


_TAG = re.compile(r"<\|?tool_calls?\|?>|<TOOLCALL>|<\|tool_call_begin\|>")
_TAG_END = re.compile(r"\s*(?:<\|?/tool_calls?\|?>|</TOOLCALL>)")


def _read_tagged(
    text: str, read: Callable[[str, int], tuple[list[ToolCall], int]], opening: re.Pattern[str] = _TAG
) -> Spoken:
    """Read what stands between a tag and its end, by what is in it; a missing end is forgiven."""
    prose, calls, mistakes = [], [], []
    place = 0
    while (tag := opening.search(text, place)) is not None:
        prose.append(text[place : tag.start()])
        try:
            found, place = read(text, tag.end())
            calls += found
            place = end.end() if (end := _TAG_END.match(text, place)) else place
        except ValueError as error:
            end = _TAG_END.search(text, tag.end())
            mistakes.append(_mistake(text[tag.end() : end.start() if end else None], error))
            place = end.end() if end else len(text)
    prose.append(text[place:])
    return Spoken(content="".join(prose), calls=tuple(calls), mistakes=tuple(mistakes))


_FUNCTION = re.compile(r"\s*<function=(?P<name>[^>\n]+)>\n?")
_PARAMETER = re.compile(
    r"\s*<parameter=(?P<name>[^>\n]+)>\n?(?P<value>.*?)\n?</parameter>(?=\s*(?:<parameter=|</function>))",
    re.DOTALL,
)
_FUNCTION_END = re.compile(r"\s*</function>")
_XML_TAG = re.compile(r"<tool_call>|(?=<function=)")


def _xml_calls(text: str, start: int, schemas: Schemas) -> tuple[list[ToolCall], int]:
    calls: list[ToolCall] = []
    place = start
    while (function := _FUNCTION.match(text, place)) is not None or not calls:
        if function is None:
            raise ValueError("it does not begin with <function=NAME>")
        name, place = function["name"].strip(), function.end()
        arguments: dict[str, Any] = {}
        while (parameter := _PARAMETER.match(text, place)) is not None:
            arguments[parameter["name"].strip()] = parameter["value"]
            place = parameter.end()
        end = _FUNCTION_END.match(text, place)
        if end is None:
            raise ValueError("its parameters, or </function>, are not whole")
        place = end.end()
        calls.append(_to_call(name, json.dumps(type_values(arguments, schemas.get(name, {})))))
    return calls, place


def type_values(texts: Mapping[str, str], schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return arguments that were written as texts, as the schema has them.

    A text stays one where the schema allows it, and where it cannot be read; an empty one that cannot be
    meant is left out, so that the default holds.
    """
    values: dict[str, Any] = {}
    for key, text in texts.items():
        types = list_types(schema.get("properties", {}).get(key, {}), schema)
        if "null" in types and text.strip() in ("null", "None"):
            values[key] = None
        elif "string" in types:
            values[key] = text
        elif text.strip():
            values[key] = text
            for read in (json.loads, ast.literal_eval):
                with suppress(ValueError, SyntaxError, RecursionError, MemoryError, TypeError):
                    value = read(text.strip())
                    json.dumps(value)
                    values[key] = value
                    break
    return values


def list_types(schema: Any, root: Mapping[str, Any], depth: int = 8) -> frozenset[str]:
    """Return the JSON types that a schema allows; one that says none allows a text."""
    if not isinstance(schema, Mapping) or not depth:
        return frozenset({"string"})
    if isinstance(reference := schema.get("$ref"), str):
        found: Any = root
        for name in reference.lstrip("#/").split("/"):
            found = found.get(name) if isinstance(found, Mapping) else None
        return list_types(found, root, depth - 1)
    if (declared := schema.get("type")) is not None:
        return frozenset([declared] if isinstance(declared, str) else declared)
    for key in ("anyOf", "oneOf", "allOf"):
        if branches := schema.get(key):
            return frozenset().union(*(list_types(branch, root, depth - 1) for branch in branches))
    values = schema.get("enum", [schema["const"]] if "const" in schema else [""])
    named = {str: "string", bool: "boolean", int: "integer", float: "number", type(None): "null"}
    return frozenset(named.get(type(value), "object") for value in values)


def _read_llama(text: str, schemas: Schemas) -> Spoken:
    """Read objects that call: behind the tag, as the reply, or of a known tool behind prose."""
    prose, is_tagged, behind = text.rpartition("<|python_tag|>")
    source = behind if is_tagged else text
    calls: list[ToolCall] = []
    place, first = 0, len(source)
    mistakes: tuple[str, ...] = ()
    is_begun = bool(is_tagged) or re.match(r"\s*\[?\s*\{\s*\"(?:type|name|function)\"", source) is not None
    while (start := source.find("{", place)) >= 0:
        try:
            call, place = _read_call(source, start)
        except ValueError as error:
            if is_begun and not calls:
                mistakes = (_mistake(source[start:], error),)
                break
            place = start + 1
            continue
        # Prose may hold objects with a name, of people say.
        has_arguments = re.search(r"\"(?:arguments|parameters)\"", source[start:place]) is not None
        if call.name in schemas or (is_begun and has_arguments):
            first = min(first, start)
            calls.append(call)
    if not is_tagged:
        prose = "" if mistakes else source[:first].rstrip("[ \n") if calls else source
    return Spoken(content=prose, calls=tuple(calls), mistakes=mistakes)


_MISTRAL_TAG = re.compile(r"\[TOOL_CALLS\]")
_MISTRAL_CALL = re.compile(r"\s*(?P<name>[\w.-]+)\s*(?:\[CALL_ID\][^\[{]*)?(?:\[ARGS\])?(?=\s*\{)")


def _mistral_calls(text: str, start: int) -> tuple[list[ToolCall], int]:
    calls: list[ToolCall] = []
    place = start
    while (named := _MISTRAL_CALL.match(text, place)) is not None:
        value = _skip(text, named.end())
        _, place = _read_value(text, value)
        calls.append(_to_call(named["name"], text[value:place]))
    if calls:
        return calls, place
    if not text.startswith("[", _skip(text, start)):
        raise ValueError("it is no list of calls")
    return _read_calls(text, start)


_PYTHON_TAG = re.compile(r"<function_calls>|<\|tool_call_start\|>")
_PYTHON_END = re.compile(r"</function_calls>|<\|tool_call_end\|>|$(?![\s\S])")
_JSON_NAMES = {"true": True, "false": False, "null": None}


def _python_calls(text: str, start: int) -> tuple[list[ToolCall], int]:
    end = _PYTHON_END.search(text, start)
    assert end is not None
    try:
        tree = ast.parse(text[start : end.start()].strip())
        nodes = [node.value for node in tree.body if isinstance(node, ast.Expr)]
        listed = [one for node in nodes for one in (node.elts if isinstance(node, ast.List) else [node])]
        if len(nodes) < len(tree.body) or not listed:
            raise ValueError("it is no list of calls")
        calls = []
        for node in listed:
            if not isinstance(node, ast.Call) or node.args or any(one.arg is None for one in node.keywords):
                raise ValueError("it is no call with named arguments")
            values = {str(one.arg): ast.literal_eval(_Named().visit(one.value)) for one in node.keywords}
            calls.append(
                _to_call(ast.unparse(node.func), json.dumps(values, ensure_ascii=False, default=str))
            )
        return calls, end.end()
    except (SyntaxError, RecursionError, MemoryError) as error:
        raise ValueError("it is no call in Python's form") from error


class _Named(ast.NodeTransformer):
    """JSON's names for Python's."""

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return ast.Constant(_JSON_NAMES[node.id]) if node.id in _JSON_NAMES else node


def _read_python(text: str, schemas: Schemas) -> Spoken:
    if _PYTHON_TAG.search(text) is None and re.match(r"\s*\[\s*[\w.]+\(", text):
        try:
            calls, _ = _python_calls(text, 0)
        except ValueError as error:
            return Spoken(content="", mistakes=(_mistake(text, error),))
        return Spoken(content="", calls=tuple(calls)) if calls[0].name in schemas else Spoken(content=text)
    return _read_tagged(text, _python_calls, _PYTHON_TAG)


_BLOCK = re.compile(
    r"(?:<\|start\|>)?(?P<head>[^<]*(?:<\|(?:channel|constrain)\|>[^<]*)*)<\|message\|>"
    r"(?P<body>.*?)(?:<\|(?:end|call|return)\|>|(?=<\|start\|>)|\Z)",
    re.DOTALL,
)
_RECIPIENT = re.compile(r"to=functions\.([\w.-]+)")


def _read_harmony(text: str, schemas: Schemas) -> Spoken:
    """Read messages by their channel: calls have a recipient, and what is analysed is thought."""
    if "<|message|>" not in text:
        return Spoken(content=text)
    thoughts: list[str] = []
    prose: list[str] = []
    calls, mistakes = [], []
    for block in _BLOCK.finditer(text):
        head, body = block["head"], block["body"]
        if (recipient := _RECIPIENT.search(head)) is not None:
            try:
                calls.append(_to_call(recipient.group(1), body.strip() or "{}"))
            except ValueError as error:
                mistakes.append(_mistake(body, error))
        else:
            (thoughts if "analysis" in head else prose).append(body)
    thought = "\n".join(thoughts) if thoughts else None
    return Spoken(
        content="\n".join(prose), reasoning=thought, calls=tuple(calls), mistakes=tuple(mistakes), source=text
    )


_FENCE = re.compile(r"```[ \t]*(?P<label>tool_call|tool|json)?[ \t]*(?:\r?\n|(?=[{\[]))")


def _read_fences(text: str, schemas: Schemas) -> Spoken:
    """Read fenced blocks that hold a call; one of JSON that does not call a known tool is prose."""
    calls, mistakes, prose, place = [], [], [], 0
    for fence, source, end in _fences(text):
        is_meant = fence["label"] in ("tool", "tool_call")
        try:
            found, _ = _read_calls(source, 0)
        except ValueError as error:
            named = re.match(r"\s*\[?\s*\{\s*\"name\"\s*:\s*\"([^\"]*)\"", source)
            if is_meant or (named is not None and named.group(1) in schemas):
                mistakes.append(_mistake(source, error))
            continue
        if is_meant or all(call.name in schemas for call in found):
            calls += found
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
            _, inside = _read_value(text, fence.end())
        except ValueError:
            inside = fence.end()
        end = text.find("```", inside)
        place = len(text) if end < 0 else end + 3
        yield fence, text[fence.end() : end if end >= 0 else None], place


def _mistake(source: str, error: ValueError) -> str:
    why = "it is no JSON" if isinstance(error, json.JSONDecodeError) else str(error)
    return f"a tool call that cannot be read: {why}: {source.strip():.200}"


_READERS: Mapping[CallFormat, Callable[[str, Schemas], Spoken]] = {
    CallFormat.QWEN_XML: lambda text, schemas: _read_tagged(
        text, partial(_xml_calls, schemas=schemas), _XML_TAG
    ),
    CallFormat.HERMES: lambda text, schemas: _read_tagged(text, _read_calls),
    CallFormat.MISTRAL: lambda text, schemas: _read_tagged(text, _mistral_calls, _MISTRAL_TAG),
    CallFormat.PYTHON: _read_python,
    CallFormat.HARMONY: _read_harmony,
    CallFormat.LLAMA: _read_llama,
    CallFormat.FENCE: _read_fences,
}

_NAMES = (
    *("kimi-k2", "deepseek-v3", "deepseek-v4", "glm-4.5", "glm-5", "minimax-m2", "gemma4"),
    *("hy3", "laguna-xs.2", "inkling"),
)
"""Renderers of `renderers` 0.1.12 whose families mark calls by tokens that no text spells."""


class _Adapter:
    """A tokenizer as `renderers` asks for one."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.name_or_path = ""
        self.unk_token_id = None
        self.eos_token_id = tokenizer.eos_id
        self.chat_template = tokenizer.require_chat_template()

    def encode(self, text: str, *_: Any, **__: Any) -> list[int]:
        return [int(one) for one in self._tokenizer.encode(text)]

    def decode(self, token_ids: Any, *_: Any, **__: Any) -> str:
        return self._tokenizer.decode(token_ids)

    def convert_tokens_to_ids(self, tokens: Any) -> Any:
        return self._tokenizer.token_id(tokens)

    def get_vocab(self) -> dict[str, int]:
        return self._tokenizer.vocab


@dataclass(frozen=True, slots=True)
class Family:
    """A renderer that reads the replies of a model."""

    renderer: Any

    def read(self, reply_ids: IntArray | Sequence[int], tools: Sequence[str]) -> Spoken:
        """Take a reply apart, its terminator included. `tools`: functions in OpenAI's form, as JSON."""
        schemas = list_schemas(tools)
        types = {
            name: {key: list_types(value, schema) for key, value in (schema.get("properties") or {}).items()}
            for name, schema in schemas.items()
        }
        # What may be a text is told to be one: it stays as it is written.
        told = []
        for one in (json.loads(tool)["function"] for tool in tools):
            schema = schemas[one["name"]]
            texts = {key: {"type": "string"} for key, may in types[one["name"]].items() if "string" in may}
            properties = {**(schema.get("properties") or {}), **texts}
            told.append({**one, "parameters": {**schema, "properties": properties}})
        found = self.renderer.parse_response([int(one) for one in reply_ids], tools=told)
        if found.reasoning_complete is False:
            return Spoken(content="", reasoning=found.reasoning_content)
        calls, mistakes = [], []
        for one in found.tool_calls:
            arguments = one.arguments if isinstance(one.arguments, dict) else {}
            for key, value in arguments.items():
                if value in ("null", "None") and "null" in types.get(one.name, {}).get(key, ()):
                    arguments[key] = None
            try:
                # A call of a tool that is not there is answered as one.
                if one.status not in ("ok", "unknown_tool"):
                    raise DataError(str(one.status))
                written = json.dumps(arguments, ensure_ascii=False)
                calls.append(ToolCall(name=one.name or "", arguments=written))
            except DataError:
                mistakes.append(f"a tool call that cannot be read: {one.status}: {one.raw.strip():.200}")
        text = self.renderer._tokenizer.decode(np.asarray(reply_ids))
        return Spoken(
            content=found.content.strip(),
            reasoning=found.reasoning_content,
            calls=tuple(calls),
            mistakes=tuple(mistakes),
            source=(split_thought(text)[1] or "").strip(),
        )


def find_family(tokenizer: Tokenizer, written: str, call: ToolCall, tools: Sequence[str]) -> Family | None:
    """Return the family that reads a template's own text of a call as that call; None if none does."""
    if find_spec("renderers") is None:
        return None
    from renderers import config_from_name, create_renderer

    ids = tokenizer.encode(written)
    for name in _NAMES:
        try:
            family = Family(create_renderer(_Adapter(tokenizer), config_from_name(name)))
            found = family.read(ids, tools).calls
        except (AssertionError, AttributeError, KeyError, LookupError, TypeError, ValueError):
            # A tokenizer without the tokens of this family.
            continue
        if is_one(found, call):
            return family
    return None
