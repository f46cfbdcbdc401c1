"""`POST chat/completions`. Shapes: openai 2.54's types; vLLM 0.32 for `return_token_ids` and reasoning."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Mapping, Sequence
from typing import Any

from strop.agents.dialect import (
    ModelRequest,
    list_logprobs,
    read_forced_call,
    read_limit,
    read_schema_of,
    read_stop,
    require_allowed,
)
from strop.environments.recording import Call
from strop.rollout import FinishReason, Message
from strop.tokenizer import Tokenizer

MAX_CHOICES = 128
"""OpenAI's limit."""
_ALLOWED: dict[str, tuple[Any, ...]] = {
    "logit_bias": (None, {}),
    "top_logprobs": (None, 0),
    "audio": (None,),
    "modalities": (None, ["text"]),
    "web_search_options": (None,),
    # The forms of calls before `tools`.
    "functions": (None, []),
    "function_call": (None, "none"),
    # What servers offer beside OpenAI's API.
    **dict.fromkeys(("structured_outputs", "guided_json", "guided_regex", "guided_choice"), (None,)),
    **dict.fromkeys(("guided_grammar", "allowed_token_ids", "bad_words", "stop_token_ids"), (None, [])),
    **dict.fromkeys(("min_tokens", "ignore_eos", "echo", "add_generation_prompt"), (None, 0)),
}
"""Other values would change the policy's distribution, or ask for tokens that were not sampled."""
_MESSAGE_KEYS = ("role", "content", "tool_calls", "tool_call_id", "name", "reasoning_content")
_numbers = itertools.count()


class Chat:
    """The chat dialect."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def read(self, body: Any) -> ModelRequest:
        """Read a request. Raises: Refused; LookupError, TypeError, ValueError, AttributeError, DataError."""
        messages = tuple(map(_read_message, body["messages"]))
        if not messages:
            raise ValueError("there is no message")
        tools = body.get("tools") or ()
        if not all(isinstance(tool["function"]["name"], str) for tool in tools):
            raise ValueError("a tool has no name")
        max_tokens = read_limit(body, "max_completion_tokens", "max_tokens")
        num_choices = read_limit(body, "n") or 1
        if num_choices > MAX_CHOICES:
            raise ValueError(f"n is {num_choices}; allowed: 1 to {MAX_CHOICES}")
        require_allowed(body, _ALLOWED)
        forced_call = read_forced_call(body, [tool["function"]["name"] for tool in tools])
        wanted = body.get("response_format") or {}
        if body.get("tool_choice") == "none":
            tools = ()
        return ModelRequest(
            body=body,
            messages=messages,
            tools=tuple(json.dumps(tool, ensure_ascii=False) for tool in tools),
            max_tokens=max_tokens,
            num_choices=num_choices,
            stop=read_stop(body),
            schema=read_schema_of(wanted, wanted.get("json_schema") or {}),
            forced_call=forced_call,
        )

    def answer(self, request: ModelRequest, calls: Sequence[Call]) -> dict[str, Any]:
        """Return a `chat.completion`."""
        choices: list[dict[str, Any]] = [
            {
                "index": index,
                "message": _to_message(call),
                "finish_reason": _finish_of(call),
                "logprobs": self._to_logprobs(call) if request.body.get("logprobs") else None,
            }
            for index, call in enumerate(calls)
        ]
        answer = _head(request, "chat.completion") | {"choices": choices, "usage": _usage_of(calls)}
        if request.body.get("return_token_ids"):
            answer["prompt_token_ids"] = calls[0].prompt_ids.tolist()
            for choice, call in zip(choices, calls, strict=True):
                choice["token_ids"] = call.reply.token_ids.tolist()
        return answer

    def stream(self, request: ModelRequest, calls: Sequence[Call]) -> str:
        """Return `chat.completion.chunk`s, one choice after the other."""
        head = _head(request, "chat.completion.chunk")
        choices: list[dict[str, Any]] = []
        for index, call in enumerate(calls):
            deltas = [{"index": index, "delta": delta} for delta in _to_deltas(_to_message(call))]
            choices += [{**delta, "finish_reason": None, "logprobs": None} for delta in deltas]
            if request.body.get("logprobs"):
                choices[-1]["logprobs"] = self._to_logprobs(call)
            choices.append({"index": index, "delta": {}, "finish_reason": _finish_of(call), "logprobs": None})
        chunks: list[dict[str, Any]] = [{**head, "choices": [choice]} for choice in choices]
        if (request.body.get("stream_options") or {}).get("include_usage"):
            chunks.append({**head, "choices": [], "usage": _usage_of(calls)})
        lines = [json.dumps(chunk, ensure_ascii=False) for chunk in chunks] + ["[DONE]"]
        return "".join(f"data: {line}\n\n" for line in lines)

    def _to_logprobs(self, call: Call) -> dict[str, Any]:
        return {"content": list_logprobs(self._tokenizer, call), "refusal": None}


def _read_message(message: Mapping[str, Any]) -> Message:
    """Read a message: the known fields, and `developer` as the role `system`, which models know."""
    fields = {key: message[key] for key in _MESSAGE_KEYS if message.get(key) is not None}
    role = "system" if message["role"] == "developer" else message["role"]
    return Message.from_json({**fields, "role": role})


def _to_message(call: Call) -> dict[str, Any]:
    spoken = call.spoken
    content = spoken.content if spoken.content or not spoken.calls else None
    message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
    if spoken.reasoning is not None:
        message["reasoning_content"] = spoken.reasoning
    if spoken.calls:
        message["tool_calls"] = [
            {
                "id": tool_call.call_id,
                "type": "function",
                "function": {"name": tool_call.name, "arguments": tool_call.arguments},
            }
            for tool_call in spoken.calls
        ]
    return message


def _to_deltas(message: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return a message in pieces: role, reasoning, content, and each tool call in two."""
    deltas: list[dict[str, Any]] = [{"role": "assistant", "content": ""}]
    deltas += [{key: message[key]} for key in ("reasoning_content", "content") if message.get(key)]
    for index, tool_call in enumerate(message.get("tool_calls", ())):
        function = tool_call["function"]
        first = {**tool_call, "index": index, "function": {"name": function["name"], "arguments": ""}}
        second = {"index": index, "function": {"arguments": function["arguments"]}}
        deltas += [{"tool_calls": [first]}, {"tool_calls": [second]}]
    return deltas


def _finish_of(call: Call) -> str:
    if call.reply.finish_reason is FinishReason.LENGTH:
        return "length"
    return "tool_calls" if call.spoken.calls else "stop"


def _usage_of(calls: Sequence[Call]) -> dict[str, int]:
    num_prompt, num_replies = len(calls[0].prompt_ids), sum(len(call.reply.token_ids) for call in calls)
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_replies,
        "total_tokens": num_prompt + num_replies,
    }


def _head(request: ModelRequest, kind: str) -> dict[str, Any]:
    return {
        "id": f"chatcmpl-{next(_numbers):08d}",
        "object": kind,
        "created": int(time.time()),
        "model": str(request.body.get("model", "policy")),
    }
