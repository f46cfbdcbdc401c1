"""Calls of tools as each family of models writes them, with prose, thinking and fences around."""

from __future__ import annotations

import json
from typing import Any

import pytest

from strop.tool_calls import CallFormat, describe_tools, find_format, name_calls, read_reply
from tests.fixtures.tool_templates import HERMES, ONE_CALL

SCHEMAS: dict[str, dict[str, Any]] = {
    "look": {
        "properties": {"place": {"type": "string"}, "depth": {"type": "integer"}, "all": {"type": "boolean"}}
    },
    "go": {"properties": {}},
}
ODD = '{"place" : "a\\"b </tool_call> ```", "depth": 1.0}'
"""Arguments that read as other things, to the letter."""
FORMS = {
    CallFormat.HERMES: (
        '<tool_call>\n{"name": "look", "arguments": ' + ODD + "}\n</tool_call>",
        '<tool_call>{"arguments": {}, "name": "go"}</tool_call>',
    ),
    CallFormat.LLAMA: ('{"name": "look", "parameters": ' + ODD + "}", '; {"name": "go", "parameters": {}}'),
    CallFormat.MISTRAL: ("[TOOL_CALLS]look[ARGS]" + ODD, "[TOOL_CALLS]go[ARGS]{}"),
    CallFormat.FENCE: (
        '```tool\n{"name": "look", "arguments": ' + ODD + "}\n```",
        '\n```json\n{"name": "go", "arguments": {}}\n```',
    ),
}
"""Two calls in each form whose arguments stay as they are written."""


@pytest.mark.parametrize("form", FORMS)
def test_arguments_stay_to_the_letter(form: CallFormat) -> None:
    one, other = FORMS[form]
    found = read_reply(one + other, form, SCHEMAS)
    assert [(call.name, call.arguments) for call in found.calls] == [("look", ODD), ("go", "{}")]
    assert (found.content, found.mistakes) == ("", ())


@pytest.mark.parametrize("form", FORMS)
def test_prose_and_thinking_stand_apart(form: CallFormat) -> None:
    one, _ = FORMS[form]
    found = read_reply(f"I wonder. {one}</think>Let me look.\n{one}", form, SCHEMAS)
    assert (found.reasoning, found.content) == (f"I wonder. {one}", "Let me look.")
    assert [call.name for call in found.calls] == ["look"]


@pytest.mark.parametrize("form", CallFormat)
def test_a_reply_without_a_call_is_prose(form: CallFormat) -> None:
    text = 'The answer is {"depth": 3} [1, 2] <b>x</b> ```json\n{"a": 1}\n```'
    assert read_reply(text, form, SCHEMAS).content == text
    assert read_reply("", form, SCHEMAS).content == ""
    for found in (read_reply(text, form, SCHEMAS), read_reply("", form, SCHEMAS)):
        assert (found.calls, found.mistakes, found.reasoning) == ((), (), None)


@pytest.mark.parametrize("form", CallFormat)
def test_thinking_without_an_end_is_all_of_it(form: CallFormat) -> None:
    call = FORMS.get(form, ("<tool_call><function=go></function></tool_call>",))[0]
    found = read_reply(f"<think>Perhaps {call}", form, SCHEMAS)
    assert (found.content, found.calls, found.mistakes) == ("", (), ())
    assert found.reasoning == f"Perhaps {call}"


@pytest.mark.parametrize(
    ("form", "text"),
    [
        (CallFormat.HERMES, '<tool_call>\n{"name": "look", "arguments": {"place": "a'),
        (CallFormat.HERMES, '<tool_call>{"arguments": {}}</tool_call>'),
        (CallFormat.HERMES, '<tool_call>{"name": "look", "arguments": [1]}</tool_call>'),
        (CallFormat.HERMES, "<tool_call>look(place)</tool_call>"),
        (CallFormat.HERMES, "<tool_call>" + "[" * 100_000),
        (CallFormat.QWEN_XML, "<tool_call>\n<function=look>\n<parameter=place>\na"),
        (CallFormat.QWEN_XML, '<tool_call>{"name": "look"}</tool_call>'),
        (CallFormat.LLAMA, '{"name": "look", "parameters": {"place": '),
        (CallFormat.LLAMA, '<|python_tag|>{"name": 3}'),
        (CallFormat.MISTRAL, '[TOOL_CALLS][{"name": "look", "arg'),
        (CallFormat.MISTRAL, '[TOOL_CALLS]look[ARGS]{"place": '),
        (CallFormat.MISTRAL, "[TOOL_CALLS]"),
        (CallFormat.FENCE, '```tool\n{"name": "look", "arguments"'),
        (CallFormat.FENCE, "```tool_call\nlook\n```"),
    ],
)
def test_half_a_call_is_a_mistake_and_no_call(form: CallFormat, text: str) -> None:
    found = read_reply(text, form, SCHEMAS)
    assert found.calls == ()
    assert len(found.mistakes) == 1
    assert found.mistakes[0].startswith("a tool call that cannot be read: ")
    assert len(found.mistakes[0]) < 400


def test_what_is_whole_counts_beside_what_is_not() -> None:
    good, bad = '<tool_call>{"name": "go", "arguments": {}}</tool_call>', "<tool_call>go</tool_call>"
    found = read_reply(
        f"{bad} and {good} and\n{good.removesuffix('</tool_call>')}", CallFormat.HERMES, SCHEMAS
    )
    assert [call.name for call in found.calls] == ["go", "go"]
    assert len(found.mistakes) == 1


def test_parameters_of_xml_have_the_types_of_the_schema() -> None:
    text = (
        "<tool_call>\n<function=look>\n<parameter=place>\n12\n</parameter>\n<parameter=depth>\n3\n</parameter>\n"
        "<parameter=all>\nTrue\n</parameter>\n<parameter=other>\n1\n</parameter>\n</function>\n</tool_call>"
    )
    (call,) = read_reply(text, CallFormat.QWEN_XML, SCHEMAS).calls
    assert json.loads(call.arguments) == {"place": "12", "depth": 3, "all": True, "other": "1"}
    place = "<parameter=place>\na</parameter>b\nc\n</parameter>"
    inside = f"<tool_call><function=look>{place}\n</function></tool_call>"
    (call,) = read_reply(inside, CallFormat.QWEN_XML, SCHEMAS).calls
    assert json.loads(call.arguments) == {"place": "a</parameter>b\nc"}


def test_older_lists_of_mistral_and_arguments_as_a_text() -> None:
    text = (
        'Wait.[TOOL_CALLS] [{"name": "look", "arguments": {"depth": 2}}, {"name": "go", "arguments": "{}"}]'
    )
    found = read_reply(text, CallFormat.MISTRAL, SCHEMAS)
    assert [(one.name, one.arguments) for one in found.calls] == [("look", '{"depth": 2}'), ("go", "{}")]
    assert found.content == "Wait."


def test_llama_may_put_a_tag_before_the_call() -> None:
    found = read_reply('<|python_tag|>{"name": "go", "parameters": {}}', CallFormat.LLAMA, SCHEMAS)
    assert [call.name for call in found.calls] == ["go"]


@pytest.mark.parametrize(
    ("template", "form"),
    [
        (None, CallFormat.FENCE),
        ("{{ messages }}", CallFormat.FENCE),
        ("{% for tool in tools %}{% endfor %}<tool_call>", CallFormat.HERMES),
        ("{{ tools }}<tool_call>\n<function=example>", CallFormat.QWEN_XML),
        ('{{ tools }}{"name": x, "parameters": y}', CallFormat.LLAMA),
        ("{{ tools }}[TOOL_CALLS]", CallFormat.MISTRAL),
        (HERMES, CallFormat.HERMES),
        (ONE_CALL, CallFormat.LLAMA),
    ],
)
def test_the_form_follows_from_the_chat_template(template: str | None, form: CallFormat) -> None:
    assert find_format(template) is form


def test_calls_get_ids_that_equal_rollouts_share() -> None:
    calls = read_reply("".join(FORMS[CallFormat.HERMES]), CallFormat.HERMES, SCHEMAS).calls
    assert [call.call_id for call in name_calls(calls, 3)] == ["000030000", "000030001"]


def test_a_model_without_a_template_for_tools_is_told_how_to_call() -> None:
    function = {"name": "look", "description": "Look.", "parameters": SCHEMAS["look"]}
    told = describe_tools([json.dumps({"type": "function", "function": function})])
    assert json.dumps(function) in told
    example = told[told.index("```") :].replace("NAME", "go")
    assert [call.name for call in read_reply(example, CallFormat.FENCE, SCHEMAS).calls] == ["go"]
