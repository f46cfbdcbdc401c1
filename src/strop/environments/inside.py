"""What plays an author's class inside a sandbox: it answers requests over one connection until that ends.

Standard output and error are the author's. `main` runs in a fork of an interpreter that has imported this
module; the class itself is imported anew for each attempt, from copies of its sources that only this sandbox
has.
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
"""Where it waits for its connection, in the private directory."""
READY = b"+"
"""Written to standard output before anything of the author's runs."""
_SOURCES = "sources"
_CHUNK_BYTES = 1 << 18


def main() -> None:
    """Wait for the connection, and answer what comes over it."""
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(SOCKET)
        listener.listen(1)
        os.write(1, READY)
        connection, _ = listener.accept()
    # One connection is all there is.
    os.unlink(SOCKET)
    connection.setblocking(False)
    asyncio.run(_serve(connection))


async def _serve(connection: socket.socket) -> None:
    loop, buffer = asyncio.get_running_loop(), bytearray()
    made: ObjectHere | None = None
    while data := await loop.sock_recv(connection, _CHUNK_BYTES):
        buffer += data
        for request, _ in unpack(buffer):
            reply: dict[str, Any] = {}
            if request["op"] == "open":
                made, reply = _open(request)
            elif made is not None:
                reply = await _answer(made, request)
            sys.stdout.flush()
            await loop.sock_sendall(connection, _pack({**reply, "nonce": request["nonce"]}))


def _pack(reply: dict[str, Any]) -> bytes:
    try:
        return pack(reply)
    except CorruptRecord as error:
        return pack({"failed": [FailureOwner.TASK, "too_large", str(error)], "nonce": reply["nonce"]})


def _open(order: Mapping[str, Any]) -> tuple[ObjectHere | None, dict[str, Any]]:
    """Import the class; no object is made."""
    place = order["place"]
    for name, text in order["sources"].items():
        path = Path(_SOURCES, name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text.encode("utf-8", "surrogateescape"))
    if order["sources"]:
        place = str(Path(_SOURCES, place).absolute())
    try:
        found = load_code(CodeRef(place=place, name=order["name"]), order["digest"])
    except ConfigError as error:
        return None, {"config": str(error)}
    limits = ObjectLimits(**order["limits"])
    to_outcome = partial(as_outcome, where=order["where"], full_marks=order["full_marks"])
    return ObjectHere(partial(make_task, found, order["values"]), to_outcome, limits), {}


async def _answer(made: ObjectHere, request: Mapping[str, Any]) -> dict[str, Any]:
    """Do what is asked; what the author's code raises is an answer."""
    try:
        with catch_failure(FailureOwner.TASK) as caught:
            return await _do(made, request)
    except ConfigError as error:
        return {"config": str(error)}
    assert caught.failure is not None
    return {"failed": [caught.failure.owner, caught.failure.kind, caught.failure.detail]}


async def _do(made: ObjectHere, request: Mapping[str, Any]) -> dict[str, Any]:
    match request["op"]:
        case "reset":
            messages = await made.reset(Example(**request["example"]), request["seed"])
            found: dict[str, Any] = {"messages": [message.to_json() for message in messages]}
        case "step":
            messages, is_over = await made.step(request["text"])
            found = {"messages": [message.to_json() for message in messages], "is_over": is_over}
        case "call":
            found = await _call(made, ToolCall(**request["call"]))
        case "score":
            found = {"outcome": outcome_to_json(await made.score())}
        case _:
            await made.close()
            found = {}
    return found


async def _call(made: ObjectHere, call: ToolCall) -> dict[str, Any]:
    try:
        text, is_over = await made.call(call)
    except CallRefused as error:
        return {"refused": str(error)}
    except ToolError as error:
        return {"told": str(error)}
    return {"text": text, "is_over": is_over}
