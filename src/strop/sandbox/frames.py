"""The frames between a client process and its servers: both lengths, a JSON header, a body of bytes.

Sandboxes and judge workers use them. Programs inside a sandbox cannot write to the channel that reports their
exit codes.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from typing import Any

from strop.errors import CorruptRecord

LENGTHS = struct.Struct("!IQ")
MAX_HEADER_BYTES = 1 << 24
"""Largest header. A text to judge has a few thousand tokens; a larger header is a fault."""


def pack(header: dict[str, Any], body: bytes = b"") -> bytes:
    """Return the frame of a header and its bytes.

    Raises: CorruptRecord if the header is larger than `MAX_HEADER_BYTES`.
    """
    text = json.dumps(header, separators=(",", ":")).encode()
    if len(text) > MAX_HEADER_BYTES:
        raise _refused(f"a header of {len(text)} bytes")
    return LENGTHS.pack(len(text), len(body)) + text + body


def unpack(buffer: bytearray) -> Iterator[tuple[dict[str, Any], bytes]]:
    """Remove the complete frames from a receive buffer and yield them.

    Raises: CorruptRecord for a malformed frame.
    """
    while len(buffer) >= LENGTHS.size:
        header_bytes, body_bytes = LENGTHS.unpack_from(buffer)
        if header_bytes > MAX_HEADER_BYTES:
            raise _refused(f"a header of {header_bytes} bytes")
        start = LENGTHS.size + header_bytes
        if len(buffer) < start + body_bytes:
            return
        try:
            header = json.loads(buffer[LENGTHS.size : start])
        except (ValueError, RecursionError) as error:
            raise _refused(f"a header that is not JSON ({error})") from error
        if not isinstance(header, dict):
            raise _refused(f"a header that is a {type(header).__name__}")
        body = bytes(buffer[start : start + body_bytes])
        del buffer[: start + body_bytes]
        yield header, body


def _refused(content: str) -> CorruptRecord:
    return CorruptRecord(
        f"two processes exchanged {content}, not a JSON object of {MAX_HEADER_BYTES} bytes at most"
    )
