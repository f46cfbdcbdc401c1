"""Asking the judge: one question, one answer, within a time that ends whatever the server does.

What goes wrong is a value, because the reply that was to be judged is not at fault: it stays unscored.
Redirects are not followed, so the key goes to the named address only.
"""

from __future__ import annotations

import json
import os
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from strop.errors import ConfigError, explain_refusal
from strop.rollout import Failure, FailureOwner
from strop.spec.judge_tasks import MAX_ANSWER_TOKENS, ROLE, is_this_machine
from strop.tasks.llm_judge.desk import CallDesk
from strop.tasks.llm_judge.role import read_handover
from strop.tasks.llm_judge.verdict import UNPARSABLE

if TYPE_CHECKING:
    import httpx

CALL_LIMIT_S = 30.0
"""From the first byte sent to the last one read, tries included."""
WAIT_LIMIT_S = 30.0
"""For a place among the calls under way, and for the rate."""
SEED = 0
_MAX_TRIES = 3
_BACKOFF_S = 0.5
_MAX_ANSWER_BYTES = 1 << 20
_BUSY = frozenset({429, 502, 503, 504})


@dataclass(frozen=True, kw_only=True, slots=True)
class Endpoint:
    """Where a judge answers."""

    url: str
    model: str
    key_env: str | None


@dataclass(frozen=True, kw_only=True, slots=True)
class _Trouble:
    """A try that failed."""

    kind: str
    detail: str
    can_retry: bool


class JudgeClient:
    """Asks one judge; usable in forked processes."""

    def __init__(self, endpoint: Endpoint, desk: CallDesk) -> None:
        self.desk = desk
        self._endpoint = endpoint
        self._client: tuple[int, httpx.Client] | None = None

    def ask(self, question: str) -> str | Failure:
        """Return the judge's answer, or why there is none.

        Raises: ConfigError if httpx is not installed or the variable of the key is not set.
        """
        client = self._open_client()
        with self.desk.place(WAIT_LIMIT_S) as has_place:
            if not has_place:
                return _failure("judge_busy", f"no call could begin within {WAIT_LIMIT_S:g} s")
            deadline = time.monotonic() + CALL_LIMIT_S
            trouble = _Trouble(kind="judge_timeout", detail="", can_retry=False)
            for number in range(_MAX_TRIES):
                refusal = self.desk.begin_call(WAIT_LIMIT_S)
                if refusal is not None:
                    return _failure(refusal, f"after {self.desk.num_calls} calls; see task.max_judge_calls")
                answer = _try(client, self._endpoint.model, question, deadline)
                if isinstance(answer, str):
                    return answer
                trouble = answer
                pause_s = _BACKOFF_S * 2**number
                if not answer.can_retry or time.monotonic() + pause_s >= deadline:
                    break
                time.sleep(pause_s)
        return _failure(trouble.kind, trouble.detail)

    def require_ready(self) -> None:
        """Refuse what every call would fail on.

        Raises: ConfigError like `ask`.
        """
        self._open_client()

    def close(self) -> None:
        """Close the connections of this process."""
        if self._client is not None and self._client[0] == os.getpid():
            self._client[1].close()
        self._client = None

    def _open_client(self) -> httpx.Client:
        """Return this process's client: connections are not shared with the one that it was forked from."""
        if self._client is None or self._client[0] != os.getpid():
            self._client = os.getpid(), _make_client(self._endpoint)
        return self._client[1]


def _make_client(endpoint: Endpoint) -> httpx.Client:
    try:
        import httpx
    except ImportError as error:
        raise ConfigError(
            explain_refusal(
                "a judge is asked with httpx, which is not installed",
                allowed="an installation with the extra 'tasks'",
                next_step="pip install 'strop[tasks]'",
            )
        ) from error
    headers, url = {}, endpoint.url
    if url == ROLE:
        url, key = read_handover(endpoint.model)
        headers["Authorization"] = f"Bearer {key}"
    if endpoint.key_env is not None:
        key = os.environ.get(endpoint.key_env, "")
        if not key:
            raise ConfigError(
                explain_refusal(
                    f"task.judge_key_env={endpoint.key_env}, and that variable is not set",
                    allowed="a variable that holds the judge's key, or none for a judge without one",
                    next_step=f"export {endpoint.key_env} where the run is started",
                )
            )
        headers["Authorization"] = f"Bearer {key}"
    # The environment's proxies are not for a server on this machine.
    is_here = is_this_machine(url)
    return httpx.Client(base_url=url.rstrip("/"), headers=headers, trust_env=not is_here)


def _try(client: httpx.Client, model: str, question: str, deadline: float) -> str | _Trouble:
    import httpx

    body = {
        "model": model,
        "messages": [{"role": "user", "content": question}],
        "temperature": 0,
        "seed": SEED,
        "max_tokens": MAX_ANSWER_TOKENS,
    }
    left_s = max(deadline - time.monotonic(), 0.01)
    data = b""
    try:
        with client.stream("POST", "/chat/completions", json=body, timeout=left_s) as response:
            for part in response.iter_bytes():
                data += part
                if len(data) > _MAX_ANSWER_BYTES:
                    return _Trouble(kind="judge_http", detail="an answer of over 1 MiB", can_retry=False)
                if time.monotonic() > deadline:
                    return _timeout()
    except httpx.TimeoutException:
        return _timeout()
    except httpx.HTTPError as error:
        return _Trouble(kind="judge_unreachable", detail=f"{type(error).__name__}: {error}", can_retry=True)
    if response.status_code != httpx.codes.OK:
        detail = f"status {response.status_code}: {data[:300].decode(errors='replace')}"
        return _Trouble(kind="judge_http", detail=detail, can_retry=response.status_code in _BUSY)
    return _read_answer(data)


def _read_answer(data: bytes) -> str | _Trouble:
    """Return the text of an answer in the form of the OpenAI protocol."""
    try:
        choice: Any = json.loads(data)["choices"][0]
        content = choice["message"]["content"]
    except (ValueError, LookupError, TypeError, RecursionError) as error:
        detail = f"no answer of the protocol ({error!r}): {data[:300].decode(errors='replace')}"
        return _Trouble(kind="judge_http", detail=detail, can_retry=False)
    if not isinstance(content, str):
        refusal = choice["message"].get("refusal")
        return _Trouble(kind=UNPARSABLE, detail=f"no text; refusal {str(refusal)[:300]!r}", can_retry=False)
    return content


def _timeout() -> _Trouble:
    return _Trouble(
        kind="judge_timeout", detail=f"no whole answer within {CALL_LIMIT_S:g} s", can_retry=False
    )


def _failure(kind: str, detail: str) -> Failure:
    return Failure(owner=FailureOwner.ENGINE, kind=kind, detail=detail)
