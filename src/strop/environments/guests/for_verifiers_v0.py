"""Environments of verifiers before v1 (`load_environment`), served by `host.py`. Tried with 0.3.1."""

from __future__ import annotations

import json
import sys
from typing import Any

from verifiers.legacy.types import ClientConfig
from verifiers.legacy.utils.env_utils import load_environment

_KEPT_ERROR_CHARS = 500


class Guest:
    """One environment and its rollouts."""

    def __init__(self, env: Any, limit_s: float) -> None:
        self._env = env
        self._limit_s = limit_s

    def tasks(self, number: int) -> list[dict[str, Any]]:
        """Return the first `number` training rows, or all if there are fewer."""
        dataset = self._env.get_dataset()
        rows = dataset.select(range(min(number, len(dataset)))).to_list()
        plain: list[dict[str, Any]] = json.loads(json.dumps(rows))
        return plain

    async def run(self, data: dict[str, Any], base_url: str, key_variable: str) -> dict[str, Any]:
        """Play a rollout; return its rewards and errors."""
        client = ClientConfig(
            api_key_var=key_variable, api_base_url=base_url, timeout=self._limit_s, max_retries=0
        )
        output = await self._env.run_rollout(data, client, "policy", {})
        error = output.get("error")
        metrics = {name: value for name, value in (output.get("metrics") or {}).items() if value is not None}
        trace = {
            "rewards": {} if error is not None else {"reward": output.get("reward")},
            "metrics": metrics,
            "errors": [] if error is None else [_describe_error(error)],
            "is_truncated": bool(output.get("is_truncated")),
        }
        return {"traces": [trace], "errors": []}


async def start(taskset: str, folder: str | None, config: dict[str, Any], limit_s: float) -> Guest:
    """Load an environment."""
    if folder is not None:
        sys.path.insert(0, folder)
    return Guest(load_environment(taskset, **config), limit_s)


def _describe_error(error: Any) -> dict[str, Any]:
    fields = error if isinstance(error, dict) else {"error": str(error)}
    text = json.dumps(fields, default=str)
    # strop's server answers calls beyond the budget with these codes.
    status = next((code for code in (400, 410) if f"Error code: {code}" in text), None)
    return {"type": str(fields.get("error", "error")), "message": text[-_KEPT_ERROR_CHARS:], "status": status}
