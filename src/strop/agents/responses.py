"""`POST responses`: items in, items out. Shapes: openai 2.54's types.

A response is kept while its rollout is open, for `previous_response_id`. As with OpenAI, each request names
its own instructions and tools. Tools have to be functions: a policy cannot call the tools that OpenAI runs on
its servers.
"""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from strop.agents.dialect import (
    ModelRequest,
    Refused,
    list_logprobs,
    read_forced_call,
    read_limit,
    read_schema_of,
    require_allowed,
)
from strop.environments.recording import Call
from strop.rollout import REASONING, FinishReason, Message
from strop.tokenizer import Tokenizer

_ALLOWED: dict[str, tuple[Any, ...]] = {
    "top_logprobs": (None, 0),
    "background": (None, False),
    "truncation": (None, "disabled"),
    "conversation": (None,),
    "prompt": (None,),
    "context_management": (None, []),
}
"""Other values would change the policy's distribution, or need state that outlives the rollout."""
_TEXT_PARTS = ("input_text", "output_text", "text")
_LOGPROBS = "message.output_text.logprobs"
_numbers = itertools.count()


class Responses:
    """The dialect of items."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._kept: dict[str, tuple[Message, ...]] = {}
        """The conversation of each response by its id: with the reply, without instructions."""

    def read(self, body: Any) -> ModelRequest:
        """Read a request. Raises: Refused; LookupError, TypeError, ValueError, AttributeError, DataError."""
        require_allowed(body, _ALLOWED)
        wanted = (body.get("text") or {}).get("format") or {}
        schema = read_schema_of(wanted, wanted)
        earlier: tuple[Message, ...] = ()
        if (previous := body.get("previous_response_id")) is not None:
            if previous not in self._kept:
                raise Refused(
                    400,
                    f"there is no response {previous!r:.80} in this attempt; send the conversation as input",
                    "previous_response_not_found",
                )
            earlier = self._kept[previous]
        if isinstance(body["input"], str):
            new: tuple[Message, ...] = (Message(role="user", content=body["input"]),)
        else:
            new = _read_items(earlier, body["input"])
        if not new:
            raise ValueError("there is no input")
        tools = [] if body.get("tool_choice") == "none" else [*(body.get("tools") or ())]
        functions = tuple(map(_read_tool, tools))
        return ModelRequest(
            body=body,
            messages=(*_read_instructions(body), *earlier, *new),
            tools=functions,
            max_tokens=read_limit(body, "max_output_tokens"),
            schema=schema,
            forced_call=read_forced_call(body, [tool["name"] for tool in tools]),
        )

    def answer(self, request: ModelRequest, calls: Sequence[Call]) -> dict[str, Any]:
        """Return a `response`, and keep its conversation."""
        (call,) = calls
        name = f"resp_{next(_numbers):08d}"
        reply = replace(call.said, reasoning=call.spoken.reasoning)
        self._kept[name] = (*request.messages[len(_read_instructions(request.body)) :], reply)
        is_cut = call.reply.finish_reason is FinishReason.LENGTH
        num_prompt, num_reply = len(call.prompt_ids), len(call.reply.token_ids)
        body = request.body
        return {
            "id": name,
            "object": "response",
            "created_at": time.time(),
            "model": str(body.get("model", "policy")),
            "error": None,
            "instructions": body.get("instructions"),
            "metadata": body.get("metadata") or {},
            "max_output_tokens": request.max_tokens,
            "parallel_tool_calls": not request.is_one_call,
            "previous_response_id": body.get("previous_response_id"),
            "tool_choice": body.get("tool_choice") or "auto",
            "tools": [*(body.get("tools") or ())],
            "truncation": "disabled",
            "status": "incomplete" if is_cut else "completed",
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "output": self._to_items(request, call, name),
            "usage": {
                "input_tokens": num_prompt,
                "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
                "output_tokens": num_reply,
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": num_prompt + num_reply,
            },
        }

    def stream(self, request: ModelRequest, calls: Sequence[Call]) -> str:
        """Return the events of a response: its beginning, each item in pieces, and its end."""
        response = self.answer(request, calls)
        begun = {**response, "status": "in_progress", "incomplete_details": None, "output": [], "usage": None}
        events: list[dict[str, Any]] = [
            {"type": "response.created", "response": begun},
            {"type": "response.in_progress", "response": begun},
        ]
        for index, item in enumerate(response["output"]):
            position = {"output_index": index}
            empty = {**item, "status": "in_progress", **_EMPTY[item["type"]]}
            events.append({"type": "response.output_item.added", "item": empty, **position})
            events += _PIECES[item["type"]](item, {**position, "item_id": item["id"]})
            events.append({"type": "response.output_item.done", "item": item, **position})
        events.append({"type": f"response.{response['status']}", "response": response})
        return "".join(
            f"event: {event['type']}\n"
            f"data: {json.dumps({**event, 'sequence_number': number}, ensure_ascii=False)}\n\n"
            for number, event in enumerate(events)
        )

    def _to_items(self, request: ModelRequest, call: Call, name: str) -> list[dict[str, Any]]:
        """Return a reply as items: reasoning, message, function calls."""
        spoken, number = call.spoken, name.removeprefix("resp_")
        is_cut = call.reply.finish_reason is FinishReason.LENGTH
        items: list[dict[str, Any]] = []
        if spoken.reasoning is not None:
            thought = [{"type": "reasoning_text", "text": spoken.reasoning}]
            items.append({"type": "reasoning", "id": f"rs_{number}", "summary": [], "content": thought})
        if spoken.content or not spoken.calls:
            part: dict[str, Any] = {"type": "output_text", "text": spoken.content, "annotations": []}
            if _LOGPROBS in (request.body.get("include") or ()):
                part["logprobs"] = list_logprobs(self._tokenizer, call)
            items.append({"type": "message", "id": f"msg_{number}", "role": "assistant", "content": [part]})
        items += [
            {
                "type": "function_call",
                "id": f"fc_{number}_{index}",
                "call_id": tool_call.call_id,
                "name": tool_call.name,
                "arguments": tool_call.arguments,
            }
            for index, tool_call in enumerate(spoken.calls)
        ]
        return [{**item, "status": "incomplete" if is_cut else "completed"} for item in items]


def _read_instructions(body: Mapping[str, Any]) -> tuple[Message, ...]:
    instructions = body.get("instructions")
    return () if instructions is None else (Message.from_json({"role": "system", "content": instructions}),)


def _read_tool(tool: Mapping[str, Any]) -> str:
    """Return a function in the chat API's form. Raises: Refused for another kind of tool."""
    require_allowed(tool, {"type": ("function",)})
    if not isinstance(tool["name"], str):
        raise TypeError("a tool has no name")
    keys = ("name", "description", "parameters", "strict")
    function = {key: tool[key] for key in keys if tool.get(key) is not None}
    return json.dumps({"type": "function", "function": function}, ensure_ascii=False)


def _read_items(earlier: Sequence[Message], items: Sequence[Any]) -> tuple[Message, ...]:
    """Return the messages of items. Successive reasoning, content and calls of the model are one message."""
    names = {call.call_id: call.name for message in earlier for call in message.tool_calls}
    messages: list[dict[str, Any]] = []
    ranks = (REASONING, "content", "tool_calls")
    for item in items:
        message = _read_item(item, names)
        last = messages[-1] if messages else {"role": ""}
        part = next((key for key in ranks if key in message), "")
        is_later = all(ranks.index(part) > ranks.index(key) for key in ranks if key in last)
        if message["role"] == last["role"] == "assistant" and (is_later or "tool_calls" in message):
            calls = [*last.get("tool_calls", ()), *message.get("tool_calls", ())]
            last |= message | ({"tool_calls": calls} if calls else {})
        else:
            messages.append(message)
    return tuple(map(Message.from_json, messages))


def _read_item(item: Mapping[str, Any], names: dict[str | None, str]) -> dict[str, Any]:
    """Return an item as a message of the chat API, or as a part of one. Raises: Refused for another kind."""
    kind = item.get("type") or "message"
    if kind == "message":
        role = "system" if item["role"] == "developer" else item["role"]
        return {"role": role, "content": _read_text(item["content"])}
    if kind == "reasoning":
        thought = item.get("content") or item.get("summary") or ()
        return {"role": "assistant", REASONING: "".join(part["text"] for part in thought)}
    if kind == "function_call":
        names[item["call_id"]] = item["name"]
        function = {"name": item["name"], "arguments": item["arguments"]}
        call = {"type": "function", "id": item["call_id"], "function": function}
        return {"role": "assistant", "tool_calls": [call]}
    if kind == "function_call_output":
        content = _read_text(item["output"])
        result = {"role": "tool", "content": content, "tool_call_id": item["call_id"]}
        return result | ({"name": names[item["call_id"]]} if item["call_id"] in names else {})
    raise Refused(
        400,
        f"an item of the type {kind!r:.60}; allowed: message, reasoning, function_call, function_call_output",
        "unsupported_value",
    )


def _read_text(content: Any) -> str:
    """Return a text, or the joined texts of parts. Raises: ValueError for a part of another kind."""
    if isinstance(content, str):
        return content
    for part in content:
        if part["type"] not in _TEXT_PARTS:
            raise ValueError(f"a part of the type {part['type']!r:.60}; allowed: {', '.join(_TEXT_PARTS)}")
    return "".join(part["text"] for part in content)


def _message_pieces(item: Mapping[str, Any], position: Mapping[str, Any]) -> list[dict[str, Any]]:
    (part,) = item["content"]
    at = {**position, "content_index": 0}
    logprobs = part.get("logprobs", [])
    empty = {**part, "text": "", **({"logprobs": []} if logprobs else {})}
    text = {"type": "response.output_text.delta", "delta": part["text"], "logprobs": logprobs, **at}
    return [
        {"type": "response.content_part.added", "part": empty, **at},
        *([text] if part["text"] else []),
        {"type": "response.output_text.done", "text": part["text"], "logprobs": logprobs, **at},
        {"type": "response.content_part.done", "part": part, **at},
    ]


def _reasoning_pieces(item: Mapping[str, Any], position: Mapping[str, Any]) -> list[dict[str, Any]]:
    (part,) = item["content"]
    at = {**position, "content_index": 0}
    return [
        {"type": "response.reasoning_text.delta", "delta": part["text"], **at},
        {"type": "response.reasoning_text.done", "text": part["text"], **at},
    ]


def _call_pieces(item: Mapping[str, Any], position: Mapping[str, Any]) -> list[dict[str, Any]]:
    name, arguments = item["name"], item["arguments"]
    return [
        {"type": "response.function_call_arguments.delta", "delta": arguments, **position},
        {"type": "response.function_call_arguments.done", "name": name, "arguments": arguments, **position},
    ]


_PIECES = {"message": _message_pieces, "reasoning": _reasoning_pieces, "function_call": _call_pieces}
_EMPTY: dict[str, dict[str, Any]] = {
    "message": {"content": []},
    "reasoning": {"content": []},
    "function_call": {"arguments": ""},
}
