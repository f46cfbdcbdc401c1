"""Hosts on the nodes of a Ray cluster: one actor on each node, also on those that join later.

The service starts the head; other nodes join by `strop runtime join`, with the address and the token in the
service's folder. All of Ray ends with the service. Ray tells when an actor or its node dies.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import Awaitable
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn, TypeVar, cast

from strop.cluster.ray.node import find_own_address
from strop.cluster.ray.runtime import TOKEN_NAME, RayHead
from strop.cluster.ray.settings import NodeSettings, check_object_store, choose_temp_dir, require_ray
from strop.errors import SandboxError, SandboxRefused
from strop.hardware.leftovers import SHARED_MEMORY
from strop.hardware.ports import NODE_VARIABLE
from strop.record.fence import ATTEMPT_VARIABLE, ROLES_FOLDER, rendezvous_path
from strop.runtime.contract import HostFacts, Order, SandboxReport
from strop.runtime.host import HostSettings, SandboxHost
from strop.runtime.ports import Gate
from strop.runtime.service import HostFailed, Service
from strop.spec.layout import RAY_NODE_MODULE

_LOOK_EVERY_S = 2.0
_CLOSE_LIMIT_S = 30.0
T = TypeVar("T")


class RayHost:
    """A `SandboxHost` that is an actor on another node. Raises `HostFailed` once it is dead."""

    def __init__(self, settings: HostSettings, ray_id: str) -> None:
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        # The service's own queue shares out the nodes' resources; Ray only has to pin the actor to its node.
        here = NodeAffinitySchedulingStrategy(ray_id, soft=False)
        actor = ray.remote(SandboxHost).options(num_cpus=0, scheduling_strategy=here)
        self._actor: Any = actor.remote(settings)

    async def open(self) -> HostFacts:
        """Prepare it. Raises: SandboxRefused as `SandboxHost.open`."""
        return await _answer_of(self._actor.open.remote())

    async def facts(self) -> HostFacts:
        """Return its facts."""
        return await _answer_of(self._actor.facts.remote())

    async def start(self, order: Order, gate: Gate | None = None) -> str:
        """Begin to make a sandbox; return its address at that node."""
        return await _answer_of(self._actor.start.remote(order))

    async def stop(self, runtime_id: str, cause: str) -> None:
        """End a sandbox."""
        await _answer_of(self._actor.stop.remote(runtime_id, cause))

    async def pause(self, runtime_id: str) -> SandboxReport:
        """Freeze a sandbox. Raises: SandboxError."""
        return await _answer_of(self._actor.pause.remote(runtime_id))

    async def resume(self, runtime_id: str) -> SandboxReport:
        """Continue a sandbox. Raises: SandboxError."""
        return await _answer_of(self._actor.resume.remote(runtime_id))

    async def states(self, wait_s: float) -> list[SandboxReport]:
        """Return what has changed."""
        return await _answer_of(self._actor.states.remote(wait_s))

    async def close(self) -> None:
        """End all sandboxes."""
        with suppress(TimeoutError):
            async with asyncio.timeout(_CLOSE_LIMIT_S):
                await _answer_of(self._actor.close.remote())


async def _answer_of(call: Awaitable[T]) -> T:
    """Return the answer of an actor. Raises: its own errors; HostFailed if it is dead."""
    from ray.exceptions import RayError, RayTaskError

    try:
        return await call
    except RayTaskError as error:
        raise cast(RayTaskError, error).cause from error
    except RayError as error:
        raise HostFailed(f"{type(error).__name__}: {str(error).splitlines()[0]}") from error


class RayHosts:
    """The Ray cluster of a service, with a host on each node."""

    def __init__(self, settings: HostSettings, folder: Path, service: Service, num_nodes: int) -> None:
        """`folder` gets the address and the token, and has to be seen by all nodes."""
        require_ray()
        check_object_store()
        self._settings = settings
        self._service = service
        temp_dir = choose_temp_dir()
        node = NodeSettings(
            temp_dir=str(temp_dir),
            shared_dir=str(choose_temp_dir(SHARED_MEMORY)),
            token_path=str(temp_dir.with_name(f"{temp_dir.name}.{TOKEN_NAME}")),
            log_path=str(folder / "ray.log"),
            keep_logs_dir=str(folder / "ray"),
            host=find_own_address(os.environ, num_nodes),
            num_cpus=os.cpu_count() or 1,
        )
        path = _rendezvous_of(folder)
        path.parent.mkdir(parents=True, exist_ok=True)
        self._head = RayHead(node, path)
        self._known: dict[str, str] = {}
        """The host of each node, by Ray's id of the node; empty where none works."""
        self._looking: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Start Ray, wait for the first host, and look for further ones from then on.

        Raises: EngineError if Ray does not start; SandboxRefused if no sandbox can be made on the first node.
        """
        self._head.launch()
        await self._head.connect()
        await self._add_new()
        self._looking = asyncio.create_task(self._keep_looking())

    async def stop(self) -> None:
        """End all of Ray."""
        if self._looking is not None:
            self._looking.cancel()
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
            self._service.write_event(
                {"at": time.time(), "event": "node_refused", "node": name, "cause": str(error)}
            )
            return
        self._known[ray_id] = f"{name}-{ray_id[:8]}"
        self._service.add_host(self._known[ray_id], host, facts, is_here=False)


def _rendezvous_of(folder: Path) -> Path:
    """Return the file by which nodes meet, with the address and the token."""
    return rendezvous_path(folder / ROLES_FOLDER, os.environ.get(ATTEMPT_VARIABLE, "local"))


def join(folder: Path) -> NoReturn:
    """Become a node of a service's Ray cluster, once there is one and until it ends."""
    # 0 is the head.
    index = os.environ.get(NODE_VARIABLE, "0")
    environ = {**os.environ, NODE_VARIABLE: index if index != "0" else "1"}
    os.execve(sys.executable, [sys.executable, "-P", "-m", RAY_NODE_MODULE, str(folder.absolute())], environ)
