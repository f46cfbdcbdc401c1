"""What the dialects of the face have in common: a request that was read, and one that is refused."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from strop.environments.recording import Call
from strop.rollout import IntArray, Message
from strop.tokenizer import Tokenizer


class Refused(Exception):
    """Raised with the status and the code of an answer that is an error."""

    def __init__(self, status: int, message: str, code: str) -> None:
        super().__init__(message)
        self.status = status
        self.code = code


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Asked:
    """What a program asks for."""

    body: Mapping[str, Any]
    """As it came; answers repeat some of it."""
    messages: tuple[Message, ...]
    tools: tuple[str, ...]
    """Functions in the form of OpenAI's chat API, as JSON; none where none may be called."""
    max_tokens: int | None
    num_choices: int = 1
    token_ids: IntArray | None = None
    """The whole prompt, where the program renders it by itself; there are no messages then."""

    @property
    def is_one_call(self) -> bool:
        """Whether a reply may ask for one tool at a time."""
        return self.body.get("parallel_tool_calls") is False


class Dialect(Protocol):
    """How programs ask at one path, and how they are answered; one object for each rollout."""

    def read(self, body: Any) -> Asked:
        """Read a request's JSON. Raises: Refused; what a value of another type raises."""
        ...

    def answer(self, asked: Asked, calls: Sequence[Call]) -> dict[str, Any]:
        """Return the answer to a request without a stream; a call for each choice."""
        ...

    def stream(self, asked: Asked, calls: Sequence[Call]) -> str:
        """Return the same as events, in the form of the server-sent ones."""
        ...


def require_fine(body: Mapping[str, Any], fine: Mapping[str, tuple[Any, ...]]) -> None:
    """Refuse values of a request that are not among those that are fine. Raises: Refused."""
    for name, values in fine.items():
        if body.get(name) not in values:
            allowed = " or ".join(json.dumps(one) for one in values if one is not None)
            raise Refused(
                400, f"{name}={json.dumps(body[name]):.80}; allowed: {allowed}", "unsupported_value"
            )


def read_limit(body: Mapping[str, Any], *names: str) -> int | None:
    """Return the first of a request's limits of tokens. Raises: ValueError."""
    name = next((name for name in names if body.get(name) is not None), None)
    if name is None:
        return None
    limit = body[name]
    if isinstance(limit, bool) or not isinstance(limit, int) or limit < 1:
        raise ValueError(f"{name} is no number of 1 or more")
    return limit


def list_logprobs(tokenizer: Tokenizer, call: Call) -> list[dict[str, Any]]:
    """Return the log-probability of each token that was sampled, with the token as text."""
    assert call.reply.logprobs is not None
    ids = call.reply.token_ids.tolist()
    texts = [tokenizer.decode([token_id], with_special=True) for token_id in ids]
    return [
        {"token": text, "logprob": value, "bytes": list(text.encode()), "top_logprobs": []}
        for text, value in zip(texts, call.reply.logprobs.tolist(), strict=True)
    ]
