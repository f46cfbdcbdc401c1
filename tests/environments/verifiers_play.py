"""Plays strop's taskset by verifiers: `PYTHON verifiers_play.py`, jobs as JSON on standard input.

Runs in the environment of verifiers. One line of JSON says what came of each job.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import verifiers.v1 as vf
from aiohttp import web
from verifiers.v1.utils import loaders


@asynccontextmanager
async def saying(replies: list[Any], asked: list[Any]) -> AsyncIterator[str]:
    """Serve a model that says given replies, texts or messages; yield its base URL."""
    left = iter(replies)

    async def answer(request: web.Request) -> web.Response:
        asked.append(await request.json())
        said = next(left)
        message = {"role": "assistant", **(said if isinstance(said, dict) else {"content": said})}
        reason = "tool_calls" if "tool_calls" in message else "stop"
        choice = {"index": 0, "finish_reason": message.pop("finish_reason", reason), "message": message}
        usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
        head = {"id": "given", "created": 0, "model": "m", "object": "chat.completion"}
        return web.json_response({**head, "choices": [choice], "usage": usage})

    app = web.Application()
    app.router.add_post("/v1/chat/completions", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    yield f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
    await runner.cleanup()


async def play(job: dict[str, Any]) -> dict[str, Any]:
    """Play one episode of a taskset, by verifiers' own client of evaluation."""
    taskset = {"id": "strop-taskset", "environment": job["environment"], "split": job.get("split", "train")}
    settings = {"taskset": taskset, "agent": job.get("agent", {})}
    env = loaders.load_environment(loaders.resolve_env_config(settings))
    try:
        task = next(one for one in env.taskset if one.data.example == job["example"])
    except Exception as error:
        return {"refused": type(error).__name__, "why": str(error)}
    asked: list[Any] = []
    async with env.serving(), saying(job["replies"], asked) as base_url:
        client = vf.EvalClientConfig(base_url=base_url, api_key_var="ABSENT")
        context = vf.ModelContext(client=client, model="m", sampling=vf.SamplingConfig())
        (slot,) = env.slots(task)
        episode = await env.run_slot(slot, context)
    (trace,) = episode.traces
    return {
        "ok": episode.ok,
        "errors": [[one.type, one.message] for one in (*episode.errors, *trace.errors)],
        "rewards": {name: None if one is None else one.value for name, one in trace.rewards.items()},
        "metrics": trace.metrics,
        "asked": asked,
    }


async def main() -> None:
    """Play all jobs."""
    for job in json.load(sys.stdin):
        sys.stdout.write(json.dumps(await play(job)) + "\n")


if __name__ == "__main__":
    asyncio.run(main())
