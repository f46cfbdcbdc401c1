"""The Ray cluster of one run, on the head: starts it, waits for all nodes, stops it without leftovers.

The token that every connection must carry is in a file that only this user can read: of the job, which its
other nodes read too, or else of this cluster alone.

Covered: one machine on loopback; several nodes, which need to share no disk.
Not covered: encryption between nodes; other users who can read the token's file, such as root.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import time
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from strop.cluster.ray.attached import Seats
from strop.cluster.ray.settings import (
    ADDRESS_NAME,
    AUTH_MODE,
    CONNECT_ERRORS,
    RayNode,
    connect_to,
    disconnect,
    node_resource,
    ray_environment,
    read_index,
)
from strop.errors import CheckRefused, EngineError
from strop.hardware.leftovers import SHARED_MEMORY, remove_dead
from strop.hardware.ports import NODE_VARIABLE, NUM_NODES_VARIABLE
from strop.hardware.process import ChildProcess, spawn, terminate
from strop.io.atomic import explain_write_failure
from strop.io.endpoints import write_secret
from strop.io.variables import set_variables
from strop.record.fence import RAY_ADDRESS, RAY_TOKEN_PATH
from strop.spec.layout import RoleSlot

START_LIMIT_S = 120.0
"""Ray's processes take two to ten seconds."""
_STOP_GRACE_S = 25.0
"""The launcher terminates Ray, then kills it; that takes a second, fifteen at most."""
_POLL_S = 0.05
_NODE_SHARE = 0.001
"""Share of a node's resource that a role requests, which only pins the role to the node."""


@dataclass(frozen=True, kw_only=True, slots=True)
class JoinedNode:
    """A node of the run, as Ray shows it."""

    ray_id: str
    name: str
    address: str
    is_alive: bool
    why: str = ""
    """Reason of its death, from Ray."""


class RayHead:
    """Ray on this machine, which other nodes may join, and this process connected to it."""

    def __init__(self, node: RayNode, num_nodes: int, token_path: Path) -> None:
        """`token_path`: for a new token, where the environment names no file of the job with one."""
        self._node, self._num_nodes = node, num_nodes
        self._own_token_path = None if RAY_TOKEN_PATH in os.environ and num_nodes > 1 else token_path
        self._mode_before = os.environ.get(AUTH_MODE, "disabled")
        self._launcher: ChildProcess | None = None
        self._undo = ExitStack()

    @property
    def mark_path(self) -> Path:
        """A file on this machine's disk: a role that sees it shares that disk."""
        return self._node.logs_dir / "ray.log"

    def reserve(self, slots: Sequence[RoleSlot]) -> Seats:
        """Return one bundle for each role, on its node. GPUs are unknown to this cluster."""
        return Seats(
            bundles=[{node_resource(slot.node): _NODE_SHARE} for slot in slots],
            indices=range(len(slots)),
            num_gpus=[0.0] * len(slots),
        )

    def launch(self) -> None:
        """Start the head's processes, without waiting for them. Raises: StoreError if the disk fails."""
        token_path = self._own_token_path or Path(os.environ[RAY_TOKEN_PATH])
        if self._own_token_path is not None:
            try:
                # A killed start may have left one.
                token_path.unlink(missing_ok=True)
                write_secret(token_path, secrets.token_hex(32))
            except OSError as error:
                raise explain_write_failure(error, token_path) from error
            self._undo.callback(token_path.unlink, missing_ok=True)
        # This process and its children become clients; set before Ray is imported, which reads these once.
        switches = ray_environment({RAY_TOKEN_PATH: str(token_path)}, self._node.host)
        self._undo.enter_context(set_variables(switches))
        told = {RAY_ADDRESS: self._node.address, NODE_VARIABLE: "0", NUM_NODES_VARIABLE: str(self._num_nodes)}
        self._launcher = launcher = spawn(self._node.launcher(), self.mark_path, {**os.environ, **told})
        # A launcher that was killed leaves its directories.
        for folder in (self._node.temp_dir.parent, SHARED_MEMORY):
            self._undo.callback(remove_dead, folder)
        self._undo.callback(terminate, launcher, _STOP_GRACE_S)

    async def connect(self) -> str:
        """Wait until the head answers, and connect this process. Return the address.

        Raises: EngineError with the last log lines if it does not come up.
        """
        deadline = time.monotonic() + START_LIMIT_S
        path = self._node.temp_dir / ADDRESS_NAME
        while not path.exists() or not (address := path.read_text().strip()):
            self._require_alive(deadline, "it wrote no address")
            await asyncio.sleep(_POLL_S)
        self._undo.callback(disconnect, self._mode_before)
        while True:
            try:
                return await connect_to(address, "strop")
            except CONNECT_ERRORS as error:
                self._require_alive(deadline, f"{type(error).__name__}: {error}")
                await asyncio.sleep(_POLL_S)

    async def await_nodes(self, indices: Iterable[int], limit_s: float) -> None:
        """Wait until all nodes have joined, the head too.

        Raises: CheckRefused naming those that did not; EngineError if the head ends meanwhile.
        """
        deadline = time.monotonic() + limit_s
        wanted = set(indices)
        while missing := sorted(wanted - set(await asyncio.to_thread(_read_living))):
            if time.monotonic() > deadline:
                raise CheckRefused(
                    f"node {', '.join(map(str, missing))} did not join the Ray cluster within"
                    f" {limit_s:.0f} s",
                    allowed=f"all {len(wanted)} nodes of the job",
                    next_step="read ray.log and agent.log of these nodes, in the attempt's folder",
                )
            self._require_alive(deadline + START_LIMIT_S, "")
            await asyncio.sleep(_POLL_S)

    def find_death(self) -> str | None:
        """Return how Ray ended on this machine, None while it runs."""
        if self._launcher is None or self._launcher.poll() is None:
            return None
        return f"Ray ended on the head:\n{self._launcher.tail()}"

    async def stop(self) -> None:
        """Disconnect and end every process of Ray on this machine. May be called at any time, and twice."""
        await asyncio.to_thread(self._undo.close)
        self._launcher = None

    def _require_alive(self, deadline: float, cause: str) -> None:
        assert self._launcher is not None, "launch comes first"
        exit_code = self._launcher.poll()
        if exit_code is None and time.monotonic() < deadline:
            return
        why = cause or "it did not answer in time"
        raise EngineError(
            f"Ray did not start: {why if exit_code is None else f'its launcher ended with {exit_code}'}\n"
            f"Its last log lines:\n{self._launcher.tail()}\n",
            allowed="a machine where Ray's processes start and listen",
            next_step=f"read the logs in {self._node.logs_dir}, mend the cause and start the run again",
        )


def read_nodes() -> list[JoinedNode]:
    """Return the nodes of the run in the cluster that this process is connected to, including dead ones.

    Not those that somebody added by `ray start`, whose loss is none of the run.
    """
    import ray

    return [
        JoinedNode(
            ray_id=node["NodeID"],
            name=node["NodeName"],
            address=node["NodeManagerAddress"],
            is_alive=bool(node["Alive"]),
            why=node.get("DeathReasonMessage", ""),
        )
        for node in ray.nodes()
        if read_index(node["NodeName"]) is not None
    ]


def _read_living() -> list[int | None]:
    return [read_index(node.name) for node in read_nodes() if node.is_alive]
