"""The servers of a run, from before the first rollout to its end: judges, and the sandbox service.

A judge is an engine process; replies that it does not answer for stay unscored. It listens on this machine
only, or where rollout workers of other nodes need it too. A server that is started here dies with this
process, and its death ends the run with its name. A sandbox service may also be a role of the job on its CPU
nodes, which ends with the job, or an existing service, which stays.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable, Coroutine, Mapping
from pathlib import Path
from typing import Any, TypeVar

from strop.cluster.engine_process import EngineProcess
from strop.engine.server import LOOPBACK
from strop.errors import ConfigError, EngineError, SandboxLost
from strop.hardware.allocation import take_devices
from strop.hardware.process import ChildProcess, spawn, tail, terminate
from strop.io.atomic import explain_write_failure
from strop.io.endpoints import RUNTIME, Endpoint, hand_over, withdraw
from strop.io.variables import log_level_of
from strop.runtime.service_dir import ServiceDir, backend_words, read_key, serve_argv
from strop.sandbox.remote import require_service
from strop.spec.judge import JudgeSettings, role_judges
from strop.spec.layout import DeviceShare, RoleKind
from strop.spec.model import LoraSpec
from strop.spec.run import RunSpec
from strop.spec.sandboxing import RuntimeSpec
from strop.store import ModelHandle
from strop.tasks.judge_model import endpoint_name
from strop.tokenizer import Tokenizer

T = TypeVar("T")
_LOOK_EVERY_S = 1.0
_MIN_REVISION_CHARS = 8
_SERVICE_LIMIT_S = 300.0
_SERVICE_GRACE_S = 20.0


class JudgeRoles:
    """The judges that a run starts itself; there may be none."""

    def __init__(
        self, spec: RunSpec, policy: ModelHandle, models: Mapping[str, ModelHandle], work_dir: Path
    ) -> None:
        """`models` are those of `role_judges`, by name.

        Raises: ConfigError if a judge has another revision than in the run file, has no chat template, or
        is the policy.
        """
        self._spec = spec
        self._models = dict(models)
        self._work_dir = work_dir.absolute()
        self._started: dict[str, EngineProcess] = {}
        """By model."""
        self._sections = {section.judge_model: section for section in role_judges(spec.task)}
        for name, section in self._sections.items():
            judge = models[name]
            revision = section.judge_revision
            if len(revision) < _MIN_REVISION_CHARS or not judge.digest.startswith(revision):
                raise ConfigError(
                    f"task.judge_revision={revision}, and {section.judge_model} has the digest"
                    f" {judge.digest}",
                    allowed=f"at least {_MIN_REVISION_CHARS} characters of the digest, from its first:"
                    " judgements are kept under it",
                    next_step=f'set task.judge_revision = "{judge.digest[:16]}"',
                )
            if judge.digest == policy.digest and not section.can_judge_itself:
                raise ConfigError(
                    f"task.judge_model={section.judge_model} has the digest of the policy,"
                    f" {policy.digest[:16]}",
                    allowed="a judge that is another model, or task.can_judge_itself = true",
                    next_step="name another judge",
                )
            Tokenizer.load(judge.path).require_chat_template()

    async def start(self) -> None:
        """Start every judge and wait until it listens.

        Raises: EngineError with its last log lines if one does not come up; StoreError if the directory of
        the run cannot be written; CheckRefused if other nodes could not reach this one.
        """
        host = _find_host(self._spec) if self._sections else LOOPBACK
        slots = self._spec.layout.of(RoleKind.JUDGE)
        for index, (name, section) in enumerate(self._sections.items()):
            process = self._make_process(
                section, self._work_dir / f"judge-{index}", host, slots[index].devices
            )
            self._started[name] = process
            process.launch()
        for name, process in self._started.items():
            await process.connect()
            endpoint = process.endpoint
            judge = {endpoint_name(name): Endpoint(url=f"{endpoint.url}/v1", key=endpoint.key)}
            try:
                hand_over(self._work_dir, judge)
            except OSError as error:
                raise explain_write_failure(error, self._work_dir) from error

    async def stop(self) -> None:
        """End every judge and remove its key. May be called at any time, and twice."""
        for name, process in self._started.items():
            withdraw(self._work_dir, [endpoint_name(name)])
            await process.stop()
        self._started = {}

    def find_failure(self) -> EngineError | None:
        """Return an error with name, process and last log lines of a judge that has ended, if any."""
        for name, process in self._started.items():
            end = process.find_death()
            if end is not None:
                return EngineError(
                    f"the judge {name} is gone: {end}\nIts last log lines:\n{tail(process.log_path)}\n",
                    allowed="a judge that lives as long as the run",
                    next_step="mend the cause and start the run again; it goes on from its last"
                    " checkpoint, and no reply was scored without the judge",
                )
        return None

    def _make_process(
        self, section: JudgeSettings, work_dir: Path, host: str, share: DeviceShare | None
    ) -> EngineProcess:
        width = {"tensor_parallel": share.count if share else 1}
        engine = self._spec.engine.model_copy(update={"kind": section.judge_engine, **width})
        level = log_level_of(self._spec.output.log_level, "judge")
        output = self._spec.output.model_copy(update={"log_level": level})
        spec = self._spec.model_copy(update={"engine": engine, "lora": LoraSpec(), "output": output})
        return EngineProcess(
            spec,
            self._models[section.judge_model].path,
            work_dir,
            host=host,
            environment=take_devices(f"judge {section.judge_model}", share, os.environ) if share else {},
        )


class RuntimeRole:
    """The sandbox service of a run; there may be none."""

    def __init__(self, spec: RuntimeSpec, run_path: Path, servers_dir: Path) -> None:
        """`servers_dir` is the folder with addresses and keys of the run's servers."""
        self._spec = spec
        self._servers_dir = servers_dir
        self._folder = ServiceDir(run_path / "runtime")
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
            endpoint = Endpoint(url=self._spec.url, key=read_key(Path(self._spec.key_file)))
            await require_service(endpoint)
            return endpoint
        if self._spec.serve == "none":
            return None
        if self._spec.serve == "here":
            # Remove the address of an earlier attempt.
            self._folder.retire()
            self._child = spawn(
                serve_argv(sys.executable, str(self._folder.path), *backend_words(self._spec.backend)),
                self._folder.path / "serve.log",
            )
        return await self._folder.wait_for(self._folder.find, limit_s=_SERVICE_LIMIT_S, check=self._check)

    async def stop(self) -> None:
        """End a service that was started here, with all of its sandboxes. May be called twice."""
        withdraw(self._servers_dir, [RUNTIME])
        child, self._child = self._child, None
        if child is not None:
            await asyncio.to_thread(terminate, child, _SERVICE_GRACE_S)

    def _check(self) -> None:
        failure = self.find_failure()
        if failure is not None:
            raise failure

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


def _find_host(spec: RunSpec) -> str:
    """Return the address of this machine at which judging processes reach a judge."""
    if not spec.placement.rollout_workers:
        return LOOPBACK
    # Imported here: a run without Ray does not need it.
    from strop.cluster.ray.node import find_own_address

    return find_own_address(os.environ, len(spec.layout.nodes))


async def guard(work: Coroutine[Any, Any, T], *find_failures: Callable[[], Exception | None]) -> T:
    """Await `work`; once one of `find_failures` returns an error, cancel it and raise the error."""
    task = asyncio.ensure_future(work)
    try:
        while not (await asyncio.wait({task}, timeout=_LOOK_EVERY_S))[0]:
            for find_failure in find_failures:
                if (failure := find_failure()) is not None:
                    raise failure
        return await task
    finally:
        if not task.done():
            task.cancel()
            await asyncio.wait({task})
