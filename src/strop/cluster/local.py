"""One process: learner and engine over one model in memory. Publishing only names the new version."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch

from strop.cluster.contract import LearnerFacts, LearnerRole, Roles, call_method
from strop.cluster.sharded import load_empty, shard_frozen, shard_learner
from strop.engine.contract import WeightTransport, WeightUpdate
from strop.engine.native import NativeEngine
from strop.hardware import free_memory_bytes
from strop.hardware.tuning import compute_in_thread
from strop.policy.distilling import require_same_vocabulary
from strop.policy.footprint import read_model_size, wants_recompute
from strop.policy.language_model import DTYPES, LanguageModel
from strop.policy.learner import Learner
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
        self._begun: asyncio.Task[Any] | None = None

    @property
    def version(self) -> int:
        """Batches that have moved the weights."""
        return self.local.version

    async def call_all(
        self, method: Callable[Concatenate[Learner, P], T], *args: P.args, **kwargs: P.kwargs
    ) -> list[T]:
        """Call a method; return its answer as a list. See `LearnerRole.call`."""
        if self._begun is not None:
            await self._begun
            self._begun = None
        return [call_method(self.local, method, *args, **kwargs)]

    async def begin(
        self, method: Callable[Concatenate[Learner, P], T], *args: P.args, **kwargs: P.kwargs
    ) -> None:
        """Begin to call a method in a thread. See `LearnerRole.begin`."""
        work = partial(call_method, self.local, method, *args, **kwargs)
        self._begun = asyncio.create_task(compute_in_thread(work))


def build_learner(spec: RunSpec, source: ModelHandle, *, num_ranks: int = 1) -> Learner:
    """Load a run's model, or this rank's part of it (see `shard_learner`), and give it an optimizer.

    Raises: ConfigError if the model cannot be loaded.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = load_policy(spec, source, device=device, num_ranks=num_ranks)
    limits: dict[str, Any] = {
        "micro_batch_positions": spec.train.micro_batch_tokens,
        "num_steps": spec.train.num_optimizer_steps,
    }
    if num_ranks > 1:
        return shard_learner(model, source.path, spec.optimizer, device=device, **limits)
    return Learner(model, spec.optimizer, **limits)


def load_frozen(learner: Learner, role: str, source: ModelHandle) -> None:
    """Load a frozen model beside a learner, in its type; of several ranks each loads its rows.

    `role` is "reference" or "teacher"; distillation compares with the teacher.
    Raises: ConfigError if it cannot be loaded or has another vocabulary.
    """
    policy = learner.model
    device, is_whole = policy.device.type, learner.ranks.num_ranks == 1
    model = (
        LanguageModel.load(source.path, dtype=policy.dtype, device=device)
        if is_whole
        else load_empty(source.path, policy.dtype)
    )
    require_same_vocabulary(policy, model, role)
    for _, parameter in model.named_parameters():
        parameter.requires_grad_(False)
    learner.frozen[role] = (
        FrozenModel(model, max_positions=learner.max_positions)
        if is_whole
        else shard_frozen(model, source.path, device=device, max_positions=learner.max_positions)
    )


def load_policy(spec: RunSpec, source: ModelHandle, *, device: str, num_ranks: int = 1) -> LanguageModel:
    """Load a run's model for training, with its adapters where the run trains those.

    Raises: ConfigError if the model cannot be loaded, or lacks a layer that is to be adapted.
    """
    # Measured before the weights are loaded.
    have_bytes = torch.cuda.mem_get_info()[0] if torch.cuda.is_available() else free_memory_bytes()
    dtype = DTYPES[spec.model.dtype]
    model = (
        LanguageModel.load(source.path, dtype=dtype, device=device)
        if num_ranks == 1
        else load_empty(source.path, dtype)
    )
    if spec.lora.rank is not None:
        model.adapt(spec.lora, seed=spec.seed)
    size = read_model_size(source.path)
    # Frozen models are not loaded yet, and assumed to have the policy's size.
    frozen = [size] * len(spec.frozen_models)
    if wants_recompute(spec, size, have_bytes, num_ranks=num_ranks, frozen=frozen):
        model.recompute_activations()
    return model


class SharedPublisher:
    """Publishes by reference."""

    def __init__(self, learner: LearnerRole) -> None:
        self._learner = learner

    async def publish(self) -> WeightUpdate:
        """Name the learner's version; the engine reads the same tensors."""
        version = self._learner.version
        return WeightUpdate(version=version, digest=f"shared-{version}", transport=WeightTransport.SHARED)

    async def close(self) -> None:
        """Do nothing: there is no publication."""


class InlinePlacement:
    """Learner and engine in this process."""

    def __init__(self, spec: RunSpec, source: ModelHandle) -> None:
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
