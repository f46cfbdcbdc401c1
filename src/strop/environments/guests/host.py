"""The process of a guest: `PYTHON host.py MODULE.py`, with one JSON request a line on standard input.

The first line holds the arguments of the module's `Guest`; each further one is `{"id", "do", ...}`, answered,
in any order, with `{"id", "found"}` or `{"id", "error", "kind"}`. `do` names a coroutine method of `Guest`;
`cancel` cancels another request by its id. The process ends with its input.
Imports nothing of strop: this interpreter does not have it.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import sys
import traceback
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

_LINE_BYTES = 1 << 28


async def main(make_guest: Callable[..., Any]) -> None:
    """Serve until the input ends."""
    # The output of packages must not mix with answers.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader(limit=_LINE_BYTES)
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    running: dict[int, asyncio.Task[Any]] = {}

    def answer(number: int, done: asyncio.Task[Any]) -> None:
        running.pop(number, None)
        error: BaseException | None = asyncio.CancelledError() if done.cancelled() else done.exception()
        if error is None:
            reply = {"id": number, "found": done.result() if number else None}
        else:
            traceback.print_exception(error)
            reply = {"id": number, "error": str(error), "kind": type(error).__name__}
        answers.write(json.dumps(reply) + "\n")
        answers.flush()

    async def begin(settings: dict[str, Any]) -> Any:
        guest = make_guest(**settings)
        await guest.start()
        return guest

    beginning = asyncio.create_task(begin(json.loads(await reader.readline())))
    await asyncio.wait([beginning])
    answer(0, beginning)
    while line := await reader.readline():
        request = json.loads(line)
        number, name = request.pop("id"), request.pop("do")
        if name == "cancel":
            if request["other"] in running:
                running[request["other"]].cancel()
            continue
        task = running[number] = asyncio.create_task(getattr(beginning.result(), name)(**request))
        task.add_done_callback(partial(answer, number))
    # The parent is gone: an orderly end has no reader.
    os._exit(0)


@asynccontextmanager
async def serve_replies(replies: list[str]) -> AsyncIterator[str]:
    """Serve a model that answers with `replies`, repeating the last one; yield its base URL."""
    # Here: only packages that call a model bring it.
    from aiohttp import web

    left = iter(replies)
    last = [""]

    async def answer(request: web.Request) -> web.StreamResponse:
        body = await request.json()
        last[0] = next(left, last[0])
        head = {"id": "given", "created": 0, "model": body["model"]}
        usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
        message = {"role": "assistant", "content": last[0]}
        if not body.get("stream"):
            choice = {"index": 0, "message": message, "finish_reason": "stop"}
            whole = {**head, "object": "chat.completion", "choices": [choice], "usage": usage}
            return web.json_response(whole)
        choices = [{"index": 0, "delta": message, "finish_reason": None}]
        choices.append({"index": 0, "delta": {}, "finish_reason": "stop"})
        chunks = [{**head, "object": "chat.completion.chunk", "choices": [choice]} for choice in choices]
        chunks.append({**head, "object": "chat.completion.chunk", "choices": [], "usage": usage})
        lines = [json.dumps(chunk) for chunk in chunks] + ["[DONE]"]
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


def _load(path: str) -> Any:
    """Load a file as a module."""
    name = f"strop_guest_{os.path.basename(path).removesuffix('.py')}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


if __name__ == "__main__":
    # Packages must not import this folder's files.
    sys.path.pop(0)
    asyncio.run(main(lambda **settings: _load(sys.argv[1]).Guest(**settings)))
