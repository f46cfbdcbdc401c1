"""The Ray cluster of one run, on the head: starts it, waits for all nodes, stops it without leftovers.

The head's processes belong to a keeper, which ends with this process, however that ends. The token that
every connection must carry is in a file that only this user can read.

Covered: one machine on loopback; several nodes that all see the rendezvous file.
Not covered: encryption between nodes; other users who can read the token's file, such as root.
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import signal
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from strop.cluster.ray.attached import Seats
from strop.cluster.ray.settings import (
    ADDRESS_NAME,
    NodeSettings,
    describe_here,
    node_resource,
    ray_variables,
)
from strop.errors import CheckRefused, EngineError
from strop.hardware.ports import LOOPBACK
from strop.hardware.process import ChildProcess, spawn, tail, terminate
from strop.io.atomic import explain_write_failure
from strop.io.endpoints import write_secret
from strop.spec.layout import RAY_NODE_MODULE, RoleSlot

START_LIMIT_S = 120.0
"""Ray's processes take two to ten seconds."""
JOIN_LIMIT_S = 300.0
HEAD_LIMIT_S = 3600.0
"""How long a node waits for the head, whose process may fetch a model before it starts Ray."""
_STOP_GRACE_S = 25.0
"""The keeper terminates Ray, then kills it; that takes a second, fifteen at most."""
_POLL_S = 0.05
_NODE_SHARE = 0.001
"""Share of a node's resource that a role requests, which only pins the role to the node."""
TOKEN_NAME = "ray.token"


@dataclass(frozen=True, kw_only=True, slots=True)
class JoinedNode:
    """A node of the cluster, as Ray shows it."""

    ray_id: str
    name: str
    address: str
    is_alive: bool
    why: str = ""
    """Reason of its death, from Ray."""


class RayHead:
    """Ray on this machine, which other nodes may join, and this process connected to it."""

    def __init__(
        self, settings: NodeSettings, rendezvous_path: Path, *, temp_parent: str | None = None
    ) -> None:
        """`rendezvous_path`: the file by which other nodes join, in a folder of this attempt alone.

        `temp_parent`: the run file's folder for Ray's directories on every node.
        """
        self._settings = settings
        self._temp_parent = temp_parent
        self._rendezvous_path = rendezvous_path
        self._token = ""
        self._keeper: ChildProcess | None = None
        self._variables: dict[str, str | None] = {}
        self._is_connected = False

    @property
    def mark_path(self) -> Path:
        """The head's settings: a file on this machine's disk that is never sent to other nodes."""
        return self._rendezvous_path.with_name("node-0.json")

    def reserve(self, slots: Sequence[RoleSlot]) -> Seats:
        """Return one bundle for each role, on its node. GPUs are unknown to this cluster."""
        return Seats(
            bundles=[{node_resource(slot.node): _NODE_SHARE} for slot in slots],
            indices=range(len(slots)),
            num_gpus=[0.0] * len(slots),
        )

    @property
    def keeper_pid(self) -> int | None:
        """Process id of the keeper, None while there is none."""
        return None if self._keeper is None else self._keeper.pid

    def launch(self) -> None:
        """Start the head's processes, without waiting for them.

        Raises: StoreError if the folder of `rendezvous_path` cannot be written.
        """
        self._clear_start_files()
        settings_path = self.mark_path
        try:
            self._token = secrets.token_hex(32)
            write_secret(Path(self._settings.token_path), self._token)
            self._settings.write(settings_path)
        except OSError as error:
            raise explain_write_failure(error, settings_path) from error
        args = [sys.executable, "-P", "-m", RAY_NODE_MODULE, "--settings", str(settings_path)]
        self._keeper = spawn(args, Path(self._settings.log_path).with_name("ray-keeper.log"))

    async def connect(self) -> str:
        """Wait until the head answers, connect this process, and announce the head. Return the address.

        Raises: EngineError with the last log lines if it does not come up.
        """
        deadline = time.monotonic() + START_LIMIT_S
        # This process and its children become clients; set before Ray is imported, which reads these once.
        variables = ray_variables(host=self._settings.host, token_path=Path(self._settings.token_path))
        self._variables = {name: os.environ.get(name) for name in variables}
        os.environ.update(variables)
        path = Path(self._settings.temp_dir) / ADDRESS_NAME
        while not path.exists() or not (address := path.read_text().strip()):
            self._require_alive(deadline, "it wrote no address")
            await asyncio.sleep(_POLL_S)
        import ray
        from ray._private import ray_constants
        from ray._raylet import AuthenticationTokenLoader, Config  # type: ignore[attr-defined]

        # Ray reads these once, and may have been imported before; and each run has its own token.
        ray_constants.ENABLE_RAY_CLUSTER = self._settings.host != LOOPBACK
        Config.initialize(json.dumps({"AUTH_MODE": variables["RAY_AUTH_MODE"]}))
        AuthenticationTokenLoader.instance().reset_cache()
        handler, hook = signal.getsignal(signal.SIGTERM), sys.excepthook
        while not self._is_connected:
            try:
                ray.init(address=address, namespace="strop", log_to_driver=False, configure_logging=False)
                self._is_connected = True
            except (ConnectionError, RuntimeError, ValueError, TimeoutError) as error:
                self._require_alive(deadline, f"{type(error).__name__}: {error}")
                await asyncio.sleep(_POLL_S)
        # Ray replaces both, but the loop handles SIGTERM.
        signal.signal(signal.SIGTERM, handler)
        sys.excepthook = hook
        self._announce(address)
        return address

    async def await_nodes(self, indices: Iterable[int], limit_s: float = JOIN_LIMIT_S) -> None:
        """Wait until all nodes have joined, the head too.

        Raises: CheckRefused naming those that did not; EngineError if the head ends meanwhile.
        """
        deadline = time.monotonic() + limit_s
        wanted = set(indices)
        while missing := sorted(wanted - set(await asyncio.to_thread(read_indices))):
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
        if self._keeper is None or self._keeper.poll() is None:
            return None
        return f"Ray ended on the head:\n{self._keeper.tail()}\n{self._tail()}"

    async def stop(self) -> None:
        """Disconnect and end every process of Ray on this machine. May be called at any time, and twice."""
        if self._is_connected:
            import ray

            self._is_connected = False
            await asyncio.to_thread(ray.shutdown)
            mode = self._variables["RAY_AUTH_MODE"] or "disabled"
            ray._raylet.Config.initialize(json.dumps({"AUTH_MODE": mode}))
        for name, value in self._variables.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        self._variables = {}
        if self._keeper is not None:
            await asyncio.to_thread(terminate, self._keeper, _STOP_GRACE_S)
            self._keeper = None
        self._clear_start_files()

    def _announce(self, address: str) -> None:
        """Write the rendezvous file, readable by this user alone: the token is in it."""
        head = {"address": address, "token": self._token, "temp_parent": self._temp_parent} | describe_here()
        path = self._rendezvous_path
        partial = path.with_suffix(".partial")
        try:
            partial.unlink(missing_ok=True)
            write_secret(partial, json.dumps(head))
            os.replace(partial, path)
        except OSError as error:
            raise explain_write_failure(error, path) from error

    def _require_alive(self, deadline: float, cause: str) -> None:
        assert self._keeper is not None, "launch comes first"
        exit_code = self._keeper.poll()
        if exit_code is None and time.monotonic() < deadline:
            return
        end = (
            cause or "it did not answer in time"
            if exit_code is None
            else f"its keeper ended with {exit_code}"
        )
        raise EngineError(
            f"Ray did not start: {end}\nIts last log lines:\n{self._keeper.tail()}\n{self._tail()}\n",
            allowed="a machine where Ray's processes start and listen",
            next_step=f"read {self._settings.log_path} and {self._settings.keep_logs_dir}, mend the cause"
            " and start the run again",
        )

    def _tail(self) -> str:
        return tail(Path(self._settings.log_path))

    def _clear_start_files(self) -> None:
        """Remove the files that only the start needs; a killed start may have left some."""
        for path in (self._rendezvous_path, Path(self._settings.token_path)):
            try:
                path.unlink(missing_ok=True)
            except OSError as error:
                raise explain_write_failure(error, path) from error


def read_nodes() -> list[JoinedNode]:
    """Return the nodes of the cluster that this process is connected to, including dead ones."""
    import ray

    return [
        JoinedNode(
            ray_id=node["NodeID"],
            name=node.get("NodeName", ""),
            address=node["NodeManagerAddress"],
            is_alive=bool(node["Alive"]),
            why=node.get("DeathReasonMessage", ""),
        )
        for node in ray.nodes()
    ]


def read_indices() -> list[int]:
    """Return the indices of the living nodes."""
    import ray

    prefix = "strop_node_"
    names = [name for node in ray.nodes() if node["Alive"] for name in node["Resources"]]
    return [int(name.removeprefix(prefix)) for name in names if name.startswith(prefix)]
