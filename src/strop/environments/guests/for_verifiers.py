"""Environments of verifiers: `PYTHON for_verifiers.py SOCKET`, which `guest` starts and asks.

Tried with verifiers 0.4.0, and with 0.3.1 for older ones. The first line on standard input holds the
arguments of `start`; the process ends with its input. Imports nothing of strop: this Python does not have it.

Every agent of an environment calls the model of strop's rollout. Its program is a message loop in this
process, unless the settings name a harness of the package. Programs run on this machine (verifiers' runtime
`subprocess`), unless the settings name another runtime.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import sys
import traceback
from collections.abc import AsyncIterator, Awaitable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import verifiers.v1 as vf
from aiohttp import web
from openai import AsyncOpenAI
from verifiers.v1.dialects.chat import message_to_wire
from verifiers.v1.utils import loaders

_KEPT_ERROR_CHARS = 500
_numbers = itertools.count()
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
    """One environment of v1, its tasks and its episodes."""

    def __init__(self, env: Any) -> None:
        self._env = env

    async def tasks(self, number: int) -> list[dict[str, Any]]:
        """Return the data of the first `number` tasks, or of all if there are fewer."""
        return [task.data.model_dump(mode="json") for task in itertools.islice(self._env.taskset, number)]

    async def run(self, data: dict[str, Any], base_url: str, key: str) -> dict[str, Any]:
        """Play an episode; return its rewards and errors."""
        # Packages take the name of a variable.
        variable = f"STROP_KEY_{next(_numbers)}"
        os.environ[variable] = key
        try:
            return await self._run(data, base_url, variable)
        finally:
            del os.environ[variable]

    async def replay(self, data: dict[str, Any], replies: list[str]) -> dict[str, Any]:
        """Play an episode with fixed replies, repeating the last one."""
        left, last = iter(replies), ""

        async def answer(request: web.Request) -> web.Response:
            nonlocal last
            last = next(left, last)
            message = {"role": "assistant", "content": last}
            choice = {"index": 0, "message": message, "finish_reason": "stop"}
            usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
            head = {"id": "given", "object": "chat.completion", "created": 0, "model": "policy"}
            return web.json_response({**head, "choices": [choice], "usage": usage})

        async with _serve("/v1/chat/completions", answer) as runner:
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            return await self.run(data, f"http://127.0.0.1:{runner.addresses[0][1]}/v1", "none")

    async def _run(self, data: dict[str, Any], base_url: str, variable: str) -> dict[str, Any]:
        client = vf.EvalClientConfig(base_url=base_url, api_key_var=variable)
        context = vf.ModelContext(client=client, model="policy", sampling=vf.SamplingConfig())
        task_type = type(self._env.taskset).task_type()
        task = task_type(task_type.data_type().model_validate(data), self._env.config.taskset.task)
        (slot,) = self._env.slots(task)
        episode = await self._env.run_slot(slot, context)
        traces = [
            {
                "rewards": {name: None if one is None else one.value for name, one in trace.rewards.items()},
                "metrics": trace.metrics,
                "errors": [_describe(error) for error in trace.errors],
                "is_truncated": bool(trace.is_truncated),
            }
            for trace in episode.traces
        ]
        return {"traces": traces, "errors": [_describe(error) for error in episode.errors]}


class OlderGuest(Guest):
    """One environment of the form before v1."""

    def __init__(self, env: Any, limit_s: float) -> None:
        super().__init__(env)
        self._limit_s = limit_s

    async def tasks(self, number: int) -> list[dict[str, Any]]:
        """Return the first `number` training rows, or all if there are fewer."""
        dataset = self._env.get_dataset()
        rows = dataset.select(range(min(number, len(dataset)))).to_list()
        plain: list[dict[str, Any]] = json.loads(json.dumps(rows))
        return plain

    async def _run(self, data: dict[str, Any], base_url: str, variable: str) -> dict[str, Any]:
        from verifiers.legacy.types import ClientConfig

        client = ClientConfig(
            api_key_var=variable, api_base_url=base_url, timeout=self._limit_s, max_retries=0
        )
        output = await self._env.run_rollout(data, client, "policy", {})
        error = output.get("error")
        trace: dict[str, Any] = {
            "rewards": {} if error is not None else {"reward": output.get("reward")},
            "metrics": output.get("metrics") or {},
            "errors": [],
            "is_truncated": bool(output.get("is_truncated")),
        }
        return {"traces": [trace], "errors": [] if error is None else [_describe_older(error)]}


async def start(taskset: str, form: str, folder: str | None, config: dict[str, Any], limit_s: float) -> Guest:
    """Load an environment, and start the services that all its episodes share."""
    if folder is not None:
        sys.path.insert(0, folder)
    if form == "v0":
        from verifiers.legacy.utils.env_utils import load_environment

        return OlderGuest(load_environment(taskset, **config), limit_s)
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


def _describe(error: Any) -> dict[str, Any]:
    return {"type": error.type, "message": error.message[:_KEPT_ERROR_CHARS], "status": error.status_code}


def _describe_older(error: Any) -> dict[str, Any]:
    fields = error if isinstance(error, dict) else {"error": str(error)}
    text = json.dumps(fields, default=str)
    # strop's server answers calls beyond the budget with these codes.
    status = next((code for code in (400, 410) if f"Error code: {code}" in text), None)
    return {"type": str(fields.get("error", "error")), "message": text[-_KEPT_ERROR_CHARS:], "status": status}


@asynccontextmanager
async def _serve(path: str, answer: Any) -> AsyncIterator[web.AppRunner]:
    """Answer requests to a path, on sites that the caller opens; who leaves cancels the answer."""
    app = web.Application(client_max_size=1 << 28)
    app.router.add_post(path, answer)
    runner = web.AppRunner(app, handler_cancellation=True)
    await runner.setup()
    try:
        yield runner
    finally:
        await runner.cleanup()


async def _told(work: Awaitable[Any]) -> bytes:
    """Return what comes of a call, as JSON: what was found, or the error."""
    try:
        reply = {"found": await work}
    except (Exception, SystemExit) as error:  # boundary: a guest's package
        traceback.print_exc()
        reply = {"error": f"{type(error).__name__}: {error}"}
    return json.dumps(reply).encode()


async def main() -> None:
    """Load an environment, and serve its methods until the input ends."""
    # Packages must not import this folder's files, and their output must not mix with the answer.
    sys.path.pop(0)
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    made: list[Guest] = []

    async def begin() -> None:
        made.append(await start(**json.loads(sys.stdin.readline())))

    async def answer(request: web.Request) -> web.Response:
        work = getattr(made[0], request.match_info["do"])(*await request.json())
        return web.Response(body=await _told(work), content_type="application/json")

    async with _serve("/{do}", answer) as runner:
        await web.UnixSite(runner, sys.argv[1]).start()
        answers.write(await _told(begin()) + b"\n")
        answers.flush()
        await asyncio.to_thread(sys.stdin.read)
        # The parent is gone: an orderly end has no reader.
        os._exit(0)


if __name__ == "__main__":
    asyncio.run(main())
