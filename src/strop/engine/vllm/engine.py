"""vLLM as an `Engine`: token ids in, token ids out, under weights of one version.

Stops, budgets and versions are computed by strop, so that a reply ends here where it ends in the native
engine. Equal requests get equal replies as far as vLLM's kernels give equal bits: another batch may round
differently, and on rare occasions a token differs.

An update closes a gate: later requests wait, and are served under the new weights. A prefix cache never
spans two versions: the version is part of its key, and it is emptied at each update. Weights that are refused
before loading leave the old ones; an update that fails later leaves an engine that serves nothing until
another one has come.
"""

from __future__ import annotations

import asyncio
import os
import platform
import sys
from collections.abc import Iterator
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from strop.engine.contract import (
    Completion,
    GenerationRequest,
    ReplyScore,
    StopStrings,
    UpdateMode,
    WeightReceipt,
    WeightTransport,
    WeightUpdate,
    check_ids,
    check_room,
    closed,
    default_rows,
)
from strop.engine.loading import EngineSettings, Loaded
from strop.engine.vllm.core import Adapter, Piece, VllmCore
from strop.engine.vllm.environment import CPU_KV_CACHE_BYTES, EngineLimits, plan_limits
from strop.errors import ConfigError, EngineError, WeightMismatch
from strop.hardware.machine import Machine, describe_machine
from strop.hardware.tuning import importing
from strop.policy.footprint import read_model_size
from strop.rollout import FinishReason, IntArray, VersionSegment
from strop.tokenizer import Tokenizer


@dataclass(slots=True, eq=False)
class _Reply:
    """A reply while it grows."""

    request: GenerationRequest
    stops: StopStrings | None
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish: FinishReason | None = None
    segments: list[VersionSegment] = field(default_factory=list)

    def take(self, piece: Piece, version: int) -> None:
        """Add tokens, up to the one that ends the reply. `version` is that of the served weights."""
        if piece.segments and not self.token_ids:
            self.segments = list(piece.segments)  # The whole reply in one piece.
        elif not self.segments or self.segments[-1].version != version:
            self.segments.append(VersionSegment(start=len(self.token_ids), version=version))
        for token_id, logprob in zip(piece.token_ids, piece.logprobs, strict=True):
            self.token_ids.append(token_id)
            self.logprobs.append(logprob)
            if token_id in self.request.stop_token_ids:
                self.finish = FinishReason.EOS
            elif self.stops is not None and self.stops.is_completed(np.array(self.token_ids, np.int32)):
                self.finish = FinishReason.STOP_STRING
            elif len(self.token_ids) == self.request.max_tokens:
                self.finish = FinishReason.LENGTH
            if self.finish is not None:
                return
        if piece.finish is not None:
            self.finish = FinishReason.ABORT

    def complete(self, tokenizer: Tokenizer, version: int) -> Completion:
        """Return the reply; `version` is for a reply without tokens."""
        finish = self.finish or FinishReason.ABORT
        logprobs = np.array(self.logprobs, np.float32)
        if not bool(np.isfinite(logprobs).all()):
            raise EngineError(
                "vLLM gave a log-probability that is not finite",
                allowed="finite log-probabilities of every sampled token",
                next_step="check the weights; the run resumes from its last checkpoint",
            )
        is_eos = finish is FinishReason.EOS
        text = tokenizer.decode(np.array(self.token_ids[: -1 if is_eos else None], np.int32))
        # Without one that begins after the end: weights may change between the last token and its delivery.
        segments = tuple(part for part in self.segments if part.start < len(self.token_ids))
        return Completion(
            token_ids=np.array(self.token_ids, np.int32),
            # Rounding may lift the log of a certain token above 0 by one place.
            logprobs=np.minimum(logprobs, np.float32(0.0)),
            text=text if self.stops is None else self.stops.cut(text),
            finish_reason=finish,
            policy_version=segments[0].version if segments else version,
            segments=segments if len(segments) > 1 else (),
        )


class VllmEngine:
    """Generates with vLLM. One instance serves one event loop."""

    def __init__(
        self,
        core: VllmCore,
        tokenizer: Tokenizer,
        *,
        limits: EngineLimits,
        version: int = 0,
        digest: str = "",
    ) -> None:
        """`digest` is that of the weights that vLLM loaded."""
        self._core = core
        self._tokenizer = tokenizer
        self._limits = limits
        self._version = version
        self._digest = digest
        self._adapter: Adapter | None = None
        self._num_adapters = 0
        self._update_lock = asyncio.Lock()
        self._gate = asyncio.Event()
        self._gate.set()
        self._replies = _Counter()
        self._scores = _Counter()
        self._num_restarts = 0
        self._flaw: str | None = None
        self._is_closed = False

    @property
    def version(self) -> int:
        """Version of the weights served."""
        return self._version

    async def generate(self, request: GenerationRequest) -> Completion:
        """Sample one reply. See `Engine.generate`."""
        self._require_open()
        check_room(len(request.prompt_ids), request.max_tokens, "asks for", self._limits.max_positions)
        check_ids(request.prompt_ids, self._limits.vocab_size)
        while True:
            await self._pass_gate()
            num_restarts = self._num_restarts
            with self._replies.counting():
                completion = await self._sample(request)
            if completion.finish_reason is not FinishReason.ABORT or num_restarts == self._num_restarts:
                self._require_sound()
                return completion

    async def score(self, prompt_ids: IntArray, reply_ids: IntArray, temperature: float) -> ReplyScore:
        """Return the log-probability of each reply token. See `Engine.score`.

        Raises: EngineError also for a temperature other than 1: vLLM's values of given tokens are at 1.
        """
        self._require_open()
        # vLLM samples one token after the scored ones.
        check_room(len(prompt_ids), len(reply_ids), "has a reply of", self._limits.max_positions - 1)
        check_ids(np.concatenate([prompt_ids, reply_ids]), self._limits.vocab_size)
        if temperature not in (0.0, 1.0):
            raise EngineError(
                f"a reply is to be scored at temperature {temperature:g} by vLLM",
                allowed="temperature 1, or 0, which counts as 1",
                next_step="score with the policy, or with engine.kind = native",
            )
        await self._pass_gate()
        with self._scores.counting():
            version = self._version
            logprobs = await self._core.score(prompt_ids, reply_ids, adapter=self._adapter)
        return ReplyScore(logprobs=np.array(logprobs, np.float32), policy_version=version)

    async def update(self, update: WeightUpdate) -> WeightReceipt:
        """Serve new weights. See `Engine.update`. Updates are applied one at a time.

        Raises: WeightMismatch also if loading failed half-way.
        """
        if self._is_closed:
            raise closed()
        is_readable = update.transport in (WeightTransport.FILE, WeightTransport.BROADCAST)
        if not is_readable or update.path is None:
            raise WeightMismatch(
                f"weight update {update.version} is by {update.transport} and names {update.path}"
            )
        async with self._update_lock:
            self._gate.clear()
            try:
                await self._stop_running(update.mode)
                swap = self._swap_adapter if update.is_adapter else self._swap_weights
                await swap(update, update.path)
            finally:
                await self._core.resume()
                self._gate.set()
        return WeightReceipt(version=update.version, digest=update.digest)

    async def close(self) -> None:
        """End vLLM's processes; waiting requests get an EngineError, and later ones too."""
        if not self._is_closed:
            self._is_closed = True
            self._gate.set()
            await asyncio.to_thread(self._core.close)

    async def _sample(self, request: GenerationRequest) -> Completion:
        stops = StopStrings(self._tokenizer, request.stop_strings) if request.stop_strings else None
        reply = _Reply(request, stops)
        adapter, version = self._adapter, self._version
        pieces = self._core.sample(
            request, salt=_salt(version, self._digest), adapter=adapter, is_whole=stops is None
        )
        async with aclosing(pieces):
            async for piece in pieces:
                # An adapter stays with the replies that began with it.
                reply.take(piece, self._version if adapter is None else version)
                if reply.finish is not None:
                    break
        return reply.complete(self._tokenizer, version)

    async def _stop_running(self, mode: UpdateMode) -> None:
        """Finish, abort or pause all running requests, by the mode. New ones wait at the gate."""
        await self._scores.none_left()
        if mode is UpdateMode.CONTINUE:
            await self._core.pause("keep")
            return
        if mode is UpdateMode.RESTART:
            self._num_restarts += 1
            await self._core.pause("abort")
        await self._replies.none_left()

    async def _swap_weights(self, update: WeightUpdate, path: str) -> None:
        """Have every worker load the file.

        Raises: WeightMismatch.
        """
        # Until proven: a failure in between leaves vLLM with the weights of no version.
        earlier_flaw, self._flaw = self._flaw, f"weight update {update.version} did not end"
        answers = await self._core.load_weights(path, update.digest)
        refusals = [answer["refusal"] for answer in answers if answer["refusal"]]
        flaws = [answer["flaw"] for answer in answers if answer["flaw"]]
        if refusals and len(refusals) == len(answers):
            self._flaw = earlier_flaw
            raise WeightMismatch(refusals[0])
        if refusals or flaws:
            self._flaw = (flaws + refusals)[0]
            raise WeightMismatch(
                f"weight update {update.version} left other weights than the published ones: {self._flaw}",
                allowed="an engine that takes all tensors of the update",
                next_step="the engine serves nothing now; start the run again, it resumes",
            )
        await self._forget_adapter()
        await self._take(update)

    async def _swap_adapter(self, update: WeightUpdate, path: str) -> None:
        """Load an adapter beside the old one, and use it from now on.

        Raises: WeightMismatch if its file does not have the promised digest; EngineError if vLLM refuses it.
        """
        from strop.engine.vllm.weights import find_adapter_flaw

        flaw = await asyncio.to_thread(find_adapter_flaw, path, update.digest)
        if flaw is not None:
            raise WeightMismatch(
                flaw,
                allowed="exactly the adapter that the policy published",
                next_step="the engine keeps its old adapter; start the run again to publish anew",
            )
        self._num_adapters += 1
        adapter = Adapter(adapter_id=self._num_adapters, path=path, version=update.version)
        await self._core.load_adapter(adapter)
        if update.mode is not UpdateMode.CONTINUE:  # Unfinished replies continue with their adapter.
            await self._forget_adapter()
        self._adapter = adapter
        await self._take(update)

    async def _forget_adapter(self) -> None:
        if self._adapter is not None:
            await self._core.drop_adapter(self._adapter)
            self._adapter = None

    async def _take(self, update: WeightUpdate) -> None:
        """Serve the loaded weights; drop everything computed before."""
        await self._core.drop_cached()
        await self._core.name_version(update.version)
        self._version, self._digest = update.version, update.digest
        self._flaw = None

    async def _pass_gate(self) -> None:
        await self._gate.wait()
        self._require_open()

    def _require_open(self) -> None:
        if self._is_closed:
            raise closed()
        self._require_sound()

    def _require_sound(self) -> None:
        if self._flaw is not None and self._gate.is_set():
            raise EngineError(
                f"the engine's weights are of no version: {self._flaw}",
                allowed="requests after an update that came whole",
                next_step="publish the weights again, or start the run again; it resumes",
            )


class _Counter:
    """Counts concurrent operations, and waits until none runs."""

    def __init__(self) -> None:
        self._count = 0
        self._is_zero = asyncio.Event()
        self._is_zero.set()

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Count one operation."""
        self._count += 1
        self._is_zero.clear()
        try:
            yield
        finally:
            self._count -= 1
            if not self._count:
                self._is_zero.set()

    async def none_left(self) -> None:
        """Wait until none runs."""
        await self._is_zero.wait()


def _salt(version: int, digest: str) -> str:
    return f"{version}/{digest[:16]}"


_MAX_ADAPTERS = 2
"""Held by vLLM at the same time: the served one, and that of replies under way or that comes next."""

_BATCHED_TOKENS = 4096
"""Prompt tokens of one forward, on a CPU."""
_GPU_BATCHED_TOKENS = 8192
"""On a GPU, where longer prompts are cut. AsyncLLM of 0.32 takes 2,048 by itself, and 128 replies at once."""
_ADAPTED = (
    *("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
    *("qkv_proj", "gate_up_proj"),
)
"""What adapters may change; others are refused. With a LoRA of the LM head, vllm 0.32 dies on a CPU when two
prompts are scored in one batch."""


async def load_vllm(settings: EngineSettings, model_dir: Path, *, version: int) -> Loaded:
    """Start vLLM with a model directory. See `load_engine`.

    Raises: ConfigError if this interpreter has no vllm, or vLLM refuses model or settings.
    """
    import torch

    is_gpu = torch.cuda.is_available()
    # Offline, without reports of use, and on the cores of this process's threads alone.
    os.environ.update(HF_HUB_OFFLINE="1", VLLM_NO_USAGE_STATS="1", DO_NOT_TRACK="1")
    if not is_gpu:
        require_instructions(describe_machine())
        cores = sorted(os.sched_getaffinity(0))[: torch.get_num_threads()]
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", ",".join(map(str, cores)))
    try:
        with importing():
            import vllm  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            f"{sys.executable} has no usable vllm ({error})",
            allowed="an interpreter that imports vllm 0.32",
            next_step="set engine.python to one, or run `make vllm-deps` and leave it out",
        ) from error
    limits = plan_limits(
        read_model_size(model_dir),
        dtype=settings.dtype,
        max_model_tokens=settings.max_model_tokens,
        kv_cache_bytes=None if is_gpu else CPU_KV_CACHE_BYTES,
    )
    from strop.engine.vllm.weights import model_digest

    digest = await asyncio.to_thread(model_digest, model_dir, getattr(torch, settings.dtype))
    core = _start(VllmCore, vllm_arguments(settings, model_dir, limits, is_gpu=is_gpu))
    await core.follow_parents()
    await core.name_version(version)
    tokenizer = Tokenizer.load(model_dir)
    engine = VllmEngine(core, tokenizer, limits=limits, version=version, digest=digest)
    return Loaded(engine=engine, model_digest=digest, tokenizer=tokenizer)


def _start(make: Any, settings: dict[str, Any]) -> Any:
    """Start vLLM's own processes.

    Raises: ConfigError if vLLM refuses model or settings; its own words are in the log before.
    """
    from strop.engine.vllm.weights import RAISED

    try:
        return make(settings)
    except RAISED as error:
        raise ConfigError(
            f"vLLM did not start with {settings['model']} ({type(error).__name__}: {error})",
            allowed="a model and settings that vLLM takes, and memory for both",
            next_step="read the lines of vLLM above, and change the engine's settings",
        ) from error


def vllm_arguments(
    wanted: EngineSettings, model_dir: Path, limits: EngineLimits, *, is_gpu: bool
) -> dict[str, Any]:
    """Return what AsyncEngineArgs takes."""
    settings: dict[str, Any] = {
        "model": str(model_dir),
        "dtype": wanted.dtype,
        "skip_tokenizer_init": True,
        "enforce_eager": (not is_gpu if wanted.is_eager is None else wanted.is_eager),
        "max_model_len": limits.max_positions,
        "tensor_parallel_size": wanted.tensor_parallel,
        "logprobs_mode": "processed_logprobs",
        "enable_prefix_caching": True,
        "worker_extension_cls": "strop.engine.vllm.weights.WeightWorker",
        "disable_log_stats": True,
        "max_num_seqs": wanted.max_num_seqs or default_rows(is_gpu=is_gpu),
        # Settings of the model's own generation_config.json would change the distribution.
        "generation_config": "vllm",
        "seed": 0,
    }
    if is_gpu:
        settings["max_num_batched_tokens"] = _GPU_BATCHED_TOKENS
    else:
        # A seeded request whose prompt is cut into chunks kills vllm 0.32 on a CPU.
        settings["enable_chunked_prefill"] = False
        settings["max_num_batched_tokens"] = max(_BATCHED_TOKENS, limits.max_positions)
        settings["kv_cache_memory_bytes"] = CPU_KV_CACHE_BYTES
    if wanted.tensor_parallel == 1:
        settings["distributed_executor_backend"] = "uni"  # On a GPU one process less.
    if wanted.gpu_memory_frac is not None:
        settings["gpu_memory_utilization"] = wanted.gpu_memory_frac
    if wanted.lora_rank is not None:
        settings |= {"enable_lora": True, "max_lora_rank": wanted.lora_rank, "max_loras": _MAX_ADAPTERS}
        settings["lora_target_modules"] = list(_ADAPTED)
    return settings


def require_instructions(machine: Machine) -> None:
    """Refuse an x86 processor that vllm-cpu has no library for: there it would die of an illegal instruction.

    Raises: ConfigError.
    """
    if platform.machine() == "x86_64" and "avx2" not in machine.cpu_flags:
        raise ConfigError(
            f"engine.kind=vllm on {machine.cpu_name or 'a processor'} without AVX2",
            allowed="vLLM on a GPU, or on an x86 processor with AVX2; native on every processor",
            next_step="set engine.kind=native",
        )
