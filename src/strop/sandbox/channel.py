"""Frames and open descriptors over a non-blocking Unix socket.

The client and the supervisor both use it, each in its event loop.
"""

from __future__ import annotations

import array
import os
import socket
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from strop.sandbox.frames import pack, unpack

_CHUNK_BYTES = 1 << 16
_MAX_DESCRIPTORS = 16
"""Received in one call; a sender starts a new message for each frame with a descriptor."""


def receive_descriptors(
    connection: socket.socket, num_bytes: int, max_descriptors: int
) -> tuple[bytes, list[int]]:
    """Receive bytes and close-on-exec descriptors. Raises: OSError."""
    # Not socket.recv_fds, which ignores its flags.
    room = socket.CMSG_SPACE(max_descriptors * array.array("i").itemsize)
    data, ancillary, _, _ = connection.recvmsg(num_bytes, room, socket.MSG_CMSG_CLOEXEC)
    descriptors = array.array("i")
    for level, kind, part in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            descriptors.frombytes(part[: len(part) - len(part) % descriptors.itemsize])
    return data, list(descriptors)


class Channel:
    """One end of a connection that carries frames and descriptors."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self.socket = connection
        self._incoming = bytearray()
        self._descriptors: deque[int] = deque()
        self._outgoing: deque[tuple[memoryview, int | None]] = deque()

    @property
    def num_unsent_bytes(self) -> int:
        """Bytes that wait until the other end reads."""
        return sum(len(data) for data, _ in self._outgoing)

    def receive(self) -> Iterator[tuple[dict[str, Any], bytes]]:
        """Return the complete frames received so far.

        Raises: EOFError if the other end has closed; CorruptRecord for a malformed frame.
        """
        try:
            data, descriptors = receive_descriptors(self.socket, _CHUNK_BYTES, _MAX_DESCRIPTORS)
        except BlockingIOError:
            return iter(())
        except OSError as error:
            raise EOFError from error
        if not data:
            raise EOFError
        self._descriptors += descriptors
        self._incoming += data
        return unpack(self._incoming)

    def take_descriptor(self) -> int:
        """Return the descriptor of the current frame; descriptors arrive in the order of their frames."""
        return self._descriptors.popleft()

    def send(self, header: dict[str, Any], body: bytes = b"", *, descriptor: int | None = None) -> None:
        """Send a frame as far as the socket accepts it now; `flush` sends the rest. Closes the descriptor.

        Raises: ConnectionError if the other end has closed.
        """
        self._outgoing.append((memoryview(pack(header, body)), descriptor))
        self.flush()

    def flush(self) -> None:
        """Send waiting bytes as far as the socket accepts them. Raises: as `send`."""
        while self._outgoing:
            data, descriptor = self._outgoing[0]
            try:
                if descriptor is None:
                    num_sent = self.socket.send(data)
                else:
                    num_sent = socket.send_fds(self.socket, [data], [descriptor])
                    os.close(descriptor)
            except BlockingIOError:
                return
            except OSError as error:
                raise ConnectionError(str(error)) from error
            if num_sent == len(data):
                self._outgoing.popleft()
            else:
                self._outgoing[0] = (data[num_sent:], None)

    def close(self) -> None:
        """Close this end, and the descriptors that were not taken."""
        self.socket.close()
        waiting = [descriptor for _, descriptor in self._outgoing if descriptor is not None]
        for descriptor in (*self._descriptors, *waiting):
            with suppress(OSError):
                os.close(descriptor)
        self._descriptors.clear()
        self._outgoing.clear()
