"""Settings of one Ray node: its command line, its environment, and checks before it starts.

Every Ray process gets port 0: the kernel picks a port for the process that binds it, so no other process can
take it in between.

Facts about Ray 2.60 that this file relies on (ray/scripts/scripts.py, ray/_private/services.py):
loopback is an address to Ray only where RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER is off, and its native processes
then bind to 127.0.0.1 alone; on any other address they bind to all interfaces. RAY_AUTH_MODE=token makes
every connection carry the token of RAY_AUTH_TOKEN_PATH.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from strop.errors import CheckRefused, ConfigError
from strop.hardware.leases import leases_dir, open_folder
from strop.hardware.leftovers import PREFIX, SHARED_MEMORY
from strop.hardware.ports import LOOPBACK
from strop.io.atomic import explain_write_failure

RAY_VERSION = "2.60.0"
ADDRESS_NAME = "ray_current_cluster"
"""The file below its temporary directory where a head writes host and port, once both are known."""
MAX_TEMP_DIR_BYTES = 43
"""Of 107 that the path of a socket may have (unix(7)), Ray adds 64 at most:
`/session_2026-11-22_02-46-02_147512_4194304/sockets/plasma_store`."""
OBJECT_STORE_BYTES = 256 << 20
"""Shared memory of a node for Ray's objects: steps and rollouts pass through it, weights do not."""
TOKEN_PATH = "RAY_AUTH_TOKEN_PATH"
_OWN_VARIABLES = re.compile(
    r"RAY_(ADDRESS|NAMESPACE|JOB_CONFIG_JSON_ENV_VAR|START_HOOK|AUTH_.*|TMPDIR|BACKEND_.*)"
)
"""Variables of another Ray cluster, which would lead the run's processes there."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeSettings:
    """One Ray node. Written as JSON for its keeper; holds no secret."""

    temp_dir: str
    """Private to this node; removed at its end."""
    shared_dir: str
    """The same in shared memory, for files between the roles of one machine."""
    token_path: str
    log_path: str
    """Output of `ray start`."""
    keep_logs_dir: str
    """Folder for the logs of Ray's processes after the end."""
    host: str = LOOPBACK
    """Address of the node; with loopback it binds to nothing else."""
    name: str = ""
    """Name for people."""
    index: int = 0
    """0 is the head."""
    num_cpus: int = 1
    object_store_bytes: int = OBJECT_STORE_BYTES

    def write(self, path: Path) -> None:
        """Write the settings for a keeper."""
        path.write_text(json.dumps(asdict(self)))

    @classmethod
    def read(cls, path: Path) -> NodeSettings:
        """Read the file of `write`."""
        return cls(**json.loads(path.read_bytes()))


def node_resource(index: int) -> str:
    """Return the resource that only one node has; a role requests a little of it to run there."""
    return f"strop_node_{index}"


def start_args(settings: NodeSettings, address: str | None) -> list[str]:
    """Return the command that starts a node: a head if `address` is None."""
    args = [sys.executable, "-P", "-m", "ray.scripts.scripts", "start", "--block"]
    if address is None:
        args += ["--head", "--port=0", "--include-dashboard=false", "--no-monitor"]
    else:
        args += [f"--address={address}"]
    return [
        *args,
        f"--node-ip-address={settings.host}",
        f"--node-name={settings.name or settings.index}",
        f"--temp-dir={settings.temp_dir}",
        f"--object-store-memory={settings.object_store_bytes}",
        f"--num-cpus={settings.num_cpus}",
        # The run's allocator assigns devices: each role sets its visible ones before torch is imported.
        "--num-gpus=0",
        "--resources=" + json.dumps({node_resource(settings.index): 1}),
        "--include-log-monitor=false",
        "--disable-usage-stats",
        # 0: the kernel picks one for every process; Ray's own default for workers is a fixed range.
        "--min-worker-port=0",
        "--max-worker-port=0",
    ]


def ray_environment(environ: Mapping[str, str], *, host: str, token_path: Path) -> dict[str, str]:
    """Return the environment of a node and of all its workers: that of this role, and Ray's switches.

    Workers inherit it unchanged from the node's processes; none of it passes through a command line.
    """
    kept = {name: value for name, value in environ.items() if not _OWN_VARIABLES.fullmatch(name)}
    return kept | ray_variables(host=host, token_path=token_path)


def ray_variables(*, host: str, token_path: Path) -> dict[str, str]:
    """Return Ray's switches, for a node and for its clients."""
    return {
        "RAY_AUTH_MODE": "token",
        TOKEN_PATH: str(token_path),
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
        "RAY_enable_metrics_collection": "0",
    }


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
    require_same_version("this machine", installed)


def require_same_version(where: str, installed: str) -> None:
    """Raise CheckRefused if a node has another release of Ray."""
    if installed != RAY_VERSION:
        raise CheckRefused(
            f"{where} has Ray {installed}",
            allowed=f"Ray {RAY_VERSION} on every node",
            next_step=f"pip install ray=={RAY_VERSION} there",
        )


def describe_here() -> dict[str, Any]:
    """Return the head's facts for nodes that join: versions must be equal."""
    return {"ray": RAY_VERSION, "python": ".".join(map(str, sys.version_info[:3])), "pid": os.getpid()}


def choose_temp_dir(configured: Path | None = None) -> Path:
    """Return the path for a new directory below `configured`, the run file's folder.

    Without one, below this user's folder of this machine, TMPDIR, or in memory: the first that is short
    enough. Raises: ConfigError if `configured` is too long for a socket; StoreError if it is not writable.
    """
    name = PREFIX + secrets.token_hex(4)
    if configured is None:
        # For this user alone, created like the folder of leases.
        usual = open_folder(leases_dir()).parent
        places = [usual, Path(tempfile.gettempdir()), SHARED_MEMORY]
        chosen = next((place for place in places if _is_short(place / name)), places[-1])
        return _require_writable(chosen.absolute() / name)
    path = configured.absolute() / name
    if not _is_short(path):
        allowed = MAX_TEMP_DIR_BYTES - len(name) - 1
        raise ConfigError(
            f"ray.temp_dir is {configured}, {len(os.fsencode(configured.absolute()))} bytes long",
            allowed=f"{allowed} bytes at most: paths of sockets end at 107, and Ray adds the rest",
            next_step="name a shorter one, or leave it out",
        )
    return _require_writable(path)


def _is_short(path: Path) -> bool:
    return len(os.fsencode(path.absolute())) <= MAX_TEMP_DIR_BYTES


def _require_writable(path: Path) -> Path:
    """Raise StoreError if a directory cannot be made there."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path.parent):
            return path
    except OSError as error:
        raise explain_write_failure(error, path) from error
