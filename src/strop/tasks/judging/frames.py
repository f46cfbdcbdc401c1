"""Messages between a pool and its workers: JSON with its length in front."""

from __future__ import annotations

import asyncio
import json
import socket
import struct
from typing import Any

from strop.errors import CorruptRecord, explain_refusal

_LENGTH = struct.Struct("!I")
MAX_BYTES = 1 << 24
"""Largest message. A reply to be judged is text of some thousand tokens; more is a fault."""


def pack(message: Any) -> bytes:
    """Return the frame of a JSON value.

    Raises: CorruptRecord if it is larger than `MAX_BYTES`.
    """
    body = json.dumps(message, separators=(",", ":")).encode()
    return _LENGTH.pack(_checked(len(body))) + body


async def read_frame(reader: asyncio.StreamReader) -> Any:
    """Return the next value.

    Raises: asyncio.IncompleteReadError at the end of the stream; CorruptRecord if what came is no frame.
    """
    (length,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
    return _parsed(await reader.readexactly(_checked(length)))


def receive_frame(connection: socket.socket) -> Any:
    """Return the next value, or None at the end of the stream. Blocks.

    Raises: CorruptRecord if what came is no frame.
    """
    head = _receive(connection, _LENGTH.size)
    if head is None:
        return None
    (length,) = _LENGTH.unpack(head)
    body = _receive(connection, _checked(length))
    return None if body is None else _parsed(body)


def _receive(connection: socket.socket, length: int) -> bytes | None:
    parts: list[bytes] = []
    while length:
        part = connection.recv(length)
        if not part:
            return None
        parts.append(part)
        length -= len(part)
    return b"".join(parts)


def _checked(length: int) -> int:
    if length > MAX_BYTES:
        raise _refused(f"a message of {length} bytes")
    return length


def _parsed(body: bytes) -> Any:
    try:
        return json.loads(body)
    except ValueError as error:
        raise _refused(f"a message that is not JSON ({error})") from error


def _refused(given: str) -> CorruptRecord:
    return CorruptRecord(
        explain_refusal(
            f"a verifier's worker and its pool exchanged {given}",
            allowed=f"JSON of at most {MAX_BYTES} bytes",
            next_step="look at what the task's verifier does with its process; the worker is replaced",
        )
    )
