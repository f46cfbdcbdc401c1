"""Environments of verifiers before v1 (`load_environment`), served by `host.py`. Tried with 0.3.1."""

from __future__ import annotations

import itertools
import json
import os
import sys
from typing import Any

from verifiers.legacy.types import ClientConfig
from verifiers.legacy.utils.env_utils import load_environment

_KEPT_ERROR_CHARS = 500


class Guest:
    """One environment and its rollouts."""

    def __init__(
        self, taskset: str, folder: str | None, harness: str, config: dict[str, Any], limit_s: float
    ) -> None:
        if folder is not None:
            sys.path.insert(0, folder)
        if harness != "chat":
            raise ValueError(f"agent_program={harness}: an environment before v1 converses by itself")
        self._env = load_environment(taskset, **config)
        self._limit_s = limit_s
        self._numbers = itertools.count()

    async def start(self) -> None:
        """Do nothing: rollouts share nothing."""

    async def tasks(self, number: int) -> list[dict[str, Any]]:
        """Return the first `number` training rows, or all if there are fewer."""
        dataset = self._env.get_dataset()
        rows = dataset.select(range(min(number, len(dataset)))).to_list()
        plain: list[dict[str, Any]] = json.loads(json.dumps(rows))
        return plain

    async def run(self, data: dict[str, Any], base_url: str, key: str) -> dict[str, Any]:
        """Play a rollout; return its rewards and errors."""
        variable = f"STROP_KEY_{next(self._numbers)}"
        os.environ[variable] = key
        client = ClientConfig(
            api_key_var=variable, api_base_url=base_url, timeout=self._limit_s, max_retries=0
        )
        try:
            output = await self._env.run_rollout(data, client, "policy", {})
        finally:
            del os.environ[variable]
        error = output.get("error")
        errors = [] if error is None else [_describe_error(error)]
        metrics = {name: value for name, value in (output.get("metrics") or {}).items() if value is not None}
        trace = {
            "rewards": {} if error is not None else {"reward": output.get("reward")},
            "metrics": metrics,
            "errors": errors,
            "is_truncated": bool(output.get("is_truncated")),
        }
        return {"traces": [trace], "errors": []}

    async def play(self, data: dict[str, Any], replies: list[str]) -> dict[str, Any]:
        """Play a rollout with fixed replies, repeating the last one."""
        async with sys.modules["__main__"].serve_replies(replies) as base_url:
            return await self.run(data, base_url, "none")


def _describe_error(error: Any) -> dict[str, Any]:
    fields = error if isinstance(error, dict) else {"error": str(error)}
    text = json.dumps(fields, default=str)
    # strop's server answers calls beyond the budget with these codes.
    status = next((code for code in (400, 410) if f"Error code: {code}" in text), None)
    return {"type": str(fields.get("error", "error")), "message": text[-_KEPT_ERROR_CHARS:], "status": status}
