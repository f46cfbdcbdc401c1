"""Frames over a socket: a length, then JSON. Also the one place where all that foreign code raises is caught.

Runs in the sandbox, where only the standard library is.
"""

from __future__ import annotations

import socket
import struct
import time
from types import TracebackType
from typing import Any

from strop.tasks.code.python_judge.values import MalformedValue, dump, parse

_LENGTH = struct.Struct("!I")
MAX_FRAME_BYTES = 16 << 20


class ChannelEnded(Exception):
    """Raised where the other end closed its socket, or sent what is no frame."""


class Channel:
    """One end of a socket that carries frames. Instants are those of `time.monotonic`."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection

    def send(self, message: Any, *, until: float | None = None) -> None:
        """Send a message of encoded values.

        Raises: ChannelEnded; TimeoutError if it is not taken in time.
        """
        body = dump(message)
        if len(body) > MAX_FRAME_BYTES:
            raise ChannelEnded(f"a message of {len(body)} bytes; at most {MAX_FRAME_BYTES} pass")
        self._limit(until)
        try:
            self.connection.sendall(_LENGTH.pack(len(body)) + body)
        except TimeoutError:
            raise
        except OSError as error:
            raise ChannelEnded(f"the connection is closed ({error})") from error

    def receive(self, *, until: float | None = None) -> Any:
        """Return the next message.

        Raises: ChannelEnded; TimeoutError if it is not whole in time.
        """
        (length,) = _LENGTH.unpack(self._receive(_LENGTH.size, until))
        if length > MAX_FRAME_BYTES:
            raise ChannelEnded(f"a message of {length} bytes; at most {MAX_FRAME_BYTES} pass")
        try:
            return parse(self._receive(length, until))
        except MalformedValue as error:
            raise ChannelEnded(str(error)) from error

    def _receive(self, length: int, until: float | None) -> bytes:
        parts: list[bytes] = []
        while length:
            self._limit(until)
            try:
                part = self.connection.recv(min(length, 1 << 20))
            except TimeoutError:
                raise
            except OSError as error:
                raise ChannelEnded(f"the connection is closed ({error})") from error
            if not part:
                raise ChannelEnded("the connection is closed")
            parts.append(part)
            length -= len(part)
        return b"".join(parts)

    def _limit(self, until: float | None) -> None:
        if until is None:
            return
        left_s = until - time.monotonic()
        if left_s <= 0.0:
            raise TimeoutError
        self.connection.settimeout(left_s)


class Caught:
    """Catches all that its block raises, `SystemExit` too; `error` is None where it ran through.

    A program may raise anything, and each of it is a value here: the reply to a call, the verdict of a
    test. boundary: sandbox execution
    """

    def __init__(self) -> None:
        self.error: BaseException | None = None

    def __enter__(self) -> Caught:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        self.error = error
        return True


def describe(error: BaseException, max_chars: int = 400) -> str:
    """Say an exception in one line, whatever its own methods do."""
    text = ""
    with Caught():
        text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}"[:max_chars]
