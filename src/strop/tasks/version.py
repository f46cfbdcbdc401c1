"""What a task's version hash covers, and how a run changes its reply limits."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, replace
from typing import Any

from strop.errors import ConfigError
from strop.spec.task import PROMPTING, TaskSpec
from strop.tasks.contract import TaskLimits

# Paths differ between machines; the content of the data is hashed apart.
# How many prompts may be too long changes no prompt and no score; nor does the order of training examples.
_NOT_HASHED = {
    # `AgentTask` makes a version of the task's own and them.
    *("agent", "agent_limit_s", "agent_tokens", "agent_paths"),
    *("source", "root", "salt_file", "max_too_long_frac", "gpu_wait_s"),
    # A user's function is hashed by its source.
    "reward",
    *("order_file", "min_solved_frac", "max_solved_frac", "max_unmatched_ids"),
    # How a judge is reached and calibrated; its rubric is hashed as a text.
    *("judge_url", "judge_key_env", "judge_concurrency", "judge_calls_per_s", "max_judge_calls"),
    *("rubric", "calibration", "can_judge_itself", "judge_engine"),
    # Where one of them is set, `Prompted` makes a version of the task's own and them.
    *PROMPTING,
}
# What the self-test requires changes no score.
_NOT_HASHED_LIMITS = {"max_goldless_frac"}
_USUAL: dict[str, Any] = {"min_reward": 0.0, "sandbox": "auto", "mcp_servers": [], "sandbox_gpus": 0.0}
"""Limits and settings hashed only where they differ from these: recorded versions are older than they."""


def hash_version(
    name: str, prompt: str, verifier: str, limits: TaskLimits, spec: TaskSpec, data_digest: str = ""
) -> str:
    """Hash everything that can change a prompt, a limit, an example or a score."""
    settings = spec.model_dump(mode="json", exclude=_NOT_HASHED)
    bounds = {key: value for key, value in hashed_limits(limits).items() if key not in _NOT_HASHED_LIMITS}
    parts = [name, prompt, verifier, bounds, _without_usual(settings), data_digest]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]


def hashed_limits(limits: TaskLimits) -> dict[str, Any]:
    """Return the limits that a version may cover, by name."""
    return _without_usual(asdict(limits))


def _without_usual(values: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in values.items() if key not in _USUAL or value != _USUAL[key]}


THINKING_TOKENS = 8192
"""What a reply may use beyond the task's own limit where thinking is on."""


def fit_limits(limits: TaskLimits, spec: TaskSpec) -> TaskLimits:
    """Return a task's limits as its section of the run file asks for them.

    A reply that thinks has room for it, and no text ends it: thoughts may hold any.

    Raises: ConfigError like `limit_reply`.
    """
    if spec.thinking == "on":
        num_tokens = limits.max_reply_tokens + THINKING_TOKENS
        limits = replace(limits, max_reply_tokens=num_tokens, stop_strings=(), base_stop_strings=())
    return limit_reply(limits, spec.max_reply_tokens)


def limit_reply(limits: TaskLimits, max_reply_tokens: int | None) -> TaskLimits:
    """Apply `task.max_reply_tokens`, and remember the task's own limit beside it.

    Raises: ConfigError if it is larger than the task's own limit.
    """
    if max_reply_tokens is None:
        return limits
    if max_reply_tokens > limits.max_reply_tokens:
        raise ConfigError(
            f"task.max_reply_tokens={max_reply_tokens}",
            allowed=f"1 to {limits.max_reply_tokens}, the task's own limit, or none for that limit",
            next_step=f"set task.max_reply_tokens to {limits.max_reply_tokens} or leave it out",
        )
    return replace(limits, max_reply_tokens=max_reply_tokens, full_reply_tokens=limits.max_reply_tokens)
