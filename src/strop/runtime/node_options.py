"""A node agent as a process: its options, the backends that work here, signals."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from strop.errors import ConfigError, SandboxLost, SandboxRefused, given_of
from strop.runtime.making import MakeSettings
from strop.runtime.node import Node, NodeSettings
from strop.runtime.planes import DataPlane
from strop.runtime.service_dir import read_key
from strop.sandbox import IsolationLevel, SandboxSpec, make_backend
from strop.sandbox.allowlist import ALLOWED, parse_network
from strop.sandbox.choose import BACKENDS

_NUM_TRIES = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeOptions:
    """As they are typed."""

    controller: str
    key_file: Path
    host: str = "127.0.0.1"
    backends: tuple[str, ...] = ()
    """Empty: all that can make a sandbox here."""
    data_plane: str = "auto"
    network: str = "none"
    warm: tuple[str, ...] = ()


async def serve_node(options: NodeOptions, *, say: Callable[[str], None]) -> None:
    """Run a node agent until SIGTERM or SIGINT, or until its controller is gone.

    Raises: ConfigError for options that cannot be; SandboxRefused if no backend works here; CheckRefused if
        the address cannot be listened on.
    """
    settings = await _understand(options, say)
    node = Node(settings)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, node.end)
    say(f"node {node.node_id} makes sandboxes by {', '.join(settings.make.backends)}")
    await node.run()


async def _understand(options: NodeOptions, say: Callable[[str], None]) -> NodeSettings:
    if options.data_plane not in list(DataPlane):
        raise ConfigError(
            f"data plane {options.data_plane!r}", allowed=", ".join(DataPlane), next_step="name one of them"
        )
    try:
        parse_network(options.network)
    except ValueError as error:
        raise ConfigError(
            f"network {options.network!r}: {error}", allowed=ALLOWED, next_step="give one of them"
        ) from error
    if not options.controller.startswith("http://"):
        raise ConfigError(
            f"controller {options.controller!r}",
            allowed="a URL as the controller says it, http://HOST:PORT",
            next_step="give it with http:// and its port",
        )
    make = MakeSettings(
        backends=await find_backends(options.backends, say),
        network=options.network,
        warm=_parse_warm(options.warm),
    )
    return NodeSettings(
        controller=options.controller.rstrip("/"),
        key=read_key(options.key_file),
        make=make,
        data_plane=DataPlane(options.data_plane),
        host=options.host,
    )


async def find_backends(wanted: tuple[str, ...], say: Callable[[str], None]) -> tuple[str, ...]:
    """Return the backends that make a sandbox here, those that have images first.

    Each is tried by one real start.
    Raises: SandboxRefused if a wanted one does not, or none at all; ConfigError for a name that there is not.
    """
    found, refusals = [], []
    for name in wanted or BACKENDS:
        try:
            await _try_backend(name)
            found.append(name)
        except SandboxRefused as refusal:
            if wanted:
                raise
            refusals.append(refusal)
            say(f"no sandboxes by {name}: {given_of(refusal)}")
    if not found:
        raise refusals[0]
    return tuple(found)


async def _try_backend(name: str) -> None:
    for num_left in reversed(range(_NUM_TRIES)):
        try:
            async with await make_backend(name).create(SandboxSpec(min_level=IsolationLevel.RLIMIT)):
                return
        except SandboxLost:
            # Killed from outside, which says nothing of the backend.
            if not num_left:
                raise


def _parse_warm(words: tuple[str, ...]) -> Mapping[str, int]:
    warm = {}
    for word in words:
        image, _, number = word.rpartition("=")
        if not image or not number.isdecimal():
            raise ConfigError(f"--warm {word}", allowed="IMAGE=N, such as host=8", next_step="give it so")
        warm[image] = int(number)
    return warm
