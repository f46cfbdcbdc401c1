"""The Ray cluster of one run: starts it, waits for all nodes, stops it without leftovers; or attaches to one.

The token that every connection must carry is in a file that only this user can read: of the job, which its
other nodes read too, or else of this cluster alone.

Covered: one machine on loopback; several nodes, which need to share no disk.
Not covered: encryption between nodes; other users who can read the token's file, such as root.
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import sys
import time
import uuid
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from strop.cluster.ray.deaths import lost
from strop.cluster.ray.node import AUTH_MODE, choose_temp_dir, ray_environment
from strop.errors import CheckRefused, EngineError, EngineLost
from strop.hardware.leftovers import SHARED_MEMORY, remove_dead
from strop.hardware.ports import NODE_VARIABLE, NUM_NODES_VARIABLE, find_host_address
from strop.hardware.process import ChildProcess, spawn, terminate
from strop.io.atomic import explain_write_failure
from strop.io.endpoints import write_secret
from strop.io.variables import set_variables
from strop.record.fence import ATTEMPT_VARIABLE, GRACE_VARIABLE, NUMBER_VARIABLE, RAY_TOKEN_PATH
from strop.spec.layout import RAY_NODE_MODULE

ADDRESS_NAME = "ray_current_cluster"
"""The file below its temporary directory where a head writes host and port, once both are known."""
CONNECT_ERRORS = (ConnectionError, RuntimeError, ValueError, TimeoutError, AssertionError)
JOIN_LIMIT_S = 900.0
"""Longest wait until all nodes of a job have joined: hosts of a cloud start minutes apart."""
START_LIMIT_S = 120.0
"""Ray's processes take two to ten seconds."""
_STOP_GRACE_S = 25.0
"""The launcher terminates Ray, then kills it; that takes a second, fifteen at most."""
_POLL_S = 0.05
_LOOK_EVERY_S = 1.0
_KNOCK_LIMIT_S = 10.0
_CARRIED = (ATTEMPT_VARIABLE, NUMBER_VARIABLE, GRACE_VARIABLE, "HF_HOME", "HF_HUB_OFFLINE", "STROP_CACHE")


class RayHead:
    """Ray on this machine, which other nodes may join, and this process connected to it."""

    def __init__(
        self, logs_dir: Path, num_nodes: int, token_path: Path, temp_dir: Path | None = None
    ) -> None:
        """`token_path`: for a new token, where the environment names no file of the job with one.

        `temp_dir`: a folder for the node's own, short, as paths of sockets end at 107 bytes.
        """
        self._logs_dir, self._num_nodes, self._token_path = logs_dir, num_nodes, token_path
        self.temp_dir = choose_temp_dir(temp_dir)
        self._launcher: ChildProcess | None = None
        self._undo = ExitStack()

    async def start(self) -> str:
        """Start the head, connect this process to it, and return its address.

        Raises: EngineError with the last log lines if it does not come up; StoreError if the disk fails.
        """
        launcher = self._launch()
        deadline = time.monotonic() + START_LIMIT_S
        path = self.temp_dir / ADDRESS_NAME
        why = "it wrote no address"
        while launcher.poll() is None and time.monotonic() < deadline:
            if path.exists() and (address := path.read_text().strip()):
                try:
                    found = await connect_to(address, "strop")
                except CONNECT_ERRORS as error:
                    why = f"{type(error).__name__}: {error}"
                else:
                    self._undo.callback(disconnect)
                    return found
            await asyncio.sleep(_POLL_S)
        raise EngineError(
            f"Ray did not start: {why}\nIts last log lines:\n{launcher.tail()}\n",
            allowed="a machine where Ray's processes start and listen",
            next_step=f"read the logs in {self._logs_dir}, mend the cause and start the run again",
        )

    async def await_nodes(self, limit_s: float = JOIN_LIMIT_S) -> list[dict[str, Any]]:
        """Wait until all nodes have joined; return them as Ray shows them, the head first.

        Raises: CheckRefused naming those that did not; EngineLost if the head ends meanwhile.
        """
        import ray

        deadline = time.monotonic() + limit_s
        while True:
            nodes = await asyncio.to_thread(ray.nodes)
            joined = {node["NodeName"].split("@")[0]: node for node in nodes if node["Alive"]}
            missing = [name for name in map(str, range(self._num_nodes)) if name not in joined]
            if not missing:
                return [joined[str(index)] for index in range(self._num_nodes)]
            if self._launcher is None or self._launcher.poll() is not None:
                raise await self.ended()
            if time.monotonic() > deadline:
                raise CheckRefused(
                    f"node {', '.join(missing)} did not join the Ray cluster within {limit_s:.0f} s",
                    allowed=f"all {self._num_nodes} nodes of the job",
                    next_step="read ray.log and agent.log of these nodes, in the attempt's folder",
                )
            await asyncio.sleep(_POLL_S)

    async def ended(self) -> EngineLost:
        """Wait until Ray has ended on this machine, and say how."""
        launcher = self._launcher
        while True:
            if launcher is None or launcher.poll() is not None:
                return lost(f"Ray ended on the head:\n{launcher.tail() if launcher else ''}")
            await asyncio.sleep(_LOOK_EVERY_S)

    async def stop(self) -> None:
        """Disconnect and end every process of Ray on this machine. May be called at any time, and twice."""
        await asyncio.to_thread(self._undo.close)
        self._launcher = None

    def _launch(self) -> ChildProcess:
        token_path = self._token_path
        if self._num_nodes > 1 and RAY_TOKEN_PATH in os.environ:
            token_path = Path(os.environ[RAY_TOKEN_PATH])
        else:
            try:
                # A killed start may have left one.
                token_path.unlink(missing_ok=True)
                write_secret(token_path, secrets.token_hex(32))
            except OSError as error:
                raise explain_write_failure(error, token_path) from error
            self._undo.callback(token_path.unlink, missing_ok=True)
        told = {NODE_VARIABLE: "0", NUM_NODES_VARIABLE: str(self._num_nodes)}
        host = find_host_address(self._num_nodes, os.environ.get("GLOO_SOCKET_IFNAME"))
        # This process and its children become clients; set before Ray is imported, which reads these once.
        self._undo.enter_context(set_variables(ray_environment({RAY_TOKEN_PATH: str(token_path)}, host)))
        words = [sys.executable, "-P", "-m", RAY_NODE_MODULE, str(self._logs_dir)]
        words += [f"--temp-dir={self.temp_dir}"]
        self._launcher = launcher = spawn(words, self._logs_dir / "ray.log", {**os.environ, **told})
        # A launcher that was killed leaves its directories.
        for folder in (self.temp_dir.parent, SHARED_MEMORY):
            self._undo.callback(remove_dead, folder)
        self._undo.callback(terminate, launcher, _STOP_GRACE_S)
        return launcher


async def attach(address: str, num_nodes: int) -> list[dict[str, Any]]:
    """Connect this process to a cluster that is already running (`ray.address`); return the run's nodes.

    As Ray shows them: this machine's first, then those with the most GPUs. The cluster's scheduler knows its
    GPUs, so the run requests them from it, role by role.
    Raises: CheckRefused if no cluster answers there, it has other software or fewer nodes than the job, or
        this machine is none of its nodes.
    """
    import ray

    host, colon, port = address.rpartition(":")
    try:
        if colon and port.isdecimal():
            # Ray itself would retry for minutes.
            knock = asyncio.open_connection(host.strip("[]"), int(port))
            (await asyncio.wait_for(knock, _KNOCK_LIMIT_S))[1].close()
        paths = os.pathsep.join(path for path in sys.path if path)
        carried = {name: os.environ[name] for name in _CARRIED if name in os.environ}
        # A unique name, so that actors of two runs on one cluster do not collide.
        await connect_to(address, f"strop-{uuid.uuid4().hex[:12]}", {"PYTHONPATH": paths, **carried})
    except (OSError, *CONNECT_ERRORS) as error:
        raise CheckRefused(
            f"ray.address={address}: nothing answers there ({' '.join(repr(error).split())[:400]})",
            allowed="the address of a cluster with this Ray and Python, or 'auto' on a node of it",
            next_step="look at `ray status` there, or leave ray.address out: the run starts its own",
        ) from error
    own_id = ray.get_runtime_context().get_node_id()
    nodes = [node for node in ray.nodes() if node["Alive"]]
    nodes.sort(key=lambda node: (node["NodeID"] != own_id, -node["Resources"].get("GPU", 0.0)))
    if len(nodes) < num_nodes:
        raise CheckRefused(
            f"the Ray cluster at {address} has {len(nodes)} nodes, and job.nodes is {num_nodes}",
            allowed="as many nodes as the cluster has, or fewer",
            next_step="lower job.nodes",
        )
    return nodes[:num_nodes]


async def connect_to(address: str, namespace: str, variables: dict[str, str] | None = None) -> str:
    """Connect this process to a cluster by the switches of its environment; return the address.

    `variables` are for the processes of all its actors. Raises: one of CONNECT_ERRORS.
    """
    import ray
    from ray._private import ray_constants
    from ray._raylet import AuthenticationTokenLoader, Config  # type: ignore[attr-defined]

    # Ray reads these once, and may have been imported before, for another cluster.
    switch = os.environ.get("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "1")
    ray_constants.ENABLE_RAY_CLUSTER = switch.lower() in ("1", "true")
    Config.initialize(json.dumps({"AUTH_MODE": os.environ.get(AUTH_MODE, "disabled")}))
    AuthenticationTokenLoader.instance().reset_cache()
    # In a thread, where Ray leaves the handler of SIGTERM to the loop.
    context = await asyncio.to_thread(
        ray.init,
        address=address,
        namespace=namespace,
        runtime_env={"env_vars": variables} if variables else None,
        log_to_driver=False,
        configure_logging=False,
    )
    return str(context.address_info["address"])


def disconnect() -> None:
    """Leave the cluster, if this process is connected to it."""
    import ray

    ray.shutdown()
