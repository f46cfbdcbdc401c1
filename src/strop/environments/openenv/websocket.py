"""A client's end of a WebSocket (RFC 6455): whole texts, no extensions.

Spoken here: what is needed of the protocol is a hundred lines, and no kept library has a client.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import os
import struct
from contextlib import ExitStack, suppress
from typing import Self
from urllib.parse import urlsplit

MAX_BYTES = 64 << 20
_MAGIC = "258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
_CONTINUED, _TEXT, _BINARY, _CLOSE, _PING, _PONG = 0, 1, 2, 8, 9, 10
_FINAL, _MASKED = 0x80, 0x80
_PORTS = {"ws": 80, "http": 80, "wss": 443, "https": 443}


class WebSocket:
    """One connection. Not for two readers at once."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    @classmethod
    async def connect(cls, url: str) -> Self:
        """Connect to a `ws`, `wss`, `http` or `https` URL. Raises: OSError if nobody speaks so there."""
        parts = urlsplit(url)
        port = parts.port or _PORTS[parts.scheme]
        is_secure = True if parts.scheme in ("wss", "https") else None
        reader, writer = await asyncio.open_connection(parts.hostname, port, ssl=is_secure)
        with ExitStack() as stack:
            stack.callback(writer.close)
            key = base64.b64encode(os.urandom(16)).decode()
            writer.write(
                f"GET {parts.path or '/'} HTTP/1.1\r\nHost: {parts.netloc.rpartition('@')[2]}\r\n"
                f"Upgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Key: {key}\r\n"
                "Sec-WebSocket-Version: 13\r\n\r\n".encode()
            )
            await writer.drain()
            try:
                head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
            except (asyncio.IncompleteReadError, asyncio.LimitOverrunError) as error:
                raise ConnectionError("it does not answer as HTTP") from error
            fields = {
                name.strip().lower(): text.strip() for name, _, text in (one.partition(":") for one in head)
            }
            digest = hashlib.sha1((key + _MAGIC).encode(), usedforsecurity=False).digest()
            wanted = base64.b64encode(digest).decode()
            if head[0].split()[1:2] != ["101"] or fields.get("sec-websocket-accept") != wanted:
                raise ConnectionError(f"it speaks no WebSocket: {head[0][:200]}")
            # It is the caller's.
            stack.pop_all()
        return cls(reader, writer)

    async def send(self, text: str) -> None:
        """Send a text. Raises: OSError."""
        await self._send(_TEXT, text.encode())

    async def receive(self) -> str:
        """Return the next text. Raises: OSError when it has ended, or speaks otherwise."""
        whole = bytearray()
        while True:
            try:
                is_final, kind, data = await self._receive(MAX_BYTES - len(whole))
            except asyncio.IncompleteReadError as error:
                raise ConnectionError("it has ended") from error
            if kind == _CLOSE:
                code = struct.unpack(">H", data[:2])[0] if len(data) >= 2 else 1005
                raise ConnectionError(f"it was closed: {code} {data[2:].decode(errors='replace')}".rstrip())
            if kind == _PING:
                await self._send(_PONG, data)
            if kind in (_TEXT, _BINARY, _CONTINUED):
                whole += data
                if is_final:
                    return whole.decode(errors="replace")

    async def close(self) -> None:
        """Take leave and hang up."""
        with suppress(OSError):
            await self._send(_CLOSE, struct.pack(">H", 1000))
        self._writer.close()
        with suppress(OSError):
            await self._writer.wait_closed()

    async def _send(self, kind: int, data: bytes) -> None:
        size = len(data)
        if size < 126:
            length = bytes([_MASKED | size])
        elif size < 1 << 16:
            length = bytes([_MASKED | 126]) + struct.pack(">H", size)
        else:
            length = bytes([_MASKED | 127]) + struct.pack(">Q", size)
        mask = os.urandom(4)
        repeated = (mask * (size // 4 + 1))[:size]
        masked = (int.from_bytes(data, "big") ^ int.from_bytes(repeated, "big")).to_bytes(size, "big")
        self._writer.write(bytes([_FINAL | kind]) + length + mask + masked)
        await self._writer.drain()

    async def _receive(self, max_bytes: int) -> tuple[bool, int, bytes]:
        """Return whether a frame is the last of its message, its kind and its bytes."""
        first, second = await self._reader.readexactly(2)
        size = second & 0x7F
        if size == 126:
            (size,) = struct.unpack(">H", await self._reader.readexactly(2))
        elif size == 127:
            (size,) = struct.unpack(">Q", await self._reader.readexactly(8))
        if size > max_bytes:
            raise ConnectionError(f"a message of more than {MAX_BYTES} bytes")
        if second & _MASKED:
            raise ConnectionError("a server's frame is masked")
        return bool(first & _FINAL), first & 0x0F, await self._reader.readexactly(size)
