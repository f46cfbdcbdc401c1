"""All roles in this process: the engine generates on the learner's own compute copies.

There is one model in memory and no weight copy; a publication only names the new version.
"""

from __future__ import annotations

from strop.cluster.contract import LearnerRole, ModelSource, Roles
from strop.cluster.local_learner import LocalLearner, build_learner
from strop.engine.contract import WeightTransport, WeightUpdate
from strop.engine.native import NativeEngine
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
        engine = NativeEngine(learner.local.model, tokenizer, max_rows=self._spec.engine.max_rows)
        self._roles = Roles(
            learner=learner, engine=engine, publisher=SharedPublisher(learner), tokenizer=tokenizer
        )
        return self._roles

    async def stop(self) -> None:
        """Close the engine."""
        if self._roles is not None:
            await self._roles.engine.close()
            self._roles = None
