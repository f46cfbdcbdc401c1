"""Environments of verifiers before v1 (`load_environment`), served by `host.py`. Tried with 0.3.1."""

from __future__ import annotations

import itertools
import json
import os
import sys
from pathlib import Path
from typing import Any

from verifiers.legacy.types import ClientConfig
from verifiers.legacy.utils.env_utils import load_environment

saying = sys.modules["__main__"].load(str(Path(__file__).with_name("saying.py"))).saying
_KEPT_ERROR_CHARS = 500


class Guest:
    """One environment, and its rollouts."""

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
        """Nothing is shared."""

    async def tasks(self, number: int) -> list[dict[str, Any]]:
        """Return the first rows to train on, as many as there are."""
        rows = self._env.get_dataset()
        found: list[dict[str, Any]] = json.loads(
            json.dumps(rows.select(range(min(number, len(rows)))).to_list())
        )
        return found

    async def run(
        self, data: dict[str, Any], base_url: str, key: str, renderer: str | None
    ) -> dict[str, Any]:
        """Play a rollout; return what it earned, and what went wrong."""
        variable = f"STROP_KEY_{next(self._numbers)}"
        os.environ[variable] = key
        client = ClientConfig(
            api_key_var=variable, api_base_url=base_url, timeout=self._limit_s, max_retries=0
        )
        if renderer is not None:
            client = client.model_copy(update={"client_type": "renderer", "renderer_model_name": renderer})
        try:
            output = await self._env.run_rollout(data, client, "policy", {})
        finally:
            del os.environ[variable]
        error = output.get("error")
        errors = [] if error is None else [_tell(error)]
        metrics = {name: one for name, one in (output.get("metrics") or {}).items() if one is not None}
        trace = {
            "rewards": {} if error is not None else {"reward": output.get("reward")},
            "metrics": metrics,
            "errors": errors,
            "is_truncated": bool(output.get("is_truncated")),
        }
        return {"traces": [trace], "errors": []}

    async def play(self, data: dict[str, Any], replies: list[str]) -> dict[str, Any]:
        """Play a rollout with given replies, the last of which is said again."""
        async with saying(replies) as base_url:
            return await self.run(data, base_url, "none", None)


def _tell(error: Any) -> dict[str, Any]:
    told = error if isinstance(error, dict) else {"error": str(error)}
    text = json.dumps(told, default=str)
    # The face's answers to calls beyond the budget.
    status = next((code for code in (400, 410) if f"Error code: {code}" in text), None)
    return {"type": str(told.get("error", "error")), "message": text[-_KEPT_ERROR_CHARS:], "status": status}
