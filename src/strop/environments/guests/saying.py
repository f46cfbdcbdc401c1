"""A model that says given replies, for guests that must ask one."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from aiohttp import web


@asynccontextmanager
async def saying(replies: list[str]) -> AsyncIterator[str]:
    """Serve a model that says given replies; yield its base URL."""
    left = iter(replies)
    last = [""]

    async def answer(request: web.Request) -> web.StreamResponse:
        asked = await request.json()
        last[0] = next(left, last[0])
        head = {"id": "given", "created": 0, "model": asked["model"]}
        usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
        said = {"role": "assistant", "content": last[0]}
        if not asked.get("stream"):
            choice = {"index": 0, "message": said, "finish_reason": "stop"}
            whole = {**head, "object": "chat.completion", "choices": [choice], "usage": usage}
            return web.json_response(whole)
        choices = [{"index": 0, "delta": said, "finish_reason": None}]
        choices.append({"index": 0, "delta": {}, "finish_reason": "stop"})
        chunks = [{**head, "object": "chat.completion.chunk", "choices": [one]} for one in choices]
        chunks.append({**head, "object": "chat.completion.chunk", "choices": [], "usage": usage})
        lines = [json.dumps(one) for one in chunks] + ["[DONE]"]
        text = "".join(f"data: {line}\n\n" for line in lines)
        return web.Response(text=text, content_type="text/event-stream")

    app = web.Application(client_max_size=1 << 28)
    app.router.add_post("/v1/chat/completions", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
    finally:
        await asyncio.shield(runner.cleanup())
