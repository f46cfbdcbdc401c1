"""The sandbox service of a run: found or started before the first rollout, and handed to every worker.

A service that is started here is a process that ends with this one, as judges are. One on the job's CPU nodes
is a role of the job, which ends with it; one that was there before stays.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, TypeVar

from strop.cluster.judge_role import guard_work
from strop.errors import SandboxLost
from strop.hardware.process import ChildProcess, spawn, tail, terminate
from strop.io.endpoints import RUNTIME, Endpoint, hand_over, withdraw
from strop.runtime.service_dir import ServiceDir, backend_words, read_key, serve_argv
from strop.sandbox.remote import require_service
from strop.spec.runtime import RuntimeSpec

T = TypeVar("T")
_START_LIMIT_S = 300.0
_STOP_GRACE_S = 20.0


class RuntimeRole:
    """The service that a run's workers use; there may be none."""

    def __init__(self, spec: RuntimeSpec, run_path: Path, servers_dir: Path) -> None:
        """`servers_dir` is where the run hands its servers over."""
        self._spec = spec
        self._servers_dir = servers_dir
        self._folder = ServiceDir(run_path / "runtime")
        self._child: ChildProcess | None = None

    async def start(self) -> None:
        """Find or start the service, wait until it listens, and hand it over.

        Raises: ConfigError for a bad key file; SandboxRefused if one that was there does not answer, or not
        to that key; CheckRefused if one does not come; SandboxLost with its last log lines if it ended.
        """
        endpoint = await self._find()
        if endpoint is not None:
            hand_over(self._servers_dir, {RUNTIME: endpoint})

    async def _find(self) -> Endpoint | None:
        if self._spec.url is not None and self._spec.key_file is not None:
            found = Endpoint(url=self._spec.url, key=read_key(Path(self._spec.key_file)))
            await require_service(found)
            return found
        if self._spec.serve == "none":
            return None
        if self._spec.serve == "here":
            # What an earlier attempt announced is gone.
            self._folder.retire()
            self._child = spawn(
                serve_argv(sys.executable, str(self._folder.path), *backend_words(self._spec.backend)),
                self._folder.path / "serve.log",
            )
        return await self._folder.wait_for(self._folder.find, limit_s=_START_LIMIT_S, check=self._check)

    async def guard(self, work: Coroutine[Any, Any, T]) -> T:
        """Wait for a work, and end it if a service that was started here dies meanwhile.

        Raises: SandboxLost with its last log lines.
        """
        return await guard_work(work, self._find_failure)

    async def stop(self) -> None:
        """End a service that was started here, with all of its sandboxes. May be called twice."""
        withdraw(self._servers_dir, [RUNTIME])
        child, self._child = self._child, None
        if child is not None:
            await asyncio.to_thread(terminate, child, _STOP_GRACE_S)

    def _check(self) -> None:
        failure = self._find_failure()
        if failure is not None:
            raise failure

    def _find_failure(self) -> SandboxLost | None:
        if self._child is None or (code := self._child.poll()) is None:
            return None
        return SandboxLost(
            f"the sandbox service ended with {code}. Its last log lines:\n{tail(self._child.log_path)}\n",
            allowed="a service that lives as long as the run",
            next_step="mend the cause and start the run again; it goes on from its last checkpoint",
            kind="infra",
        )
