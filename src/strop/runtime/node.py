"""The agent of one node: makes the sandboxes that the controller orders, and reports their states.

    strop runtime node --controller http://HOST:PORT --key-file FILE

It runs one event loop. The address of a sandbox is held from the answer to its order until its end. A report
of all sandboxes goes to the controller every `HEARTBEAT_S`, and one of the changed sandboxes after each
change. A controller that has not answered for `silence_limit_s` is gone or has given this node up: the agent
ends all sandboxes and itself. However this process ends, its sandboxes end with it (`sandbox.daemon`).

Routes: those of `NodeOrder`, with the node key; GET /health, without a key.
"""

from __future__ import annotations

import asyncio
import logging
import os
import platform
import signal
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from strop.errors import ConfigError, SandboxError, SandboxLost, SandboxRefused, given_of
from strop.hardware.identity import read_boot_id
from strop.runtime.capacity import find_end, measure_capacity
from strop.runtime.contract import (
    HEARTBEAT_S,
    NODE_KEY_HEADER,
    NodeAnswer,
    NodeOrder,
    NodeReply,
    NodeReport,
    SandboxReport,
    Slot,
)
from strop.runtime.held import HeldSandbox
from strop.runtime.http_client import HttpClient, RequestFailed
from strop.runtime.http_server import (
    Answer,
    HttpError,
    Request,
    Upgrade,
    has_key,
    json_answer,
    serve_connection,
)
from strop.runtime.making import MakeSettings, Starter
from strop.runtime.planes import DataPlane
from strop.runtime.ports import hold_listener
from strop.runtime.pulling import Images, engine_of
from strop.runtime.service_dir import read_key
from strop.sandbox import IsolationLevel, SandboxSpec, make_backend
from strop.sandbox.allowlist import ALLOWED, parse_network
from strop.sandbox.choose import BACKENDS
from strop.sandbox.janitor import clear_abandoned
from strop.sandbox.local import shown_folders

_log = logging.getLogger("strop.runtime.node")
_MAX_ORDER_BYTES = 2 << 20
_BACKLOG = 256
_REPORT_LIMIT_S = 5.0
_SETTLE_S = 0.02
"""Changes within this time share a report."""
_DRAIN_BEFORE_END_S = 120.0
_STOPS_AT_ONCE = 32
_NUM_TRIES = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeSettings:
    """Settings of a node agent."""

    controller: str
    """Its URL, without a path."""
    key: str = field(repr=False)
    make: MakeSettings
    data_plane: DataPlane = DataPlane.AUTO
    host: str = "127.0.0.1"
    """The one address of this machine on which the agent and all sandboxes listen."""
    registries: tuple[str, ...] = ()
    """Where clients' images may be pulled from, as HOST or HOST:PORT."""
    capacity: Slot | None = None
    """None: as `measure_capacity` finds."""
    silence_limit_s: float = 60.0


class Node:
    """One node agent. `run` it once."""

    def __init__(self, settings: NodeSettings) -> None:
        self.node_id = f"{platform.node()}-{uuid.uuid4().hex[:12]}"
        self._settings = settings
        self._capacity = settings.capacity or measure_capacity()
        engine = engine_of(settings.make.backends)
        self._images = Images(engine, registries=settings.registries)
        self._news = asyncio.Event()
        self._starter = Starter(settings.make, settings.data_plane, self._images)
        self._held: dict[str, HeldSandbox] = {}
        self._stopping: set[asyncio.Task[None]] = set()
        self._changed: set[str] = set()
        """Runtime ids of the sandboxes that changed since the last report."""
        self._full_report_at = 0.0
        """When the next report of all sandboxes is due, by the monotonic clock."""
        self._ending = asyncio.Event()
        self._is_draining = False
        self._answered_at = time.monotonic()
        ends_in_s = find_end()
        # Read once, so that the time left does not jump with the wall clock.
        self._ends_at = None if ends_in_s is None else self._answered_at + ends_in_s
        self._counts: Counter[str] = Counter()
        self._url = ""
        self._stop_turn = asyncio.Semaphore(_STOPS_AT_ONCE)

    async def run(self) -> None:
        """Serve until `end` is called, or the controller is silent for too long.

        Raises: CheckRefused if the address cannot be listened on.
        """
        for line in await asyncio.to_thread(clear_abandoned):
            _log.warning("an agent that was killed had left: %s", line)
        listener = hold_listener(self._settings.host, 0, backlog=_BACKLOG)
        host, port = listener.getsockname()[:2]
        self._url = f"http://{host}:{port}"
        server = await asyncio.start_server(self._serve, sock=listener, backlog=_BACKLOG)
        reporting = asyncio.create_task(self._keep_reporting())
        ending = asyncio.create_task(self._ending.wait())
        try:
            await asyncio.wait({reporting, ending}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            server.close()
            reporting.cancel()
            ending.cancel()
            await asyncio.gather(reporting, ending, return_exceptions=True)
            await self._close()

    def end(self) -> None:
        """Make `run` end all sandboxes and return."""
        self._ending.set()

    @property
    def url(self) -> str:
        """The address of this agent, once it runs."""
        return self._url

    async def _close(self) -> None:
        await asyncio.gather(*(self._stop(held, "the node ends") for held in self._held.values()))
        await asyncio.gather(*self._stopping, return_exceptions=True)
        await self._starter.close()
        await asyncio.to_thread(clear_abandoned)
        # The last report has how each sandbox ended.
        self._is_draining = True
        self._full_report_at = 0.0
        async with aclosing(HttpClient(max_connections=1)) as client:
            with suppress(RequestFailed, ValueError, OSError):
                await self._report(client, limit_s=1.0)

    # Reports.

    async def _keep_reporting(self) -> None:
        async with aclosing(HttpClient(max_connections=1)) as client:
            while True:
                self._news.clear()
                left_s = self._left_s()
                if not self._is_draining and left_s is not None and left_s < _DRAIN_BEFORE_END_S:
                    _log.warning("this job ends soon: draining")
                    self._is_draining = True
                try:
                    await self._report(client)
                except (RequestFailed, ValueError) as error:
                    silent_s = time.monotonic() - self._answered_at
                    _log.warning("the controller does not answer for %.0f s: %s", silent_s, error)
                    if silent_s > self._settings.silence_limit_s:
                        _log.error("the controller is gone: this node ends")
                        return
                    await asyncio.sleep(min(HEARTBEAT_S, 0.5))
                    continue
                with suppress(TimeoutError):
                    async with asyncio.timeout(HEARTBEAT_S):
                        await self._news.wait()
                await asyncio.sleep(_SETTLE_S)

    def _left_s(self) -> float | None:
        return None if self._ends_at is None else max(0.0, self._ends_at - time.monotonic())

    async def _report(self, client: HttpClient, limit_s: float = _REPORT_LIMIT_S) -> None:
        sent_at, full_report_at = time.monotonic(), self._full_report_at
        has_all = sent_at >= full_report_at
        report = self._make_report(self._held if has_all else self._changed, has_all=has_all)
        self._changed = set()
        # Unless this report is answered, the next one has all sandboxes: this one may not have been read.
        self._full_report_at = 0.0
        answer = await client.ask(
            "POST",
            f"{self._settings.controller}/nodes/{self.node_id}",
            headers={NODE_KEY_HEADER: self._settings.key, "content-type": "application/json"},
            content=report.model_dump_json().encode(),
            limit_s=limit_s,
        )
        if not answer.is_success:
            raise RequestFailed(f"it answered {answer.status}")
        reply = NodeReply.model_validate_json(answer.body)
        self._answered_at = time.monotonic()
        if reply.wants_all:
            self._news.set()
            return
        self._full_report_at = sent_at + HEARTBEAT_S if has_all else full_report_at
        for reported in report.sandboxes:
            held = self._held.get(reported.runtime_id)
            # The controller knows of its end, which need not be reported again.
            if held is not None and reported.state == held.state and held.is_over:
                del self._held[reported.runtime_id]
        for runtime_id in reply.to_stop:
            if (held := self._held.get(runtime_id)) is not None and not held.is_over:
                task = asyncio.create_task(self._stop(held, "the controller does not want it any more"))
                self._stopping.add(task)
                task.add_done_callback(self._stopping.discard)

    def _make_report(self, runtime_ids: Iterable[str], *, has_all: bool) -> NodeReport:
        return NodeReport(
            node_id=self.node_id,
            host=platform.node(),
            url=self._url,
            boot_id=read_boot_id(),
            pid=os.getpid(),
            capacity=self._capacity,
            backends=self._settings.make.backends,
            is_draining=self._is_draining,
            ends_in_s=self._left_s(),
            sandboxes=tuple(self._held[name].report() for name in runtime_ids if name in self._held),
            has_all=has_all,
            metrics={
                **{name: float(count) for name, count in self._counts.items()},
                **self._starter.metrics(),
            },
        )

    # Orders.

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await serve_connection(
                reader, writer, self._answer, admit=self._admit, max_body_bytes=_MAX_ORDER_BYTES
            )
        except asyncio.CancelledError:
            # The agent ends; asyncio would log a traceback for each idle connection.
            pass
        finally:
            writer.close()

    async def _answer(self, request: Request) -> Answer | Upgrade:
        if request.path == "/health":
            return json_answer({"status": "ok"})
        value: Any
        match request.method, request.path.strip("/").split("/"):
            case "POST", ["sandboxes"]:
                value = await self._take_order(NodeOrder.model_validate_json(request.body))
            case "GET" | "DELETE" as method, ["sandboxes", runtime_id]:
                held = self._find(runtime_id)
                if method == "DELETE":
                    await self._stop(held, request.query_field("cause", "it was asked for"))
                value = held.report()
            case "POST", ["sandboxes", runtime_id, "pause" | "resume" as verb]:
                value = await self._operate(self._find(runtime_id), verb)
            case _:
                raise HttpError(404, "Not Found")
        return json_answer(value)

    def _admit(self, path: str, headers: Mapping[str, str]) -> None:
        """Refuse a request without the key before its body is read."""
        if path != "/health" and not has_key(headers, NODE_KEY_HEADER, self._settings.key):
            raise HttpError(401, f"{NODE_KEY_HEADER} is missing or wrong")

    async def _take_order(self, order: NodeOrder) -> NodeAnswer:
        held = self._held.get(order.runtime_id)
        if held is None:
            if self._is_draining or self._ending.is_set():
                raise HttpError(503, "this node takes nothing new: it ends soon")
            held = HeldSandbox(order, self._starter, partial(self._note_change, order.runtime_id))
            self._held[order.runtime_id] = held
            self._counts["node_orders_total"] += 1
            await held.start(self._settings.host)
        return NodeAnswer(url=held.url)

    async def _operate(self, held: HeldSandbox, verb: str) -> SandboxReport:
        try:
            if verb == "pause":
                await held.pause()
            else:
                await held.resume()
        except SandboxError as error:
            raise HttpError(409 if error.kind == "state" else 500, given_of(error)) from error
        return held.report()

    def _note_change(self, runtime_id: str) -> None:
        self._changed.add(runtime_id)
        self._news.set()

    def _find(self, runtime_id: str) -> HeldSandbox:
        held = self._held.get(runtime_id)
        if held is None:
            raise HttpError(404, f"there is no sandbox {runtime_id!r} here")
        return held

    async def _stop(self, held: HeldSandbox, cause: str) -> None:
        async with self._stop_turn:
            await held.stop(cause)
        self._counts["node_stops_total"] += 1


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeOptions:
    """The options of `strop runtime node`, unparsed."""

    controller: str
    key_file: Path
    host: str = "127.0.0.1"
    backends: tuple[str, ...] = ()
    """Empty: all backends that can make a sandbox here."""
    data_plane: str = "auto"
    network: str = "none"
    image_dirs: tuple[Path, ...] = ()
    registries: tuple[str, ...] = ()
    warm: tuple[str, ...] = ()


async def serve_node(options: NodeOptions, *, say: Callable[[str], None]) -> None:
    """Run a node agent until SIGTERM or SIGINT, or until its controller is gone.

    Raises: ConfigError for invalid options; SandboxRefused if no backend works here; CheckRefused if the
        address cannot be listened on.
    """
    settings = await _read_options(options, say)
    node = Node(settings)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, node.end)
    say(f"node {node.node_id} makes sandboxes by {', '.join(settings.make.backends)}")
    await node.run()


async def _read_options(options: NodeOptions, say: Callable[[str], None]) -> NodeSettings:
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
    warm = {}
    for word in options.warm:
        image, _, number = word.rpartition("=")
        if not image or not number.isdecimal():
            raise ConfigError(f"--warm {word}", allowed="IMAGE=N, such as host=8", next_step="give it so")
        warm[image] = int(number)
    key_file = options.key_file.resolve()
    folders = tuple(folder.resolve() for folder in options.image_dirs)
    holding = [path for path in (*folders, *map(Path, shown_folders())) if key_file.is_relative_to(path)]
    for path in (*holding, *(path for path in folders if not path.is_dir())):
        raise ConfigError(
            f"{path}, which sandboxes see, {'has the service' if path in holding else 'is no directory'}",
            allowed="directories that have images and no keys, and a service that no sandbox sees",
            next_step="name others with --image-dir, or another folder for the service with --dir",
        )
    backends = await find_backends(options.backends, say)
    return NodeSettings(
        controller=options.controller.rstrip("/"),
        key=read_key(options.key_file),
        make=MakeSettings(
            backends=backends, network=options.network, image_dirs=tuple(map(str, folders)), warm=warm
        ),
        data_plane=DataPlane(options.data_plane),
        registries=options.registries,
        host=options.host,
    )


async def find_backends(wanted: tuple[str, ...], say: Callable[[str], None]) -> tuple[str, ...]:
    """Return the backends that work here. Each is tried by starting a sandbox.

    With none wanted, only those whose programs cannot read the service's keys.

    Raises: SandboxRefused if a wanted backend does not work, or none does; ConfigError for an unknown name.
    """
    working, refusals = [], []
    # Programs of `process` are this user, who may read the service's keys, unless it is root.
    shielding = BACKENDS if os.geteuid() == 0 else tuple(name for name in BACKENDS if name != "process")
    for name in wanted or shielding:
        try:
            await _try_backend(name)
            working.append(name)
        except SandboxRefused as refusal:
            if wanted:
                raise
            refusals.append(refusal)
            say(f"no sandboxes by {name}: {given_of(refusal)}")
    if not working:
        raise refusals[0]
    return tuple(working)


async def _try_backend(name: str) -> None:
    for num_left in reversed(range(_NUM_TRIES)):
        try:
            async with await make_backend(name).create(SandboxSpec(min_level=IsolationLevel.RLIMIT)):
                return
        except SandboxLost:
            # It was killed from outside, which says nothing about the backend.
            if not num_left:
                raise
