"""Runs a service: one process that answers clients and, on one machine, holds the host of the sandboxes.

With several nodes it asks Ray for a host on each (`cluster`). It ends with SIGTERM or SIGINT, and all
sandboxes with it, however it ends. Started again with the same folder, it has its keys, and no sandboxes.

Not covered: encryption. Bind it to a network that only its users share.
"""

from __future__ import annotations

import asyncio
import logging
import platform
import resource
import signal
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from functools import partial
from pathlib import Path

import uvicorn
from fastapi import FastAPI
from pydantic import TypeAdapter, ValidationError
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from strop.errors import CheckRefused, ConfigError
from strop.io.endpoints import RUNTIME, Endpoint, withdraw, write_endpoint
from strop.io.lock import FileLock
from strop.runtime.contract import Options, Policy
from strop.runtime.gate import Connections, hold_listener
from strop.runtime.host import LocalHost
from strop.runtime.keys import open_keys, read_keys
from strop.runtime.routes import build_app
from strop.runtime.service import Service
from strop.runtime.service_dir import KEYS
from strop.sandbox.janitor import clear_abandoned
from strop.sandbox.local import shown_folders

MAX_CLIENTS = 4096
"""Connections of clients and strangers together; a `Gate` says which is cut off beyond."""
_TICK_S = 1.0
_KEEP_ALIVE_S = 75
"""Longer than any client keeps an idle connection; else a client may send into a connection that closes."""
_log = logging.getLogger("strop.runtime.serve")


async def serve(options: Options, on_ready: Callable[[Endpoint, Service], None]) -> None:
    """Serve until this is cancelled; call `on_ready` once clients may connect.

    Raises: ConfigError for invalid keys or options; SandboxRefused if no backend works here; CheckRefused if
        the port is taken or another service has the folder; EngineError if Ray does not start.
    """
    folder, keys_path = options.folder, options.folder / KEYS
    _check(folder)
    folder.mkdir(parents=True, exist_ok=True)
    async with AsyncExitStack() as stack:
        lock = FileLock(folder / "service.lock")
        if not lock.try_acquire():
            raise CheckRefused(
                f"{folder} is held by {lock.holder() or 'another process'}",
                allowed="one service for each folder",
                next_step="stop it, or name another folder",
            )
        stack.callback(lock.release)
        retire = partial(withdraw, folder, (RUNTIME,))
        retire()
        owners = open_keys(keys_path, "default")
        # Each sandbox has its own port here.
        _, most_files = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most_files, most_files))
        listener = stack.enter_context(hold_listener(options.address, options.port))
        service = Service(policy=options.policy, address=options.address)
        await _open_hosts(options, service, stack)
        url = f"http://{options.address}:{listener.getsockname()[1]}"
        endpoint = Endpoint(url=url, key=[*owners][-1])
        await stack.enter_async_context(_answering(build_app(service, owners), listener))
        write_endpoint(folder, RUNTIME, endpoint)
        # First of all, so that nobody finds a service that ends.
        stack.callback(retire)
        _log.info("listening on %s", url)
        on_ready(endpoint, service)
        while True:
            await asyncio.sleep(_TICK_S)
            service.tick()
            try:
                new = read_keys(keys_path)
                owners.clear()
                owners.update(new)
            except ConfigError as error:
                _log.warning("keys stay as they were: %s", error)


async def _open_hosts(options: Options, service: Service, stack: AsyncExitStack) -> None:
    """Give a service its hosts; `stack` ends them with their sandboxes."""
    if options.num_nodes == 1:
        stack.push_async_callback(asyncio.to_thread, clear_abandoned)
        stack.push_async_callback(service.close)
        host = LocalHost(options)
        service.add_host(platform.node(), host, await host.open())
        return
    # Imported here: one machine needs no Ray.
    from strop.runtime.cluster import RayHosts

    hosts = RayHosts(options, service)
    stack.push_async_callback(hosts.stop)
    stack.push_async_callback(service.close)
    await hosts.start()


@asynccontextmanager
async def _answering(app: FastAPI, listener: socket.socket) -> AsyncIterator[None]:
    """Answer clients, whose connections are bounded, until the end of the block."""
    connections = Connections(MAX_CLIENTS)

    class Bounded(H11Protocol):
        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            connections.note_use(transport)
            super().connection_made(transport)

        def data_received(self, data: bytes) -> None:
            connections.note_use(self.transport)
            super().data_received(data)

        def connection_lost(self, error: Exception | None) -> None:
            connections.forget(self.transport)
            super().connection_lost(error)

    config = uvicorn.Config(
        app,
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=_KEEP_ALIVE_S,
    )
    config.load()
    state = ServerState()
    # Not by `uvicorn.Server`, which takes over this process's signals.
    server = await asyncio.get_running_loop().create_server(
        lambda: Bounded(config=config, server_state=state, app_state={}), sock=listener
    )
    try:
        yield
    finally:
        server.close()
        connections.cut_all()
        for task in state.tasks:
            task.cancel()
        await asyncio.gather(*state.tasks, return_exceptions=True)


async def serve_until_signal(options: Options, on_ready: Callable[[Endpoint], None]) -> None:
    """Serve until SIGTERM or SIGINT. Raises: as `serve`."""

    def begin(endpoint: Endpoint, _: Service) -> None:
        # Ray has put its own handlers in front, which abort the process at a second signal.
        listen()
        on_ready(endpoint)

    def listen() -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, cancel)

    def cancel() -> None:
        # A second signal must not end the clean-up.
        if not serving.cancelling():
            serving.cancel()

    serving = asyncio.create_task(serve(options, begin))
    listen()
    with suppress(asyncio.CancelledError):
        await serving


def read_policy(text: str) -> Policy:
    """Return the default policy with the fields of a JSON object replaced. Raises: ConfigError."""
    try:
        return TypeAdapter(Policy).validate_json(text, strict=False, extra="forbid")
    except ValidationError as error:
        raise ConfigError(
            f"the policy {text!r} cannot be read ({error.errors()[0]['msg']})",
            allowed=f"a JSON object with any of {', '.join(Policy.__dataclass_fields__)}",
            next_step="correct it",
        ) from error


def _check(folder: Path) -> None:
    """Refuse a folder that sandboxes see. Raises: ConfigError."""
    for shown in shown_folders():
        if folder.resolve().is_relative_to(shown):
            raise ConfigError(
                f"{folder} is in {shown}, which sandboxes see",
                allowed="a folder of the service that no sandbox sees",
                next_step="name another one with --dir",
            )
