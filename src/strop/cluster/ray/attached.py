"""A Ray cluster that is already running, to which a run attaches and which it leaves unchanged.

Its scheduler knows its GPUs, so the run requests them from it, role by role. Its processes have other
environments than the run: roles get the variables that the run needs.
"""

from __future__ import annotations

import asyncio
import os
import sys
import uuid
from pathlib import Path
from typing import Any

from strop.cluster.ray.runtime import CONNECT_ERRORS, connect_to
from strop.errors import CheckRefused
from strop.io.atomic import write_bytes_atomically
from strop.record.fence import ATTEMPT_VARIABLE, GRACE_VARIABLE, NUMBER_VARIABLE

_KNOCK_LIMIT_S = 10.0
_CARRIED = (ATTEMPT_VARIABLE, NUMBER_VARIABLE, GRACE_VARIABLE, "HF_HOME", "HF_HUB_OFFLINE", "STROP_CACHE")


class AttachedCluster:
    """The cluster at `ray.address`, with this process connected to it."""

    def __init__(self, address: str, work_dir: Path, num_nodes: int) -> None:
        """`work_dir`: for a mark file; a role that sees it shares the run's disk."""
        self._address = address
        self._num_nodes = num_nodes
        self._is_connected = False
        self.mark_path = work_dir / "attached"

    async def start(self) -> str:
        """Connect this process; return the address.

        Raises: CheckRefused if no cluster answers there, it has other software, or this machine is none of
            its nodes; StoreError if `work_dir` cannot be written.
        """
        host, colon, port = self._address.rpartition(":")
        try:
            if colon and port.isdecimal():
                # Ray itself would retry for minutes.
                knock = asyncio.open_connection(host.strip("[]"), int(port))
                (await asyncio.wait_for(knock, _KNOCK_LIMIT_S))[1].close()
            paths = os.pathsep.join(path for path in sys.path if path)
            carried = {name: os.environ[name] for name in _CARRIED if name in os.environ}
            # A unique name, so that actors of two runs on one cluster do not collide.
            namespace = f"strop-{uuid.uuid4().hex[:12]}"
            address = await connect_to(self._address, namespace, {"PYTHONPATH": paths, **carried})
        except (OSError, *CONNECT_ERRORS) as error:
            raise CheckRefused(
                f"ray.address={self._address}: nothing answers there ({' '.join(repr(error).split())[:400]})",
                allowed="the address of a cluster with this Ray and Python, or 'auto' on a node of it",
                next_step="look at `ray status` there, or leave ray.address out: the run starts its own",
            ) from error
        self._is_connected = True
        self.mark_path.parent.mkdir(parents=True, exist_ok=True)
        write_bytes_atomically(self.mark_path, self._address.encode())
        return address

    async def await_nodes(self) -> list[dict[str, Any]]:
        """Return the nodes of the run as Ray shows them: this machine's first, then those with the most GPUs.

        Raises: CheckRefused if the cluster has fewer nodes than the job needs; it will not grow.
        """
        import ray

        own_id = ray.get_runtime_context().get_node_id()
        nodes = [node for node in ray.nodes() if node["Alive"]]
        nodes.sort(key=lambda node: (node["NodeID"] != own_id, -node["Resources"].get("GPU", 0.0)))
        if len(nodes) < self._num_nodes:
            raise CheckRefused(
                f"the Ray cluster at {self._address} has {len(nodes)} nodes, and job.nodes is"
                f" {self._num_nodes}",
                allowed="as many nodes as the cluster has, or fewer",
                next_step="lower job.nodes",
            )
        return nodes[: self._num_nodes]

    def find_death(self) -> str | None:
        """Return None: the cluster outlives the run."""
        return None

    async def stop(self) -> None:
        """Disconnect; the cluster keeps running. May be called at any time, and twice."""
        if self._is_connected:
            import ray

            self._is_connected = False
            await asyncio.to_thread(ray.shutdown)
        self.mark_path.unlink(missing_ok=True)
