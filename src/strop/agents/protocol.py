"""Calls of a model in OpenAI's two forms, chat completions and responses. Shapes: openai 2.54's types.

A request of items is turned into the chat request that it means, so that one function reads both. Tools have
to be functions. Replies are sampled whole; a stream has each in one piece.
"""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from strop.environments.recording import Call
from strop.rollout import REASONING, FinishReason, Message
from strop.tokenizer import Tokenizer

_ALLOWED: dict[str, tuple[Any, ...]] = {
    "n": (None, 1),
    "logit_bias": (None, {}),
    "top_logprobs": (None, 0),
    "audio": (None,),
    "modalities": (None, ["text"]),
    "web_search_options": (None,),
    # The forms of calls before `tools`.
    "functions": (None, []),
    "function_call": (None, "none"),
    # Of responses: state of a server.
    "background": (None, False),
    "truncation": (None, "disabled"),
    "previous_response_id": (None,),
    **dict.fromkeys(("conversation", "prompt", "context_management"), (None, [])),
    # What servers offer beside OpenAI's API.
    **dict.fromkeys(("structured_outputs", "guided_json", "guided_regex", "guided_choice"), (None,)),
    **dict.fromkeys(("guided_grammar", "allowed_token_ids", "bad_words", "stop_token_ids"), (None, [])),
    **dict.fromkeys(("min_tokens", "ignore_eos", "echo", "add_generation_prompt"), (None, 0)),
}
"""Other values would change the policy's distribution, or ask for tokens that were not sampled."""
_MESSAGE_KEYS = ("role", "content", "tool_calls", "tool_call_id", "name", REASONING)
_LOGPROBS = "message.output_text.logprobs"
_numbers = itertools.count()


class Refused(Exception):
    """A request is refused with a status and an error code."""

    def __init__(self, status: int, message: str, code: str) -> None:
        super().__init__(message)
        self.status = status
        self.code = code


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ModelRequest:
    """A program's request to the model."""

    tokenizer: Tokenizer
    body: Mapping[str, Any]
    """The request's JSON; answers repeat some of its fields."""
    messages: tuple[Message, ...]
    tools: tuple[str, ...]
    """Functions in the form of OpenAI's chat API, as JSON; none if the reply may call none."""
    max_tokens: int | None
    stop: tuple[str, ...]
    """Texts that end a reply."""
    schema: Any
    """A validator of the JSON that the reply has to be; None: any text."""
    forced_call: str | None
    """The tool that the reply has to call, "" for any; None: none."""
    is_one_call: bool
    """Whether a reply may call only one tool."""

    def is_met(self, call: Call) -> bool:
        """Whether a reply has the form that the request asks for. Nothing forces it: the policy learns it."""
        names = {tool_call.name for tool_call in call.spoken.calls}
        if call.spoken.mistakes or (self.forced_call is not None and not names):
            return False
        if self.forced_call and names != {self.forced_call}:
            return False
        if self.schema is None or names:
            return True
        try:
            value = json.loads(call.spoken.content)
        except (ValueError, RecursionError):
            return False
        return bool(self.schema.is_valid(value))


def read_request(path: str, body: Any, tokenizer: Tokenizer) -> ModelRequest:
    """Read a request. Raises: Refused; any error that a value of a wrong type raises."""
    _require_allowed(body, _ALLOWED)
    chat = _to_chat(body) if path == "responses" else body
    tools = chat.get("tools") or ()
    for tool in tools:
        _require_allowed(tool, {"type": (None, "function")})
        if not isinstance(tool["function"]["name"], str):
            raise TypeError("a tool has no name")
    messages = tuple(map(_read_message, chat["messages"]))
    if not messages:
        raise ValueError("there is no message")
    stop = chat.get("stop") or ()
    stops = (stop,) if isinstance(stop, str) else tuple(stop)
    if not all(isinstance(text, str) and text for text in stops):
        raise ValueError("stop is no text, and no list of texts")
    return ModelRequest(
        tokenizer=tokenizer,
        body=body,
        messages=messages,
        tools=tuple(
            json.dumps(tool, ensure_ascii=False) for tool in tools if chat.get("tool_choice") != "none"
        ),
        max_tokens=_read_number(chat, "max_completion_tokens", "max_tokens", "max_output_tokens"),
        stop=stops,
        is_one_call=body.get("parallel_tool_calls") is False,
        schema=_read_schema(chat.get("response_format") or {}),
        forced_call=_read_forced_call(chat, [tool["function"]["name"] for tool in tools]),
    )


def _read_message(message: Mapping[str, Any]) -> Message:
    """Read the known fields of a message; models know the role `developer` as `system`."""
    fields = {key: message[key] for key in _MESSAGE_KEYS if message.get(key) is not None}
    role = "system" if message["role"] == "developer" else message["role"]
    return Message.from_json({**fields, "role": role})


def _require_allowed(body: Mapping[str, Any], allowed: Mapping[str, tuple[Any, ...]]) -> None:
    """Refuse fields of a request whose values are not allowed. Raises: Refused."""
    for name, values in allowed.items():
        if body.get(name) not in values:
            listed = " or ".join(json.dumps(value) for value in values if value is not None) or "null"
            raise Refused(400, f"{name}={json.dumps(body[name]):.80}; allowed: {listed}", "unsupported_value")


def _read_number(body: Mapping[str, Any], *names: str) -> int | None:
    """Return the first field of `names` that a request sets, an integer from 1 on. Raises: ValueError."""
    name = next((name for name in names if body.get(name) is not None), None)
    if name is None:
        return None
    number = body[name]
    if isinstance(number, bool) or not isinstance(number, int) or number < 1:
        raise ValueError(f"{name} is no number of 1 or more")
    return number


def _read_schema(wanted: Mapping[str, Any]) -> Any:
    """Return a validator of a reply's format; None for any text.

    Raises: Refused for another type; KeyError, ValueError if it is none; ImportError without jsonschema.
    """
    kind = wanted.get("type", "text")
    _require_allowed({"type": kind}, {"type": ("text", "json_object", "json_schema")})
    if kind == "text":
        return None
    from jsonschema import validators

    schema = {"type": "object"} if kind == "json_object" else (wanted.get("json_schema") or wanted)["schema"]
    known = validators.validator_for(schema)
    if not known(known.META_SCHEMA).is_valid(schema):
        raise ValueError("the reply's format is no JSON Schema")
    return known(schema)


def _read_forced_call(body: Mapping[str, Any], names: Collection[str]) -> str | None:
    """Return the tool that `tool_choice` asks for, "" for any. Raises: Refused; KeyError, ValueError."""
    choice = body.get("tool_choice")
    if choice == "required":
        choice = {"type": "function", "name": ""}
    if not isinstance(choice, Mapping):
        _require_allowed(body, {"tool_choice": (None, "auto", "none", "required")})
        return None
    _require_allowed(choice, {"type": ("function",)})
    name = (choice.get("function") or choice)["name"]
    if not names or (name and name not in names):
        raise ValueError(f"tool_choice asks for a call of {name or 'a tool'}; the tools: {', '.join(names)}")
    return str(name)


def _to_chat(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return the chat request that a request of items means. Raises: as `read_request`."""
    items = body["input"]
    if isinstance(items, str):
        items = [{"role": "user", "content": items}]
    if not items:
        raise ValueError("there is no input")
    tools = [*(body.get("tools") or ())]
    for tool in tools:
        _require_allowed(tool, {"type": ("function",)})
    keys = ("name", "description", "parameters", "strict")
    functions = [{key: tool[key] for key in keys if tool.get(key) is not None} for tool in tools]
    instructions = body.get("instructions")
    system = [] if instructions is None else [{"role": "system", "content": instructions}]
    return {
        "messages": [*system, *_read_items(items)],
        "tools": [{"type": "function", "function": function} for function in functions],
        "tool_choice": body.get("tool_choice"),
        "max_output_tokens": body.get("max_output_tokens"),
        "response_format": (body.get("text") or {}).get("format"),
    }


def _read_items(items: Sequence[Any]) -> list[dict[str, Any]]:
    """Return the messages of items. Successive reasoning, content and calls of the model are one message."""
    names: dict[str, str] = {}
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
    return messages


def _read_item(item: Mapping[str, Any], names: dict[str, str]) -> dict[str, Any]:
    """Return an item as a message of the chat API, or as a part of one. Raises: Refused for another kind."""
    kind = item.get("type") or "message"
    if kind == "message":
        return {"role": item["role"], "content": _to_content(item["content"])}
    if kind == "reasoning":
        thought = item.get("content") or item.get("summary") or ()
        return {"role": "assistant", REASONING: "".join(part["text"] for part in thought)}
    if kind == "function_call":
        names[item["call_id"]] = item["name"]
        function = {"name": item["name"], "arguments": item["arguments"]}
        call = {"type": "function", "id": item["call_id"], "function": function}
        return {"role": "assistant", "tool_calls": [call]}
    if kind == "function_call_output":
        content, name = _to_content(item["output"]), names.get(item["call_id"])
        return {"role": "tool", "content": content, "tool_call_id": item["call_id"], "name": name}
    raise Refused(
        400,
        f"an item of the type {kind!r:.60}; allowed: message, reasoning, function_call, function_call_output",
        "unsupported_value",
    )


def _to_content(content: Any) -> Any:
    if isinstance(content, str):
        return content
    texts = ("input_text", "output_text")
    return [{**part, "type": "text"} if part["type"] in texts else part for part in content]


def _answer_chat(request: ModelRequest, call: Call) -> dict[str, Any]:
    """Return a `chat.completion`."""
    body, spoken, message = request.body, call.spoken, call.said.to_json()
    message |= {"content": None if spoken.calls and not spoken.content else spoken.content}
    message |= {} if spoken.reasoning is None else {REASONING: spoken.reasoning}
    is_cut = call.reply.finish_reason is FinishReason.LENGTH
    logprobs = {"content": list_logprobs(request, call), "refusal": None} if body.get("logprobs") else None
    choice: dict[str, Any] = {"index": 0, "message": message, "logprobs": logprobs}
    choice["finish_reason"] = "length" if is_cut else "tool_calls" if spoken.calls else "stop"
    num_prompt, num_reply = len(call.prompt_ids), len(call.reply.token_ids)
    answer: dict[str, Any] = {
        "id": f"chatcmpl-{next(_numbers):08d}",
        "object": "chat.completion",
        "created": int(time.time()),
        "model": str(body.get("model", "policy")),
        "choices": [choice],
        "usage": {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_reply,
            "total_tokens": num_prompt + num_reply,
        },
    }
    if body.get("return_token_ids"):
        choice["token_ids"] = call.reply.token_ids.tolist()
        answer["prompt_token_ids"] = call.prompt_ids.tolist()
    return answer


def _stream_chat(request: ModelRequest, call: Call) -> str:
    """Return `chat.completion.chunk`s: the message, and its end."""
    answer = _answer_chat(request, call)
    usage, (choice,) = answer.pop("usage"), answer.pop("choices")
    delta = choice.pop("message")
    for index, tool_call in enumerate(delta.get("tool_calls", ())):
        tool_call["index"] = index
    chunks: list[dict[str, Any]] = [
        {"choices": [{**choice, "delta": delta, "finish_reason": None}]},
        {"choices": [{**choice, "delta": {}, "logprobs": None}]},
    ]
    if (request.body.get("stream_options") or {}).get("include_usage"):
        chunks.append({"choices": [], "usage": usage})
    head = answer | {"object": "chat.completion.chunk"}
    lines = [json.dumps({**head, **chunk}, ensure_ascii=False) for chunk in chunks] + ["[DONE]"]
    return "".join(f"data: {line}\n\n" for line in lines)


def list_logprobs(request: ModelRequest, call: Call) -> list[dict[str, Any]]:
    """Return the log-probability and the text of each sampled token."""
    assert call.reply.logprobs is not None
    texts = [request.tokenizer.token_text(token_id) for token_id in call.reply.token_ids.tolist()]
    return [
        {"token": text, "logprob": value, "bytes": list(text.encode()), "top_logprobs": []}
        for text, value in zip(texts, call.reply.logprobs.tolist(), strict=True)
    ]


def _answer_response(request: ModelRequest, call: Call) -> dict[str, Any]:
    """Return a `response`."""
    body, number = request.body, f"{next(_numbers):08d}"
    is_cut = call.reply.finish_reason is FinishReason.LENGTH
    num_prompt, num_reply = len(call.prompt_ids), len(call.reply.token_ids)
    return {
        "id": f"resp_{number}",
        "object": "response",
        "created_at": time.time(),
        "model": str(body.get("model", "policy")),
        "parallel_tool_calls": not request.is_one_call,
        "tool_choice": body.get("tool_choice") or "auto",
        "tools": [*(body.get("tools") or ())],
        "status": "incomplete" if is_cut else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
        "output": _to_items(request, call, number),
        "usage": {
            "input_tokens": num_prompt,
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": num_reply,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": num_prompt + num_reply,
        },
    }


def _to_items(request: ModelRequest, call: Call, number: str) -> list[dict[str, Any]]:
    """Return a reply as items: reasoning, message, function calls."""
    spoken = call.spoken
    items: list[dict[str, Any]] = []
    if spoken.reasoning is not None:
        thought = [{"type": "reasoning_text", "text": spoken.reasoning}]
        items.append({"type": "reasoning", "id": f"rs_{number}", "summary": [], "content": thought})
    if spoken.content or not spoken.calls:
        part: dict[str, Any] = {"type": "output_text", "text": spoken.content, "annotations": []}
        if _LOGPROBS in (request.body.get("include") or ()):
            part["logprobs"] = list_logprobs(request, call)
        items.append({"type": "message", "id": f"msg_{number}", "role": "assistant", "content": [part]})
    for index, tool_call in enumerate(spoken.calls):
        named = {"call_id": tool_call.call_id, "name": tool_call.name, "arguments": tool_call.arguments}
        items.append({"type": "function_call", "id": f"fc_{number}_{index}", **named})
    is_cut = call.reply.finish_reason is FinishReason.LENGTH
    return [{**item, "status": "incomplete" if is_cut else "completed"} for item in items]


def _stream_response(request: ModelRequest, call: Call) -> str:
    """Return the events of a response: its beginning, each item in pieces, and its end."""
    response = _answer_response(request, call)
    begun = {**response, "status": "in_progress", "incomplete_details": None, "output": [], "usage": None}
    events: list[tuple[str, dict[str, Any]]] = [
        ("created", {"response": begun}),
        ("in_progress", {"response": begun}),
    ]
    for index, item in enumerate(response["output"]):
        place = {"output_index": index}
        empty: dict[str, Any] = {"arguments": ""} if "arguments" in item else {"content": []}
        events.append(("output_item.added", {"item": {**item, "status": "in_progress", **empty}, **place}))
        events += _to_pieces(item, {**place, "item_id": item["id"]})
        events.append(("output_item.done", {"item": item, **place}))
    events.append((response["status"], {"response": response}))
    lines = []
    for number, (kind, fields) in enumerate(events):
        event = {"type": f"response.{kind}", "sequence_number": number, **fields}
        lines.append(f"event: response.{kind}\ndata: {json.dumps(event, ensure_ascii=False)}\n\n")
    return "".join(lines)


def _to_pieces(item: Mapping[str, Any], place: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    if item["type"] == "function_call":
        kind, whole = "function_call_arguments", {key: item[key] for key in ("name", "arguments")}
        return [
            (f"{kind}.delta", {"delta": item["arguments"], **place}),
            (f"{kind}.done", {**whole, **place}),
        ]
    (part,) = item["content"]
    kind, text, place = part["type"], part["text"], {**place, "content_index": 0}
    ends = {"logprobs": part.get("logprobs", []), **place} if kind == "output_text" else place
    pieces = [(f"{kind}.delta", {"delta": text, **ends}), (f"{kind}.done", {"text": text, **ends})]
    if kind == "reasoning_text":
        return pieces
    empty = {**part, "text": "", "logprobs": []}
    return [
        ("content_part.added", {"part": empty, **place}),
        *pieces,
        ("content_part.done", {"part": part, **place}),
    ]


FORMS: Mapping[str, tuple[Callable[[ModelRequest, Call], Any], ...]] = {
    "chat/completions": (_answer_chat, _stream_chat),
    "responses": (_answer_response, _stream_response),
}
"""What answers a request at a path, and as server-sent events."""
