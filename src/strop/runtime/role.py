"""The sandbox service of a run, from before the first rollout to the end.

A service that is started here dies with this process, and its death ends the run with its name. It may also
be a role of the job on its CPU nodes, which ends with the job, or an existing service, which stays.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from strop.errors import SandboxLost, SandboxRefused, describe_error
from strop.hardware.process import ChildProcess, spawn, tail, terminate
from strop.io.endpoints import RUNTIME, Endpoint, hand_over, withdraw
from strop.runtime.contract import SERVICE_KEY_HEADER
from strop.runtime.keys import read_keys
from strop.runtime.service_dir import backend_words, serve_argv, wait_for_server
from strop.spec.sandboxing import RuntimeSpec

_SERVICE_LIMIT_S = 300.0
_SERVICE_GRACE_S = 20.0
_ANSWER_LIMIT_S = 30.0


class RuntimeRole:
    """The sandbox service of a run; there may be none."""

    def __init__(self, spec: RuntimeSpec, run_path: Path, servers_dir: Path) -> None:
        """`servers_dir` is the folder with addresses and keys of the run's servers."""
        self._spec = spec
        self._servers_dir = servers_dir
        self._folder = (run_path / "runtime").absolute()
        self._child: ChildProcess | None = None

    async def start(self) -> None:
        """Find or start the service, wait until it listens, and publish its address and key.

        Raises: ConfigError for a bad key file; SandboxRefused if an existing service does not answer, or not
        to that key; CheckRefused if none starts; SandboxLost with its last log lines if it ended.
        """
        endpoint = await self._find()
        if endpoint is not None:
            hand_over(self._servers_dir, {RUNTIME: endpoint})

    async def _find(self) -> Endpoint | None:
        if self._spec.url is not None and self._spec.key_file is not None:
            endpoint = Endpoint(url=self._spec.url, key=[*read_keys(Path(self._spec.key_file))][-1])
            await _require_service(endpoint)
            return endpoint
        if self._spec.serve == "none":
            return None
        if self._spec.serve == "here":
            # Remove the address of an earlier attempt.
            withdraw(self._folder, (RUNTIME,))
            self._child = spawn(
                serve_argv(sys.executable, str(self._folder), *backend_words(self._spec.backend)),
                self._folder / "serve.log",
            )
        return await wait_for_server(self._folder, RUNTIME, limit_s=_SERVICE_LIMIT_S, check=self.find_failure)

    async def stop(self) -> None:
        """End a service that was started here, with all of its sandboxes. May be called twice."""
        withdraw(self._servers_dir, [RUNTIME])
        child, self._child = self._child, None
        if child is not None:
            await asyncio.to_thread(terminate, child, _SERVICE_GRACE_S)

    def find_failure(self) -> SandboxLost | None:
        """Return an error with the last log lines of a service that was started here, if it has ended."""
        if self._child is None or (code := self._child.poll()) is None:
            return None
        return SandboxLost(
            f"the sandbox service ended with {code}. Its last log lines:\n{tail(self._child.log_path)}\n",
            allowed="a service that lives as long as the run",
            next_step="mend the cause and start the run again; it goes on from its last checkpoint",
            kind="infra",
        )


async def _require_service(endpoint: Endpoint) -> None:
    """Refuse a service that does not answer, or not to its key. Raises: SandboxRefused with kind service."""
    import httpx

    try:
        # Proxies in the environment lead out of the cluster; the service is inside.
        async with httpx.AsyncClient(trust_env=False, timeout=_ANSWER_LIMIT_S) as http:
            answer = await http.get(f"{endpoint.url}/list", headers={SERVICE_KEY_HEADER: endpoint.key})
        why = "" if answer.is_success else f"it answered {answer.status_code}"
    except httpx.HTTPError as error:
        why = f"it does not answer: {describe_error(error)}"
    if why:
        raise SandboxRefused(
            f"runtime.url={endpoint.url}: {why}",
            allowed="a sandbox service that runs, and its key in runtime.key_file",
            next_step="look at its log, and at the key file",
            kind="service",
        )
