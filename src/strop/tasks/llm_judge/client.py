"""The judge's HTTP client and its rate limit; a judge that the run started (`role`) is found by its name.

A failed call is returned as a value: it is not the reply's fault, which stays unscored. Redirects are not
followed, so the key is sent to the named address only.
"""

from __future__ import annotations

import fcntl
import json
import os
import struct
import tempfile
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from strop.errors import ConfigError
from strop.io.endpoints import find_endpoint
from strop.rollout import Failure, FailureOwner
from strop.spec.judge import MAX_ANSWER_TOKENS, ROLE, is_this_machine
from strop.tasks.llm_judge.rubric import UNPARSABLE

if TYPE_CHECKING:
    import httpx


CALL_LIMIT_S = 30.0
"""Limit from the first byte sent to the last one read, all tries included."""
WAIT_LIMIT_S = 30.0
"""Limit of the wait for a free slot, and of the wait for the rate."""
SEED = 0
_MAX_TRIES = 3
_BACKOFF_S = 0.5
_MAX_ANSWER_BYTES = 1 << 20
_BUSY = frozenset({429, 500, 502, 503, 504})


@dataclass(frozen=True, kw_only=True, slots=True)
class _FailedTry:
    """A try that failed."""

    kind: str
    detail: str
    can_retry: bool


class JudgeClient:
    """The client of one judge; usable in forked processes."""

    def __init__(self, url: str, model: str, key_env: str | None, limiter: CallLimiter) -> None:
        self.limiter = limiter
        self._url = url
        self._model = model
        self._key_env = key_env
        self._client: tuple[int, httpx.Client] | None = None

    def ask(self, question: str) -> str | Failure:
        """Return the judge's answer, or a failure.

        Raises: ConfigError if httpx is not installed or the variable of the key is not set.
        """
        client = self.open()
        with self.limiter.slot(WAIT_LIMIT_S) as has_slot:
            if not has_slot:
                return _failure("judge_busy", f"no call could begin within {WAIT_LIMIT_S:g} s")
            deadline = time.monotonic() + CALL_LIMIT_S
            failure = _FailedTry(kind="judge_timeout", detail="", can_retry=False)
            for number in range(_MAX_TRIES):
                if not self.limiter.begin_call():
                    detail = f"after {self.limiter.num_calls} calls; see task.max_judge_calls"
                    return _failure("judge_budget", detail)
                answer = _try(client, self._model, question, deadline)
                if isinstance(answer, str):
                    return answer
                failure = answer
                pause_s = _BACKOFF_S * 2**number
                if not answer.can_retry or time.monotonic() + pause_s >= deadline:
                    break
                time.sleep(pause_s)
        return _failure(failure.kind, failure.detail)

    def open(self) -> httpx.Client:
        """Return this process's HTTP client; a fork does not share its parent's connections.

        Raises: ConfigError like `ask`.
        """
        if self._client is not None and self._client[0] == os.getpid():
            return self._client[1]
        try:
            import httpx
        except ImportError as error:
            raise ConfigError(
                "a judge is asked with httpx, which is not installed",
                allowed="an installation with the extra 'tasks'",
                next_step="pip install 'strop[tasks]'",
            ) from error
        headers, url = {}, self._url
        if url == ROLE:
            role = find_endpoint(endpoint_name(self._model))
            if role is None:
                raise ConfigError(
                    f"task.judge_url=role, and no run has started {self._model} for this process",
                    allowed="'role' while `strop train` runs, which starts the judge; else an address",
                    next_step="set task.judge_url to a server that answers, such as http://127.0.0.1:8000/v1",
                )
            url, headers["Authorization"] = role.url, f"Bearer {role.key}"
        if self._key_env is not None:
            key = os.environ.get(self._key_env, "")
            if not key:
                raise ConfigError(
                    f"task.judge_key_env={self._key_env}, and that variable is not set",
                    allowed="a variable that holds the judge's key, or none for a judge without one",
                    next_step=f"export {self._key_env} where the run is started",
                )
            headers["Authorization"] = f"Bearer {key}"
        # Proxies of the environment do not apply to a server on this machine.
        client = httpx.Client(base_url=url.rstrip("/"), headers=headers, trust_env=not is_this_machine(url))
        self._client = os.getpid(), client
        return client

    def close(self) -> None:
        """Close the connections of this process."""
        if self._client is not None and self._client[0] == os.getpid():
            self._client[1].close()
        self._client = None


def _try(client: httpx.Client, model: str, question: str, deadline: float) -> str | _FailedTry:
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
                    return _FailedTry(kind="judge_http", detail="an answer of over 1 MiB", can_retry=False)
                if time.monotonic() > deadline:
                    return _timeout()
    except httpx.TimeoutException:
        return _timeout()
    except httpx.HTTPError as error:
        return _FailedTry(kind="judge_unreachable", detail=f"{type(error).__name__}: {error}", can_retry=True)
    if response.status_code != httpx.codes.OK:
        detail = f"status {response.status_code}: {data[:300].decode(errors='replace')}"
        return _FailedTry(kind="judge_http", detail=detail, can_retry=response.status_code in _BUSY)
    return _read_answer(data)


def _read_answer(data: bytes) -> str | _FailedTry:
    """Return the text of an answer in the form of the OpenAI protocol."""
    try:
        choice: Any = json.loads(data)["choices"][0]
        content = choice["message"]["content"]
    except (ValueError, LookupError, TypeError, RecursionError) as error:
        detail = f"no answer of the protocol ({error!r}): {data[:300].decode(errors='replace')}"
        return _FailedTry(kind="judge_http", detail=detail, can_retry=False)
    if not isinstance(content, str):
        refusal = choice["message"].get("refusal")
        return _FailedTry(kind=UNPARSABLE, detail=f"no text; refusal {str(refusal)[:300]!r}", can_retry=False)
    return content


def _timeout() -> _FailedTry:
    return _FailedTry(
        kind="judge_timeout", detail=f"no whole answer within {CALL_LIMIT_S:g} s", can_retry=False
    )


def _failure(kind: str, detail: str) -> Failure:
    return Failure(owner=FailureOwner.ENGINE, kind=kind, detail=detail)


_STATE = struct.Struct("=Q")
"""Number of calls begun."""
_FIRST_SLOT = _STATE.size
_POLL_S = 0.01


class CallLimiter:
    """Limits calls at once and in all, over all worker processes. Build it before the fork.

    Forked workers share an unnamed file with the count. Slots are locks on its bytes, which the kernel
    releases when their holder is killed.
    """

    def __init__(self, *, num_at_once: int, max_calls: int) -> None:
        self._num_at_once = num_at_once
        self._max_calls = max_calls
        if hasattr(os, "memfd_create"):
            self._file = os.memfd_create("strop-judge")
        else:
            self._file, path = tempfile.mkstemp()
            os.unlink(path)
        weakref.finalize(self, os.close, self._file)
        os.pwrite(self._file, _STATE.pack(0), 0)

    @property
    def num_calls(self) -> int:
        """Calls begun so far, in all processes."""
        with _locked(self._file):
            return self._read()

    @contextmanager
    def slot(self, wait_limit_s: float) -> Iterator[bool]:
        """Hold a slot while the block runs. False: none was free in time."""
        deadline, held = time.monotonic() + wait_limit_s, None
        while held is None:
            for slot in range(_FIRST_SLOT, _FIRST_SLOT + self._num_at_once):
                with suppress(OSError):
                    fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, slot)
                    held = slot
                    break
            if held is None and time.monotonic() >= deadline:
                break
            time.sleep(_POLL_S if held is None else 0.0)
        try:
            yield held is not None
        finally:
            if held is not None:
                fcntl.lockf(self._file, fcntl.LOCK_UN, 1, held)

    def begin_call(self) -> bool:
        """Count a call. False: the last one that is allowed was begun before."""
        with _locked(self._file):
            num_calls = self._read()
            if num_calls >= self._max_calls:
                return False
            os.pwrite(self._file, _STATE.pack(num_calls + 1), 0)
        return True

    def _read(self) -> int:
        (num_calls,) = _STATE.unpack(os.pread(self._file, _STATE.size, 0))
        return int(num_calls)


@contextmanager
def _locked(file: int) -> Iterator[None]:
    fcntl.lockf(file, fcntl.LOCK_EX, 1, 0)
    try:
        yield
    finally:
        fcntl.lockf(file, fcntl.LOCK_UN, 1, 0)


def endpoint_name(model: str) -> str:
    """Return the endpoint name of a judge that the run started."""
    return f"judge {model}"
