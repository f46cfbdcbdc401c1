"""A task's version hash, and its reply limits under a run's settings."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, replace
from typing import Any

from strop.errors import ConfigError
from strop.spec.base import NOT_HASHED
from strop.spec.task import TaskSpec
from strop.tasks.task import TaskLimits

# A requirement of the self-test changes no score.
_NOT_HASHED_LIMITS = {"max_goldless_frac"}


def hash_version(
    name: str, prompt: str, verifier: str, limits: TaskLimits, spec: TaskSpec, data_digest: str = ""
) -> str:
    """Hash everything that can change a prompt, a limit, an example or a score.

    Of the settings all but those of the type `Unhashed`, and all that a user's class has of its own.
    """
    left_out = {key for key, field in type(spec).model_fields.items() if NOT_HASHED in field.metadata}
    settings = spec.model_dump(mode="json", exclude=left_out)
    parts = [name, prompt, verifier, hashed_limits(limits), settings, data_digest]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]


def hashed_limits(limits: TaskLimits) -> dict[str, Any]:
    """Return the limits that a version covers, by name."""
    return {key: value for key, value in asdict(limits).items() if key not in _NOT_HASHED_LIMITS}


THINKING_TOKENS = 8192
"""Tokens that a reply may use beyond the task's own limit where thinking is on."""


def fit_limits(limits: TaskLimits, spec: TaskSpec) -> TaskLimits:
    """Apply `task.thinking` and `task.max_reply_tokens` to a task's limits; keep the task's own limit.

    Thinking gets more tokens and no stop strings: thoughts may contain any text.

    Raises: ConfigError if `task.max_reply_tokens` is larger than the task's own limit.
    """
    if spec.thinking == "on":
        num_tokens = limits.max_reply_tokens + THINKING_TOKENS
        limits = replace(limits, max_reply_tokens=num_tokens, stop_strings=(), base_stop_strings=())
    max_reply_tokens = spec.max_reply_tokens
    if max_reply_tokens is None:
        return limits
    if max_reply_tokens > limits.max_reply_tokens:
        raise ConfigError(
            f"task.max_reply_tokens={max_reply_tokens}",
            allowed=f"1 to {limits.max_reply_tokens}, the task's own limit, or none for that limit",
            next_step=f"set task.max_reply_tokens to {limits.max_reply_tokens} or leave it out",
        )
    return replace(limits, max_reply_tokens=max_reply_tokens, full_reply_tokens=limits.max_reply_tokens)
