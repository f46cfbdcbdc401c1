"""One machine: a learner in this process, the engine beside it or in a child with a copy of the model.

`InlinePlacement` has one model in memory and no weight copy; publishing only names the new version.
`ProcessPlacement` sends weights by file, `v000012.safetensors`, with version and digest: in shared memory, or
in `<work_dir>/weights` where that has no room or `engine.transport` is 'file'. The child dies with this
process, however it ends, and writes `<work_dir>/engine.log` from its first byte. `stop` removes all other
files of the placement under `work_dir`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from contextvars import copy_context
from functools import partial
from itertools import count
from pathlib import Path
from typing import TypeVar

import torch

from strop.cluster.contract import LearnerRole, Publisher, Roles, Scorer, start_all
from strop.cluster.engine_process import EngineProcess
from strop.cluster.publishers import (
    clear_publications,
    has_memory_room,
    open_memory_dir,
    open_publisher,
)
from strop.engine.contract import WeightTransport, WeightUpdate
from strop.engine.native import NativeEngine
from strop.engine.server import LOOPBACK
from strop.errors import EngineError
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
from strop.policy.weights import weights_digest
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


class ProcessPlacement:
    """Learner here, engine in a child process."""

    def __init__(self, spec: RunSpec, source: ModelHandle, work_dir: Path) -> None:
        self._spec = spec
        self._source = source
        self._process = EngineProcess(spec, source.path, work_dir)
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
        # In a thread where rollouts run during a step.
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
            host=LOOPBACK,
        )
        engine = await self._process.connect()
        tokenizer = Tokenizer.load(self._source.path)
        # An engine with other weights or another tokenizer than the learner's is refused.
        health = await engine.health()
        actual, expected = health.model_digest, weights_digest(learner.local.model)
        if actual != expected:
            raise EngineError(
                f"the engine loaded weights with digest {actual[:12]} from {self._source.path}",
                allowed=f"those of the learner, {expected[:12]}",
                next_step="see that nothing writes to the model directory, then start the run again",
            )
        if health.tokenizer_digest != tokenizer.digest:
            raise EngineError(
                f"the engine has a tokenizer with digest {health.tokenizer_digest}",
                allowed=f"that of the policy, {tokenizer.digest}: ids would mean other texts",
                next_step="give engine and learner one model directory, then start the run again",
            )
        await engine.update(await publisher.publish())
        return Roles(
            learner=learner,
            engine=engine,
            publisher=publisher,
            tokenizer=tokenizer,
        )
