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
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

from strop.cluster.ray.node import require_ray
from strop.cluster.ray.runtime import RayHead
from strop.errors import CheckRefused, SandboxError, SandboxRefused
from strop.hardware.ports import NODE_VARIABLE, NUM_NODES_VARIABLE
from strop.io.atomic import write_bytes_atomically
from strop.record.fence import RAY_ADDRESS, RAY_TOKEN_PATH
from strop.runtime.contract import HostFacts, Order, SandboxReport
from strop.runtime.gate import dial
from strop.runtime.host import HostFailed, HostSettings, SandboxHost
from strop.runtime.service import Service
from strop.runtime.service_dir import START_LIMIT_S
from strop.sandbox.hosts import answer_of
from strop.spec.layout import RAY_NODE_MODULE

_LOOK_EVERY_S = 2.0
_CLOSE_LIMIT_S = 30.0
_POLL_S = 0.2
_log = logging.getLogger("strop.runtime.cluster")


class RayHost:
    """A `SandboxHost` that is an actor on another node. Raises `HostFailed` once it is dead."""

    def __init__(self, settings: HostSettings, ray_id: str) -> None:
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        # The service's own queue shares out the nodes' resources; Ray only has to pin the actor to its node.
        here = NodeAffinitySchedulingStrategy(ray_id, soft=False)
        actor = ray.remote(SandboxHost).options(num_cpus=0, scheduling_strategy=here)
        self._actor: Any = actor.remote(settings)
        self._urls: dict[str, str] = {}
        """Addresses at its node, by runtime id."""

    async def open(self) -> HostFacts:
        """Prepare it. Raises: SandboxRefused as `SandboxHost.open`."""
        return await answer_of(self._actor.open.remote(), HostFailed)

    async def start(self, order: Order) -> None:
        """Begin to make a sandbox, and have it listen at its node. Raises: CheckRefused."""
        await answer_of(self._actor.start.remote(order), HostFailed)
        self._urls[order.runtime_id] = await answer_of(
            self._actor.listen.remote(order.runtime_id), HostFailed
        )

    async def connect(self, runtime_id: str) -> socket.socket:
        """Return a connection to a sandbox's address at its node. Raises: OSError."""
        if runtime_id not in self._urls:
            raise ConnectionError("the sandbox is not placed yet")
        return await dial(self._urls[runtime_id])

    async def stop(self, runtime_id: str, cause: str) -> None:
        """End a sandbox."""
        self._urls.pop(runtime_id, None)
        await answer_of(self._actor.stop.remote(runtime_id, cause), HostFailed)

    async def pause(self, runtime_id: str) -> SandboxReport:
        """Freeze a sandbox. Raises: SandboxError."""
        return await answer_of(self._actor.pause.remote(runtime_id), HostFailed)

    async def resume(self, runtime_id: str) -> SandboxReport:
        """Continue a sandbox. Raises: SandboxError."""
        return await answer_of(self._actor.resume.remote(runtime_id), HostFailed)

    async def states(self, wait_s: float) -> list[SandboxReport]:
        """Return what has changed."""
        return await answer_of(self._actor.states.remote(wait_s), HostFailed)

    async def close(self) -> None:
        """End all sandboxes."""
        with suppress(TimeoutError):
            async with asyncio.timeout(_CLOSE_LIMIT_S):
                await answer_of(self._actor.close.remote(), HostFailed)


class RayHosts:
    """The Ray cluster of a service, with a host on each node."""

    def __init__(self, settings: HostSettings, folder: Path, service: Service, num_nodes: int) -> None:
        """`folder` gets the address and the token, and has to be seen by all nodes."""
        require_ray()
        for name in (RAY_ADDRESS, RAY_TOKEN_PATH):
            # Those of a job are for the cluster of its run.
            os.environ.pop(name, None)
        self._settings = settings
        self._service = service
        self._num_nodes = num_nodes
        self._address_path = folder / "ray.address"
        self._address_path.unlink(missing_ok=True)
        self._head = RayHead(folder, num_nodes, _token_path(folder))
        self._known: dict[str, str] = {}
        """The host of each node, by Ray's id of the node; empty where none works."""
        self._looking: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Start Ray, wait for the first host, and look for further ones from then on.

        Raises: EngineError if Ray does not start; SandboxRefused if no sandbox can be made on the first node.
        """
        address = await self._head.start()
        write_bytes_atomically(self._address_path, address.encode())
        await self._add_new()
        self._looking = asyncio.create_task(self._keep_looking())

    async def stop(self) -> None:
        """End all of Ray."""
        if self._looking is not None:
            self._looking.cancel()
        self._address_path.unlink(missing_ok=True)
        await self._head.stop()

    async def _keep_looking(self) -> None:
        while True:
            await asyncio.sleep(_LOOK_EVERY_S)
            await self._add_new()

    async def _add_new(self) -> None:
        """Make a host on each node that has joined."""
        import ray

        nodes = await asyncio.to_thread(ray.nodes)
        # A host that was lost is made anew, if its node is alive.
        served = {ray_id for ray_id, host in self._known.items() if not host or host in self._service.nodes}
        new = [one for one in nodes if one["Alive"] and one["NodeID"] not in served]
        await asyncio.gather(*(self._add(one["NodeID"], one["NodeName"]) for one in new))

    async def _add(self, ray_id: str, name: str) -> None:
        host = RayHost(self._settings, ray_id)
        self._known[ray_id] = ""
        try:
            facts = await host.open()
        except (HostFailed, SandboxError) as error:
            if isinstance(error, SandboxRefused) and not self._service.nodes:
                raise
            _log.warning("node %s has no sandboxes: %s", name, error)
            return
        self._known[ray_id] = f"{name}-{ray_id[:8]}"
        self._service.add_host(self._known[ray_id], host, facts)


def _token_path(folder: Path) -> Path:
    return folder / "ray.token"


def join(folder: Path) -> NoReturn:
    """Become a node of a service's Ray cluster, until the service ends.

    Raises: CheckRefused if there is no service of several nodes.
    """
    deadline = time.monotonic() + START_LIMIT_S
    path = folder.absolute() / "ray.address"
    while not path.exists():
        if time.monotonic() > deadline:
            raise CheckRefused(
                f"no service of several nodes has written {path} for {START_LIMIT_S:.0f} s",
                allowed="`strop runtime serve` with several nodes, and a folder on a disk that both see",
                next_step="look at its log; on a cluster, at whether its job has begun",
            )
        time.sleep(_POLL_S)
    index = os.environ.get(NODE_VARIABLE, "0")
    environ = {
        **os.environ,
        RAY_ADDRESS: path.read_text(),
        RAY_TOKEN_PATH: str(_token_path(path.parent)),
        # 0 is the head.
        NODE_VARIABLE: index if index != "0" else "1",
        NUM_NODES_VARIABLE: "2",
    }
    os.execve(sys.executable, [sys.executable, "-P", "-m", RAY_NODE_MODULE, str(path.parent)], environ)
