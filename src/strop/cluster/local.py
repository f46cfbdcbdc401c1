"""Placements on one machine: the engine in this process, or in a child with its own copy of the model.

`InlinePlacement` has one model in memory and no weight copy; publishing only names the new version.
`ProcessPlacement` sends weights by file, `v000012.safetensors`, with version and digest: in shared memory, or
in `<work_dir>/weights` where that has no room or `engine.transport` is 'file'. The child dies with this
process, however it ends, and writes `<work_dir>/engine.log` from its first byte. Everything else under
`work_dir` that the placement made is gone after `stop`.
"""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

from strop.cluster.contract import LearnerRole, ModelSource, Publisher, Roles, start_all
from strop.cluster.engine_process import EngineProcess
from strop.cluster.local_learner import LocalLearner, build_learner
from strop.cluster.publishers import (
    clear_publications,
    has_memory_room,
    open_memory_dir,
    open_publisher,
)
from strop.engine.contract import WeightTransport, WeightUpdate
from strop.engine.native import NativeEngine
from strop.engine.remote import RemoteEngine, WaitLimits
from strop.engine.server import LOOPBACK
from strop.errors import EngineError
from strop.policy.learner import Learner
from strop.policy.weights import weights_digest
from strop.spec.run import RunSpec
from strop.tokenizer import Tokenizer


class SharedPublisher:
    """Publishes by reference."""

    def __init__(self, learner: LearnerRole) -> None:
        self._learner = learner

    async def publish(self) -> WeightUpdate:
        """Name the learner's version; the engine reads the same tensors."""
        version = self._learner.version
        return WeightUpdate(version=version, digest=f"shared-{version}", transport=WeightTransport.SHARED)

    async def close(self) -> None:
        """Nothing was made."""


class InlinePlacement:
    """Learner and engine in this process."""

    def __init__(self, spec: RunSpec, source: ModelSource) -> None:
        self._spec = spec
        self._source = source
        self._roles: Roles | None = None

    async def start(self) -> Roles:
        """Load the model once and build both roles on it."""
        learner = LocalLearner(build_learner(self._spec, self._source))
        tokenizer = Tokenizer.load(self._source.path)
        engine = NativeEngine(learner.local.model, tokenizer, max_num_seqs=self._spec.engine.max_num_seqs)
        self._roles = Roles(
            learner=learner, engine=engine, publisher=SharedPublisher(learner), tokenizer=tokenizer
        )
        return self._roles

    async def stop(self) -> None:
        """Close the engine."""
        if self._roles is not None:
            await self._roles.engine.close()
            self._roles = None


class ProcessPlacement:
    """Learner here, engine in a child process."""

    def __init__(
        self, spec: RunSpec, source: ModelSource, work_dir: Path, *, limits: WaitLimits | None = None
    ) -> None:
        self._spec = spec
        self._source = source
        self._process = EngineProcess(spec, source.path, work_dir, limits=limits)
        self._work_dir = work_dir.absolute()
        self._weights_dir = self._work_dir / "weights"
        self._memory = ExitStack()
        self._publisher: Publisher | None = None

    @property
    def engine_pid(self) -> int | None:
        """Process id of the engine, None while there is none."""
        return self._process.pid

    async def start(self) -> Roles:
        """Start the engine, load the learner meanwhile, and have both hold the same weights.

        Raises: EngineError with the engine's last log lines if it does not come up; ConfigError if
        the model cannot be loaded or the server extra is missing; StoreError if `work_dir` cannot be
        written.
        """
        return await start_all(self._start, self.stop)

    async def stop(self) -> None:
        """End the engine's process and remove key and weight files. May be called at any time, and twice."""
        await self._process.stop()
        if self._publisher is not None:
            await self._publisher.close()
            self._publisher = None
        self._memory.close()
        self._weights_dir = self._work_dir / "weights"

    async def _start(self) -> Roles:
        clear_publications(self._weights_dir)
        self._process.launch()
        # Aside where rollouts are walked meanwhile.
        learner = LocalLearner(
            build_learner(self._spec, self._source), is_async=self._spec.train.max_staleness > 0
        )
        if self._spec.engine.transport == "auto" and has_memory_room(self._source.path):
            self._weights_dir = self._memory.enter_context(open_memory_dir())
        self._publisher = publisher = open_publisher(
            self._spec,
            learner,
            self._weights_dir,
            lambda: self._process.served_version,
            run_name=self._work_dir.parent.name,
            host=LOOPBACK,
        )
        engine = await self._process.connect()
        tokenizer = Tokenizer.load(self._source.path)
        await self._check_model(engine, learner.local, tokenizer)
        await engine.update(await publisher.publish())
        return Roles(
            learner=learner,
            engine=engine,
            publisher=publisher,
            tokenizer=tokenizer,
        )

    async def _check_model(self, engine: RemoteEngine, learner: Learner, tokenizer: Tokenizer) -> None:
        """Refuse an engine with other weights or another tokenizer than the learner's."""
        health = await engine.health()
        found, expected = health.model_digest, weights_digest(learner.model)
        if found != expected:
            raise EngineError(
                f"the engine loaded weights with digest {found[:12]} from {self._source.path}",
                allowed=f"those of the learner, {expected[:12]}",
                next_step="see that nothing writes to the model directory, then start the run again",
            )
        if health.tokenizer_digest != tokenizer.digest:
            raise EngineError(
                f"the engine has a tokenizer with digest {health.tokenizer_digest}",
                allowed=f"that of the policy, {tokenizer.digest}: ids would mean other texts",
                next_step="give engine and learner one model directory, then start the run again",
            )
