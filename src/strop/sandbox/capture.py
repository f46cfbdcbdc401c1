"""The beginning and the end of a stream, in bounded memory, with the exact number of bytes between."""

from __future__ import annotations


class Capture:
    """Keeps `head_bytes` of the beginning and `tail_bytes` of the end of what is fed to it."""

    def __init__(self, head_bytes: int, tail_bytes: int) -> None:
        self._head_bytes = head_bytes
        self._tail_bytes = tail_bytes
        self._head = bytearray()
        self._tail = bytearray()
        self.total = 0

    def feed(self, data: bytes) -> None:
        """Take the next bytes of the stream."""
        self.total += len(data)
        room = self._head_bytes - len(self._head)
        if room > 0:
            self._head += data[:room]
            data = data[room:]
        if data:
            self._tail += data
            # Cut seldom: each cut moves the whole tail.
            if len(self._tail) > 2 * self._tail_bytes + (1 << 16):
                self._cut()

    def kept(self) -> bytes:
        """Return head and tail; all of the stream if it fits."""
        self._cut()
        return bytes(self._head + self._tail)

    def _cut(self) -> None:
        surplus = len(self._tail) - self._tail_bytes
        if surplus > 0:
            del self._tail[:surplus]
