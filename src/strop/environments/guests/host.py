"""The process of a guest: `PYTHON host.py MODULE SOCKET`, which `process.py` starts and asks.

The first line on standard input holds the arguments of the module's `start`. The process ends with its input.
Imports nothing of strop: this interpreter does not have it.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import os
import sys
import traceback
from collections.abc import Awaitable, Callable
from typing import Any

_LINE_BYTES = 1 << 28


async def serve(make: Callable[..., Awaitable[Any]]) -> None:
    """Make an object, and call its coroutine methods for whoever asks on the socket, until the input ends."""
    # The output of packages must not mix with answers.
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    made: list[Any] = []

    async def begin(**settings: Any) -> None:
        made.append(await make(**settings))

    async def respond(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        request = json.loads(await reader.readline())
        work = asyncio.create_task(_answer(getattr(made[0], request.pop("do"))(**request)))
        left = asyncio.create_task(reader.read(1))
        await asyncio.wait([work, left], return_when=asyncio.FIRST_COMPLETED)
        if work.done():
            writer.write(work.result())
        work.cancel()
        left.cancel()
        await asyncio.wait([work, left])
        writer.close()

    async with await asyncio.start_unix_server(respond, sys.argv[-1], limit=_LINE_BYTES):
        answers.write(await _answer(begin(**json.loads(sys.stdin.readline()))))
        answers.flush()
        await asyncio.to_thread(sys.stdin.read)
        # The parent is gone: an orderly end has no reader.
        os._exit(0)


async def _answer(work: Awaitable[Any]) -> bytes:
    try:
        reply = {"found": await work}
    except (Exception, SystemExit) as error:  # boundary: a guest's package
        traceback.print_exc()
        reply = {"error": f"{type(error).__name__}: {error}"}
    return json.dumps(reply).encode() + b"\n"


async def _start(**settings: Any) -> Any:
    """Call `start` of the module of this folder that the command names."""
    module = importlib.import_module(sys.argv[1])
    # Packages must not import this folder's files.
    sys.path.pop(0)
    return await module.start(**settings)


if __name__ == "__main__":
    asyncio.run(serve(_start))
