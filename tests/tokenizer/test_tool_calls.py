"""Calls of tools as each family of models writes them, with prose, thinking and fences around."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, get_args

import pytest

from strop.tasks.tool_calls import CallFormat, describe_tools, name_calls, read_reply
from strop.thoughts import split_thought

FOLDER = Path(__file__).parent / "forms"

SCHEMAS: dict[str, dict[str, Any]] = {
    "look": {
        "properties": {"place": {"type": "string"}, "depth": {"type": "integer"}, "all": {"type": "boolean"}}
    },
    "go": {"properties": {}},
    "typed": {
        "properties": {
            "text": {"type": "string"},
            "text_or_none": {"anyOf": [{"type": "string"}, {"type": "null"}]},
            "nested": {"$ref": "#/$defs/Point"},
            "number_or_none": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
            "flag": {"type": "boolean"},
            "items": {"type": "array", "items": {"type": "string"}},
            "choice": {"enum": [1, 2, 3]},
            "word": {"enum": ["3", "4"]},
            "union": {"anyOf": [{"type": "integer"}, {"type": "string"}]},
            "listed": {"type": ["integer", "null"]},
            "anything": {},
        },
        "$defs": {"Point": {"type": "object", "properties": {"x": {"type": "integer"}}}},
    },
}
ODD = '{"place" : "a\\"b </tool_call> ```", "depth": 1.0}'
FORMS: dict[CallFormat, tuple[str, str]] = {
    "hermes": (
        '<tool_call>\n{"name": "look", "arguments": ' + ODD + "}\n</tool_call>",
        '<tool_call>{"arguments": {}, "name": "go"}</tool_call>',
    ),
    "llama": ('{"name": "look", "parameters": ' + ODD + "}", '; {"name": "go", "parameters": {}}'),
    "mistral": ("[TOOL_CALLS]look[ARGS]" + ODD, "[TOOL_CALLS]go[ARGS]{}"),
    "fence": (
        '```tool\n{"name": "look", "arguments": ' + ODD + "}\n```",
        '\n```json\n{"name": "go", "arguments": {}}\n```',
    ),
}


@pytest.mark.parametrize("form", FORMS)
def test_calls_are_read_behind_each_other(form: CallFormat) -> None:
    one, other = FORMS[form]
    found = read_reply(one + other, form, SCHEMAS)
    assert [(one.name, json.loads(one.arguments)) for one in found.calls] == [
        ("look", json.loads(ODD)),
        ("go", {}),
    ]
    assert (found.content, found.mistakes) == ("", ())


ROWS = [json.loads(line) for line in (FOLDER / "tool_calls.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("row", ROWS, ids=[f"{row['form']}: {row['why']}" for row in ROWS])
def test_a_reply_is_read_as_it_is_meant(row: dict[str, Any]) -> None:
    found = read_reply(row["text"], row["form"], SCHEMAS)
    assert [[call.name, json.loads(call.arguments)] for call in found.calls] == row.get("calls", [])
    assert len(found.mistakes) == row.get("mistake", False)
    assert found.reasoning == row.get("reasoning")
    assert found.content == row.get("content", found.content)
    assert read_reply(row["text"], row["form"], {}).calls == ()


THOUGHTS = [json.loads(line) for line in (FOLDER / "thoughts.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("row", THOUGHTS, ids=[row["why"] for row in THOUGHTS])
def test_a_thought_stands_apart_from_what_is_said(row: dict[str, Any]) -> None:
    assert split_thought(row["text"]) == (row["thought"], row["said"])


@pytest.mark.parametrize("form", get_args(CallFormat))
@pytest.mark.parametrize("text", ["{", "[", "<tool_call>", "<function=", "<function=go>", "```json\n{", "f{"])
def test_a_hostile_reply_calls_nothing(form: CallFormat, text: str) -> None:
    assert read_reply(text * 10_000, form, SCHEMAS).calls == ()


def test_calls_get_ids_that_equal_rollouts_share() -> None:
    calls = read_reply("".join(FORMS["hermes"]), "hermes", SCHEMAS).calls
    assert [call.call_id for call in name_calls(calls, 3)] == ["000030000", "000030001"]


def test_a_model_without_a_template_for_tools_is_told_how_to_call() -> None:
    function = {"name": "look", "description": "Look.", "parameters": SCHEMAS["look"]}
    told = describe_tools([json.dumps({"type": "function", "function": function})])
    assert json.dumps(function) in told
    example = told[told.index("```") :].replace("NAME", "go")
    assert [call.name for call in read_reply(example, "fence", SCHEMAS).calls] == ["go"]
