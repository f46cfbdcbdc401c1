"""What strop's own client and a node say to each other before frames flow: paths and headers.

Frames are those of `client`. On a node they are taken by `runtime.owner_plane`.
"""

from __future__ import annotations

SERVICE_KEY_HEADER = "X-API-Key"
"""For the controller: the caller's."""
SANDBOX_KEY_HEADER = "X-Session-API-Key"
"""For a sandbox's address: the sandbox's own."""
FRAMES_PATH = "/strop/frames"
"""The connection carries frames from then on. The sandbox is its owner's, and ends with it."""
CONNECT_PATH = "/strop/connect"
"""`?port=` or `?path=`: the connection carries what a server inside says and hears."""
PROTOCOL = "strop-sandbox-1"
"""In `Upgrade`, for both."""
MAX_BODY_BYTES = 256 << 20
"""Of one frame: both sides hold it in memory."""
