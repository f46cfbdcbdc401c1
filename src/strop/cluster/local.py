"""One process: learner and engine over one model in memory. Publishing only names the new version."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from functools import partial
from itertools import count
from pathlib import Path
from typing import TypeVar

import torch

from strop.cluster.contract import LearnerRole, Roles, Scorer
from strop.engine.contract import WeightTransport, WeightUpdate
from strop.engine.native import NativeEngine
from strop.hardware import free_memory_bytes
from strop.hardware.tuning import compute_in_thread
from strop.policy.device_wires import DeviceSender, Wire, device_digest, send_copies
from strop.policy.distilling import require_same_vocabulary
from strop.policy.footprint import read_model_size, wants_recompute
from strop.policy.language_model import DTYPES, LanguageModel, ModelShape
from strop.policy.learner import Learner, Term
from strop.policy.optimizer import StepPlan, StepReport
from strop.policy.packing import PackedGroup
from strop.policy.scoring import FrozenModel
from strop.policy.sharded import shard_frozen, shard_learner
from strop.rollout import FloatArray
from strop.spec.run import RunSpec
from strop.store import ModelHandle
from strop.tokenizer import Tokenizer

Answer = TypeVar("Answer")
TEACHER = "teacher"
"""The role that the terms of distillation compare with."""


class LocalLearner:
    """A `LearnerRole` around one `Learner`.

    A step blocks the event loop, unless `is_async`: then it runs in a thread, while rollouts continue. One
    step, score or write runs at a time.
    """

    def __init__(self, local: Learner, *, is_async: bool = False) -> None:
        self.local = local
        self._frozen: dict[str, FrozenModel] = {}
        self._sender: DeviceSender | None = None
        self._sending: asyncio.Task[None] | None = None
        self._num_offers = count()
        # One thread for all steps: every thread that computes keeps an OpenMP team and its freed memory.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="learner") if is_async else None

    @property
    def is_async(self) -> bool:
        """Whether steps run in a thread."""
        return self._thread is not None

    @property
    def version(self) -> int:
        """Batches that have moved the weights."""
        return self.local.version

    @property
    def shape(self) -> ModelShape:
        """The sizes of the model."""
        return self.local.model.shape

    @property
    def device(self) -> str:
        """Kind of its device."""
        return self.local.model.device.type

    @property
    def recomputes(self) -> bool:
        """Whether it recomputes activations."""
        return self.local.model.recomputes

    async def step_terms(self, terms: Sequence[Term], plan: StepPlan | None = None) -> StepReport:
        """Take one optimizer step. See `LearnerRole.step_terms`."""
        return await self._do(partial(self.local.step_terms, terms, plan))

    async def score(self, groups: Sequence[PackedGroup], temperature: float) -> list[FloatArray]:
        """Return the log-probability of each reply's scored tokens. See `LearnerRole.score`."""
        return await self._do(partial(self.local.score, groups, temperature))

    async def digest_tensors(self, role: str | None = None) -> dict[str, str]:
        """Return the digest of each tensor. See `LearnerRole.digest_tensors`."""
        owner = self.local if role is None else self._frozen[role]
        return await self._do(owner.digest_tensors)

    async def add_frozen(self, role: str, source: ModelHandle) -> Scorer:
        """Load a frozen model. See `LearnerRole.add_frozen`."""
        self._frozen[role] = frozen = await self._do(partial(load_frozen, self.local, role, source))
        return _LocalScorer(frozen, self._do)

    async def write_weights(self, path: Path) -> str:
        """Write the compute copies; in a thread, because hashing would block the event loop."""
        return await compute_in_thread(partial(self.local.write_weights, path))

    async def weights_digest(self) -> str:
        """Return the digest of the compute copies; in a thread like `write_weights`."""
        return await compute_in_thread(self.local.weights_digest)

    async def export(self, target: Path, tokenizer_dir: Path) -> str:
        """Write a Hugging Face model directory. See `LearnerRole.export`."""
        return await self._do(partial(self.local.export, target, tokenizer_dir))

    async def offer_weights(self, wire: Wire, host: str, num_receivers: int) -> tuple[str, str]:
        """Begin to send. See `LearnerRole.offer_weights`."""
        digest = await self._do(lambda: device_digest(self.local.compute_copies()))
        self._sender = self._sender or DeviceSender(host)
        name = f"v{self.version:06d}-{next(self._num_offers)}"
        copies = self.local.compute_copies()
        send = partial(send_copies, self._sender, wire, name, copies, num_receivers)
        self._sending = asyncio.create_task(compute_in_thread(send))
        return self._sender.address(wire, name), digest

    async def write_adapter(self, target: Path) -> str:
        """Write the adapters in peft's form. Returns the digest of their tensors."""
        return await compute_in_thread(partial(self.local.write_adapter, target))

    async def save_state(self, target: Path) -> None:
        """Write masters, moments and counters. See `LearnerRole.save_state`."""
        await self._do(partial(self.local.save_state, target))

    async def load_state(self, source: Path) -> None:
        """Restore the files of `save_state`. See `LearnerRole.load_state`."""
        self.local.load_state(source)

    async def _do(self, work: Callable[[], Answer]) -> Answer:
        if self._sending is not None:
            # Weights must not move while they are sent.
            await self._sending
            self._sending = None
        if self._thread is None:
            return work()
        run = copy_context().run
        return await asyncio.get_running_loop().run_in_executor(self._thread, run, work)


class _LocalScorer:
    """A `Scorer` that takes turns with the learner of this process."""

    def __init__(self, frozen: FrozenModel, do: Callable[..., Awaitable[list[FloatArray]]]) -> None:
        self._frozen = frozen
        self._do = do

    async def score(self, groups: Sequence[PackedGroup], temperature: float) -> list[FloatArray]:
        """Return the log-probability of each reply's scored tokens. See `Scorer.score`."""
        return await self._do(partial(self._frozen.score, groups, temperature))


def build_learner(spec: RunSpec, source: ModelHandle) -> Learner:
    """Load a run's model and give it an optimizer.

    Raises: ConfigError if the model cannot be loaded.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = load_policy(spec, source, device=device)
    return Learner(
        model,
        spec.optimizer,
        micro_batch_positions=spec.train.micro_batch_tokens,
        num_steps=spec.train.num_optimizer_steps,
    )


def build_rank(spec: RunSpec, source: ModelHandle, *, num_ranks: int) -> Learner:
    """Load a run's model and keep this rank's part of it. See `shard_learner`.

    Raises: ConfigError if the model cannot be loaded.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = load_policy(spec, source, device="cpu", num_ranks=num_ranks)
    return shard_learner(
        model,
        spec.optimizer,
        device=device,
        micro_batch_positions=spec.train.micro_batch_tokens,
        num_steps=spec.train.num_optimizer_steps,
    )


def load_frozen(learner: Learner, role: str, source: ModelHandle, *, num_ranks: int = 1) -> FrozenModel:
    """Load a frozen model beside a learner, in its type; with several ranks, keep only this rank's rows.

    Raises: ConfigError if it cannot be loaded or has another vocabulary.
    """
    policy = learner.model
    device, is_whole = policy.device.type, num_ranks == 1
    model = LanguageModel.load(
        source.path, dtype=policy.dtype, device=device if is_whole else "cpu", may_fuse=is_whole
    )
    require_same_vocabulary(policy, model, role)
    for _, parameter in model.named_parameters():
        parameter.requires_grad_(False)
    frozen = (
        FrozenModel(model, max_positions=learner.max_positions)
        if is_whole
        else shard_frozen(model, device=device, max_positions=learner.max_positions)
    )
    if role == TEACHER:
        learner.teacher = frozen
    return frozen


def load_policy(spec: RunSpec, source: ModelHandle, *, device: str, num_ranks: int = 1) -> LanguageModel:
    """Load a run's model for training, with its adapters where the run trains those.

    Raises: ConfigError if the model cannot be loaded, or lacks a layer that is to be adapted.
    """
    # Measured before the weights are loaded.
    have_bytes = torch.cuda.mem_get_info()[0] if torch.cuda.is_available() else free_memory_bytes()
    model = LanguageModel.load(
        source.path, dtype=DTYPES[spec.model.dtype], device=device, may_fuse=num_ranks == 1
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
