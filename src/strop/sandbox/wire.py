"""Paths and headers of the HTTP requests that open a connection from strop's client to a node.

The connection then carries the frames of `client`; at the node `runtime.owner_plane` serves them.
"""

from __future__ import annotations

import socket

SERVICE_KEY_HEADER = "X-API-Key"
"""Holds the caller's key in requests to the service."""
SANDBOX_KEY_HEADER = "X-Session-API-Key"
"""Holds the key of the sandbox in requests to its address."""
FRAMES_PATH = "/strop/frames"
"""Opens a connection of frames. The sandbox ends with this connection."""
CONNECT_PATH = "/strop/connect"
"""With `?port=` or `?path=`: opens a connection to a server inside."""
PROTOCOL = "strop-sandbox-1"
"""Value of the header `Upgrade` in both."""
MAX_BODY_BYTES = 256 << 20
"""Limit of a frame's body; both ends hold it in memory."""
_KEEP_ALIVE = {socket.TCP_KEEPIDLE: 10, socket.TCP_KEEPINTVL: 5, socket.TCP_KEEPCNT: 3}
"""A peer that is cut off counts as lost after 25 s."""


def keep_alive(connection: socket.socket) -> None:
    """Let the kernel detect a TCP peer that is gone without closing the connection."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in _KEEP_ALIVE.items():
        connection.setsockopt(socket.IPPROTO_TCP, option, value)
