"""The controller, which clients and node agents talk to. It answers from memory and keeps a journal.

    python -m strop.runtime.controller --state-dir DIR

prints one JSON line with its address and the files of its keys, and serves until SIGTERM. Sandboxes outlive
it: restarted with the same directory, it has the same port, and every sandbox its address and key.

Not covered: encryption. Bind it to a network that only its users share.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import logging
import os
import resource
import signal
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, field
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import Any

import uvicorn
from pydantic import TypeAdapter, ValidationError
from starlette.applications import Starlette

from strop.errors import CheckRefused, ConfigError, StropError
from strop.hardware.ports import LOOPBACK
from strop.io.atomic import write_bytes_atomically
from strop.io.endpoints import Endpoint
from strop.io.variables import LOG_FORMAT
from strop.runtime.journal import Journal
from strop.runtime.keys import KeyRing, open_keys, require_keys_or_loopback
from strop.runtime.nodes import NodeClient
from strop.runtime.placement import Placement
from strop.runtime.ports import hold_listener
from strop.runtime.queue import Admission
from strop.runtime.registry import Registry
from strop.runtime.routes import Routes, build_routes
from strop.runtime.service_dir import ServiceDir, read_key
from strop.runtime.sessions import Policy, Sessions
from strop.runtime.web import KEEP_ALIVE_S, BoundedProtocol, Guard, add_error_answers, close_idle

_TICK_S = 1.0
_BACKLOG = 2048
_EVENT_LOG_BYTES = 64 << 20
_EVENT_DELAY_S = 0.1
_log = logging.getLogger("strop.runtime.controller")


@dataclass(frozen=True, kw_only=True, slots=True)
class ControllerOptions:
    """Options of a controller."""

    state_dir: Path
    """Holds the journal, the event log, the keys and the port of this controller alone."""
    host: str = LOOPBACK
    port: int = 0
    """0: the previous port, or a free one."""
    keys_file: Path | None = None
    """None: `keys` in the state directory, created if it is missing."""
    node_keys_file: Path | None = None
    """None: `node-keys` in the state directory, created if it is missing."""
    disable_auth: bool = False
    is_forced: bool = False
    """Whether to serve without keys on an address that other machines can reach."""
    policy: Policy = field(default_factory=Policy)


@dataclass(frozen=True, kw_only=True, slots=True)
class Serving:
    """The address of a running controller, and its key files."""

    url: str
    pid: int
    keys_file: str
    """Empty if clients need no key."""
    node_keys_file: str


async def serve(
    options: ControllerOptions, on_ready: Callable[[Serving], None], until: asyncio.Event | None = None
) -> None:
    """Serve until `until` is set or this is cancelled; call `on_ready` once clients may connect.

    Raises: ConfigError for invalid keys or options; StoreError if the journal is broken or held; CheckRefused
        if the port is taken.
    """
    if options.disable_auth:
        require_keys_or_loopback(options.host, is_forced=options.is_forced)
    options.state_dir.mkdir(parents=True, exist_ok=True)
    keys_file = options.keys_file or options.state_dir / "keys"
    node_keys_file = options.node_keys_file or options.state_dir / "node-keys"
    keys = None if options.disable_auth else open_keys(keys_file, "default")
    node_keys = open_keys(node_keys_file, "nodes")
    raise_descriptor_limit()
    async with AsyncExitStack() as stack:
        journal = Journal.open(options.state_dir / "journal.jsonl")
        log = EventLog(options.state_dir / "events.jsonl")
        stack.callback(log.close)
        registry = Registry(journal, log.write)
        stack.push_async_callback(registry.close)
        client = NodeClient(node_keys)
        stack.push_async_callback(client.close)
        policy = options.policy
        admission = Admission(cpu_factor=policy.cpu_factor, min_left_s=policy.min_left_s)
        placement = Placement(registry, client, host=options.host, admission=admission)
        stack.push_async_callback(placement.close)
        sessions = Sessions(options.policy, registry, placement)
        listener = stack.enter_context(_listen(options))
        await sessions.restore()
        server = _Server(_configure(sessions, options, keys, node_keys))
        rings = [ring for ring in (keys, node_keys) if ring is not None]
        ticking = asyncio.create_task(_tick(sessions, rings, server))
        stack.callback(ticking.cancel)
        host, port = listener.getsockname()[:2]
        url = f"http://{host}:{port}"
        on_ready(
            Serving(
                url=url,
                pid=os.getpid(),
                keys_file="" if keys is None else str(keys_file),
                node_keys_file=str(node_keys_file),
            )
        )
        _log.info("listening on %s, %d sandboxes taken back", url, len(registry.alive))
        await _run(server, listener, until)


class _Server(uvicorn.Server):
    """A server that leaves signals to its caller."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def _run(server: uvicorn.Server, listener: socket.socket, until: asyncio.Event | None) -> None:
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    waiting = asyncio.create_task((until or asyncio.Event()).wait())
    try:
        await asyncio.wait([serving, waiting], return_when=asyncio.FIRST_COMPLETED)
    finally:
        waiting.cancel()
        server.should_exit = True
        await serving


def _configure(
    sessions: Sessions, options: ControllerOptions, keys: KeyRing | None, node_keys: KeyRing
) -> uvicorn.Config:
    app = Starlette(routes=build_routes(Routes(sessions=sessions)))
    app.router.redirect_slashes = False
    add_error_answers(app)
    BoundedProtocol.max_connections = resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2
    return uvicorn.Config(
        Guard(app, keys=keys, node_keys=node_keys),
        http=BoundedProtocol,
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        backlog=_BACKLOG,
        timeout_keep_alive=int(KEEP_ALIVE_S),
        timeout_graceful_shutdown=1,
    )


async def _tick(sessions: Sessions, rings: Sequence[KeyRing], server: uvicorn.Server) -> None:
    while True:
        await asyncio.sleep(_TICK_S)
        sessions.tick()
        close_idle(server.server_state.connections)
        for ring in rings:
            if problem := ring.refresh():
                _log.warning("keys stay as they were: %s", problem)


def _listen(options: ControllerOptions) -> socket.socket:
    """Listen on the port of the options, else on the previous one if it is free, else on any free one."""
    address_path = options.state_dir / "address.json"
    if options.port:
        return hold_listener(options.host, options.port, backlog=_BACKLOG)
    listener = None
    try:
        previous = json.loads(address_path.read_bytes())
        if previous["host"] == options.host:
            listener = hold_listener(options.host, previous["port"], backlog=_BACKLOG)
    except (OSError, ValueError, KeyError, TypeError):
        pass
    except CheckRefused as error:
        _log.warning("the previous port is taken, its clients are lost: %s", error)
    listener = listener or hold_listener(options.host, 0, backlog=_BACKLOG)
    content = {"host": options.host, "port": listener.getsockname()[1]}
    write_bytes_atomically(address_path, json.dumps(content).encode())
    return listener


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


def raise_descriptor_limit() -> None:
    """Raise the limit of open files to the hard limit: each waiting sandbox has its own port here."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve until SIGTERM or SIGINT; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m strop.runtime.controller", description=__doc__)
    parser.add_argument("--state-dir", type=Path, required=True, help="journal, event log and keys")
    parser.add_argument("--announce", action="store_true", help="write the address there for others to find")
    parser.add_argument("--host", default=LOOPBACK, help="address to listen on; loopback by default")
    parser.add_argument("--port", type=int, default=0, help="0: the previous port, or a free one")
    parser.add_argument("--keys-file", type=Path, help="lines of OWNER KEY; created if it is missing")
    parser.add_argument("--node-keys-file", type=Path, help="the same, for node agents")
    parser.add_argument("--disable-auth", action="store_true", help="serve clients without a key")
    parser.add_argument("--force", action="store_true", help="also where other machines can connect")
    parser.add_argument("--policy", default="{}", help="JSON: fields of Policy to change")
    args = parser.parse_args(arguments)
    logging.basicConfig(format=LOG_FORMAT, level=logging.INFO)
    logging.getLogger("httpx").setLevel(logging.WARNING)
    try:
        options = ControllerOptions(
            state_dir=args.state_dir,
            host=args.host,
            port=args.port,
            keys_file=args.keys_file,
            node_keys_file=args.node_keys_file,
            disable_auth=args.disable_auth,
            is_forced=args.force,
            policy=read_policy(args.policy),
        )
        asyncio.run(_serve_until_signal(options, ServiceDir(args.state_dir) if args.announce else None))
    except StropError as error:
        sys.stderr.write(f"{error}\n")
        return error.exit_code
    return 0


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


async def _serve_until_signal(options: ControllerOptions, folder: ServiceDir | None) -> None:
    until = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, until.set)

    def announce(serving: Serving) -> None:
        sys.stdout.write(json.dumps(asdict(serving)) + "\n")
        sys.stdout.flush()
        if folder is not None:
            key = "" if options.disable_auth else read_key(folder.keys_path)
            folder.announce(Endpoint(url=serving.url, key=key), node_key=read_key(folder.node_keys_path))

    # Imported modules never become garbage, and many starts at once allocate long-lived objects.
    gc.freeze()
    gc.set_threshold(50_000)
    await serve(options, announce, until)


if __name__ == "__main__":
    sys.exit(main())
