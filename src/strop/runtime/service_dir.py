"""The folder of a service, on a disk that its nodes share: keys, logs, and the addresses of its servers.

A server writes its address once it listens. The workers of a run, and nodes that join, wait for that.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from urllib.parse import urlsplit

from strop.errors import CheckRefused
from strop.io.endpoints import Endpoint, read_endpoint

KEYS = "keys"
"""The name of the file with the keys."""
START_LIMIT_S = 600.0
"""The service may be on a node whose allocation begins later."""
_POLL_S = 0.2
_CONNECT_LIMIT_S = 2.0


async def wait_for_server(
    folder: Path, name: str, *, limit_s: float, check: Callable[[], Exception | None] = lambda: None
) -> Endpoint:
    """Wait for the address of a server that listens.

    Raises: CheckRefused if there is none in time; what `check`, which is called meanwhile, returns.
    """
    # Imported here: the launcher imports this module, and each import delays its short commands.
    import asyncio

    deadline = time.monotonic() + limit_s
    # The address may be a leftover of a killed service.
    while (endpoint := read_endpoint(folder, name)) is None or not await _is_listening(endpoint.url):
        if (failure := check()) is not None:
            raise failure
        if time.monotonic() > deadline:
            raise CheckRefused(
                f"no {name} of a sandbox service has written its address in {folder} for {limit_s:.0f} s",
                allowed="a service with this folder, on a disk that both see; of several nodes for `join`",
                next_step="look at its log; on a cluster, at whether its job has begun",
            )
        await asyncio.sleep(_POLL_S)
    return endpoint


async def _is_listening(url: str) -> bool:
    import asyncio

    address = urlsplit(url)
    try:
        async with asyncio.timeout(_CONNECT_LIMIT_S):
            _, writer = await asyncio.open_connection(address.hostname, address.port)
    except (OSError, TimeoutError):
        return False
    writer.close()
    return True


def serve_argv(python: str, folder: str, *words: str) -> tuple[str, ...]:
    """Return the command that runs a service with a folder; `words` are further options."""
    return (python, "-m", "strop.cli", "runtime", "serve", "--dir", folder, *words)


def backend_words(backend: str) -> tuple[str, ...]:
    """Return the option that chooses a backend; none for `auto`."""
    return () if backend == "auto" else ("--backend", backend)
