"""The clients' protocol: reads their requests, and makes the record that the answers consist of.

Source: the protocol of openhands-workspace 1.58.0. Unknown fields are ignored.
"""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Mapping
from typing import Any
from urllib.parse import unquote

from pydantic import ValidationError

from strop.runtime.contract import FailureKind, StartRequest, State
from strop.runtime.http_server import HttpError
from strop.runtime.session import Session

MAX_ID_CHARS = 256
MAX_FACTOR = 1024.0
POD_LOG_CHARS = 16_000
_UNSAFE = "/?#\\\0"
"""Clients put an id into a path unescaped, so a sandbox with such an id could not be asked for."""
_RESERVED = frozenset({".", ".."})
_DEFAULTED = frozenset({"working_dir", "environment", "resource_factor", "lifetime_s", "image_pull_policy"})

WORDS: Mapping[tuple[State, FailureKind | None], tuple[str, str]] = {
    (State.QUEUED, None): ("starting", "pending"),
    (State.IMAGE, None): ("starting", "pending"),
    (State.STARTING, None): ("starting", "running"),
    (State.READY, None): ("running", "ready"),
    (State.PAUSED, None): ("paused", "not found"),
    (State.RESUMING, None): ("starting", "running"),
    (State.FAILED, FailureKind.TASK_OOM): ("error", "crashloopbackoff"),
    (State.FAILED, FailureKind.IMAGE_ERROR): ("error", "failed"),
    (State.FAILED, FailureKind.AGENT_ERROR): ("error", "failed"),
    (State.FAILED, FailureKind.CAPACITY): ("error", "failed"),
    (State.FAILED, FailureKind.INFRA_LOST): ("error", "unknown"),
}
"""`status` and `pod_status` of each state."""
_STOPPED = ("stopped", "not found")


def words_of(state: State, failure_kind: FailureKind | None) -> tuple[str, str]:
    """Return `status` and `pod_status`."""
    if state is State.STOPPED:
        return _STOPPED
    return WORDS[state, failure_kind if state is State.FAILED else None]


def read_object(body: bytes) -> dict[str, Any]:
    """Return the JSON object of a body. Raises: HttpError."""
    try:
        content = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise HttpError(400, f"the body is not JSON ({error})") from error
    if not isinstance(content, dict):
        raise HttpError(422, "the body is not a JSON object")
    try:
        # JSON can write half of a character ("\\ud800"), which no later message, path or file can.
        json.dumps(content, ensure_ascii=False).encode()
    except (UnicodeEncodeError, RecursionError) as error:
        raise HttpError(422, f"the body has text that is no Unicode ({error})") from error
    return content


def read_start(body: bytes) -> StartRequest:
    """Return the start request of a body. Raises: HttpError with 400 or 422."""
    content = read_object(body)
    check_session_id(content.get("session_id"))
    fields = {name: value for name, value in content.items() if not (value is None and name in _DEFAULTED)}
    fields["command"] = _read_command(fields.get("command"))
    if "environment" in fields:
        fields["environment"] = _read_environment(fields["environment"])
    try:
        request = StartRequest(**fields)
    except TypeError as error:
        raise HttpError(422, str(error)) from error
    except ValidationError as error:
        faults = (
            f"{'.'.join(map(str, fault['loc']))}: {fault['msg']}"
            for fault in error.errors(include_input=False)
        )
        raise HttpError(422, "; ".join(faults)) from error
    if not (math.isfinite(request.resource_factor) and 0 < request.resource_factor <= MAX_FACTOR):
        raise HttpError(
            422, f"resource_factor {request.resource_factor} is not above 0, at most {MAX_FACTOR:g}"
        )
    if not request.image.strip() or "\0" in request.image or request.image.startswith("-"):
        raise HttpError(422, "image is empty, or begins with -")
    if not request.working_dir.startswith("/") or "\0" in request.working_dir:
        raise HttpError(422, "working_dir is not an absolute path")
    return request


def check_session_id(value: object) -> None:
    """Refuse an id that a client could not ask for again. Raises: HttpError 400; 422 if it is no text."""
    if not isinstance(value, str):
        raise HttpError(422, "session_id is not a text")
    is_plain = not any(letter in value for letter in _UNSAFE) and unquote(value) == value
    if not value or not is_plain or value in _RESERVED or len(value) > MAX_ID_CHARS:
        raise HttpError(
            400,
            f"session_id has to have 1 to {MAX_ID_CHARS} characters, none of / ? # \\ or NUL, no % before two"
            f" hexadecimal digits, and not to be {', '.join(sorted(_RESERVED))}",
        )


def read_runtime_id(body: bytes) -> str:
    """Return the runtime id of a body. Raises: HttpError."""
    value = read_object(body).get("runtime_id")
    if not isinstance(value, str) or not value:
        raise HttpError(422, "runtime_id is not a text")
    return value


def make_record(
    session: Session, *, place: tuple[int, int] | None, expires_in_s: float | None
) -> dict[str, Any]:
    """Return a sandbox's record for clients.

    `place`: its place in the queue and the queue's length. `expires_in_s`: time until lease or age ends it.
    """
    status, pod_status = words_of(session.state, session.failure_kind)
    events = list(session.events)
    if place is not None:
        events.insert(0, f"waits for a slot: {place[0]} of {place[1]}")
    pod_logs = session.log_tail[-POD_LOG_CHARS:]
    if not session.is_alive:
        kind = f"[{session.failure_kind.value}] " if session.failure_kind else ""
        pod_logs = "\n".join(filter(None, (f"{kind}{session.cause}", pod_logs)))
    waiting = {"name": "sandbox", "state": session.state.value, "message": events[0] if events else ""}
    return {
        "runtime_id": session.runtime_id,
        "session_id": session.session_id,
        "url": session.url,
        "node_url": session.node_url,
        "session_api_key": session.key,
        "status": status,
        "pod_status": pod_status,
        "restart_count": 0,
        "restart_reasons": [],
        "container_statuses": [waiting] if session.is_beginning else [],
        "events": events,
        "pod_logs": pod_logs,
        "failure_kind": session.failure_kind.value if session.failure_kind else None,
        "cause": session.cause,
        "refusal": session.refusal,
        "isolation": session.isolation,
        "node": session.node_id,
        "lease_expires_in_s": expires_in_s,
        "timeline": session.timeline,
        "usage": session.usage,
        "last_termination_reason": session.cause,
        "last_termination_exit_code": session.exit_code,
    }


def _read_command(value: object) -> list[str]:
    if not isinstance(value, str):
        raise HttpError(422, "command is not a text")
    try:
        words = shlex.split(value)
    except ValueError as error:
        raise HttpError(422, f"command cannot be split as a shell would ({error})") from error
    if not words or not words[0] or "\0" in value:
        raise HttpError(422, "command names no program")
    return words


def _read_environment(value: object) -> dict[str, str]:
    if not isinstance(value, dict):
        raise HttpError(422, "environment is not an object")
    environment = {}
    for name, content in value.items():
        if isinstance(content, bool):
            content = "true" if content else "false"
        if not isinstance(content, str | int | float) or "\0" in str(content):
            raise HttpError(422, f"environment variable {name!r} is not a text")
        if not name or "=" in name or "\0" in name:
            raise HttpError(422, f"{name!r} cannot be the name of an environment variable")
        environment[name] = str(content)
    return environment
