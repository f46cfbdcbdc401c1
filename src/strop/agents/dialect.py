"""The common parts of the face's dialects: parsed requests, refusals, token limits and log-probabilities."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from strop.environments.recording import Call
from strop.rollout import Message
from strop.tasks.user.rewards import read_schema
from strop.tokenizer import Tokenizer


class Refused(Exception):
    """A request is refused with a status and an error code."""

    def __init__(self, status: int, message: str, code: str) -> None:
        super().__init__(message)
        self.status = status
        self.code = code


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ModelRequest:
    """A program's request to the model."""

    body: Mapping[str, Any]
    """The request's JSON; answers repeat some of its fields."""
    messages: tuple[Message, ...]
    tools: tuple[str, ...]
    """Functions in the form of OpenAI's chat API, as JSON; none if the reply may call none."""
    max_tokens: int | None
    num_choices: int = 1
    stop: tuple[str, ...] = ()
    """Texts that end a reply."""
    schema: Mapping[str, Any] | bool | None = None
    """What the reply has to be as JSON, a JSON Schema; None: any text."""
    forced_call: str | None = None
    """The tool that the reply has to call, "" for any; None: none."""

    @property
    def is_one_call(self) -> bool:
        """Whether a reply may call only one tool."""
        return self.body.get("parallel_tool_calls") is False

    def is_met(self, call: Call) -> bool:
        """Whether a reply has the form that the request asks for.

        Nothing forces it: the policy is sampled as always, and has to learn the form.
        """
        names = [tool_call.name for tool_call in call.spoken.calls]
        if call.spoken.mistakes or (self.forced_call is not None and not names):
            return False
        if self.forced_call and set(names) != {self.forced_call}:
            return False
        return self.schema is None or bool(names) or _fits(call.spoken.content, self.schema)


class Dialect(Protocol):
    """The form of requests and answers at one path. Each rollout has its own object."""

    def read(self, body: Any) -> ModelRequest:
        """Read a request's JSON. Raises: Refused; any error that a value of a wrong type raises."""
        ...

    def answer(self, request: ModelRequest, calls: Sequence[Call]) -> dict[str, Any]:
        """Return the answer to a request; there is one call for each choice."""
        ...

    def stream(self, request: ModelRequest, calls: Sequence[Call]) -> str:
        """Return the answer as server-sent events."""
        ...


def require_allowed(body: Mapping[str, Any], allowed: Mapping[str, tuple[Any, ...]]) -> None:
    """Refuse fields of a request whose values are not allowed. Raises: Refused."""
    for name, values in allowed.items():
        if body.get(name) not in values:
            listed = " or ".join(json.dumps(value) for value in values if value is not None)
            raise Refused(400, f"{name}={json.dumps(body[name]):.80}; allowed: {listed}", "unsupported_value")


def read_stop(params: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the texts of `stop` that end a reply. Raises: ValueError."""
    stop = params.get("stop") or ()
    stops = (stop,) if isinstance(stop, str) else tuple(stop)
    if not all(isinstance(text, str) and text for text in stops):
        raise ValueError("stop is no text, and no list of texts")
    return stops


def read_schema_of(wanted: Any, place: Mapping[str, Any]) -> Mapping[str, Any] | bool | None:
    """Return the JSON Schema of a text's `format`, which is at `place` if it has one; None for any text.

    Raises: Refused for another type; KeyError, ValueError if it is none; ImportError without jsonschema.
    """
    kind = (wanted or {}).get("type", "text")
    if kind == "json_schema":
        schema: Mapping[str, Any] | bool = read_schema(place["schema"])
        return schema
    require_allowed({"type": kind}, {"type": ("text", "json_object", "json_schema")})
    return {"type": "object"} if kind == "json_object" else None


def read_forced_call(body: Mapping[str, Any], names: Collection[str]) -> str | None:
    """Return the tool that `tool_choice` asks for, "" for any. Raises: Refused; KeyError, ValueError."""
    choice = body.get("tool_choice")
    if choice == "required":
        choice = {"type": "function", "name": ""}
    if not isinstance(choice, Mapping):
        require_allowed(body, {"tool_choice": (None, "auto", "none", "required")})
        return None
    require_allowed(choice, {"type": ("function",)})
    name = choice["function"]["name"] if "function" in choice else choice["name"]
    if not names or (name and name not in names):
        raise ValueError(f"tool_choice asks for a call of {name or 'a tool'}; the tools: {', '.join(names)}")
    return str(name)


def _fits(text: str, schema: Mapping[str, Any] | bool) -> bool:
    from jsonschema import validators

    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return False
    return bool(validators.validator_for(schema)(schema).is_valid(value))


def read_limit(body: Mapping[str, Any], *names: str) -> int | None:
    """Return the first field of `names` that a request sets, an integer from 1 on. Raises: ValueError."""
    name = next((name for name in names if body.get(name) is not None), None)
    if name is None:
        return None
    limit = body[name]
    if isinstance(limit, bool) or not isinstance(limit, int) or limit < 1:
        raise ValueError(f"{name} is no number of 1 or more")
    return limit


def list_logprobs(tokenizer: Tokenizer, call: Call) -> list[dict[str, Any]]:
    """Return the log-probability and the text of each sampled token."""
    assert call.reply.logprobs is not None
    ids = call.reply.token_ids.tolist()
    texts = [tokenizer.decode([token_id]) for token_id in ids]
    return [
        {"token": text, "logprob": value, "bytes": list(text.encode()), "top_logprobs": []}
        for text, value in zip(texts, call.reply.logprobs.tolist(), strict=True)
    ]
