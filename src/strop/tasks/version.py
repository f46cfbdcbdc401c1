"""A task's version hash, and its reply limits under a run's settings."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, replace
from typing import Any

from strop.errors import ConfigError
from strop.spec.task import PROMPTING, TaskSpec
from strop.tasks.contract import TaskLimits

# Paths differ between machines; the content of the data is hashed separately.
# The share of prompts that may be too long changes no prompt and no score; nor does the order of training.
_NOT_HASHED = {
    # `AgentTask` hashes these together with the task's version.
    *("agent", "agent_limit_s", "agent_tokens", "agent_paths"),
    *("source", "root", "salt_file", "max_too_long_frac", "gpu_wait_s"),
    # A user's function is hashed by its source.
    "reward",
    *("order_file", "min_solved_frac", "max_solved_frac", "max_unmatched_ids"),
    # Address and calibration of a judge; the text of its rubric is hashed.
    *("judge_url", "judge_key_env", "judge_concurrency", "judge_calls_per_s", "max_judge_calls"),
    *("rubric", "calibration", "can_judge_itself", "judge_engine"),
    # Where one of them is set, `Prompted` hashes them together with the task's version.
    *PROMPTING,
}
# A requirement of the self-test changes no score.
_NOT_HASHED_LIMITS = {"max_goldless_frac"}
_USUAL: dict[str, Any] = {"min_reward": 0.0, "sandbox": "auto", "mcp_servers": [], "sandbox_gpus": 0.0}
"""Limits and settings hashed only where they differ from these: they are newer than recorded versions."""


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
