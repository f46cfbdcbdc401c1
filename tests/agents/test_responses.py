"""`/v1/responses` by the real client of OpenAI: its answers, and the record."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest

from tests.agents.test_agents import Asked, chat, user
from tests.environments.test_worlds import TEMPLATES, call, tokenizer_of

LOOK: dict[str, Any] = {
    "type": "function",
    "name": "look",
    "description": "Look somewhere.",
    "parameters": {"type": "object", "properties": {"place": {"type": "string"}}},
}


async def ask(client: openai.AsyncOpenAI, items: Any, **more: Any) -> Any:
    create: Any = client.responses.create
    return await create(model="any", input=items, **more)


def output_of(item: Any, text: str) -> dict[str, Any]:
    return {"type": "function_call_output", "call_id": item.call_id, "output": text}


@pytest.mark.parametrize("form", TEMPLATES)
def test_items_sent_back_are_one_sample(tmp_path: Path, form: str) -> None:
    """An agent that keeps the items itself, as most do."""
    thinks = "" if form == "llama" else "<think>Where?</think>"
    lines = [thinks + call("look", form, place='a "b"'), call("look", form, place="c"), "Done."]
    asked = Asked(tokenizer_of(tmp_path, form), [*lines])

    async def work(client: openai.AsyncOpenAI) -> str:
        items: list[Any] = [user("Look.")]
        # Mistral's template has no place for them.
        fields = {} if form == "mistral" else {"instructions": "Be brief."}
        for _ in range(3):
            answer = await ask(client, items, tools=[LOOK], store=False, **fields)
            items += [one.model_dump(exclude_none=True) for one in answer.output]
            for one in answer.output:
                if one.type == "function_call":
                    # As clients do: JSON is read and written anew.
                    items[-1]["arguments"] = json.dumps(json.loads(one.arguments), indent=1)
                    items.append(output_of(one, "seen"))
        assert [one["type"] for one in items if "type" in one].count("function_call_output") == 2
        return str(answer.output_text)

    assert asked.let(work) == "Done."
    assert [turn.role for turn in asked.turns] == ["prompt", "assistant"] * 3
    assert ("Be brief." in asked.turns[0].text) == (form != "mistral")
    asked.check()


def test_events_build_the_response_that_is_answered_without_them(tmp_path: Path) -> None:
    form = "hermes"
    text = "<think>Why?</think>So: " + call("look", form, place="a")
    asked = Asked(tokenizer_of(tmp_path, form), [text, text])
    include: Any = ["message.output_text.logprobs"]

    async def work(client: openai.AsyncOpenAI) -> None:
        plain = await ask(client, "x", tools=[LOOK], include=include)
        thought, message, called = plain.output
        assert (thought.content[0].text, plain.output_text) == ("Why?", "So:")
        assert (called.name, called.arguments, plain.status) == ("look", '{"place": "a"}', "completed")
        assert len(message.content[0].logprobs) == plain.usage.output_tokens
        stream: Any = client.responses.stream
        kinds: list[str] = []
        async with stream(model="any", input="x", tools=[LOOK], include=include) as events:
            async for event in events:
                assert event.sequence_number == len(kinds)
                kinds.append(event.type)
            final = await events.get_final_response()
        assert [one.type for one in final.output] == ["reasoning", "message", "function_call"]
        assert final.output[2].arguments == called.arguments
        assert final.usage == plain.usage
        assert kinds[0] == "response.created"
        assert kinds[-1] == "response.completed"
        assert kinds.count("response.output_item.done") == 3
        for delta in ("output_text", "reasoning_text", "function_call_arguments"):
            assert f"response.{delta}.delta" in kinds

    asked.let(work)
    asked.check()


def test_a_reply_that_was_cut_is_incomplete(tmp_path: Path) -> None:
    form = "hermes"
    asked = Asked(tokenizer_of(tmp_path, form), [call("look", form, place="a")] * 2)

    async def work(client: openai.AsyncOpenAI) -> None:
        cut = await ask(client, "x", tools=[LOOK], max_output_tokens=20)
        assert (cut.status, cut.incomplete_details.reason) == ("incomplete", "max_output_tokens")
        assert [one.type for one in cut.output] == ["message"]
        events = [event async for event in await ask(client, "y", max_output_tokens=20, stream=True)]
        assert events[-1].type == "response.incomplete"

    asked.let(work)


def test_both_dialects_say_the_same_and_share_a_conversation(tmp_path: Path) -> None:
    asked = Asked(tokenizer_of(tmp_path), ["a", "b", "c"])

    async def work(client: openai.AsyncOpenAI) -> None:
        reply = (await ask(client, [{"role": "developer", "content": "Be."}, user("x")])).output_text
        history = [{"role": "system", "content": "Be."}, user("x"), {"role": "assistant", "content": reply}]
        await chat(client, *history, user("y"))
        parts = [{"type": "input_text", "text": "x"}]
        await ask(client, [{"role": "user", "content": parts}], instructions="Be.")

    asked.let(work)
    assert [turn.role for turn in asked.turns[:4]] == ["prompt", "assistant"] * 2
    first, _, third = asked.engine.requests
    assert np.array_equal(first.prompt_ids, third.prompt_ids)
    asked.check()


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"previous_response_id": "resp_x"}, "previous_response_id="),
        ({"conversation": "c"}, "conversation="),
        ({"background": True}, "background=true; allowed: false"),
        ({"truncation": "auto"}, "truncation"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [{"type": "web_search"}]}, 'type="web_search"; allowed: "function"'),
        ({"text": {"format": {"type": "grammar"}}}, "grammar"),
        ({"top_logprobs": 3}, "top_logprobs=3; allowed: 0"),
        ({"max_output_tokens": 0}, "max_output_tokens is no number"),
        ({"input": []}, "there is no input"),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "type 'item_reference'; allowed: message"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input_image"),
        (
            {"input": [{"type": "function_call", "call_id": "1", "name": "f", "arguments": "{"}]},
            "cannot be read",
        ),
        ({"input": [7]}, "cannot be read"),
    ],
)
def test_what_cannot_be_served_is_refused_and_nothing_sampled(
    tmp_path: Path, fields: dict[str, Any], error: str
) -> None:
    asked = Asked(tokenizer_of(tmp_path), [])

    async def work(client: openai.AsyncOpenAI) -> None:
        with pytest.raises(openai.BadRequestError, match=error):
            await ask(client, **{"items": fields.pop("input", "x"), **fields})

    asked.let(work)
    assert asked.engine.requests == []
