"""Take replies apart: thoughts, prose, and calls of tools as each family of models writes them.

What looks like a call and is none is a mistake of the model's: it is named, and never dropped. Families whose
calls no text spells are read by the package `renderers`, by ids. A model whose template writes no calls is
told in words to write a fenced block.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Literal

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


CallFormat = Literal["qwen-xml", "hermes", "mistral", "python", "harmony", "llama", "fence"]
"""How families of models write a call in text: see `_FORMS`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Spoken:
    """A reply, taken apart."""

    content: str
    """The prose before and between calls; all of it where there are none."""
    reasoning: str | None = None
    calls: tuple[ToolCall, ...] = ()
    mistakes: tuple[str, ...] = ()
    """What was to be a call and is none, and why; in words for the model."""


CallReader = Callable[[str, "IntArray", Sequence[str]], Spoken]
"""(reply, with what its prompt had begun; its ids; functions in OpenAI's form, as JSON) -> its parts."""


_ANALYSIS = re.compile(r"(?s)<\|channel\|>analysis[^<]*<\|message\|>(.*?)(?:<\|end\|>|(?=<\|start\|>)|\Z)")
_HARMONY_MARK = re.compile(r"<\|(?:start|channel|constrain)\|>\w*|<\|(?:message|end|call|return)\|>")


def read_reply(text: str, form: CallFormat, schemas: Schemas) -> Spoken:
    """Take a reply apart.

    `text` has the tokenizer's special tokens in it, but for the terminator. Without tools there are no calls.
    Thinking that is not closed is all of the reply. Calls in another form than the model's are mistakes.
    """
    said: str | None
    if form == "harmony" and "<|message|>" in text:
        reasoning, said = "\n".join(_ANALYSIS.findall(text)) or None, _ANALYSIS.sub("", text)
    else:
        reasoning, said = split_thought(
            text,
            lambda mark: any(mark in one.arguments for one in _scan(text, form, schemas).calls),
        )
    if said is None:
        return Spoken(content="", reasoning=reasoning)
    found = _scan(said, form, schemas)
    if schemas and not found.calls and not found.mistakes and _ANY_MARK.search(said) is not None:
        wrong = ValueError("calls are written in another form")
        found = replace(found, mistakes=(_mistake(said, wrong),))
    content = _HARMONY_MARK.sub("", found.content) if form == "harmony" else found.content
    return replace(found, content=content.strip(), reasoning=reasoning)


def read_any(text: str, schemas: Schemas) -> Spoken:
    """Take apart a reply of an unknown model: the first form counts in which it calls something."""
    read = [read_reply(text, form, schemas) for form in _FORMS]
    return next((one for one in read if one.calls), read[-1])


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


def _to_call(name: Any, arguments: Any) -> ToolCall:
    """Return a call; some write its arguments as a text, as OpenAI's API has them. Raises: ValueError."""
    if not isinstance(name, str):
        raise ValueError('it is no object with "name" and "arguments"')
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False, default=str)
    try:
        return ToolCall(name=name, arguments=text)
    except DataError as error:
        raise ValueError("its arguments are no JSON object") from error


def _call_of(value: Any) -> ToolCall:
    """Return what an object calls, OpenAI's with a function in it too. Raises: ValueError."""
    fields = value if isinstance(value, dict) else {}
    if isinstance(fields.get("function"), dict):
        fields = fields["function"]
    name = fields.get("name", fields.get("function"))
    return _to_call(name, fields.get("arguments", fields.get("parameters", {})))


_DECODER = json.JSONDecoder()
_OBJECT = re.compile(
    r"\s*[,;]?\s*"
    # Mistral's and gpt-oss's calls have the name before their object.
    r"(?:(?P<name>[\w.-]++)(?:\[CALL_ID\][^\[{]*)?(?:\[ARGS\]\s*|[^{=]*?<\|message\|>\s*|(?=\{)))?"
    r"(?=\[?\s*\{)"
)


def _read_json(text: str, start: int, schemas: Schemas) -> Iterator[tuple[ToolCall, int]]:
    while (found := _OBJECT.match(text, start)) is not None:
        try:
            value, start = _DECODER.raw_decode(text, found.end())
        except RecursionError as error:
            raise ValueError("it is nested too deeply") from error
        if found["name"]:
            yield _to_call(found["name"], value), start
        else:
            yield from ((_call_of(one), start) for one in (value if isinstance(value, list) else [value]))


_PARAMETER = re.compile(
    r"\s*<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>(?=\s*(?:<parameter=|</function>))", re.DOTALL
)
_FUNCTION = re.compile(
    rf"\s*<function=(?P<name>[^>\n]+)>(?P<body>(?:{_PARAMETER.pattern})*+)\s*</function>", re.DOTALL
)


def _read_xml(text: str, start: int, schemas: Schemas) -> Iterator[tuple[ToolCall, int]]:
    while (function := _FUNCTION.match(text, start)) is not None:
        name, start = function["name"].strip(), function.end()
        arguments = {key.strip(): value for key, value in _PARAMETER.findall(function[0])}
        yield _to_call(name, _type_values(arguments, schemas.get(name, {}))), start


def _type_values(values: Mapping[str, Any], schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return arguments, those that were written as texts as the schema has them.

    A text stays one where the schema allows it, and where it cannot be read; an empty one that cannot be
    meant is left out, so that the default holds.
    """
    typed: dict[str, Any] = {}
    for key, value in values.items():
        types = _list_types(schema.get("properties", {}).get(key), schema)
        is_null = "null" in types and str(value).strip() in ("null", "None")
        if not isinstance(value, str) or ("string" in types and not is_null):
            typed[key] = value
        elif value.strip():
            typed[key] = _read_literal(value.strip())
    return typed


def _read_literal(text: str) -> Any:
    for read in (json.loads, ast.literal_eval):
        with suppress(ValueError, SyntaxError, RecursionError, MemoryError, TypeError):
            value = read(text)
            json.dumps(value)
            return value
    return text


def _list_types(schema: Any, root: Mapping[str, Any], depth: int = 8) -> set[str]:
    """Return the JSON types that a schema allows; one that says none allows a text."""
    if not isinstance(schema, Mapping) or not depth:
        return {"string"}
    if "$ref" in schema:
        named = root.get("$defs") or root.get("definitions") or {}
        return _list_types(named.get(schema["$ref"].rpartition("/")[2]), root, depth - 1)
    branches = [branch for key in ("anyOf", "oneOf", "allOf") for branch in schema.get(key, ())]
    if branches and "type" not in schema:
        return set().union(*(_list_types(branch, root, depth - 1) for branch in branches))
    names = {str: "string", bool: "boolean", int: "integer", float: "number", type(None): "null"}
    values = schema.get("enum", [schema.get("const", "")])
    declared = schema.get("type", [names.get(type(value), "object") for value in values])
    return {declared} if isinstance(declared, str) else set(declared)


_PYTHON_END = re.compile(r"</function_calls>|<\|(?:tool_call|python)_end\|>|\Z")


def _read_python(text: str, start: int, schemas: Schemas) -> Iterator[tuple[ToolCall, int]]:
    end = _PYTHON_END.search(text, start)
    assert end is not None
    try:
        tree = _Named().visit(ast.parse(text[start : end.start()].strip()))
        nodes = [node.value if isinstance(node, ast.Expr) else None for node in tree.body]
        listed = [one for node in nodes for one in (node.elts if isinstance(node, ast.List) else [node])]
        yield from ((_python_call(one), end.start()) for one in listed)
    except (SyntaxError, RecursionError, MemoryError) as error:
        raise ValueError("it is no call in Python's form") from error


def _python_call(node: Any) -> ToolCall:
    if not isinstance(node, ast.Call) or node.args or any(one.arg is None for one in node.keywords):
        raise ValueError("it is no call with named arguments")
    values = {str(one.arg): ast.literal_eval(one.value) for one in node.keywords}
    return _to_call(ast.unparse(node.func), values)


class _Named(ast.NodeTransformer):
    """JSON's names for Python's."""

    def visit_Name(self, node: ast.Name) -> ast.expr:
        names = {"true": True, "false": False, "null": None}
        return ast.Constant(names[node.id]) if node.id in names else node


_NEVER = "(?!)"
_LABELLED = r"[ \t]*(?:\r?\n|(?=[{\[]))"
_BEGUN = r'\A\s*(?=\[?\s*\{\s*"(?:type|name|function)"\s*:\s*"[^"]*"\s*,\s*"(?:name|func|arg|para))'
_Read = Callable[[str, int, Schemas], Iterator[tuple[ToolCall, int]]]
_FORMS: Mapping[CallFormat, tuple[_Read, str, str]] = {
    # Qwen3-Coder, Qwen 3.5. Values are typed by the schema.
    "qwen-xml": (_read_xml, r"<tool_call>|(?=<function=)", _NEVER),
    # Objects or a list of them: Hermes, Qwen 3, Granite, Hunyuan, Nemotron.
    "hermes": (_read_json, r"<\|?tool_calls?\|?>|<TOOLCALL>", _NEVER),
    # A list, or from version 11 on NAME[ARGS]{...}.
    "mistral": (_read_json, r"\[TOOL_CALLS\]", _NEVER),
    # [NAME(KEY=VALUE)]: OLMo 3, LFM2; as the whole reply: Llama 4.
    "python": (_read_python, r"<function_calls>|<\|(?:tool_call|python)_start\|>", r"\A\s*(?=\[\s*[\w.]+\()"),
    # gpt-oss: a message to functions.NAME, in a channel of its own.
    "harmony": (_read_json, r"\bto=functions\.", _NEVER),
    # Llama 3: an object as the reply. In most of those above there is one too.
    "llama": (_read_json, rf"<\|python_(?:tag|start)\|>|{_BEGUN}", r"(?=\{)"),
    # For models whose template knows no tools.
    "fence": (_read_json, rf"```[ \t]*tool(?:_call|_code)?{_LABELLED}", rf"```[ \t]*(?:json)?{_LABELLED}"),
}
"""What reads a call behind a mark, what marks one, and what may begin one of a known tool, or prose.

A reader takes text, place and schemas, yields calls and where each ends, and raises ValueError.
"""
_END = re.compile(
    r"\s*(?:<\|?/tool_calls?\|?>|</TOOLCALL>|</function_calls>|<\|(?:tool_call|python)_end\|>|<\|call\|>|```|\Z)"
)
_ANY_MARK = re.compile("|".join(mark for _, mark, _ in _FORMS.values()))
_HEAD = re.compile(r'\s*(?:\[?\s*\{[^{}]*?"(?:name|function)"\s*:\s*"|\[\s*(?=[\w.]+\())(?P<name>[\w.-]+)')
"""What a call begins with that may be broken."""


def _scan(text: str, form: CallFormat, schemas: Schemas) -> Spoken:
    """Read what stands between the marks of a form and their ends; a missing end is forgiven."""
    read, marks, maybe = _FORMS[form]
    opening = re.compile(f"(?P<mark>{marks})|{maybe}")
    prose, calls, mistakes = "", [], []
    place = kept = 0
    while schemas and (mark := opening.search(text, place)) is not None:
        found: list[ToolCall] = []
        behind, wrong = mark.end(), None
        try:
            for call, place in read(text, mark.end(), schemas):
                found.append(call)
                behind = place
            if not found:
                raise ValueError("no call follows")
        except ValueError as error:
            wrong = error
        head = _HEAD.match(text, mark.end())
        called = found[0].name if found else head and head["name"]
        if mark["mark"] is None and called not in schemas:
            place = mark.start() + max(1, len(mark.group()))
            continue
        end = _END.match(text, behind)
        if wrong is not None and (end := _END.search(text, behind)) is not None:
            mistakes.append(_mistake(text[behind : end.start()], wrong))
        calls += found
        prose += text[kept : mark.start()]
        place = kept = end.end() if end else behind
    return Spoken(content=prose + text[kept:], calls=tuple(calls), mistakes=tuple(mistakes))


def _mistake(source: str, error: ValueError) -> str:
    why = "it is no JSON" if isinstance(error, json.JSONDecodeError) else str(error)
    return f"a tool call that cannot be read: {why}: {source.strip():.200}"


_RENDERERS = (
    *("kimi-k2", "deepseek-v3", "deepseek-v4", "glm-4.5", "glm-5", "minimax-m2", "gemma4"),
    *("hy3", "laguna-xs.2", "inkling"),
)
"""Those of `renderers` 0.1.12 whose families mark calls by tokens that no text spells."""


def list_readers(tokenizer: Tokenizer) -> Iterator[CallReader]:
    """Yield what reads calls: each form in text, then each family whose marks the tokenizer has."""
    for form in _FORMS:
        if form != "fence":
            yield text_reader(form)
    if find_spec("renderers") is None:
        return
    from renderers import config_from_name, create_renderer

    adapter = adapt(tokenizer)
    for name in _RENDERERS:
        with suppress(AssertionError, AttributeError, LookupError, TypeError, ValueError):
            yield partial(_read_ids, create_renderer(adapter, config_from_name(name)))


def text_reader(form: CallFormat) -> CallReader:
    """Return what reads the calls of a form."""
    return lambda text, _, tools: read_reply(text, form, list_schemas(tools))


def adapt(tokenizer: Tokenizer) -> Any:
    """Return a tokenizer as `renderers` asks for one."""
    return SimpleNamespace(
        name_or_path="",
        unk_token_id=None,
        encode=lambda text, **_: tokenizer.encode(text).tolist(),
        decode=lambda ids, **_: tokenizer.decode(ids),
        convert_tokens_to_ids=tokenizer.token_id,
    )


def _read_ids(renderer: Any, text: str, reply_ids: IntArray, tools: Sequence[str]) -> Spoken:
    """Take a reply apart by a renderer of its family; `reply_ids` are all that was sampled."""
    schemas = list_schemas(tools)
    if not schemas:
        return read_reply(text, "fence", {})
    told = []
    for name, schema in schemas.items():
        # Each value is told to be a text, and typed here as of all families: the package's types differ.
        texts = {key: {"type": "string"} for key in schema.get("properties") or ()}
        told.append({"name": name, "parameters": {**schema, "properties": texts}})
    found = renderer.parse_response(reply_ids.tolist(), tools=told)
    if found.reasoning_complete is False:
        return Spoken(content="", reasoning=found.reasoning_content)
    calls, mistakes = [], []
    for one in found.tool_calls:
        try:
            # A call of a tool that is not there is answered as one.
            if one.status not in ("ok", "unknown_tool"):
                raise ValueError(str(one.status))
            typed = isinstance(one.arguments, dict)
            values = _type_values(one.arguments, schemas.get(one.name, {})) if typed else one.arguments
            calls.append(_to_call(one.name, values))
        except ValueError as error:
            mistakes.append(_mistake(one.raw, error))
    return Spoken(
        content=found.content.strip(),
        reasoning=found.reasoning_content,
        calls=tuple(calls),
        mistakes=tuple(mistakes),
    )
