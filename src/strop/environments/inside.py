"""The process that runs an author's class inside a sandbox, and answers requests over one connection.

Standard output and error belong to the author. `main` runs in a fork of an interpreter that has imported this
module; the class itself is imported for each attempt, from copies of its sources in this sandbox.
"""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from strop.environments.objects import ObjectHere, ObjectLimits
from strop.environments.tools import CallRefused, ToolError
from strop.errors import ConfigError, CorruptRecord
from strop.rollout import Example, FailureOwner, ToolCall
from strop.sandbox.frames import pack, unpack
from strop.tasks.failures import catch_failure
from strop.tasks.judging.judge import outcome_to_json
from strop.tasks.user.posing import make_task
from strop.tasks.user.rewards import as_outcome
from strop.user_code import CodeRef, load_code

SOCKET = ".strop-world"
"""The listening socket, in the private directory."""
READY = b"+"
"""Written to standard output before any code of the author runs."""
_SOURCES = "sources"
_CHUNK_BYTES = 1 << 18


def main() -> None:
    """Wait for the connection, and serve it."""
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(SOCKET)
        listener.listen(1)
        os.write(1, READY)
        connection, _ = listener.accept()
    # There is no second connection.
    os.unlink(SOCKET)
    connection.setblocking(False)
    asyncio.run(_serve(connection))


async def _serve(connection: socket.socket) -> None:
    loop, buffer = asyncio.get_running_loop(), bytearray()
    world: ObjectHere | None = None
    while data := await loop.sock_recv(connection, _CHUNK_BYTES):
        buffer += data
        for request, _ in unpack(buffer):
            reply: dict[str, Any] = {}
            if request["op"] == "open":
                world, reply = _open(request)
            elif world is not None:
                reply = await _answer(world, request)
            sys.stdout.flush()
            nonce = {"nonce": request["nonce"]}
            try:
                packed = pack(reply | nonce)
            except CorruptRecord as error:
                packed = pack({"failed": [FailureOwner.TASK, "too_large", str(error)], **nonce})
            await loop.sock_sendall(connection, packed)


def _open(order: Mapping[str, Any]) -> tuple[ObjectHere | None, dict[str, Any]]:
    """Import the class, without making an object yet."""
    place = order["place"]
    for name, text in order["sources"].items():
        path = Path(_SOURCES, name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text.encode("utf-8", "surrogateescape"))
    if order["sources"]:
        place = str(Path(_SOURCES, place).absolute())
    try:
        kind = load_code(CodeRef(place=place, name=order["name"]), order["digest"])
    except ConfigError as error:
        return None, {"config": str(error)}
    limits = ObjectLimits(**order["limits"])
    to_outcome = partial(as_outcome, where=order["where"], full_marks=order["full_marks"])
    return ObjectHere(partial(make_task, kind, order["values"]), to_outcome, limits), {}


async def _answer(world: ObjectHere, request: Mapping[str, Any]) -> dict[str, Any]:
    """Execute a request; an exception of the author's code becomes an answer."""
    try:
        with catch_failure(FailureOwner.TASK) as caught:
            return await _execute(world, request)
    except ConfigError as error:
        return {"config": str(error)}
    assert caught.failure is not None
    return {"failed": [caught.failure.owner, caught.failure.kind, caught.failure.detail]}


async def _execute(world: ObjectHere, request: Mapping[str, Any]) -> dict[str, Any]:
    reply: dict[str, Any] = {}
    match request["op"]:
        case "reset":
            messages = await world.reset(Example(**request["example"]), request["seed"])
            reply = {"messages": [message.to_json() for message in messages]}
        case "step":
            messages, is_over = await world.step(request["text"])
            reply = {"messages": [message.to_json() for message in messages], "is_over": is_over}
        case "call":
            try:
                text, is_over = await world.call(ToolCall(**request["call"]))
                reply = {"text": text, "is_over": is_over}
            except CallRefused as error:
                reply = {"refused": str(error)}
            except ToolError as error:
                reply = {"told": str(error)}
        case "score":
            reply = {"outcome": outcome_to_json(await world.score())}
        case _:
            await world.close()
    return reply
