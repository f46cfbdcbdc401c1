"""A bounded copy of an output stream: its beginning and its end, with exact counts."""

from __future__ import annotations


class Capture:
    """Keep the first `head_bytes` and the last `tail_bytes` of a stream.

    Readers that follow the stream read from here too. A slow reader costs no memory and does not block the
    command: it misses the middle, and the missed bytes are counted.
    """

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
            # Cut rarely: each cut moves the whole tail.
            if len(self._tail) > 2 * self._tail_bytes + (1 << 16):
                self._cut()

    def kept(self) -> bytes:
        """Return head and tail: the whole stream if it fits."""
        self._cut()
        return bytes(self._head + self._tail)

    @property
    def num_head_bytes(self) -> int:
        """Length of the stream's beginning in `kept`."""
        return len(self._head)

    def since(self, position: int) -> tuple[int, bytes]:
        """Return the number of dropped bytes behind `position`, and the kept bytes behind those."""
        self._cut()
        return unread(bytes(self._head), bytes(self._tail), self.total, position)

    def _cut(self) -> None:
        surplus = len(self._tail) - self._tail_bytes
        if surplus > 0:
            del self._tail[:surplus]


def unread(head: bytes, tail: bytes, total: int, position: int) -> tuple[int, bytes]:
    """Compute `Capture.since` from a stream's kept beginning and end.

    The bytes have no gap: if the end does not follow the beginning directly, it is returned by the next call.
    """
    tail_at = total - len(tail)
    if position < len(head):
        return 0, head[position:] + (tail if tail_at == len(head) else b"")
    gone = max(0, tail_at - position)
    return gone, tail[position + gone - tail_at :]
