"""Messages between a sandbox's user and its supervisor: a JSON header and bytes, lengths in front.

The commands inside cannot write to this channel; their exit codes and limits travel on it.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from typing import Any

LENGTHS = struct.Struct("!IQ")
MAX_HEADER_BYTES = 1 << 22


def pack(header: dict[str, Any], body: bytes = b"") -> bytes:
    """Return the frame of a header and its bytes."""
    text = json.dumps(header, separators=(",", ":")).encode()
    return LENGTHS.pack(len(text), len(body)) + text + body


def unpack(buffer: bytearray) -> Iterator[tuple[dict[str, Any], bytes]]:
    """Take the complete frames out of a buffer that is being filled."""
    while len(buffer) >= LENGTHS.size:
        header_bytes, body_bytes = LENGTHS.unpack_from(buffer)
        start = LENGTHS.size + header_bytes
        if len(buffer) < start + body_bytes:
            return
        header = json.loads(buffer[LENGTHS.size : start])
        body = bytes(buffer[start : start + body_bytes])
        del buffer[: start + body_bytes]
        yield header, body
