"""Hosts on the nodes of a Ray cluster: one actor on each node, also on those that join later.

The service starts the head; other nodes join by `strop runtime join`, with the address and the token in the
service's folder. All of Ray ends with the service. Ray tells when an actor or its node dies.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import sys
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from strop.cluster.ray.node import require_ray
from strop.cluster.ray.runtime import RayHead
from strop.errors import SandboxError, SandboxLost
from strop.hardware.ports import NODE_VARIABLE, NUM_NODES_VARIABLE, find_host_address
from strop.io.endpoints import Endpoint, withdraw, write_endpoint
from strop.record.fence import RAY_ADDRESS, RAY_TOKEN_PATH
from strop.runtime.contract import Options, Slot, StartRequest
from strop.runtime.gate import Gate, dial
from strop.runtime.host import HostFacts, LocalHost, Server
from strop.runtime.service import Service
from strop.runtime.service_dir import START_LIMIT_S, wait_for_server
from strop.sandbox.hosts import HostRequests, SandboxHost, answer_of
from strop.sandbox.served import ServedSandbox
from strop.spec.layout import RAY_NODE_MODULE

RAY = "ray"
"""The name of the head's address in the service's folder."""
_TOKEN = "ray.token"
_LOOK_EVERY_S = 2.0
_log = logging.getLogger("strop.runtime.cluster")


class NodeHost(SandboxHost):
    """The host of a node: an actor, which also holds a port there for each server in a sandbox."""

    def __init__(self, options: Options) -> None:
        super().__init__()
        self._local = LocalHost(options)
        self._gates: dict[str, Gate] = {}

    async def open(self) -> HostFacts:
        """Prepare it; see `LocalHost.open`."""
        return await self._local.open()

    async def make(self, name: str, request: StartRequest, slot: Slot) -> tuple[dict[str, Any], str, Server]:
        """Make a sandbox; return its properties, the address of its server, and how that is started.

        Raises: as `Host.make`; CheckRefused if no port can be held.
        """
        sandbox, server = await self._local.make(request, slot)
        properties = self.hold(name, sandbox)
        address = find_host_address(2, os.environ.get("GLOO_SOCKET_IFNAME"))
        gate = self._gates[name] = Gate(address)
        await gate.open(partial(sandbox.connect, server.port))
        return properties, gate.url, server

    async def end(self, name: str) -> bool:
        """End a sandbox and release its port; see `SandboxHost.end`."""
        if (gate := self._gates.pop(name, None)) is not None:
            await gate.close()
        return await super().end(name)

    async def stay(self) -> None:
        """Wait until the actor dies."""
        await asyncio.Event().wait()


class NodeSandbox(ServedSandbox):
    """A sandbox of a `NodeHost`."""

    def __init__(self, requests: HostRequests, url: str, **properties: Any) -> None:
        super().__init__(requests, env={}, **properties)
        self._url = url

    async def connect(self, address: int | str) -> socket.socket:
        """Return a connection to its server, whose port is `address`. Raises: OSError."""
        return await dial(self._url)


class RayHost:
    """A `Host` that is an actor on another node."""

    def __init__(self, options: Options, ray_id: str) -> None:
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        # The service's own queue shares out the nodes' resources; Ray only has to pin the actor to its node.
        here = NodeAffinitySchedulingStrategy(ray_id, soft=False)
        make = ray.remote(NodeHost).options(num_cpus=0, max_concurrency=100_000, scheduling_strategy=here)
        self.actor: Any = make.remote(options)

    async def make(self, request: StartRequest, slot: Slot) -> tuple[NodeSandbox, Server]:
        """Return a fresh sandbox; see `Host.make`."""
        requests = HostRequests(self.actor)
        making = requests.keep(requests.make(self.actor.make, request, slot))
        try:
            properties, url, server = await asyncio.shield(making)
        except BaseException:
            # Nobody will have it, and only what was made can be ended.
            making.add_done_callback(lambda _: requests.close())
            raise
        return NodeSandbox(requests, url, **properties), server


class RayHosts:
    """The Ray cluster of a service, with a host on each node."""

    def __init__(self, options: Options, service: Service) -> None:
        """The service's folder gets the address and the token, and has to be seen by all nodes."""
        require_ray()
        for name in (RAY_ADDRESS, RAY_TOKEN_PATH):
            # Those of a job are for the cluster of its run.
            os.environ.pop(name, None)
        self._options = options
        self._service = service
        withdraw(options.folder, (RAY,))
        self._head = RayHead(options.folder, options.num_nodes, options.folder / _TOKEN)
        self._known: dict[str, asyncio.Task[None] | None] = {}
        """The watch of each node's host, by Ray's id of the node; None where none works."""
        self._looking: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Start Ray, wait for the first host, and look for further ones from then on.

        Raises: EngineError if Ray does not start; SandboxRefused if no sandbox can be made on the first node.
        """
        write_endpoint(self._options.folder, RAY, Endpoint(url=f"tcp://{await self._head.start()}", key=""))
        await self._add_new()
        self._looking = asyncio.create_task(self._keep_looking())

    async def stop(self) -> None:
        """End all of Ray."""
        for task in filter(None, (self._looking, *self._known.values())):
            task.cancel()
        withdraw(self._options.folder, (RAY,))
        await self._head.stop()

    async def _keep_looking(self) -> None:
        while True:
            await asyncio.sleep(_LOOK_EVERY_S)
            await self._add_new()

    async def _add_new(self) -> None:
        """Make a host on each node that has joined, and anew where one was lost and its node is alive."""
        import ray

        nodes = await asyncio.to_thread(ray.nodes)
        new = [one for one in nodes if one["Alive"] and one["NodeID"] not in self._known]
        await asyncio.gather(*(self._add(one["NodeID"], one["NodeName"]) for one in new))

    async def _add(self, ray_id: str, name: str) -> None:
        host = RayHost(self._options, ray_id)
        self._known[ray_id] = None
        try:
            facts: HostFacts = await answer_of(host.actor.open.remote(), _lost)
        except SandboxError as error:
            if self._looking is None and not self._service.nodes:
                raise
            _log.warning("node %s has no sandboxes: %s", name, error)
            return
        node_id = f"{name}-{ray_id[:8]}"
        self._service.add_host(node_id, host, facts)
        self._known[ray_id] = asyncio.create_task(self._watch(ray_id, node_id, host))

    async def _watch(self, ray_id: str, node_id: str, host: RayHost) -> None:
        try:
            await answer_of(host.actor.stay.remote(), _lost)
        except SandboxLost as error:
            self._service.drop_host(node_id, str(error))
        del self._known[ray_id]


def _lost(why: str) -> SandboxLost:
    return SandboxLost(why, kind="infra")


def join(folder: Path) -> NoReturn:
    """Become a node of a service's Ray cluster, until the service ends.

    Raises: CheckRefused if there is no service of several nodes.
    """
    found = asyncio.run(wait_for_server(folder.absolute(), RAY, limit_s=START_LIMIT_S))
    index = os.environ.get(NODE_VARIABLE, "0")
    environ = {
        **os.environ,
        RAY_ADDRESS: found.url.removeprefix("tcp://"),
        RAY_TOKEN_PATH: str(folder.absolute() / _TOKEN),
        # 0 is the head.
        NODE_VARIABLE: index if index != "0" else "1",
        NUM_NODES_VARIABLE: "2",
    }
    words = [sys.executable, "-P", "-m", RAY_NODE_MODULE, str(folder.absolute())]
    os.execve(sys.executable, words, environ)
