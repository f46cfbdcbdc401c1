"""The process of a guest: `PYTHON host.py MODULE.py`, asked on standard input, a JSON object a line.

The first line is what the module's `Guest` is made with; each other one is `{"id", "do", ...}`, and is
answered, in any order, with `{"id", "found"}` or `{"id", "error", "kind"}`. `do` is a method of `Guest`, a
coroutine function; `cancel` ends another one by its id. The end of the input is the end of the process.
Imports nothing of strop: this interpreter has none.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import sys
import traceback
from collections.abc import Callable
from functools import partial
from typing import Any

_LINE_BYTES = 1 << 28


async def main(make_guest: Callable[..., Any]) -> None:
    """Serve until the input ends."""
    # What packages print is no answer.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader(limit=_LINE_BYTES)
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    under_way: dict[int, asyncio.Task[Any]] = {}

    def answer(number: int, done: asyncio.Task[Any]) -> None:
        under_way.pop(number, None)
        error: BaseException | None = asyncio.CancelledError() if done.cancelled() else done.exception()
        if error is None:
            found = {"id": number, "found": done.result() if number else None}
        else:
            traceback.print_exception(error)
            found = {"id": number, "error": str(error), "kind": type(error).__name__}
        answers.write(json.dumps(found) + "\n")
        answers.flush()

    settings = json.loads(await reader.readline())
    beginning = asyncio.create_task(_begin(make_guest, settings))
    await asyncio.wait([beginning])
    answer(0, beginning)
    while line := await reader.readline():
        asked = json.loads(line)
        number, name = asked.pop("id"), asked.pop("do")
        if name == "cancel":
            if asked["other"] in under_way:
                under_way[asked["other"]].cancel()
            continue
        task = under_way[number] = asyncio.create_task(getattr(beginning.result(), name)(**asked))
        task.add_done_callback(partial(answer, number))
    # The parent is gone: an orderly end has no reader.
    os._exit(0)


async def _begin(make_guest: Callable[..., Any], settings: dict[str, Any]) -> Any:
    guest = make_guest(**settings)
    await guest.start()
    return guest


def load(path: str) -> Any:
    """Load a file as a module, under its own name."""
    name = f"strop_guest_{os.path.basename(path).removesuffix('.py')}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


if __name__ == "__main__":
    # Not this folder: its files are no modules for a package to find.
    sys.path.pop(0)
    asyncio.run(main(lambda **settings: load(sys.argv[1]).Guest(**settings)))
