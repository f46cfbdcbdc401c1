"""One process: learner and engine over one model in memory. Publishing only names the new version."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Concatenate, ParamSpec, TypeVar

import torch

from strop.cluster.contract import LearnerFacts, LearnerRole, Roles, call_method
from strop.cluster.sharded import ShardedMasters, load_empty
from strop.engine.contract import WeightTransport, WeightUpdate
from strop.engine.native import NativeEngine
from strop.hardware import free_memory_bytes
from strop.policy.distilling import require_same_vocabulary
from strop.policy.footprint import read_model_size, wants_recompute
from strop.policy.language_model import DTYPES, LanguageModel
from strop.policy.learner import Learner
from strop.policy.optimizer import Ranks
from strop.policy.scoring import FrozenModel
from strop.spec.run import RunSpec
from strop.store import ModelHandle
from strop.tokenizer import Tokenizer

P = ParamSpec("P")
T = TypeVar("T")


class LocalLearner(LearnerRole):
    """A learner in this process, whose event loop waits during a call."""

    def __init__(self, local: Learner, *, is_async: bool = False) -> None:
        super().__init__(LearnerFacts.of(local), is_async=is_async)
        self.local = local

    @property
    def version(self) -> int:
        """Batches that have moved the weights."""
        return self.local.version

    async def call_all(
        self, method: Callable[Concatenate[Learner, P], T], *args: P.args, **kwargs: P.kwargs
    ) -> list[T]:
        """Call a method; return its answer as a list. See `LearnerRole.call`."""
        return [call_method(self.local, method, *args, **kwargs)]


def build_learner(spec: RunSpec, source: ModelHandle, *, num_ranks: int = 1) -> Learner:
    """Load a run's model with its adapters, or this rank's part of it, and give it an optimizer.

    Of several ranks every one must call it, in an initialised process group.
    Raises: ConfigError if the model cannot be loaded, or lacks a layer that is to be adapted.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    # Measured before the weights are loaded.
    have_bytes = torch.cuda.mem_get_info()[0] if device == "cuda" else free_memory_bytes()
    ranks = Ranks(is_group=num_ranks > 1)
    model = _load(source.path, DTYPES[spec.model.dtype], device, ranks)
    if spec.lora.rank is not None:
        model.adapt(spec.lora, seed=spec.seed)
    size = read_model_size(source.path)
    # Frozen models are not loaded yet, and assumed to have the policy's size.
    frozen = [size] * len(spec.frozen_models)
    if wants_recompute(spec, size, have_bytes, num_ranks=num_ranks, frozen=frozen):
        model.recompute_activations()
    return Learner(
        model,
        spec.optimizer,
        micro_batch_positions=spec.train.micro_batch_tokens,
        masters=ShardedMasters(model, source.path, device) if num_ranks > 1 else None,
        ranks=ranks,
        num_steps=spec.train.num_optimizer_steps,
    )


def load_frozen(learner: Learner, role: str, source: ModelHandle) -> None:
    """Load a frozen model beside a learner, in its type; of several ranks each loads its rows.

    `role` is "reference" or "teacher"; distillation compares with the teacher.
    Raises: ConfigError if it cannot be loaded or has another vocabulary.
    """
    policy, ranks, device = learner.model, learner.ranks, learner.model.device.type
    model = _load(source.path, policy.dtype, device, ranks)
    require_same_vocabulary(policy, model, role)
    for _, parameter in model.named_parameters():
        parameter.requires_grad_(False)
    weights = ShardedMasters(model, source.path, device) if ranks.num_ranks > 1 else None
    learner.frozen[role] = FrozenModel(
        model, max_positions=learner.max_positions, weights=weights, ranks=ranks
    )


def _load(path: Path, dtype: torch.dtype, device: str, ranks: Ranks) -> LanguageModel:
    """Load a model, empty if it is for several ranks."""
    if ranks.num_ranks > 1:
        return load_empty(path, dtype)
    return LanguageModel.load(path, dtype=dtype, device=device)


async def publish_shared(learner: LearnerRole) -> WeightUpdate:
    """Name the learner's version; the engine reads the same tensors."""
    version = learner.version
    return WeightUpdate(version=version, digest=f"shared-{version}", transport=WeightTransport.SHARED)


class InlinePlacement:
    """Learner and engine in this process."""

    def __init__(self, spec: RunSpec, source: ModelHandle) -> None:
        self._spec = spec
        self._source = source
        self._engine: NativeEngine | None = None

    async def start(self) -> Roles:
        """Load the model once and build both roles on it."""
        learner = LocalLearner(build_learner(self._spec, self._source))
        tokenizer = Tokenizer.load(self._source.path)
        max_num_seqs = self._spec.engine.max_num_seqs
        self._engine = engine = NativeEngine(learner.local.model, tokenizer, max_num_seqs=max_num_seqs)
        publish = partial(publish_shared, learner)
        return Roles(learner=learner, engine=engine, publish=publish, tokenizer=tokenizer)

    async def stop(self) -> None:
        """Close the engine."""
        if self._engine is not None:
            await self._engine.close()
