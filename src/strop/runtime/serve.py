"""A service as it is run: a controller and the node agent beside it, or the node agent alone, kept alive.

Both are processes of their own, so that either can be killed without the other. One that ends is started
again: the controller has its port, its journal and its sandboxes back, and a node agent begins anew without
any. All end together, by SIGTERM, SIGINT, or with this process.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from strop.errors import CheckRefused
from strop.hardware.process import ChildProcess, spawn, tail, terminate, tied_argv
from strop.io.endpoints import Endpoint
from strop.runtime.service_dir import START_LIMIT_S, ServiceDir, serve_argv

_LOOK_EVERY_S = 0.2
_MIN_LIFE_S = 10.0
_MAX_SHORT_LIVES = 3
"""In a row: more is an error that a new start does not mend."""
_STOP_GRACE_S = 30.0


@dataclass(frozen=True, kw_only=True, slots=True)
class ServeOptions:
    """What is run here, and with which options."""

    folder: ServiceDir
    has_controller: bool = True
    controller_words: tuple[str, ...] = ()
    """Further arguments of `python -m strop.runtime.controller`."""
    node_words: tuple[str, ...] = ()
    """Further arguments of `strop runtime node`."""


class _Kept:
    """A process that is started again when it ends."""

    def __init__(
        self, name: str, words: Sequence[str], folder: ServiceDir, say: Callable[[str], None]
    ) -> None:
        self.name = name
        self._argv = (sys.executable, "-m", *words)
        # Jobs of a pool may share a node.
        place = "-".join(filter(None, (os.environ.get("SLURMD_NODENAME"), os.environ.get("SLURM_JOB_ID"))))
        self._log_path = folder.path / f"{name}-{place or 'here'}.log"
        self._say = say
        self._num_short = 0
        self._start()

    def _start(self) -> None:
        self._began_at = time.monotonic()
        self.child: ChildProcess = spawn(self._argv, self._log_path)

    def look(self) -> bool:
        """Start it again if it ended badly; return whether it ended well.

        Raises: CheckRefused with its last lines if it ends again and again.
        """
        code = self.child.poll()
        if code is None:
            return False
        if code == 0:
            return True
        is_short = time.monotonic() - self._began_at < _MIN_LIFE_S
        self._num_short = self._num_short + 1 if is_short else 1
        if self._num_short >= _MAX_SHORT_LIVES or code in (2, 76):
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
    """Run the service until it is told to end; `on_ready` is told where clients reach it.

    Raises: CheckRefused if a part of it cannot be kept alive, or no controller is found.
    """
    folder = options.folder
    folder.path.mkdir(parents=True, exist_ok=True)
    is_told = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, is_told.set)
    kept: list[_Kept] = []
    try:
        if options.has_controller:
            folder.retire()
            controller = ("strop.runtime.controller", "--announce", "--state-dir", str(folder.path))
            kept.append(_Kept("controller", (*controller, *options.controller_words), folder, say))
        node = ("strop.cli", "runtime", "node", "--dir", str(folder.path))
        kept.append(_Kept("node", (*node, *options.node_words), folder, say))

        looking = folder.wait_for(folder.find, limit_s=START_LIMIT_S, check=lambda: _look_at(kept))
        ready = asyncio.create_task(looking)
        told = asyncio.create_task(is_told.wait())
        await asyncio.wait({ready, told}, return_when=asyncio.FIRST_COMPLETED)
        told.cancel()
        if not ready.done():
            ready.cancel()
            return
        on_ready(ready.result())
        while not is_told.is_set():
            # A node agent that ends well was given up by a controller that is gone for good, or told to.
            if _look_at(kept):
                return
            await asyncio.sleep(_LOOK_EVERY_S)
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)
        # First: a job that is cancelled may be killed before its sandboxes have ended.
        if options.has_controller:
            folder.retire()
        # The node agent first: it ends its sandboxes and tells the controller.
        for one in reversed(kept):
            await asyncio.to_thread(terminate, one.child, _STOP_GRACE_S)
        if options.has_controller:
            folder.retire()


@asynccontextmanager
async def served_beside(*words: str) -> AsyncIterator[Endpoint]:
    """Run a service of this machine in a directory of its own for the block; `words` are its options.

    It is in the network that the calling thread is in, and is killed with that thread.

    Raises: CheckRefused with its last lines if it ends before it can be reached.
    """
    with tempfile.TemporaryDirectory(prefix="strop-service-") as name, tempfile.NamedTemporaryFile() as log:
        folder = ServiceDir(Path(name))
        argv = serve_argv(sys.executable, name, "--host", "127.0.0.1", *words)
        # Not by `spawn`, whose own thread stays in the network that it was started in.
        process = await asyncio.create_subprocess_exec(
            *tied_argv(argv[0], argv),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )

        def check() -> None:
            if process.returncode is not None:
                raise CheckRefused(
                    f"the service ended with {process.returncode}; its last lines:\n{tail(Path(log.name))}",
                    allowed="a service that stays",
                    next_step="mend the cause",
                )

        try:
            yield await folder.wait_for(folder.find, limit_s=START_LIMIT_S, check=check)
        finally:
            if process.returncode is None:
                process.terminate()
            await process.wait()


def _look_at(kept: Sequence[_Kept]) -> bool:
    """Look at all; return whether one ended well. Raises: as `_Kept.look`."""
    return any(one.look() for one in kept)
