"""Runs a service: a controller with a node agent, or a node agent alone, each restarted when it dies.

They are separate processes, so that either can be killed without the other. A restarted controller has its
port, its journal and its sandboxes again; a restarted node agent has no sandboxes. Both end with SIGTERM or
SIGINT, or with this process.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from strop.errors import CheckRefused
from strop.hardware.process import ChildProcess, spawn, terminate
from strop.io.endpoints import Endpoint
from strop.runtime.service_dir import START_LIMIT_S, ServiceDir

_POLL_S = 0.2
_MIN_RUN_S = 10.0
_MAX_SHORT_RUNS = 3
"""Successive runs below `_MIN_RUN_S`, after which the service gives up."""
_STOP_GRACE_S = 30.0


@dataclass(frozen=True, kw_only=True, slots=True)
class ServeOptions:
    """The processes to run, and their options."""

    folder: ServiceDir
    has_controller: bool = True
    controller_words: tuple[str, ...] = ()
    """Further arguments of `python -m strop.runtime.controller`."""
    node_words: tuple[str, ...] = ()
    """Further arguments of `strop runtime node`."""


class _Restarted:
    """A process that is restarted when it ends."""

    def __init__(
        self, name: str, words: Sequence[str], folder: ServiceDir, say: Callable[[str], None]
    ) -> None:
        self.name = name
        self._argv = (sys.executable, "-m", *words)
        # Several jobs of one service may share a node.
        job = "-".join(filter(None, (os.environ.get("SLURMD_NODENAME"), os.environ.get("SLURM_JOB_ID"))))
        self._log_path = folder.path / f"{name}-{job or 'here'}.log"
        self._say = say
        self._num_short = 0
        self._start()

    def _start(self) -> None:
        self._began_at = time.monotonic()
        self.child: ChildProcess = spawn(self._argv, self._log_path)

    def check(self) -> bool:
        """Restart the process if it failed; return whether it ended with success.

        Raises: CheckRefused with its last lines if it keeps failing.
        """
        code = self.child.poll()
        if code is None:
            return False
        if code == 0:
            return True
        is_short = time.monotonic() - self._began_at < _MIN_RUN_S
        self._num_short = self._num_short + 1 if is_short else 1
        if self._num_short >= _MAX_SHORT_RUNS or code in (2, 76):
            raise CheckRefused(
                f"runtime {self.name} ended with {code}; its last lines:\n{self.child.tail()}",
                allowed="a process that stays",
                next_step=f"mend the cause; its log is {self._log_path}",
            )
        self._say(f"runtime {self.name} ended with {code} and is started again")
        self._start()
        return False


async def serve(
    options: ServeOptions, *, on_ready: Callable[[Endpoint], None], say: Callable[[str], None]
) -> None:
    """Run the service until a signal; call `on_ready` with its address once clients can reach it.

    Raises: CheckRefused if one of its processes keeps failing, or no controller is found.
    """
    folder = options.folder
    folder.path.mkdir(parents=True, exist_ok=True)
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopping.set)
    processes: list[_Restarted] = []

    def check() -> bool:
        return any(process.check() for process in processes)

    try:
        if options.has_controller:
            folder.retire()
            controller = ("strop.runtime.controller", "--announce", "--state-dir", str(folder.path))
            processes.append(_Restarted("controller", (*controller, *options.controller_words), folder, say))
        node = ("strop.cli", "runtime", "node", "--dir", str(folder.path))
        processes.append(_Restarted("node", (*node, *options.node_words), folder, say))

        ready = asyncio.create_task(folder.wait_for(folder.find, limit_s=START_LIMIT_S, check=check))
        stopped = asyncio.create_task(stopping.wait())
        await asyncio.wait({ready, stopped}, return_when=asyncio.FIRST_COMPLETED)
        stopped.cancel()
        if not ready.done():
            ready.cancel()
            return
        on_ready(ready.result())
        while not stopping.is_set():
            # A node agent ends with success when its controller is gone for good, or after a signal.
            if check():
                return
            await asyncio.sleep(_POLL_S)
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)
        # Before the sandboxes end: a cancelled job may be killed meanwhile.
        if options.has_controller:
            folder.retire()
        # The node agent first: it ends its sandboxes and reports that to the controller.
        for process in reversed(processes):
            await asyncio.to_thread(terminate, process.child, _STOP_GRACE_S)
        if options.has_controller:
            folder.retire()
