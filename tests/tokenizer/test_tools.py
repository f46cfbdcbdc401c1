"""Tool calls, tool replies and reasoning reach the chat template, or are refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from strop.errors import ConfigError
from strop.rollout import Message, ToolCall
from strop.tasks import render_prompt
from strop.tokenizer import Tokenizer
from tests.fixtures.tiny_tokenizer import CHAT_TEMPLATE, tiny_tokenizer
from tests.fixtures.tool_templates import HERMES, ONE_CALL

CALL = ToolCall(name="run", arguments='{"command": "ls <b> \\u00e9", "limits": {"s": 2}}', call_id="call-1")
CHAT = (
    Message(role="system", content="Use the tools."),
    Message(role="user", content="What is there?"),
    Message(role="assistant", tool_calls=(CALL,)),
    Message(role="tool", content='{"files": ["a\\n"]}', tool_call_id="call-1", name="run"),
    Message(role="assistant", content="One file."),
    Message(role="user", content="And now?"),
)
CALLS = (CALL, replace(CALL, call_id="call-2"))
TWO_CALLS = replace(CHAT[2], content="I look.", reasoning="Two.", tool_calls=CALLS)


def build(model_dir: Path, template: str) -> Tokenizer:
    (tiny_tokenizer(model_dir) / "chat_template.jinja").write_text(template)
    return Tokenizer.load(model_dir)


def to_transformers(message: Message) -> dict[str, Any]:
    """Return a message as the documentation of transformers writes it for chat templates."""
    found: dict[str, Any] = {"role": message.role, "content": message.text}
    if message.tool_calls:
        found["tool_calls"] = [
            {
                "type": "function",
                "id": call.call_id,
                "function": {"name": call.name, "arguments": json.loads(call.arguments)},
            }
            for call in message.tool_calls
        ]
    if message.role == "tool":
        found |= {"tool_call_id": message.tool_call_id, "name": message.name}
    if message.reasoning:
        found["reasoning_content"] = message.reasoning
    return found


@pytest.mark.parametrize(
    ("template", "chat"),
    [(HERMES, CHAT), (HERMES, (*CHAT[:2], TWO_CALLS, CHAT[3], CHAT[3])), (ONE_CALL, CHAT)],
    ids=["hermes", "two calls and reasoning", "one call"],
)
def test_a_chat_with_tools_reads_as_transformers_writes_it(
    tmp_path: Path, template: str, chat: tuple[Message, ...]
) -> None:
    from transformers import AutoTokenizer

    tokenizer = build(tmp_path, template)
    reference: Any = AutoTokenizer.from_pretrained(str(tmp_path))
    written = reference.apply_chat_template(
        [to_transformers(one) for one in chat], tokenize=False, add_generation_prompt=True
    )
    text, ids = render_prompt(tokenizer, chat, "chat")
    assert text == written
    assert ids.tolist() == tokenizer.encode(written).tolist()


def test_the_arguments_of_a_call_are_written_as_an_object(tmp_path: Path) -> None:
    text = build(tmp_path, HERMES).render(CHAT)
    assert '{"name": "run", "arguments": {"command": "ls <b> é", "limits": {"s": 2}}}' in text
    assert "<|start|>user\nWhat is there?<|end|>" in text


@pytest.mark.parametrize(
    ("template", "chat", "refusal"),
    [
        (CHAT_TEMPLATE, CHAT, "leaves out a call of the tool run"),
        (ONE_CALL, (CHAT[1], Message(role="assistant", tool_calls=CALLS)), "single tool-calls at once"),
        (HERMES.replace("message.tool_calls or []", "message.tool_calls[:1]"), (TWO_CALLS,), "tool run"),
        (HERMES.replace("tool_call.arguments", "tool_call.parameters or {}"), CHAT, "tool run"),
        (
            "{% for m in messages if m.role != 'tool' %}{{ m.content }}{% endfor %}",
            (CHAT[1], CHAT[3]),
            "leaves out a message of the role tool",
        ),
        ("{{ messages[0].content }}", (CHAT[1], Message(role="developer", content="Be brief.")), "developer"),
        (CHAT_TEMPLATE, (CHAT[1], Message(role="assistant", reasoning="Hm")), "reads none of reasoning"),
    ],
    ids=["no calls", "two for one", "first call", "no arguments", "no replies", "developer", "reasoning"],
)
def test_what_a_template_leaves_out_is_refused(
    tmp_path: Path, template: str, chat: tuple[Message, ...], refusal: str
) -> None:
    with pytest.raises(ConfigError, match=refusal):
        build(tmp_path, template).render(chat)


@pytest.mark.parametrize("place", [2, 3])
def test_plain_text_has_replies_of_tools_and_no_calls(tmp_path: Path, place: int) -> None:
    tokenizer = Tokenizer.load(tiny_tokenizer(tmp_path, with_chat_template=False))
    chat = (CHAT[1], CHAT[place])
    if place == 2:
        with pytest.raises(ConfigError):
            render_prompt(tokenizer, chat, "base")
    else:
        assert render_prompt(tokenizer, chat, "base")[0] == 'What is there?\n\n{"files": ["a\\n"]}\n'


@pytest.mark.parametrize("key", ["reasoning", "reasoning_content", "thinking"])
def test_reasoning_goes_under_the_key_that_the_template_reads(tmp_path: Path, key: str) -> None:
    tokenizer = build(tmp_path, "{% for m in messages %}{{ m." + key + " }}{{ m.content }}{% endfor %}")
    assert tokenizer.render([Message(role="assistant", content="7", reasoning="3 + 4 is ")]) == "3 + 4 is 7"
