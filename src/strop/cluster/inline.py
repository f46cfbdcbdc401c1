"""All roles in this process: the engine generates on the learner's own compute copies.

There is one model in memory and no weight copy; a publication only names the new version.
"""

from __future__ import annotations

import torch

from strop.cluster.contract import ModelSource, Roles
from strop.engine.contract import WeightTransport, WeightUpdate
from strop.engine.native import NativeEngine
from strop.policy.language_model import DTYPES, LanguageModel
from strop.policy.learner import Learner
from strop.spec.run import RunSpec
from strop.tokenizer import Tokenizer


class SharedPublisher:
    """Publishes by reference."""

    async def publish(self, learner: Learner) -> WeightUpdate:
        """Name the learner's version; the engine reads the same tensors."""
        return WeightUpdate(
            version=learner.version, digest=f"shared-{learner.version}", transport=WeightTransport.SHARED
        )


class InlinePlacement:
    """Learner and engine in this process."""

    def __init__(self, spec: RunSpec, source: ModelSource) -> None:
        self._spec = spec
        self._source = source
        self._roles: Roles | None = None

    async def start(self) -> Roles:
        """Load the model once and build both roles on it."""
        learner = build_learner(self._spec, self._source)
        tokenizer = Tokenizer.load(self._source.path)
        engine = NativeEngine(learner.model, tokenizer, max_rows=self._spec.engine.max_rows)
        self._roles = Roles(learner=learner, engine=engine, publisher=SharedPublisher(), tokenizer=tokenizer)
        return self._roles

    async def stop(self) -> None:
        """Close the engine."""
        if self._roles is not None:
            await self._roles.engine.close()
            self._roles = None


def build_learner(spec: RunSpec, source: ModelSource) -> Learner:
    """Load a run's model and give it an optimizer.

    Raises: ConfigError if the model cannot be loaded.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = LanguageModel.load(source.path, dtype=DTYPES[spec.model.dtype], device=device)
    return Learner(model, spec.optimizer, micro_batch_positions=spec.train.micro_batch_tokens)
