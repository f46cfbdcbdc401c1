"""Keeps one Ray node of a run: `python -m strop.cluster.ray.node LOGS`.

The one launcher of Ray, wherever a run's Ray runs. The run itself starts it for its head; on every other node
of a job the node's agent does, like any other role. Its environment says the rest: the node's index, the
head's address, the file of the token (`hardware.ports`). It runs `ray start --block`, and ends everything
that it started on SIGTERM, when the process that started it dies, or when Ray ends by itself: so a node ends
seconds after its head. All roles that Ray places here inherit its environment.

Ray's processes watch each other, but its agents outlive a killed raylet by more than a minute (2.60): this
process adopts them. `ray symmetric-run` would not do: at SIGTERM it ends Ray while the run still saves.

Covered: kill -9 of the owner; death of any of Ray's processes; workers in other sessions.
Not covered: kill -9 of this process: Ray's processes then end with it, agents a minute later, and the next
launcher of this user removes the directories.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import shutil
import signal
import socket
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from strop.cluster.ray.settings import (
    RayNode,
    check_object_store,
    choose_temp_dir,
    ray_environment,
    require_ray,
)
from strop.errors import EXIT_DONE, EXIT_FAILED, CheckRefused, StropError
from strop.hardware.leftovers import own_dir
from strop.hardware.ports import count_nodes
from strop.hardware.process import (
    TAIL_BYTES,
    become_subreaper,
    end_descendants,
    reap_orphans,
    spawn,
    terminate,
)
from strop.hardware.tuning import tune_process
from strop.spec.layout import RAY_NODE_MODULE

HEAD_LIMIT_S = 3600.0
"""How long a node waits for the head, whose run may fetch a model before it starts Ray."""
_OUTPUT = Path("/dev/stdout")
_POLL_S = 0.1
_CONNECT_S = 5.0
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
    """Run a node until it must end; return 0 then and after the head's end, 1 if it ended by itself."""
    order = Order()
    parser = argparse.ArgumentParser(prog=RAY_NODE_MODULE, description=__doc__)
    parser.add_argument("logs", type=Path, help="folder for the logs of Ray's processes")
    place = parser.add_mutually_exclusive_group()
    place.add_argument("--temp-dir", type=Path, help="the new directory of this node")
    place.add_argument("--below", type=Path, help="the folder for it; default: the user's own below /tmp")
    options = parser.parse_args(arguments)
    try:
        require_ray()
        check_object_store()
        node = RayNode.here(
            os.environ,
            count_nodes(os.environ),
            temp_dir=options.temp_dir or choose_temp_dir(options.below),
            logs_dir=options.logs,
        )
        if node.index and not await_head(node.address, order.find):
            return EXIT_DONE
        return keep_node(node, order.find)
    except StropError as error:
        _say(str(error))
        return error.exit_code


def keep_node(node: RayNode, find_order: Callable[[], str | None]) -> int:
    """Start a node, wait for its end, and clean up.

    `find_order` returns why it must end, None while it must not. Returns 0 after an order or the head's end.
    Raises: StoreError if its directories cannot be made.
    """
    # For the roles that Ray starts here: a joining node has no other process that does it.
    tune_process()
    with own_dir(node.temp_dir), own_dir(node.shared_dir):
        child = spawn(node.ray_start(), _OUTPUT, ray_environment(os.environ, node.host))
        why = None
        try:
            while child.poll() is None and (why := find_order()) is None:
                reap_orphans([child.pid])
                time.sleep(_POLL_S)
        finally:
            terminate(child, _GRACE_S)
            left = end_descendants(_END_LIMIT_S)
            if left:
                _say(f"processes {', '.join(map(str, left))} did not end")
            _keep_logs(node.temp_dir, node.logs_dir / "ray")
    if why is None and node.index and not _answers(node.address):
        why = "the head has ended"
    if why is None:
        _say(f"Ray node {node.index} ended by itself")
        return EXIT_FAILED
    _say(f"Ray node {node.index} ends: {why}")
    return EXIT_DONE


def await_head(address: str, find_order: Callable[[], str | None], limit_s: float = HEAD_LIMIT_S) -> bool:
    """Wait until the head listens; return False if `find_order` returns an order before.

    Raises: CheckRefused if it does not within `limit_s`.
    """
    deadline = time.monotonic() + limit_s
    while not _answers(address):
        if find_order() is not None:
            return False
        if time.monotonic() > deadline:
            raise CheckRefused(
                f"nothing listens at {address} after {limit_s:.0f} s",
                allowed="a run on node 0 that starts Ray there, and a network between the nodes",
                next_step="read the log of node 0",
            )
        time.sleep(_POLL_S)
    return True


def _answers(address: str) -> bool:
    """Whether something listens there. In a container's first seconds the host's name may not resolve."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), _CONNECT_S).close()
    except OSError:
        return False
    return True


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


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
