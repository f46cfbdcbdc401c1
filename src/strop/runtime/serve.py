"""Runs a service: one process that answers clients and, on one machine, holds the host of the sandboxes.

With several nodes it asks Ray for a host on each (`cluster`). It ends with SIGTERM or SIGINT, and all
sandboxes with it, however it ends. Started again with the same folder, it has its keys, and no sandboxes.

Not covered: encryption. Bind it to a network that only its users share.
"""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import platform
import resource
import signal
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field
from functools import partial
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from strop.errors import CheckRefused, ConfigError
from strop.hardware.ports import LOOPBACK
from strop.io.endpoints import Endpoint
from strop.io.lock import FileLock
from strop.runtime.host import HostSettings, SandboxHost
from strop.runtime.keys import KeyRing, open_keys, require_keys_or_loopback
from strop.runtime.making import MakeSettings
from strop.runtime.ports import Gate
from strop.runtime.routes import build_app, guard
from strop.runtime.service import Policy, Service
from strop.runtime.service_dir import ServiceDir
from strop.runtime.web import HttpFace
from strop.sandbox.allowlist import ALLOWED, parse_network
from strop.sandbox.local import shown_folders

_TICK_S = 1.0
_EVENT_LOG_BYTES = 64 << 20
_EVENT_DELAY_S = 0.1
_MAX_CLIENTS = 10_000
_log = logging.getLogger("strop.runtime.serve")


@dataclass(frozen=True, kw_only=True, slots=True)
class ServeOptions:
    """Options of a service."""

    folder: ServiceDir
    """Holds the event log, the keys and the address of this service alone."""
    host: HostSettings
    address: str = LOOPBACK
    port: int = 0
    """0: a free one."""
    disable_auth: bool = False
    policy: Policy = field(default_factory=Policy)
    num_nodes: int = 1
    """With more, hosts are actors of Ray on that many nodes, and on each that joins later."""


async def serve(options: ServeOptions, on_ready: Callable[[Endpoint, Service], None]) -> None:
    """Serve until this is cancelled; call `on_ready` once clients may connect.

    Raises: ConfigError for invalid keys or options; SandboxRefused if no backend works here; CheckRefused if
        the port is taken or another service has the folder; EngineError if Ray does not start.
    """
    folder = options.folder
    if options.disable_auth:
        require_keys_or_loopback(options.address)
    folder.path.mkdir(parents=True, exist_ok=True)
    async with AsyncExitStack() as stack:
        lock = FileLock(folder.path / "service.lock")
        if not lock.try_acquire():
            raise CheckRefused(
                f"{folder.path} is held by {lock.holder() or 'another process'}",
                allowed="one service for each folder",
                next_step="stop it, or name another folder",
            )
        stack.callback(lock.release)
        folder.retire()
        keys = None if options.disable_auth else open_keys(folder.keys_path, "default")
        _raise_descriptor_limit()
        log = EventLog(folder.path / "events.jsonl")
        stack.callback(log.close)
        service = Service(policy=options.policy, address=options.address, write_event=log.write)
        await _open_hosts(options, service, stack)
        face = HttpFace(guard(build_app(service), keys))
        stack.push_async_callback(face.close)

        async def connect() -> asyncio.Protocol:
            return face.protocol()

        gate = await Gate.listen(connect, host=options.address, port=options.port)
        stack.push_async_callback(gate.close)
        gate.max_connections = _MAX_CLIENTS
        if keys is not None:
            gate.is_known = keys.is_in
        ticking = asyncio.create_task(_tick(service, keys))
        stack.callback(ticking.cancel)
        endpoint = Endpoint(url=gate.url, key="" if keys is None else keys.newest)
        folder.announce(endpoint)
        # First of all, so that nobody finds a service that ends.
        stack.callback(folder.retire)
        _log.info("listening on %s", gate.url)
        on_ready(endpoint, service)
        await asyncio.Event().wait()


async def _open_hosts(options: ServeOptions, service: Service, stack: AsyncExitStack) -> None:
    """Give a service its hosts; `stack` ends them with their sandboxes."""
    if options.num_nodes == 1:
        stack.push_async_callback(service.close)
        host = SandboxHost(options.host)
        service.add_host(platform.node(), host, await host.open(), is_here=True)
        return
    # Imported here: one machine needs no Ray.
    from strop.runtime.cluster import RayHosts

    hosts = RayHosts(options.host, options.folder.path, service, options.num_nodes)
    stack.push_async_callback(hosts.stop)
    stack.push_async_callback(service.close)
    await hosts.start()


async def serve_until_signal(options: ServeOptions, on_ready: Callable[[Endpoint], None]) -> None:
    """Serve until SIGTERM or SIGINT. Raises: as `serve`."""
    serving = asyncio.create_task(serve(options, lambda endpoint, _: on_ready(endpoint)))
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, partial(_cancel_once, serving))
    # Imported modules never become garbage, and many starts at once allocate long-lived objects.
    gc.freeze()
    gc.set_threshold(50_000)
    with suppress(asyncio.CancelledError):
        await serving


def _cancel_once(task: asyncio.Task[None]) -> None:
    # A second signal must not end the clean-up.
    if not task.cancelling():
        task.cancel()


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


def read_host_settings(
    folder: ServiceDir,
    *,
    backends: Sequence[str] = (),
    network: str = "none",
    image_dirs: Sequence[Path] = (),
    registries: Sequence[str] = (),
    warm: Sequence[str] = (),
) -> HostSettings:
    """Return the settings of hosts. Raises: ConfigError for an option that cannot be."""
    try:
        parse_network(network)
    except ValueError as error:
        raise ConfigError(
            f"network {network!r}: {error}", allowed=ALLOWED, next_step="give one of them"
        ) from error
    numbers = {}
    for word in warm:
        image, _, number = word.rpartition("=")
        if not image or not number.isdecimal():
            raise ConfigError(f"--warm {word}", allowed="IMAGE=N, such as host=8", next_step="give it so")
        numbers[image] = int(number)
    folders = tuple(path.resolve() for path in image_dirs)
    keys_path = folder.keys_path.resolve()
    holding = [path for path in (*folders, *map(Path, shown_folders())) if keys_path.is_relative_to(path)]
    for path in (*holding, *(path for path in folders if not path.is_dir())):
        raise ConfigError(
            f"{path}, which sandboxes see, {'has the service' if path in holding else 'is no directory'}",
            allowed="directories that have images and no keys, and a service that no sandbox sees",
            next_step="name others with --image-dir, or another folder for the service with --dir",
        )
    return HostSettings(
        make=MakeSettings(
            backends=tuple(backends), network=network, image_dirs=tuple(map(str, folders)), warm=numbers
        ),
        registries=tuple(registries),
    )


async def _tick(service: Service, keys: KeyRing | None) -> None:
    while True:
        await asyncio.sleep(_TICK_S)
        service.tick()
        if keys is not None and (problem := keys.refresh()):
            _log.warning("keys stay as they were: %s", problem)


def _raise_descriptor_limit() -> None:
    """Raise the limit of open files to the hard limit: each sandbox has its own port here."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


class EventLog(RotatingFileHandler):
    """A log of one JSON line for each transition, in files of bounded size."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, maxBytes=_EVENT_LOG_BYTES, backupCount=2)
        self._lines: list[str] = []

    def write(self, facts: dict[str, Any]) -> None:
        """Queue a line; it is in the file 0.1 s later."""
        if not self._lines:
            asyncio.get_running_loop().call_later(_EVENT_DELAY_S, self.write_out)
        self._lines.append(json.dumps(facts))

    def write_out(self) -> None:
        """Write the queued lines."""
        if self._lines:
            self.emit(logging.makeLogRecord({"msg": "\n".join(self._lines)}))
            self._lines.clear()

    def close(self) -> None:
        """Write the queued lines and close the file."""
        self.write_out()
        super().close()
