"""A task's version hash, and its reply limits under a run's settings."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, replace

from strop.spec.base import NOT_HASHED
from strop.spec.task import TaskSpec
from strop.tasks.task import TaskLimits

THINKING_TOKENS = 8192
"""Tokens that a reply may use beyond the task's own limit where thinking is on."""


def hash_version(
    name: str, prompt: str, verifier: str, limits: TaskLimits, spec: TaskSpec, data_digest: str = ""
) -> str:
    """Hash everything that can change a prompt, a limit, an example or a score.

    Of the settings all but those of the type `Unhashed`, and all that a user's class has of its own.
    """
    left_out = {key for key, field in type(spec).model_fields.items() if NOT_HASHED in field.metadata}
    settings = spec.model_dump(mode="json", exclude=left_out)
    parts = [name, prompt, verifier, asdict(limits), settings, data_digest]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]


def fit_limits(limits: TaskLimits, spec: TaskSpec) -> TaskLimits:
    """Apply `task.thinking`, `task.stop` and `task.max_reply_tokens` to a task's limits; keep its own limit.

    Thinking gets more tokens and no stop strings: thoughts may contain any text.
    """
    stop, own_tokens, asked = spec.stop, limits.max_reply_tokens, spec.max_reply_tokens
    if spec.thinking == "on":
        stop, own_tokens = (), own_tokens + THINKING_TOKENS
    if stop is not None:
        limits = replace(limits, stop_strings=stop, base_stop_strings=())
    if asked is None:
        return replace(limits, max_reply_tokens=own_tokens)
    return replace(limits, max_reply_tokens=asked, full_reply_tokens=own_tokens)
