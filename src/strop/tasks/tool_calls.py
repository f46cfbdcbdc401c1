"""Take replies apart: thoughts, prose, and calls of tools as each family of models writes them.

What looks like a call and is none is a mistake of the model's: it is named, and never dropped. Families with
tokens of their own for calls are read by the package `renderers`, by ids. A model whose template writes no
calls is told in words to write a fenced block.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from enum import StrEnum
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from strop.errors import DataError
from strop.rollout import ToolCall
from strop.thoughts import split_thought

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


def guess_format(text: str) -> CallFormat | None:
    """Return the format of the calls in a reply of an unknown model; None if it has no call's mark."""
    return next((form for form, (_, *marks) in _FORMS.items() if any(mark in text for mark in marks)), None)


def find_format(written: str, call: ToolCall, schemas: Schemas) -> CallFormat | None:
    """Return the format in which a template's own text of a call reads as that call; None if in none."""
    return next(
        (form for form, (read, *_) in _FORMS.items() if is_one(read(written, schemas).calls, call)), None
    )


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
    if schemas and form is CallFormat.HARMONY:
        return _read_harmony(text, schemas)
    read = _FORMS[form][0] if schemas else lambda text, _: Spoken(content=text)
    reasoning, said = split_thought(
        text, lambda mark: any(mark in one.arguments for one in read(text, schemas).calls)
    )
    if said is None:
        return Spoken(content="", reasoning=reasoning)
    found = read(said, schemas)
    if schemas and not found.calls and not found.mistakes and guess_format(said) not in (None, form):
        found = replace(found, mistakes=(_mistake(said, ValueError("calls are written in another form")),))
    return replace(found, content=found.content.strip(), reasoning=reasoning, source=said.strip())


def name_calls(calls: Sequence[ToolCall], turn: int) -> tuple[ToolCall, ...]:
    """Give calls ids that equal rollouts share: nine digits, as Mistral's template demands them."""
    return tuple(replace(call, call_id=f"{turn:05d}{index:04d}") for index, call in enumerate(calls))


def write_call(call: ToolCall) -> str:
    """Return a call as a fenced block."""
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
_NEXT_OBJECT = re.compile(r"\s*[,;]?\s*(?=\{)")


def _read_value(text: str, start: int) -> tuple[Any, int]:
    """Return the JSON value at `start`, and where it ends. Raises: ValueError."""
    space = _SPACE.match(text, start)
    assert space is not None
    try:
        return _DECODER.raw_decode(text, space.end())
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def _read_calls(text: str, start: int) -> tuple[list[ToolCall], int]:
    """Return the calls at `start`, objects behind each other or those of a list, and where they end.

    Raises: ValueError saying what one lacks.
    """
    value, end = _read_value(text, start)
    values = value if isinstance(value, list) else [value]
    while values is not value and (more := _NEXT_OBJECT.match(text, end)) is not None:
        another, end = _read_value(text, more.end())
        values.append(another)
    return list(map(_call_of, values)), end


def _call_of(value: Any) -> ToolCall:
    """Return what an object calls. Raises: ValueError."""
    function = value.get("function") if isinstance(value, dict) else None
    if isinstance(function, dict):
        # OpenAI's object.
        value, function = function, None
    name = value.get("name", function) if isinstance(value, dict) else None
    if not isinstance(name, str):
        raise ValueError('it is no object with "name" and "arguments"')
    return _to_call(name, value.get("arguments", value.get("parameters", {})))


def _to_call(name: str, arguments: Any) -> ToolCall:
    """Return a call; some write its arguments as a text, as OpenAI's API has them. Raises: ValueError."""
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False, default=str)
    try:
        return ToolCall(name=name, arguments=text)
    except DataError as error:
        raise ValueError("its arguments are no JSON object") from error


_TAG = re.compile(r"<\|?tool_calls?\|?>|<TOOLCALL>|<\|tool_call_begin\|>")
_TAG_END = re.compile(r"\s*(?:<\|?/tool_calls?\|?>|</TOOLCALL>)")
Found = tuple[list[ToolCall], int] | None
"""The calls behind a mark, and where they end; None if it marks no call."""


def _scan(
    text: str,
    read: Callable[[re.Match[str]], Found],
    opening: re.Pattern[str] = _TAG,
    closing: re.Pattern[str] = _TAG_END,
) -> Spoken:
    """Read what stands between marks and their ends; a missing end is forgiven.

    `read` raises ValueError if a mark begins a call, and none can be read.
    """
    prose, calls, mistakes = "", [], []
    place = kept = 0
    while (mark := opening.search(text, place)) is not None:
        try:
            found = read(mark)
            if found is None:
                place = max(mark.end(), place + 1)
                continue
            calls += found[0]
            place = found[1]
            end = closing.match(text, place)
        except ValueError as error:
            end = closing.search(text, mark.end())
            mistakes.append(_mistake(text[mark.end() : end.start() if end else None], error))
            place = len(text)
        prose += text[kept : mark.start()]
        place = kept = end.end() if end else place
    return Spoken(content=prose + text[kept:], calls=tuple(calls), mistakes=tuple(mistakes))


def _read_tagged(text: str, schemas: Schemas) -> Spoken:
    return _scan(text, lambda mark: _read_calls(text, mark.end()))


_FUNCTION = re.compile(r"\s*<function=(?P<name>[^>\n]+)>\n?")
_PARAMETER = re.compile(
    r"\s*<parameter=(?P<name>[^>\n]+)>\n?(?P<value>.*?)\n?</parameter>(?=\s*(?:<parameter=|</function>))",
    re.DOTALL,
)
_FUNCTION_END = re.compile(r"\s*</function>")
_XML_TAG = re.compile(r"<tool_call>|(?=<function=)")


def _read_xml(text: str, schemas: Schemas) -> Spoken:
    def read(mark: re.Match[str]) -> Found:
        calls: list[ToolCall] = []
        place = mark.end()
        while (function := _FUNCTION.match(text, place)) is not None:
            name, place = function["name"].strip(), function.end()
            arguments: dict[str, str] = {}
            while (parameter := _PARAMETER.match(text, place)) is not None:
                arguments[parameter["name"].strip()] = parameter["value"]
                place = parameter.end()
            if (end := _FUNCTION_END.match(text, place)) is None:
                raise ValueError("its parameters, or </function>, are not whole")
            place = end.end()
            calls.append(_to_call(name, type_values(arguments, schemas.get(name, {}))))
        if not calls:
            raise ValueError("it does not begin with <function=NAME>")
        return calls, place

    return _scan(text, read, _XML_TAG)


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
    is_begun = bool(is_tagged) or re.match(r"\s*\[?\s*\{\s*\"(?:type|name|function)\"", source) is not None
    while (start := source.find("{", place)) >= 0:
        try:
            value, place = _read_value(source, start)
            call = _call_of(value)
        except ValueError as error:
            if is_begun and not calls:
                return Spoken(content=prose if is_tagged else "", mistakes=(_mistake(source[start:], error),))
            place = start + 1
            continue
        # Prose may hold objects with a name, of people say.
        if call.name in schemas or (is_begun and not value.keys().isdisjoint(("arguments", "parameters"))):
            first = min(first, start)
            calls.append(call)
    if not is_tagged:
        prose = source[:first].rstrip("[ \n") if calls else source
    return Spoken(content=prose, calls=tuple(calls))


_MISTRAL_TAG = re.compile(r"\[TOOL_CALLS\]")
_MISTRAL_CALL = re.compile(r"\s*(?P<name>[\w.-]+)\s*(?:\[CALL_ID\][^\[{]*)?(?:\[ARGS\])?(?=\s*\{)")


def _read_mistral(text: str, schemas: Schemas) -> Spoken:
    def read(mark: re.Match[str]) -> Found:
        calls: list[ToolCall] = []
        place = mark.end()
        while (named := _MISTRAL_CALL.match(text, place)) is not None:
            value, place = _read_value(text, named.end())
            calls.append(_to_call(named["name"], value))
        return (calls, place) if calls else _read_calls(text, place)

    return _scan(text, read, _MISTRAL_TAG)


_PYTHON_TAG = re.compile(r"<function_calls>|<\|tool_call_start\|>|\A\s*(?=\[\s*[\w.]+\()")
_PYTHON_END = re.compile(r"</function_calls>|<\|tool_call_end\|>|\Z")
_JSON_NAMES = {"true": True, "false": False, "null": None}


def _read_python(text: str, schemas: Schemas) -> Spoken:
    def read(mark: re.Match[str]) -> Found:
        end = _PYTHON_END.search(text, mark.end())
        assert end is not None
        try:
            tree = ast.parse(text[mark.end() : end.start()].strip())
            nodes = [node.value for node in tree.body if isinstance(node, ast.Expr)]
            listed = [one for node in nodes for one in (node.elts if isinstance(node, ast.List) else [node])]
            if len(nodes) < len(tree.body) or not listed:
                raise ValueError("it is no list of calls")
            calls = list(map(_python_call, listed))
        except (SyntaxError, RecursionError, MemoryError) as error:
            raise ValueError("it is no call in Python's form") from error
        # A list without a tag may be prose.
        return (calls, end.start()) if mark.group().strip() or calls[0].name in schemas else None

    return _scan(text, read, _PYTHON_TAG, _PYTHON_END)


def _python_call(node: ast.expr) -> ToolCall:
    if not isinstance(node, ast.Call) or node.args or any(one.arg is None for one in node.keywords):
        raise ValueError("it is no call with named arguments")
    values = {str(one.arg): ast.literal_eval(_Named().visit(one.value)) for one in node.keywords}
    return _to_call(ast.unparse(node.func), values)


class _Named(ast.NodeTransformer):
    """JSON's names for Python's."""

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return ast.Constant(_JSON_NAMES[node.id]) if node.id in _JSON_NAMES else node


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
_FENCE_END = re.compile(r"\s*```")


def _read_fences(text: str, schemas: Schemas) -> Spoken:
    """Read fenced blocks that hold a call; one of JSON that does not call a known tool is prose."""

    def read(mark: re.Match[str]) -> Found:
        is_meant = mark["label"] in ("tool", "tool_call")
        try:
            calls, end = _read_calls(text, mark.end())
        except ValueError:
            named = re.compile(r"\s*\[?\s*\{\s*\"name\"\s*:\s*\"([^\"]*)\"").match(text, mark.end())
            if is_meant or (named is not None and named.group(1) in schemas):
                raise
            return None
        return (calls, end) if is_meant or all(call.name in schemas for call in calls) else None

    return _scan(text, read, _FENCE, _FENCE_END)


def _mistake(source: str, error: ValueError) -> str:
    why = "it is no JSON" if isinstance(error, json.JSONDecodeError) else str(error)
    return f"a tool call that cannot be read: {why}: {source.strip():.200}"


_FORMS: Mapping[CallFormat, tuple[Callable[[str, Schemas], Spoken], *tuple[str, ...]]] = {
    # XML stands in the tag of Hermes.
    CallFormat.QWEN_XML: (_read_xml, "<function="),
    CallFormat.HERMES: (_read_tagged, "<tool_call>", "<|tool_call|>"),
    CallFormat.MISTRAL: (_read_mistral, "[TOOL_CALLS]"),
    CallFormat.PYTHON: (_read_python, "<function_calls>", "<|tool_call_start|>"),
    CallFormat.HARMONY: (_read_harmony, "to=functions."),
    CallFormat.LLAMA: (_read_llama, "<|python_tag|>"),
    CallFormat.FENCE: (_read_fences, "```tool"),
}
"""What reads each form, and what shows a call of it."""

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


def read_ids(renderer: Any, text: str, reply_ids: IntArray, tools: Sequence[str]) -> Spoken:
    """Take a reply apart by a renderer of its family; `reply_ids` are all that was sampled."""
    schemas = list_schemas(tools)
    told = []
    for one in (json.loads(tool)["function"] for tool in tools):
        # Each value is told to be a text, and typed here as of all families: the package's types differ.
        texts = {key: {"type": "string"} for key in schemas[one["name"]].get("properties") or ()}
        told.append({**one, "parameters": {**schemas[one["name"]], "properties": texts}})
    found = renderer.parse_response(reply_ids.tolist(), tools=told)
    if found.reasoning_complete is False:
        return Spoken(content="", reasoning=found.reasoning_content)
    calls, mistakes = [], []
    for one in found.tool_calls:
        values = one.arguments if isinstance(one.arguments, dict) else {}
        written = {key: value for key, value in values.items() if isinstance(value, str)}
        typed = type_values(written, schemas.get(one.name, {}))
        values = {key: value for key, value in values.items() if key not in written} | typed
        try:
            # A call of a tool that is not there is answered as one.
            if one.status not in ("ok", "unknown_tool"):
                raise ValueError(str(one.status))
            calls.append(_to_call(one.name or "", values))
        except ValueError as error:
            mistakes.append(_mistake(one.raw, error))
    return Spoken(
        content=found.content.strip(),
        reasoning=found.reasoning_content,
        calls=tuple(calls),
        mistakes=tuple(mistakes),
        source=(split_thought(text)[1] or "").strip(),
    )


def find_renderer(tokenizer: Tokenizer, written: str, call: ToolCall, tools: Sequence[str]) -> Any:
    """Return the renderer that reads a template's own text of a call as that call; None if none does."""
    if find_spec("renderers") is None:
        return None
    from renderers import config_from_name, create_renderer

    ids = tokenizer.encode(written)
    for name in _NAMES:
        try:
            renderer = create_renderer(_Adapter(tokenizer), config_from_name(name))
            found = read_ids(renderer, written, ids, tools).calls
        except (AssertionError, AttributeError, KeyError, LookupError, TypeError, ValueError):
            # A tokenizer without the tokens of this family.
            continue
        if is_one(found, call):
            return renderer
    return None
