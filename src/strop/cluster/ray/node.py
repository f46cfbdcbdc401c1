"""Runs one Ray node of a run: `python -m strop.cluster.ray.node`, with `--settings FILE` the head.

With the directory of a run it joins that run's cluster, started by the node's agent like any other role, with
the run's environment, which all roles that Ray places here inherit. It waits for the head's file
(`record.fence`), joins, and ends its Ray processes when that file is removed; then it waits for the agent's
signal, since a sidecar does not leave a run by itself.

It starts `ray start --block`, waits, and ends everything that it started on SIGTERM, when the process that
started it dies, or when the node ends by itself. Ray's processes watch each other, but its agents outlive a
killed raylet by more than a minute (2.60): this process adopts them.

Covered: kill -9 of the owner; death of any of Ray's processes; workers in other sessions.
Not covered: kill -9 of this process: Ray's processes then end with it, agents a minute later, and the next
keeper of this user removes the temporary directory.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import shutil
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from strop.cluster.ray.runtime import HEAD_LIMIT_S, TOKEN_NAME
from strop.cluster.ray.settings import (
    RAY_VERSION,
    NodeSettings,
    check_object_store,
    choose_temp_dir,
    describe_here,
    ray_environment,
    require_ray,
    require_same_version,
    start_args,
)
from strop.errors import EXIT_DONE, EXIT_FAILED, CheckRefused, StropError
from strop.hardware.leftovers import SHARED_MEMORY, own_dir
from strop.hardware.ports import NODE_VARIABLE, find_host_address
from strop.hardware.process import (
    TAIL_BYTES,
    become_subreaper,
    end_descendants,
    reap_orphans,
    spawn,
    tail,
    terminate,
)
from strop.hardware.tuning import tune_process
from strop.io.atomic import explain_write_failure
from strop.io.endpoints import write_secret
from strop.record.fence import ATTEMPT_VARIABLE, ROLES_FOLDER, rendezvous_path
from strop.spec.layout import RAY_NODE_MODULE

_POLL_S = 0.1
_GRACE_S = 3.0
_END_LIMIT_S = 10.0
_LOG_ENDINGS = {".out", ".err", ".log"}


class Order:
    """Why this process must end, if it must. Created by the main thread before anything is started."""

    def __init__(self) -> None:
        self.signal_name = ""
        self._owner_pid = os.getppid()
        # No signal at the owner's death (1 is PR_SET_PDEATHSIG): it would kill this process before cleanup.
        ctypes.CDLL(None).prctl(1, 0, 0, 0, 0)
        become_subreaper()

        def note(number: int, _frame: object) -> None:
            self.signal_name = signal.Signals(number).name

        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, note)

    def find(self) -> str | None:
        """Return why the node must end; None while it must not."""
        if self.signal_name:
            return f"told to by {self.signal_name}"
        return "its owner has ended" if os.getppid() != self._owner_pid else None


def main(arguments: list[str] | None = None) -> int:
    """Run a node until it must end; return 0 after an order, 1 if it ended by itself."""
    order = Order()
    parser = argparse.ArgumentParser(prog=RAY_NODE_MODULE, description=__doc__)
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("run", nargs="?", type=Path, help="the directory of the run that is joined")
    which.add_argument("--settings", type=Path, help="those of a head")
    options = parser.parse_args(arguments)
    try:
        if options.settings is not None:
            return keep_node(NodeSettings.read(options.settings), None, order.find)
        code = join_run(options.run.absolute(), order)
    except StropError as error:
        say(str(error))
        return error.exit_code
    while code == EXIT_DONE and order.find() is None:
        time.sleep(_POLL_S)
    return code


def join_run(run_path: Path, order: Order) -> int:
    """Run a node of a run's cluster while its head is alive; return the result of `keep_node`.

    Raises: as `keep_node`; CheckRefused if there is no head, or one with other software.
    """
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
    return code


def say(text: str) -> None:
    """Write a line to this process's log."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def keep_node(settings: NodeSettings, address: str | None, find_order: Callable[[], str | None]) -> int:
    """Start a node, of the head at `address` or the head itself, wait for its end, and clean up.

    `find_order` returns why it must end, None while it must not. Returns 0 after an order, 1 otherwise.
    Raises: StoreError if its directories cannot be made.
    """
    log_path = Path(settings.log_path)
    # For the roles that Ray starts here: a joining node has no other process that does it.
    tune_process()
    environment = ray_environment(os.environ, host=settings.host, token_path=Path(settings.token_path))
    with own_dir(Path(settings.temp_dir)), own_dir(Path(settings.shared_dir)):
        child = spawn(start_args(settings, address), log_path, environment)
        why = None
        try:
            while child.poll() is None and (why := find_order()) is None:
                reap_orphans([child.pid])
                time.sleep(_POLL_S)
        finally:
            terminate(child, _GRACE_S)
            left = end_descendants(_END_LIMIT_S)
            if left:
                say(f"processes {', '.join(map(str, left))} did not end")
            _keep_logs(Path(settings.temp_dir), Path(settings.keep_logs_dir))
    if why is None:
        say(f"Ray node {settings.index} ended by itself; it said last:\n{tail(log_path)}")
        return EXIT_FAILED
    say(f"Ray node {settings.index} ends: {why}")
    return EXIT_DONE


def _keep_logs(temp_dir: Path, target: Path) -> None:
    """Copy the ends of the logs of Ray's processes that are not empty."""
    with suppress(OSError):
        for path in sorted(temp_dir.glob("session_2*/logs/*")):
            if path.suffix not in _LOG_ENDINGS or not path.stat().st_size:
                continue
            target.mkdir(parents=True, exist_ok=True)
            with path.open("rb") as source, (target / path.name).open("wb") as copy:
                source.seek(max(0, path.stat().st_size - TAIL_BYTES))
                shutil.copyfileobj(source, copy)


def find_own_address(environ: Mapping[str, str], num_nodes: int = 2) -> str:
    """Return the address at which the other nodes reach this one; loopback for a single node.

    Raises: CheckRefused if this node has only loopback.
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
    """Return the content of the head's file once it exists.

    Raises: CheckRefused if it does not within `limit_s`, or `find_order` returns an order.
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
    head: dict[str, Any] = json.loads(path.read_bytes())
    return head


def _choose_settings(head: Mapping[str, Any], run_path: Path) -> NodeSettings:
    """Return the settings of this node: those of the head, with other directories."""
    temp_parent, index = head["temp_parent"], int(os.environ[NODE_VARIABLE])
    check_object_store()
    temp_dir = choose_temp_dir(Path(temp_parent) if temp_parent else None)
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
    )


if __name__ == "__main__":
    sys.exit(main())
