"""A Ray cluster that is already running, to which a run attaches and which it leaves unchanged.

Its scheduler knows its GPUs, so the run requests them from it, role by role, in one placement group that ends
with the run. Its processes have other environments than the run: roles get the variables that the run needs.
"""

from __future__ import annotations

import asyncio
import os
import sys
import uuid
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from strop.cluster.ray.settings import CONNECT_ERRORS, connect_to
from strop.errors import CheckRefused
from strop.io.atomic import explain_write_failure
from strop.record.fence import ATTEMPT_VARIABLE, GRACE_VARIABLE, NUMBER_VARIABLE
from strop.spec.layout import RoleSlot

_NODE_SHARE = 0.001
"""Share of the resource that Ray gives every node by its address; it only pins a role to the node."""
_KNOCK_LIMIT_S = 10.0
_CARRIED = (ATTEMPT_VARIABLE, NUMBER_VARIABLE, GRACE_VARIABLE, "HF_HOME", "HF_HUB_OFFLINE", "STROP_CACHE")


@dataclass(frozen=True, kw_only=True, slots=True)
class Seats:
    """The bundles of a placement group, and each role's place in it."""

    bundles: Sequence[dict[str, float]]
    indices: Sequence[int]
    """The bundle of each role, in the order of the roles."""
    num_gpus: Sequence[float]
    """GPUs that each role requests; roles that share GPUs request parts of them."""
    variables: Mapping[str, str] = field(default_factory=dict)
    """Variables that the processes of the cluster lack."""


class AttachedCluster:
    """The cluster at `ray.address`, with this process connected to it."""

    def __init__(self, address: str, work_dir: Path, num_nodes: int) -> None:
        """`work_dir`: for a mark file; a role that sees it shares the run's disk."""
        self._address = address
        self._num_nodes = num_nodes
        self._hosts: list[str] = []
        self._is_connected = False
        self.mark_path = work_dir / "attached"

    def launch(self) -> None:
        """Write the mark. Raises: StoreError if `work_dir` cannot be written."""
        try:
            self.mark_path.parent.mkdir(parents=True, exist_ok=True)
            self.mark_path.write_text(self._address)
        except OSError as error:
            raise explain_write_failure(error, self.mark_path) from error

    async def connect(self) -> str:
        """Connect this process, and choose the nodes: this machine's first, then those with the most GPUs.

        Raises: CheckRefused if no cluster answers there, it has other software, or this machine is none of
            its nodes.
        """
        host, colon, port = self._address.rpartition(":")
        try:
            if colon and port.isdecimal():
                # Ray itself would retry for minutes.
                knock = asyncio.open_connection(host.strip("[]"), int(port))
                (await asyncio.wait_for(knock, _KNOCK_LIMIT_S))[1].close()
        except (OSError, TimeoutError) as error:
            raise self._refuse(f"nothing answers there ({str(error) or 'in time'})") from error
        import ray

        try:
            # A unique name, so that actors of two runs on one cluster do not collide.
            address = await connect_to(self._address, f"strop-{uuid.uuid4().hex[:12]}")
        except CONNECT_ERRORS as error:
            raise self._refuse(" ".join(str(error).split())[:400]) from error
        self._is_connected = True
        nodes = [node for node in ray.nodes() if node["Alive"]]
        own = [node for node in nodes if node["NodeID"] == ray.get_runtime_context().get_node_id()]
        others = [node for node in nodes if node not in own]
        others.sort(key=lambda node: -node["Resources"].get("GPU", 0.0))
        chosen = [*own, *others][: self._num_nodes]
        self._hosts = [str(node["NodeManagerAddress"]) for node in chosen]
        return address

    async def await_nodes(self, indices: Iterable[int], limit_s: float) -> None:
        """Raises: CheckRefused if the cluster has fewer nodes than the job needs; it will not grow."""
        wanted = len(list(indices))
        if len(self._hosts) < wanted:
            raise CheckRefused(
                f"the Ray cluster at {self._address} has {len(self._hosts)} nodes, and job.nodes is {wanted}",
                allowed="as many nodes as the cluster has, or fewer",
                next_step="lower job.nodes",
            )

    def reserve(self, slots: Sequence[RoleSlot]) -> Seats:
        """Return one bundle for each share of GPUs, which its roles divide, and one for each other role.

        Raises: CheckRefused if the cluster's nodes have fewer GPUs.
        """
        import ray

        keys = [
            (slot.node, slot.devices) if slot.devices and slot.devices.count else (slot.node, slot.name)
            for slot in slots
        ]
        sharing = Counter(keys)
        order = list(dict.fromkeys(keys))
        bundles, counts = [], []
        for node, share in order:
            count = 0 if isinstance(share, str) else share.count
            gpus = {"GPU": float(count)} if count else {}
            bundles.append({f"node:{self._hosts[node]}": _NODE_SHARE, **gpus})
            counts.append(count)
        total = {str(node["NodeManagerAddress"]): node["Resources"].get("GPU", 0.0) for node in ray.nodes()}
        wanted: Counter[str] = Counter()
        for (node, _), count in zip(order, counts, strict=True):
            wanted[self._hosts[node]] += count
        lacking = [f"{host} has {total[host]:g} of {n}" for host, n in wanted.items() if total[host] < n]
        if lacking:
            raise CheckRefused(
                f"GPUs of the Ray cluster at {self._address}: {', '.join(lacking)}",
                allowed="as many GPUs as Ray knows on a node",
                next_step="ask for fewer in the job section",
            )
        indices = [order.index(key) for key in keys]
        shares = [counts[index] / sharing[key] for index, key in zip(indices, keys, strict=True)]
        # Ray accepts fractions of one GPU, and only whole numbers above.
        num_gpus = [share if share < 1 else float(int(share)) for share in shares]
        paths = os.pathsep.join(path for path in sys.path if path)
        carried = {name: os.environ[name] for name in _CARRIED if name in os.environ}
        return Seats(
            bundles=bundles, indices=indices, num_gpus=num_gpus, variables={"PYTHONPATH": paths} | carried
        )

    def find_death(self) -> str | None:
        """Return None: the cluster outlives the run, and the deaths of its nodes show in its list."""
        return None

    async def stop(self) -> None:
        """Disconnect; the cluster keeps running. May be called at any time, and twice."""
        if self._is_connected:
            import ray

            self._is_connected = False
            await asyncio.to_thread(ray.shutdown)
        self.mark_path.unlink(missing_ok=True)

    def _refuse(self, why: str) -> CheckRefused:
        return CheckRefused(
            f"ray.address={self._address}: {why}",
            allowed="the address of a running cluster with this Ray and Python, or 'auto' on a node of it",
            next_step="look at `ray status` there, or leave ray.address out: the run starts its own",
        )
