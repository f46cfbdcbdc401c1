"""An engine's process on a node of the run, kept by an actor there; the loop talks to it over HTTP.

The actor only starts it, watches it and ends it: requests and replies never pass through Ray.
"""

from __future__ import annotations

import asyncio
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from strop.cluster.contract import ModelSource
from strop.cluster.ray.node import find_own_address
from strop.cluster.ray.roles import RayRole
from strop.hardware.process import tail
from strop.spec.run import RunSpec

if TYPE_CHECKING:
    from strop.cluster.engine_process import EngineProcess

_POLL_S = 0.1


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineAddress:
    """Where an engine listens, and what opens it."""

    url: str
    key: str
    is_streamed: bool
    """Whether replies come home as they end."""
    model_digest: str
    tokenizer_digest: str
    pid: int
    log_path: str


class EngineHost(RayRole):
    """Keeps one engine's process on its node. No coroutines here: Ray would run all calls in one loop."""

    _process: EngineProcess | None = None

    def load(self, spec: RunSpec, source: ModelSource, work_dir: Path, num_nodes: int) -> EngineAddress:
        """Start the engine and wait until it listens, of several nodes at the address of this one.

        Its log goes beside this role's, its key into `work_dir`.

        Raises: EngineError with its last log lines if it does not; ConfigError if a part of it is missing.
        """
        host = find_own_address(os.environ, num_nodes)
        from strop.cluster.engine_process import EngineProcess

        log_dir = Path(self._start.log_path).with_suffix("")
        self._process = EngineProcess(spec, source.path, work_dir, host=host, log_dir=log_dir)
        self._process.launch()
        return asyncio.run(_connect(self._process))

    def wait_for_end(self) -> str:
        """Return why the engine ended."""
        while not self._ended.is_set():
            end = None if self._process is None else self._process.find_death()
            if end is not None:
                # The run may not see this machine's disk.
                words = tail(self._process.log_path) if self._process is not None else ""
                return f"the engine of {os.uname().nodename} ended: {end}\nIt said last:\n{words}"
            time.sleep(_POLL_S)
        return "it was told to end"

    def end(self) -> None:
        """End the engine's process."""
        super().end()
        if self._process is not None:
            asyncio.run(self._process.stop())


async def _connect(process: EngineProcess) -> EngineAddress:
    """Wait until an engine listens, and return what a client needs."""
    engine = await process.connect()
    health = await engine.health()
    url, key = process.address
    await engine.close()
    return EngineAddress(
        url=url,
        key=key,
        is_streamed=engine.is_streamed,
        model_digest=health.model_digest,
        tokenizer_digest=health.tokenizer_digest,
        pid=process.pid or 0,
        log_path=str(process.log_path),
    )
