"""Settings of one Ray node: its command line, its environment, and checks before it starts.

Facts about Ray 2.60 that this file relies on (ray/scripts/scripts.py, ray/_private/services.py):
loopback is an address to Ray only where RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER is off, and its native processes
then bind to 127.0.0.1 alone; on any other address they bind to all interfaces. RAY_AUTH_MODE=token makes
every connection carry the token of RAY_AUTH_TOKEN_PATH. Port 0 lets the kernel pick one for the process that
binds it, so no other process can take it in between; only the head of several nodes has a port that all know.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import secrets
import shutil
import signal
import socket
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from strop.errors import CheckRefused, ConfigError
from strop.hardware.leases import leases_dir, open_folder
from strop.hardware.leftovers import MEMORY_PREFIX, PREFIX, SHARED_MEMORY
from strop.hardware.ports import LOOPBACK, NODE_VARIABLE, find_host_address
from strop.io.atomic import explain_write_failure
from strop.record.fence import RAY_ADDRESS, RAY_TOKEN_PATH
from strop.spec.layout import RAY_NODE_MODULE

RAY_VERSION = "2.60.0"
ADDRESS_NAME = "ray_current_cluster"
"""The file below its temporary directory where a head writes host and port, once both are known."""
MAX_TEMP_DIR_BYTES = 43
"""Of 107 that the path of a socket may have (unix(7)), Ray adds 64 at most:
`/session_2026-11-22_02-46-02_147512_4194304/sockets/plasma_store`."""
OBJECT_STORE_BYTES = 256 << 20
"""Shared memory of a node for Ray's objects: steps and rollouts pass through it, weights do not."""
_OWN_VARIABLES = re.compile(
    rf"{RAY_ADDRESS}|RAY_(NAMESPACE|JOB_CONFIG_JSON_ENV_VAR|START_HOOK|AUTH_.*|TMPDIR|BACKEND_.*)"
)
"""Variables of another Ray cluster, which would lead the run's processes there."""
AUTH_MODE = "RAY_AUTH_MODE"
CONNECT_ERRORS = (ConnectionError, RuntimeError, ValueError, TimeoutError, AssertionError)
_NODE_NAME = re.compile(r"(\d+)@")


@dataclass(frozen=True, kw_only=True, slots=True)
class RayNode:
    """One Ray node of a run, as its launcher and the head's run see it. Holds no secret."""

    temp_dir: Path
    """Private to this node; removed at its end."""
    logs_dir: Path
    """Folder for the logs of its launcher and of Ray's processes."""
    host: str
    """Address of the node; with loopback it binds to nothing else."""
    index: int
    """0 is the head."""
    address: str
    """Host and port of the head, as this node reaches it. Port 0: the kernel picks one."""

    @classmethod
    def here(cls, environ: Mapping[str, str], num_nodes: int, *, temp_dir: Path, logs_dir: Path) -> RayNode:
        """Return this machine's node of a run over `num_nodes`.

        Raises: CheckRefused if the others cannot reach this machine.
        """
        interface = environ.get("GLOO_SOCKET_IFNAME")
        host = find_host_address(num_nodes, interface)
        if num_nodes > 1 and host.startswith("127."):
            raise CheckRefused(
                f"GLOO_SOCKET_IFNAME={interface} leads to {host}, loopback, in a job of {num_nodes} nodes",
                allowed="the interface of the network between the nodes: Ray joins none over loopback",
                next_step="name that one in GLOO_SOCKET_IFNAME, or use one node",
            )
        return cls(
            temp_dir=temp_dir,
            logs_dir=logs_dir,
            host=host,
            index=int(environ.get(NODE_VARIABLE, "0")),
            address=environ.get(RAY_ADDRESS, f"{host}:0") if num_nodes > 1 else f"{host}:0",
        )

    @property
    def shared_dir(self) -> Path:
        """Another one in shared memory, for files between the roles of one machine."""
        return SHARED_MEMORY / f"{MEMORY_PREFIX}{self.temp_dir.name}"

    def launcher(self) -> list[str]:
        """Return the command that keeps this node; the rest is in its environment."""
        words = [sys.executable, "-P", "-m", RAY_NODE_MODULE, str(self.logs_dir)]
        return [*words, f"--temp-dir={self.temp_dir}"]

    def ray_start(self) -> list[str]:
        """Return the command that starts this node."""
        words = [sys.executable, "-P", "-m", "ray.scripts.scripts", "start", "--block"]
        if self.index:
            words += [f"--address={self.address}"]
        else:
            port = self.address.rpartition(":")[2]
            words += ["--head", f"--port={port}", "--include-dashboard=false", "--no-monitor"]
        return [
            *words,
            f"--node-ip-address={self.host}",
            f"--node-name={self.index}@{socket.gethostname()}",
            f"--temp-dir={self.temp_dir}",
            f"--object-store-memory={OBJECT_STORE_BYTES}",
            f"--num-cpus={os.cpu_count() or 1}",
            # The run's allocator assigns devices: each role sets its visible ones before torch is imported.
            "--num-gpus=0",
            "--resources=" + json.dumps({node_resource(self.index): 1}),
            "--include-log-monitor=false",
            "--disable-usage-stats",
            # Ray's own default for workers is a fixed range.
            "--min-worker-port=0",
            "--max-worker-port=0",
        ]


def node_resource(index: int) -> str:
    """Return the resource that only one node has; a role requests a little of it to run there."""
    return f"strop_node_{index}"


def read_index(node_name: str) -> int | None:
    """Return the index of a run's node from its name in Ray; None for a node that somebody else added."""
    match = _NODE_NAME.match(node_name)
    return int(match[1]) if match else None


def ray_environment(environ: Mapping[str, str], host: str) -> dict[str, str]:
    """Return an environment with Ray's switches, for a node with its workers, and for its clients.

    The file of the token is in `environ`. Workers inherit it unchanged from the node's processes; none of it
    passes through a command line.
    """
    kept = {name: value for name, value in environ.items() if not _OWN_VARIABLES.fullmatch(name)}
    return kept | {
        AUTH_MODE: "token",
        RAY_TOKEN_PATH: environ[RAY_TOKEN_PATH],
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0" if host == LOOPBACK else "1",
        "RAY_USAGE_STATS_ENABLED": "0",
        # Shut down at once: the loop has saved everything.
        "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0",
        "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1",
        # Prestarted workers cost a second of CPU each, and a run starts few.
        "RAY_enable_worker_prestart": "0",
        "RAY_prestart_worker_first_driver": "0",
        # Ray's own 15 puts learners and engines behind the programs that they share a node with.
        "RAY_worker_niceness": "0",
        # A silent node counts as dead after Ray's five failed checks, 5 to 20 s here.
        "RAY_health_check_period_ms": "1000",
        "RAY_health_check_timeout_ms": "3000",
        # A node ends so many seconds after its head.
        "RAY_gcs_rpc_server_reconnect_timeout_s": "10",
        "RAY_enable_metrics_collection": "0",
    }


async def connect_to(address: str, namespace: str) -> str:
    """Connect this process to a cluster by the switches of its environment; return the address.

    Raises: one of CONNECT_ERRORS.
    """
    import ray
    from ray._private import ray_constants
    from ray._raylet import AuthenticationTokenLoader  # type: ignore[attr-defined]

    # Ray reads these once, and may have been imported before, for another cluster.
    switch = os.environ.get("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "1")
    ray_constants.ENABLE_RAY_CLUSTER = switch.lower() in ("1", "true")
    _read_mode(os.environ.get(AUTH_MODE, "disabled"))
    AuthenticationTokenLoader.instance().reset_cache()
    handler, hook = signal.getsignal(signal.SIGTERM), sys.excepthook
    quiet = {"log_to_driver": False, "configure_logging": False}
    try:
        context = await asyncio.to_thread(ray.init, address=address, namespace=namespace, **quiet)
    finally:
        # Ray replaces both, but the loop handles SIGTERM.
        signal.signal(signal.SIGTERM, handler)
        sys.excepthook = hook
    return str(context.address_info["address"])


def disconnect(mode_before: str) -> None:
    """Leave the cluster, if this process is connected to it, and have Ray use a mode of authentication."""
    import ray

    ray.shutdown()
    _read_mode(mode_before)


def _read_mode(mode: str) -> None:
    from ray._raylet import Config  # type: ignore[attr-defined]

    Config.initialize(json.dumps({"AUTH_MODE": mode}))


def check_object_store() -> None:
    """Refuse an object store that does not fit into shared memory: Ray would silently put it on a disk.

    Raises: CheckRefused.
    """
    free = shutil.disk_usage(SHARED_MEMORY).free
    if free < OBJECT_STORE_BYTES:
        raise CheckRefused(
            f"Ray's object store takes {OBJECT_STORE_BYTES} bytes, and {SHARED_MEMORY} has {free} free",
            allowed="an object store that fits into shared memory",
            next_step="give the container more shared memory (--shm-size of podman and docker)",
        )


def require_ray() -> None:
    """Raise ConfigError if Ray is missing here, CheckRefused if it is another release than strop's."""
    # Not imported: Ray then reads its switches from the environment, which are not set yet.
    try:
        installed = version("ray")
    except PackageNotFoundError as error:
        raise ConfigError(
            "several processes of a role run on Ray, which is not installed here",
            allowed=f"ray=={RAY_VERSION}, which the extra 'ray' brings",
            next_step="pip install 'strop[ray]'",
        ) from error
    if installed != RAY_VERSION:
        raise CheckRefused(
            f"this machine has Ray {installed}",
            allowed=f"Ray {RAY_VERSION} on every node",
            next_step=f"pip install ray=={RAY_VERSION} here",
        )


def choose_temp_dir(configured: Path | None = None) -> Path:
    """Return the path for a new directory below `configured`, the run file's folder.

    Without one, below this user's folder of this machine, TMPDIR, or in memory: the first that is short
    enough. Raises: ConfigError if `configured` is too long for a socket; StoreError if it is not writable.
    """
    name = PREFIX + secrets.token_hex(4)
    # The usual one is for this user alone, created like the folder of leases.
    usual = (open_folder(leases_dir()).parent, Path(tempfile.gettempdir()), SHARED_MEMORY)
    places = usual if configured is None else (configured,)
    paths = [place.absolute() / name for place in places]
    path = next((path for path in paths if len(os.fsencode(path)) <= MAX_TEMP_DIR_BYTES), None)
    if path is None:
        raise ConfigError(
            f"ray.temp_dir is {configured}, {len(os.fsencode(paths[0].parent))} bytes long",
            allowed=f"{MAX_TEMP_DIR_BYTES - len(name) - 1} bytes at most: paths of sockets end at 107",
            next_step="name a shorter one, or leave it out",
        )
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path.parent):
            return path
    except OSError as error:
        raise explain_write_failure(error, path) from error
