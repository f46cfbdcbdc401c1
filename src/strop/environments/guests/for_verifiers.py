"""Environments of verifiers v1, served by `host.py`. Tried with verifiers 0.4.0.

Every agent of an environment calls the model of strop's rollout. Its program is a message loop in this
process, unless the settings name a harness of the package. Programs run on this machine (verifiers' runtime
`subprocess`), unless the settings name another runtime.
"""

from __future__ import annotations

import itertools
import sys
from contextlib import AsyncExitStack
from typing import Any

import verifiers.v1 as vf
from openai import AsyncOpenAI
from verifiers.v1.dialects.chat import message_to_wire
from verifiers.v1.utils import loaders

_KEPT_ERROR_CHARS = 500
__all__ = ["ChatHarness"]
"""What verifiers finds here, where this module is a harness's id."""


class ChatHarness(vf.Harness[vf.HarnessConfig]):  # type: ignore[misc]
    """Sends the task's prompt, or the conversation so far, and keeps the reply."""

    APPENDS_SYSTEM_PROMPT = True
    SUPPORTS_RESUME = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self, ctx: Any, trace: Any, runtime: Any, endpoint: str, secret: str, mcp_urls: Any, data: Any
    ) -> Any:
        """Call the model once, through verifiers' own recorder."""
        system, prompt = self.resolve_prompt(data)
        messages: list[Any] = [{"role": "system", "content": system}] if system else []
        if isinstance(prompt, str):
            messages.append({"role": "user", "content": prompt})
        else:
            messages += [message_to_wire(message) for message in prompt or ()]
        async with AsyncOpenAI(base_url=endpoint, api_key=secret, max_retries=0) as client:
            await client.chat.completions.create(model=ctx.model, messages=messages)
        return vf.ProgramResult(exit_code=0, stdout="", stderr="")


class Guest:
    """One environment, its tasks and its episodes."""

    def __init__(self, env: Any) -> None:
        self._env = env

    def tasks(self, number: int) -> list[dict[str, Any]]:
        """Return the data of the first `number` tasks, or of all if there are fewer."""
        return [task.data.model_dump(mode="json") for task in itertools.islice(self._env.taskset, number)]

    async def run(self, data: dict[str, Any], base_url: str, key_variable: str) -> dict[str, Any]:
        """Play an episode; return its rewards and errors."""
        client = vf.EvalClientConfig(base_url=base_url, api_key_var=key_variable)
        context = vf.ModelContext(client=client, model="policy", sampling=vf.SamplingConfig())
        task_type = type(self._env.taskset).task_type()
        task = task_type(task_type.data_type().model_validate(data), self._env.config.taskset.task)
        (slot,) = self._env.slots(task)
        episode = await self._env.run_slot(slot, context)
        return {
            "traces": [_describe(trace) for trace in episode.traces],
            "errors": [_describe_error(error) for error in episode.errors],
        }


async def start(taskset: str, folder: str | None, config: dict[str, Any], limit_s: float) -> Guest:
    """Load an environment, and start the services that all its episodes share."""
    if folder is not None:
        sys.path.insert(0, folder)
    raw = {**config, "taskset": {**config.get("taskset", {}), "id": taskset}}
    kind = loaders.env_config_type(taskset, raw.get("id", ""))
    for name, field in kind.model_fields.items():
        if isinstance(field.default, vf.AgentConfig):
            own = raw.get(name, {})
            timeout = {"rollout": limit_s, **own.get("timeout", {})}
            local = {"runtime": {"type": "subprocess"}, "harness": {"id": __name__}}
            raw[name] = {**local, **own, "timeout": timeout}
    env = loaders.load_environment(loaders.resolve_env_config(raw))
    # Never left: the process ends with it.
    await AsyncExitStack().enter_async_context(env.serving())
    return Guest(env)


def _describe(trace: Any) -> dict[str, Any]:
    return {
        "rewards": {name: None if reward is None else reward.value for name, reward in trace.rewards.items()},
        "metrics": {name: value for name, value in trace.metrics.items() if value is not None},
        "errors": [_describe_error(error) for error in trace.errors],
        "is_truncated": bool(trace.is_truncated),
    }


def _describe_error(error: Any) -> dict[str, Any]:
    return {"type": error.type, "message": error.message[:_KEPT_ERROR_CHARS], "status": error.status_code}
