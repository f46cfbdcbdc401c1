"""Keeps one Ray node of a run: `python -m strop.cluster.ray.node LOGS`.

The one launcher of Ray, wherever a run's Ray runs. The run itself starts it for its head; on every other node
of a job the node's agent does, like any other role. Its environment says the rest: the node's index, the
head's address, the file of the token (`hardware.ports`). It runs `ray start --block`, which waits for the
head, and ends everything that it started on SIGTERM, when the process that started it dies, or when Ray ends
by itself: so a node ends seconds after its head. All roles that Ray places here inherit its environment.

Ray's processes watch each other, but its agents outlive a killed raylet by more than a minute (2.60): this
process adopts them. `ray symmetric-run` would not do: at SIGTERM it ends Ray while the run still saves.

Facts about Ray 2.60 that this file relies on (ray/scripts/scripts.py, ray/_private/services.py):
loopback is an address to Ray only where RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER is off, and its native processes
then bind to 127.0.0.1 alone; on any other address they bind to all interfaces. RAY_AUTH_MODE=token makes
every connection carry the token of RAY_AUTH_TOKEN_PATH. Port 0 lets the kernel pick one for the process that
binds it, so no other process can take it in between; only the head of several nodes has a port that all know.

Covered: kill -9 of the owner; death of any of Ray's processes; workers in other sessions.
Not covered: kill -9 of this process: Ray's processes then end with it, agents a minute later, and the next
launcher of this user removes the directories.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import secrets
import shutil
import signal
import socket
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

from strop.errors import EXIT_DONE, EXIT_FAILED, ConfigError, StropError
from strop.hardware.leases import USER_FOLDER, open_folder
from strop.hardware.leftovers import MEMORY_PREFIX, PREFIX, SHARED_MEMORY, own_dir
from strop.hardware.ports import LOOPBACK, NODE_VARIABLE, count_nodes, find_host_address
from strop.hardware.process import become_subreaper, end_descendants, reap_orphans, spawn, terminate
from strop.hardware.tuning import tune_process
from strop.record.fence import RAY_ADDRESS, RAY_TOKEN_PATH
from strop.sandbox.janitor import clear_abandoned
from strop.spec.layout import RAY_NODE_MODULE

OBJECT_STORE_BYTES = 256 << 20
"""Shared memory of a node for Ray's objects: steps and rollouts pass through it, weights do not."""
AUTH_MODE = "RAY_AUTH_MODE"
_POLL_S = 0.1
_CONNECT_S = 5.0
_GRACE_S = 3.0
_END_LIMIT_S = 10.0


def main(arguments: list[str] | None = None) -> int:
    """Run a node until it must end; return 0 then and after the head's end, 1 if it ended by itself."""
    owner_pid = os.getppid()
    # No signal at the owner's death (1 is PR_SET_PDEATHSIG): it would kill this process before cleanup.
    ctypes.CDLL(None).prctl(1, 0, 0, 0, 0)
    become_subreaper()
    signals: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, _: signals.append(number))
    parser = argparse.ArgumentParser(prog=RAY_NODE_MODULE, description=__doc__)
    parser.add_argument("logs", type=Path, help="folder for the logs of Ray's processes")
    place = parser.add_mutually_exclusive_group()
    place.add_argument("--temp-dir", type=Path, help="the new directory of this node")
    place.add_argument("--below", type=Path, help="the folder for it; default: the user's own below /tmp")
    options = parser.parse_args(arguments)
    # For the roles that Ray starts here: a joining node has no other process that does it.
    tune_process()
    why = ""
    try:
        require_ray()
        temp_dir = options.temp_dir or choose_temp_dir(options.below)
        host = find_host_address(count_nodes(os.environ), os.environ.get("GLOO_SOCKET_IFNAME"))
        index = int(os.environ.get(NODE_VARIABLE, "0"))
        with own_dir(temp_dir), own_dir(shared_dir_of(temp_dir)):
            environ = os.environ | ray_environment(os.environ, host)
            child = spawn(ray_start(environ, host, temp_dir), Path("/dev/stdout"), environ)
            try:
                while child.poll() is None and not why:
                    reap_orphans([child.pid])
                    time.sleep(_POLL_S)
                    if signals:
                        why = f"told to by {signal.Signals(signals[0]).name}"
                    elif os.getppid() != owner_pid:
                        why = "its owner has ended"
            finally:
                terminate(child, _GRACE_S)
                left = end_descendants(_END_LIMIT_S)
                with suppress(OSError, shutil.Error):
                    # Of sandboxes that were killed before they had cleared up.
                    clear_abandoned()
                    logs_dir = temp_dir / "session_latest" / "logs"
                    shutil.copytree(logs_dir, options.logs / f"ray-{index}", dirs_exist_ok=True)
    except StropError as error:
        sys.stdout.write(f"{error}\n")
        return error.exit_code
    if not why and index and not _answers(os.environ[RAY_ADDRESS]):
        why = "the head has ended"
    sys.stdout.write(f"Ray node {index} ends: {why or 'by itself'}; processes that did not end: {left}\n")
    return EXIT_DONE if why else EXIT_FAILED


def ray_start(environ: Mapping[str, str], host: str, temp_dir: Path) -> list[str]:
    """Return the command that starts the node of an environment, at its own address `host`."""
    index = int(environ.get(NODE_VARIABLE, "0"))
    head = environ.get(RAY_ADDRESS, f"{host}:0") if count_nodes(environ) > 1 else f"{host}:0"
    port = head.rpartition(":")[2]
    return [
        *(sys.executable, "-P", "-m", "ray.scripts.scripts", "start", "--block"),
        *([f"--address={head}"] if index else ["--head", f"--port={port}", "--include-dashboard=false"]),
        *([] if index else ["--no-monitor"]),
        f"--node-ip-address={host}",
        f"--node-name={index}@{socket.gethostname()}",
        f"--temp-dir={temp_dir}",
        f"--object-store-memory={OBJECT_STORE_BYTES}",
        f"--num-cpus={len(os.sched_getaffinity(0))}",
        # The run's allocator assigns devices: each role sets its visible ones before torch is imported. Ray
        # could not have roles take turns on several GPUs each: it shares out parts of one GPU only.
        "--num-gpus=0",
        "--include-log-monitor=false",
        "--disable-usage-stats",
        # Ray's own default for workers is a fixed range.
        "--min-worker-port=0",
        "--max-worker-port=0",
    ]


def ray_environment(environ: Mapping[str, str], host: str) -> dict[str, str]:
    """Return Ray's switches for a node with its workers, and for its clients.

    The file of the token is in `environ`. Workers inherit the rest of a node's environment unchanged; none of
    it passes through a command line.
    """
    return {
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
        # A node tries to join for an hour (each time half a minute): the run may fetch a model before.
        "RAY_gcs_server_port_wait_time_s": "120",
        # A silent node counts as dead after Ray's five failed checks, 5 to 20 s here.
        "RAY_health_check_period_ms": "1000",
        "RAY_health_check_timeout_ms": "3000",
        # A node ends so many seconds after its head.
        "RAY_gcs_rpc_server_reconnect_timeout_s": "10",
        "RAY_enable_metrics_collection": "0",
    }


def require_ray() -> None:
    """Raise ConfigError if Ray is missing here."""
    # Not imported: Ray then reads its switches from the environment, which are not set yet.
    if find_spec("ray") is None:
        raise ConfigError(
            "several processes of a role run on Ray, which is not installed here",
            allowed="Ray, which the extra 'ray' brings",
            next_step="pip install 'strop[ray]'",
        )


def choose_temp_dir(configured: Path | None = None) -> Path:
    """Return a short path for a new directory, by default where only this user is. Raises: StoreError."""
    folder = configured or open_folder(USER_FOLDER / "leases").parent
    return folder.absolute() / (PREFIX + secrets.token_hex(4))


def shared_dir_of(temp_dir: Path) -> Path:
    """Return the second directory of a node, for files between its roles: in shared memory."""
    return SHARED_MEMORY / f"{MEMORY_PREFIX}{temp_dir.name}"


def _answers(address: str) -> bool:
    """Whether something listens there."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), _CONNECT_S).close()
    except OSError:
        return False
    return True


if __name__ == "__main__":
    sys.exit(main())
