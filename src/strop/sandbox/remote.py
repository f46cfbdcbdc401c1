"""The client's side of the sandboxes of a service, on other machines.

The service starts a sandbox; the client uses it over one connection to its address at the node,
with the same frames as for a supervisor of this machine. The sandbox ends with that connection. Address and
key of the service were passed to this process.
"""

from __future__ import annotations

import asyncio
import json
import socket
import time
import uuid
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack, ExitStack, suppress
from dataclasses import asdict
from functools import partial
from typing import Any, NoReturn, Self
from urllib.parse import urlencode, urlsplit

from strop.errors import SandboxError, SandboxLost, SandboxRefused
from strop.io.endpoints import RUNTIME, Endpoint, find_endpoint
from strop.sandbox.allowlist import refuse_network
from strop.sandbox.client import Client
from strop.sandbox.contract import ExecResult, SandboxSpec
from strop.sandbox.served import ServedSandbox, read_isolation
from strop.sandbox.wire import (
    CONNECT_PATH,
    FRAMES_PATH,
    MAX_BODY_BYTES,
    PROTOCOL,
    SANDBOX_KEY_HEADER,
    SERVICE_KEY_HEADER,
    keep_alive,
)

_NAME = "remote"
_HOST_IMAGE = "host"
_ANSWER_LIMIT_S = 30.0
_STOP_LIMIT_S = 10.0
PATIENCE_S = 5.0
"""How long an unanswered request is repeated; a service that was killed may be back by then."""
_AGAIN_AFTER_S = 0.2
_UNACKNOWLEDGED_MS = 25_000
_KINDS = {"image_error": "image", "capacity": "capacity"}
"""Kinds of refusal, by a record's failure kind, where the node reports none."""
_CHUNK_BYTES = 1 << 16


def find_service() -> RemoteBackend:
    """Return the service that was passed to this process. Raises: SandboxRefused with kind service."""
    endpoint = find_endpoint(RUNTIME)
    if endpoint is None:
        raise SandboxRefused(
            "no sandbox service was handed to this process",
            allowed="a run that has one: runtime.serve, or runtime.url with runtime.key_file",
            next_step="set one of them, or choose a sandbox of this machine",
            kind="service",
        )
    return RemoteBackend(endpoint)


async def require_service(endpoint: Endpoint) -> None:
    """Refuse a service that does not answer, or does not accept its key.

    Raises: SandboxRefused with kind service or key.
    """
    async with _Service(endpoint) as service:
        await service.list_all()


class RemoteBackend:
    """Make sandboxes by a service."""

    name = _NAME

    def __init__(self, endpoint: Endpoint) -> None:
        self.endpoint = endpoint

    async def create(self, spec: SandboxSpec, *, main_source: str = "") -> RemoteSandbox:
        """Return a fresh sandbox; see `SandboxBackend.create`. Waits while the service queues the request.

        `main_source`: Python that defines `main`, for `run_main`. It is loaded inside at each call.

        Raises: SandboxRefused with kind network, mounts, gpus, key, limits, capacity, service if it
        does not answer, lost if the node was lost, or a kind of the node's backend (`LocalBackend.create`).
        """
        refuse_network(spec.network, _NAME)
        _refuse_own(spec)
        async with AsyncExitStack() as stack:
            async with _Service(self.endpoint) as service:
                record = await service.start(spec)
                end = partial(_stop, self.endpoint, record["runtime_id"])
                stack.push_async_callback(end)
                record = await service.wait_ready(record)
            address = _Address(record["node_url"] or record["url"], record["session_api_key"])
            try:
                client = Client(await address.open(FRAMES_PATH), _NAME, max_body_bytes=MAX_BODY_BYTES)
                stack.callback(client.close)
                reply, _ = await client.ask({"op": "describe"})
            except (OSError, SandboxError) as error:
                raise _refused(f"sandbox {record['runtime_id']} was lost: {error}", "lost") from error
            made = RemoteSandbox(client, address, reply, spec, main_source, end)
            for path, data in spec.files.items():
                await made.write(path, data)
            # All files are written: the sandbox is the caller's.
            stack.pop_all()
        return made


class RemoteSandbox(ServedSandbox):
    """A sandbox at a node of a service; see `Sandbox`. Usable from one event loop."""

    def __init__(
        self,
        client: Client,
        address: _Address,
        reply: dict[str, Any],
        spec: SandboxSpec,
        main_source: str,
        end: Callable[[], Awaitable[None]],
    ) -> None:
        """`end` asks the service to end the sandbox."""
        super().__init__(
            client,
            read_isolation(reply["isolation"]),
            scratch=reply["scratch"],
            env=spec.env,
            python_argv=tuple(reply["python_argv"]),
            supervisor_pid=reply["supervisor_pid"],
        )
        self.address = address
        """The sandbox's address at its node."""
        self._main_source = main_source
        self._end = end

    async def run_main(self, *, wall_limit_s: float, stdin: bytes = b"") -> ExecResult:
        """Run the sandbox's `main`; see `ServedSandbox.run_main`."""
        argv = [*self.python_argv, "-c", f"{self._main_source}\nmain()\n"]
        return await self.exec(argv, wall_limit_s=wall_limit_s, stdin=stdin)

    async def connect(self, address: int | str) -> socket.socket:
        """Return a connection to a server inside; see `Sandbox.connect`."""
        if self.is_lost:
            raise self.client.lost(self.client.lost_kind)
        query = {"port": address} if isinstance(address, int) else {"path": address}
        try:
            connection = await self.address.open(f"{CONNECT_PATH}?{urlencode(query)}")
        except OSError as error:
            raise self.client.lost("infra", str(error)) from error
        connection.setblocking(True)
        return connection

    async def stop(self) -> None:
        """End everything in it; see `Sandbox.stop`."""
        self.client.lost_kind = self.client.lost_kind or "stopped"
        await self._end()
        # If the service did not answer, the node ends the sandbox.
        await super().stop()


class _Address:
    """The address and the key of a sandbox at its node."""

    def __init__(self, url: str, key: str) -> None:
        where = urlsplit(url)
        self._host, self._port = where.hostname or "", where.port or 80
        self.url, self.key = url, key

    async def open(self, target: str) -> socket.socket:
        """Return a non-blocking connection, once the node has upgraded it.

        Raises: OSError if it does not; SandboxError with the kind of the node's refusal.
        """
        loop = asyncio.get_running_loop()
        addresses = await loop.getaddrinfo(self._host, self._port, type=socket.SOCK_STREAM)
        family, kind, protocol, _, place = addresses[0]
        with ExitStack() as stack:
            connection = stack.enter_context(socket.socket(family, kind, protocol))
            connection.setblocking(False)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            keep_alive(connection)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _UNACKNOWLEDGED_MS)
            async with asyncio.timeout(_ANSWER_LIMIT_S):
                await loop.sock_connect(connection, place)
                await self._upgrade(connection, target)
            # The connection is the caller's.
            stack.pop_all()
        return connection

    async def _upgrade(self, connection: socket.socket, target: str) -> None:
        import h11

        loop = asyncio.get_running_loop()
        http = h11.Connection(h11.CLIENT)
        headers = [
            ("host", f"{self._host}:{self._port}"),
            ("connection", "upgrade"),
            ("upgrade", PROTOCOL),
            (SANDBOX_KEY_HEADER, self.key),
        ]
        request = h11.Request(method="GET", target=target, headers=headers)
        await loop.sock_sendall(connection, http.send(request) + http.send(h11.EndOfMessage()))
        status, body = 0, b""
        while True:
            event = http.next_event()
            if event is h11.NEED_DATA:
                http.receive_data(await loop.sock_recv(connection, _CHUNK_BYTES))
            elif isinstance(event, h11.InformationalResponse) and event.status_code == 101:
                return
            elif isinstance(event, h11.Response):
                status = event.status_code
            elif isinstance(event, h11.Data):
                body += event.data
            elif isinstance(event, h11.EndOfMessage):
                _raise_refusal(status, body)
            else:
                raise ConnectionError("the node closed the connection")


def _raise_refusal(status: int, body: bytes) -> NoReturn:
    try:
        reply = json.loads(body)
    except ValueError:
        reply = {}
    if not reply.get("kind"):
        raise ConnectionError(f"the node answered {status} {reply.get('detail', '')}")
    kind, why = reply["kind"], reply["detail"]
    error = SandboxLost if kind in ("stopped", "from_inside", "infra") else SandboxError
    raise error(
        f"the remote sandbox could not do it: {why}",
        allowed="an operation that its current state allows",
        next_step="wait until something listens there",
        kind=kind,
    )


class _Service:
    """A connection to a service, closed by leaving its `async with` block."""

    def __init__(self, endpoint: Endpoint) -> None:
        import httpx

        self._url = endpoint.url
        self._http = httpx.AsyncClient(
            base_url=endpoint.url,
            headers={SERVICE_KEY_HEADER: endpoint.key},
            # Proxies in the environment lead out of the cluster; the service is inside.
            trust_env=False,
            verify=endpoint.url.startswith("https:"),
            timeout=_ANSWER_LIMIT_S,
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.aclose()

    async def start(self, spec: SandboxSpec) -> dict[str, Any]:
        terms = {
            "limits": asdict(spec.limits),
            "user": spec.user,
            "network": spec.network,
            "has_workspace": spec.has_workspace,
            "min_level": int(spec.min_level),
        }
        body = {
            "image": spec.image or _HOST_IMAGE,
            "command": _NAME,
            "session_id": uuid.uuid4().hex,
            "sandbox": terms,
        }
        return await self._ask("POST", "/start", body)

    async def wait_ready(self, record: dict[str, Any]) -> dict[str, Any]:
        """Return a sandbox's record once it is ready. Raises: SandboxRefused if it failed or was stopped."""
        while record["pod_status"] != "ready":
            if record["status"] in ("error", "stopped"):
                failure = record["failure_kind"] or ""
                kind = record["refusal"] or _KINDS.get(failure, "lost")
                raise _refused(record["cause"] or "it was stopped", kind)
            record = await self._ask("GET", f"/sessions/{record['session_id']}")
        return record

    async def list_all(self) -> dict[str, Any]:
        return await self._ask("GET", "/list")

    async def stop(self, runtime_id: str) -> None:
        """End a sandbox, if the service answers."""
        import httpx

        with suppress(httpx.HTTPError):
            await self._http.post("/stop", json={"runtime_id": runtime_id}, timeout=_STOP_LIMIT_S)

    async def _ask(self, method: str, path: str, body: Any = None) -> dict[str, Any]:
        """Send a request, and repeat it if nothing answers; a start repeated in one session is one start.

        Raises: SandboxRefused with kind key, limits, capacity or service.
        """
        import httpx

        deadline = time.monotonic() + PATIENCE_S
        while True:
            try:
                answer = await self._http.request(method, path, json=body)
                break
            except httpx.HTTPError as error:
                if time.monotonic() > deadline:
                    why = f"{self._url} does not answer: {type(error).__name__} {error}"
                    raise _refused(why, "service") from error
                await asyncio.sleep(_AGAIN_AFTER_S)
        try:
            content = answer.json()
        except ValueError:
            content = None
        if not answer.is_success or not isinstance(content, dict):
            detail = content.get("detail", "") if isinstance(content, dict) else answer.text[:200]
            kind = {401: "key", 422: "limits", 429: "capacity"}.get(answer.status_code, "service")
            raise _refused(f"{self._url} answered {answer.status_code}: {detail}", kind)
        return content


async def _stop(endpoint: Endpoint, runtime_id: str) -> None:
    async with _Service(endpoint) as service:
        await service.stop(runtime_id)


_NEXT_STEPS = {
    "key": "hand over the service's own key: its file is runtime.key_file",
    "limits": "change what the message names",
    "capacity": "ask for less, or let the service have more nodes",
    "service": "look whether the service runs: its log is in the run's folder `runtime`",
    "lost": "ask for another one",
}


def _refused(why: str, kind: str) -> SandboxRefused:
    return SandboxRefused(
        f"no remote sandbox was created: {why}",
        allowed="a sandbox that a node of the service supports and has room for",
        next_step=_NEXT_STEPS.get(kind, "look at its message, and at the service's nodes"),
        kind=kind,
    )


def _refuse_own(spec: SandboxSpec) -> None:
    """Refuse resources that only this machine has. Raises: SandboxRefused with kind mounts or gpus."""
    if spec.gpus:
        raise SandboxRefused(
            f"GPUs {', '.join(spec.gpus)} of this machine for a remote sandbox",
            allowed="GPUs for sandboxes of this machine: bubblewrap, podman, docker",
            next_step="leave them out, or choose one of these backends",
            kind="gpus",
        )
    if spec.mounts:
        raise SandboxRefused(
            "mounts of this machine for a remote sandbox",
            allowed="files that are written or uploaded into it",
            next_step="give them as files of the spec, or choose a backend of this machine",
            kind="mounts",
        )
