"""The common parts of the face's dialects: parsed requests, refusals, token limits and log-probabilities."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from strop.environments.recording import Call
from strop.rollout import IntArray, Message
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
    token_ids: IntArray | None = None
    """The whole prompt, if the program renders it; there are no messages then."""

    @property
    def is_one_call(self) -> bool:
        """Whether a reply may call only one tool."""
        return self.body.get("parallel_tool_calls") is False


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
    texts = [tokenizer.decode([token_id], with_special=True) for token_id in ids]
    return [
        {"token": text, "logprob": value, "bytes": list(text.encode()), "top_logprobs": []}
        for text, value in zip(texts, call.reply.logprobs.tolist(), strict=True)
    ]
