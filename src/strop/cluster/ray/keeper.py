"""Keeps one Ray node: `python -m strop.cluster.ray.keeper --settings FILE` keeps a head.

Starts `ray start --block`, waits, and ends everything that it started when it is told to (SIGTERM), when
the process that started it dies, or when the node ends by itself. Ray's own processes watch each other,
but its agents outlive a killed raylet by more than a minute (2.60): this process adopts them.

Covered: kill -9 of the owner; death of any of Ray's processes; workers in sessions of their own.
Not covered: kill -9 of this process itself, after which Ray's processes end with it, agents a minute later;
the temporary directory is then removed by the next keeper of this user.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from strop.cluster.ray.settings import (
    NodeSettings,
    choose_ports,
    ray_environment,
    start_args,
)
from strop.errors import EXIT_DONE, EXIT_FAILED, StropError
from strop.hardware.leftovers import own_dir
from strop.hardware.process import (
    TAIL_BYTES,
    ChildProcess,
    become_subreaper,
    end_descendants,
    reap_orphans,
    spawn,
    tail,
    terminate,
)
from strop.hardware.tuning import tune_process

_POLL_S = 0.1
_GRACE_S = 3.0
_END_LIMIT_S = 10.0
_LOG_ENDINGS = {".out", ".err", ".log"}


class Order:
    """Whether this process is to end, and why. Made before anything is started, by the main thread."""

    def __init__(self) -> None:
        self.signal_name = ""
        self._owner_pid = os.getppid()
        # The kernel's kill at the owner's death would come before anything is cleared. 1 is PR_SET_PDEATHSIG.
        ctypes.CDLL(None).prctl(1, 0, 0, 0, 0)
        become_subreaper()
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._note)

    def _note(self, number: int, _frame: object) -> None:
        self.signal_name = signal.Signals(number).name

    def find(self) -> str | None:
        """Return why the node is to end; None while it is not."""
        if self.signal_name:
            return f"told to by {self.signal_name}"
        return "its owner has ended" if os.getppid() != self._owner_pid else None


def main(arguments: list[str] | None = None) -> int:
    """Keep a head until it is to end; return 0 if it was told to, 1 if it ended by itself."""
    order = Order()
    parser = argparse.ArgumentParser(prog="strop.cluster.ray.keeper", description=__doc__)
    parser.add_argument("--settings", type=Path, required=True)
    given = parser.parse_args(arguments)
    try:
        return keep_node(NodeSettings.read(given.settings), None, order.find)
    except StropError as error:
        say(str(error))
        return error.exit_code


def say(text: str) -> None:
    """Write a line to this process's log."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def keep_node(settings: NodeSettings, address: str | None, find_order: Callable[[], str | None]) -> int:
    """Start a node, of the head at `address` or the head itself, and wait for its end; nothing is left then.

    `find_order` says why it is to end, None while it is not. Returns 0 after an order, 1 otherwise.
    Raises: CheckRefused if its ports are taken; StoreError if its directories cannot be made.
    """
    log_path = Path(settings.log_path)
    # For the roles that Ray starts here: on a node that joins, no run has done it.
    tune_process()
    environment = ray_environment(os.environ, host=settings.host, token_path=Path(settings.token_path))
    ports = choose_ports(settings)
    with own_dir(Path(settings.temp_dir)), own_dir(Path(settings.shared_dir)):
        child = spawn(start_args(settings, address, ports), log_path, environment)
        try:
            why = _wait(child, find_order)
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


def _wait(child: ChildProcess, find_order: Callable[[], str | None]) -> str | None:
    """Wait for an order to end and return why; None if the node ended first."""
    while child.poll() is None:
        why = find_order()
        if why is not None:
            return why
        reap_orphans([child.pid])
        time.sleep(_POLL_S)
    return None


def _keep_logs(temp_dir: Path, target: Path) -> None:
    """Copy the ends of the logs of Ray's processes, of those that said anything."""
    with suppress(OSError):
        for path in sorted(temp_dir.glob("session_2*/logs/*")):
            if path.suffix not in _LOG_ENDINGS or not path.stat().st_size:
                continue
            target.mkdir(parents=True, exist_ok=True)
            with path.open("rb") as source, (target / path.name).open("wb") as copy:
                source.seek(max(0, path.stat().st_size - TAIL_BYTES))
                shutil.copyfileobj(source, copy)


if __name__ == "__main__":
    sys.exit(main())
