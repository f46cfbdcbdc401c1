"""The process of a guest: `PYTHON host.py MODULE.py SOCKET`, which `process.py` starts and asks.

The first line on standard input holds the arguments of the module's `Guest`. The process ends with its input.
Imports nothing of strop: this interpreter does not have it.
"""

from __future__ import annotations

import asyncio
import importlib.util
import itertools
import json
import os
import sys
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

_LINE_BYTES = 1 << 28


async def serve(make: Callable[..., Awaitable[Any]]) -> None:
    """Make an object, and call its coroutine methods for whoever asks on the socket, until the input ends."""
    # The output of packages must not mix with answers.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    beginning = asyncio.ensure_future(make(**json.loads(sys.stdin.readline())))
    await asyncio.wait([beginning])

    async def respond(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        request = json.loads(await reader.readline())
        work = asyncio.create_task(getattr(beginning.result(), request.pop("do"))(**request))
        left = asyncio.create_task(reader.read(1))
        await asyncio.wait([work, left], return_when=asyncio.FIRST_COMPLETED)
        if left.done():
            work.cancel()
            await asyncio.wait([work])
        else:
            left.cancel()
            found = None if work.cancelled() or work.exception() else work.result()
            writer.write(_tell(work, found))
        writer.close()

    async with await asyncio.start_unix_server(respond, sys.argv[-1], limit=_LINE_BYTES):
        answers.write(_tell(beginning, None).decode())
        answers.flush()
        await asyncio.to_thread(sys.stdin.read)
        # The parent is gone: an orderly end has no reader.
        os._exit(0)


def _tell(work: asyncio.Future[Any], found: Any) -> bytes:
    error = asyncio.CancelledError() if work.cancelled() else work.exception()
    if error is not None:
        traceback.print_exception(error)
    reply = {"found": found} if error is None else {"error": str(error), "kind": type(error).__name__}
    return json.dumps(reply).encode() + b"\n"


class Host:
    """Plays the episodes of a module's `Guest`."""

    def __init__(self, guest: Any) -> None:
        self._guest = guest
        self._numbers = itertools.count()

    async def tasks(self, number: int) -> list[dict[str, Any]]:
        """Return the data of the first `number` tasks, or of all if there are fewer."""
        found: list[dict[str, Any]] = self._guest.tasks(number)
        return found

    async def run(self, data: dict[str, Any], base_url: str, key: str) -> dict[str, Any]:
        """Play an episode; return its rewards and errors."""
        # Packages take the name of a variable.
        variable = f"STROP_KEY_{next(self._numbers)}"
        os.environ[variable] = key
        try:
            episode: dict[str, Any] = await self._guest.run(data, base_url, variable)
        finally:
            del os.environ[variable]
        return episode

    async def play(self, data: dict[str, Any], replies: list[str]) -> dict[str, Any]:
        """Play an episode with fixed replies, repeating the last one."""
        async with _serve_replies(replies) as base_url:
            return await self.run(data, base_url, "none")


@asynccontextmanager
async def _serve_replies(replies: list[str]) -> AsyncIterator[str]:
    """Serve a model that answers with `replies`, repeating the last one; yield its base URL."""
    # Here: only packages that call a model bring it.
    from aiohttp import web

    left = iter(replies)
    last = [""]

    async def answer(request: web.Request) -> web.Response:
        last[0] = next(left, last[0])
        message = {"role": "assistant", "content": last[0]}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
        head = {"id": "given", "object": "chat.completion", "created": 0, "model": "policy"}
        return web.json_response({**head, "choices": [choice], "usage": usage})

    app = web.Application(client_max_size=_LINE_BYTES)
    app.router.add_post("/v1/chat/completions", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
    finally:
        await asyncio.shield(runner.cleanup())


async def _make(**settings: Any) -> Host:
    """Make the `Guest` of the module that the command names."""
    path = sys.argv[1]
    name = f"strop_guest_{os.path.basename(path).removesuffix('.py')}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return Host(await module.start(**settings))


if __name__ == "__main__":
    # Packages must not import this folder's files.
    sys.path.pop(0)
    asyncio.run(serve(_make))
