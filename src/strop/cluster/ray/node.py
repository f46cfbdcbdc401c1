"""A node of a job that joins the run's Ray cluster: `python -m strop.cluster.ray.node RUN`.

A role like any other, started by the node's agent with the run's environment, which all roles that Ray
places here inherit. It waits for the head's file (`record.fence`), joins, and ends its Ray processes when
that file goes; then it waits for the agent's order, since a sidecar does not leave a run by itself.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from strop.cluster.ray.keeper import Order, keep_node, say
from strop.cluster.ray.runtime import HEAD_LIMIT_S, TOKEN_NAME
from strop.cluster.ray.settings import (
    RAY_VERSION,
    NodeSettings,
    check_object_store,
    choose_temp_dir,
    describe_here,
    require_ray,
    require_same_version,
)
from strop.errors import EXIT_DONE, CheckRefused, StropError
from strop.hardware.leftovers import SHARED_MEMORY
from strop.hardware.ports import NODE_VARIABLE, find_host_address
from strop.io.atomic import explain_write_failure
from strop.io.endpoints import write_secret
from strop.record.fence import ATTEMPT_VARIABLE, ROLES_FOLDER, rendezvous_path
from strop.spec.layout import RAY_NODE_MODULE

_POLL_S = 0.2


def main(arguments: list[str] | None = None) -> int:
    """Join, stay as long as the head does, and return 0 after an order to end."""
    order = Order()
    parser = argparse.ArgumentParser(prog=RAY_NODE_MODULE, description=__doc__)
    parser.add_argument("run", type=Path, help="the run's directory")
    run_path = parser.parse_args(arguments).run.absolute()
    try:
        require_ray()
        head_path = rendezvous_path(run_path / ROLES_FOLDER, os.environ.get(ATTEMPT_VARIABLE, "local"))
        head = await_head(head_path, order.find)
        require_same_python(head)
        settings = _choose_settings(head, run_path)
        code = keep_node(
            settings,
            head["address"],
            lambda: order.find() or (None if head_path.exists() else "the head has ended"),
        )
        Path(settings.token_path).unlink(missing_ok=True)
    except StropError as error:
        say(str(error))
        return error.exit_code
    while code == EXIT_DONE and order.find() is None:
        time.sleep(_POLL_S)
    return code


def find_own_address(environ: Mapping[str, str], num_nodes: int = 2) -> str:
    """Return the address at which the other nodes reach this one; loopback where it is the only one.

    Raises: CheckRefused if this node has none but loopback.
    """
    address = find_host_address(num_nodes, environ.get("GLOO_SOCKET_IFNAME"))
    if num_nodes > 1 and address.startswith("127."):
        name = environ.get("GLOO_SOCKET_IFNAME")
        raise CheckRefused(
            f"GLOO_SOCKET_IFNAME={name} leads to {address}, loopback, in a job of {num_nodes} nodes",
            allowed="the interface of the network between the nodes: Ray joins none over loopback",
            next_step="name that one in GLOO_SOCKET_IFNAME, or use one node",
        )
    return address


def require_same_python(head: Mapping[str, Any]) -> None:
    """Raise CheckRefused if the head has another release of Ray or Python than this node."""
    require_same_version("the head of this Ray cluster", head["ray"])
    here = describe_here()["python"]
    if head["python"].rpartition(".")[0] != here.rpartition(".")[0]:
        raise CheckRefused(
            f"the head runs Python {head['python']} and this node {here}",
            allowed=f"one release of Python, beside Ray {RAY_VERSION}, on every node",
            next_step="give both nodes the same environment",
        )


def await_head(
    path: Path, find_order: Callable[[], str | None], limit_s: float = HEAD_LIMIT_S
) -> dict[str, Any]:
    """Return what the head says of itself once it does.

    Raises: CheckRefused if it does not within `limit_s`, or an end is ordered meanwhile.
    """
    deadline = time.monotonic() + limit_s
    while not path.exists():
        why = find_order()
        if why is not None or time.monotonic() > deadline:
            raise CheckRefused(
                why or f"no head has left {path} within {limit_s:.0f} s",
                allowed="a run on node 0 that starts Ray, and nodes that meet by that file",
                next_step="read the log of node 0",
            )
        time.sleep(_POLL_S)
    found: dict[str, Any] = json.loads(path.read_bytes())
    return found


def _choose_settings(head: Mapping[str, Any], run_path: Path) -> NodeSettings:
    """Return how this node is started: as the head was, with directories of its own."""
    given, index = head["settings"], int(os.environ[NODE_VARIABLE])
    check_object_store(given["object_store_bytes"])
    temp_dir = choose_temp_dir(Path(given["temp_parent"]) if given["temp_parent"] else None)
    logs_dir = run_path / "attempts" / os.environ.get(ATTEMPT_VARIABLE, "local") / str(index)
    token_path = temp_dir.with_name(f"{temp_dir.name}.{TOKEN_NAME}")
    try:
        write_secret(token_path, head["token"])
    except OSError as error:
        raise explain_write_failure(error, token_path) from error
    return NodeSettings(
        temp_dir=str(temp_dir),
        shared_dir=str(choose_temp_dir(SHARED_MEMORY)),
        token_path=str(token_path),
        log_path=str(logs_dir / "ray-node.log"),
        keep_logs_dir=str(logs_dir / "ray"),
        host=find_own_address(os.environ),
        name=f"{index}@{socket.gethostname()}",
        index=index,
        num_cpus=os.cpu_count() or 1,
        object_store_bytes=given["object_store_bytes"],
        first_port=given["first_port"],
        last_port=given["last_port"],
    )


if __name__ == "__main__":
    sys.exit(main())
