"""Paths and headers that strop's own client and a node exchange before frames flow.

Frames are those of `client`. On a node they are taken by `runtime.owner_plane`.
"""

from __future__ import annotations

import socket

SERVICE_KEY_HEADER = "X-API-Key"
"""For the controller: the caller's."""
SANDBOX_KEY_HEADER = "X-Session-API-Key"
"""For a sandbox's address, or a snapshot: its own."""
FRAMES_PATH = "/strop/frames"
"""The connection carries frames from then on. The sandbox is its owner's, and ends with it."""
CONNECT_PATH = "/strop/connect"
"""`?port=` or `?path=`: the connection carries what a server inside says and hears."""
SNAPSHOT_PATH = "/strop/snapshot"
"""At a node agent's address, with the snapshot's own key: the snapshot lasts as long as that connection."""
PROTOCOL = "strop-sandbox-1"
"""In `Upgrade`, for all."""
MAX_BODY_BYTES = 256 << 20
"""Of one frame: both sides hold it in memory."""
_KEEP_ALIVE = {socket.TCP_KEEPIDLE: 10, socket.TCP_KEEPINTVL: 5, socket.TCP_KEEPCNT: 3}
"""A side that is cut off without a word is lost after 25 s."""


def keep_alive(connection: socket.socket) -> None:
    """Have the kernel notice the end of a TCP connection when the other side is gone without a word."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in _KEEP_ALIVE.items():
        connection.setsockopt(socket.IPPROTO_TCP, option, value)
