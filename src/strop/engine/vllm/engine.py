"""vLLM as an `Engine`: token ids in, token ids out, under weights of one version. Made for vllm 0.32.

Stops, budgets and versions are computed by strop, so that a reply ends here where it ends in the native
engine. Equal requests get equal replies as far as vLLM's kernels give equal bits: another batch may round
differently, and on rare occasions a token differs.

An update closes a gate: later requests wait, and are served under the new weights. A prefix cache never
spans two versions: the version is part of its key, and it is emptied at each update. Weights that are refused
before loading leave the old ones; an update that fails later leaves an engine that serves nothing until
another one has come.

Facts about 0.32 that this relies on: `processed_logprobs` are of the distribution sampled from (of a greedy
token: at temperature 1), prompt log-probabilities are at temperature 1 and never use the prefix cache, and a
`cache_salt` is part of the prefix cache's key.
"""

from __future__ import annotations

import asyncio
import os
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
from strop.engine.loading import EngineSettings
from strop.engine.vllm.environment import CPU_KV_CACHE_BYTES
from strop.errors import ConfigError, EngineError, EngineLost, WeightMismatch, describe_error
from strop.hardware.tuning import importing
from strop.policy.footprint import read_model_size
from strop.rollout import FinishReason, IntArray, VersionSegment
from strop.tokenizer import Tokenizer

_MAX_SEED = 2**63
"""vLLM keeps a seed as a signed 64-bit integer."""
_PAUSES = {UpdateMode.DRAIN: "wait", UpdateMode.RESTART: "abort", UpdateMode.CONTINUE: "keep"}


@dataclass(slots=True, eq=False)
class _Reply:
    """A reply while it grows."""

    request: GenerationRequest
    stops: StopStrings | None
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish: FinishReason | None = None
    segments: list[VersionSegment] = field(default_factory=list)

    def take(self, piece: Any, version: int) -> None:
        """Add tokens of vLLM's output, up to the one that ends the reply.

        `version` is that of the served weights. vLLM names the versions of a reply that comes whole.
        """
        if piece.weight_versions and not self.token_ids:
            self.segments = [
                VersionSegment(start=span.start, version=int(span.version)) for span in piece.weight_versions
            ]
        elif not self.segments or self.segments[-1].version != version:
            self.segments.append(VersionSegment(start=len(self.token_ids), version=version))
        for token_id, row in zip(piece.token_ids, piece.logprobs or (), strict=True):
            self.token_ids.append(token_id)
            self.logprobs.append(row[token_id].logprob)
            if token_id in self.request.stop_token_ids:
                self.finish = FinishReason.EOS
            elif self.stops is not None and self.stops.is_completed(np.array(self.token_ids, np.int32)):
                self.finish = FinishReason.STOP_STRING
            elif len(self.token_ids) == self.request.max_tokens:
                self.finish = FinishReason.LENGTH
            if self.finish is not None:
                return
        if piece.finish_reason is not None:
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
        self, llm: Any, tokenizer: Tokenizer, *, max_positions: int, vocab_size: int, version: int = 0
    ) -> None:
        """`llm` is vLLM's AsyncLLM. `max_positions` limit prompt and reply together."""
        self._llm = llm
        self._tokenizer = tokenizer
        self._max_positions = max_positions
        self._vocab_size = vocab_size
        self._version = version
        self._salt = str(version)
        self._adapter: Any = None
        self._num_adapters = 0
        self._num_requests = 0
        self._update_lock = asyncio.Lock()
        self._gate = asyncio.Event()
        self._gate.set()
        self._num_running = 0
        """Replies that wait for vLLM."""
        self._num_restarts = 0
        self._flaw: str | None = None
        self._is_closed = False

    async def generate(self, request: GenerationRequest) -> Completion:
        """Sample one reply. See `Engine.generate`."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        self._require_open()
        check_room(len(request.prompt_ids), request.max_tokens, "asks for", self._max_positions)
        check_ids(request.prompt_ids, self._vocab_size)
        stops = StopStrings(self._tokenizer, request.stop_strings) if request.stop_strings else None
        params = SamplingParams(
            temperature=request.sampling.temperature,
            top_p=request.sampling.top_p,
            top_k=request.sampling.top_k or 0,
            seed=request.seed % _MAX_SEED,
            max_tokens=request.max_tokens,
            stop_token_ids=sorted(request.stop_token_ids),
            ignore_eos=True,
            detokenize=False,
            logprobs=0,
            output_kind=RequestOutputKind.FINAL_ONLY if stops is None else RequestOutputKind.DELTA,
        )
        while True:
            await self._gate.wait()
            self._require_open()
            reply, version, num_restarts = _Reply(request, stops), self._version, self._num_restarts
            adapter = self._adapter
            prompt = {"prompt_token_ids": request.prompt_ids.tolist(), "cache_salt": self._salt}
            self._num_requests += 1
            outputs = self._llm.generate(prompt, params, f"r{self._num_requests}", lora_request=adapter)
            self._num_running += 1
            try:
                with _as_engine_errors("answer a request"):
                    async with aclosing(outputs):
                        async for output in outputs:
                            # An adapter stays with the replies that began with it.
                            reply.take(output.outputs[0], self._version if adapter is None else version)
                            if reply.finish is not None:
                                break
            finally:
                self._num_running -= 1
            completion = reply.complete(self._tokenizer, version)
            if completion.finish_reason is not FinishReason.ABORT or num_restarts == self._num_restarts:
                self._require_sound()
                return completion

    async def score(self, prompt_ids: IntArray, reply_ids: IntArray, temperature: float) -> ReplyScore:
        """Return the log-probability of each reply token. See `Engine.score`.

        Raises: EngineError also for a temperature other than 1: vLLM's values of given tokens are at 1.
        """
        from vllm import SamplingParams

        self._require_open()
        # vLLM samples one token after the scored ones.
        check_room(len(prompt_ids), len(reply_ids), "has a reply of", self._max_positions - 1)
        check_ids(np.concatenate([prompt_ids, reply_ids]), self._vocab_size)
        if temperature not in (0.0, 1.0):
            raise EngineError(
                f"a reply is to be scored at temperature {temperature:g} by vLLM",
                allowed="temperature 1, or 0, which counts as 1",
                next_step="score with the policy, or with engine.kind = native",
            )
        params = SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False, temperature=0.0)
        prompt = {"prompt_token_ids": [*prompt_ids.tolist(), *reply_ids.tolist()], "cache_salt": "score"}
        weights: Any = None
        # An update may abort it, or continue it under new weights.
        while weights != (self._version, self._num_restarts):
            await self._gate.wait()
            self._require_open()
            weights = (self._version, self._num_restarts)
            self._num_requests += 1
            name = f"r{self._num_requests}"
            with _as_engine_errors("score a reply"):
                async for output in self._llm.generate(prompt, params, name, lora_request=self._adapter):
                    last = output
        rows = last.prompt_logprobs[len(prompt_ids) :]
        values = [row[token_id].logprob for row, token_id in zip(rows, reply_ids.tolist(), strict=True)]
        return ReplyScore(logprobs=np.array(values, np.float32), policy_version=weights[0])

    async def update(self, update: WeightUpdate) -> WeightReceipt:
        """Serve new weights. See `Engine.update`. Updates are applied one at a time.

        Raises: WeightMismatch also if loading failed half-way.
        """
        if self._is_closed:
            raise closed()
        if update.transport is WeightTransport.SHARED or update.path is None:
            raise WeightMismatch(
                f"weight update {update.version} is by {update.transport} and names {update.path}"
            )
        async with self._update_lock:
            self._gate.clear()
            try:
                self._num_restarts += update.mode is UpdateMode.RESTART
                await self._llm.pause_generation(mode=_PAUSES[update.mode])
                while self._num_running and update.mode is not UpdateMode.CONTINUE:  # noqa: ASYNC110
                    # vLLM has ended them, and their last tokens are on their way.
                    await asyncio.sleep(0)
                load = self._load_adapter if update.is_adapter else self._load_weights
                await load(update, update.path)
                # What was computed before is dropped, also of kept requests.
                await self._llm.reset_prefix_cache(reset_running_requests=True)
                await self._llm.update_weight_version(str(update.version))
                self._version, self._salt = update.version, f"{update.version}/{update.digest[:16]}"
                self._flaw = None
            finally:
                await self._llm.resume_generation()
                self._gate.set()
        return WeightReceipt(version=update.version, digest=update.digest)

    async def close(self) -> None:
        """End vLLM's processes; waiting requests get an EngineError, and later ones too."""
        if not self._is_closed:
            self._is_closed = True
            self._gate.set()
            await asyncio.to_thread(self._llm.shutdown)

    async def _load_weights(self, update: WeightUpdate, path: str) -> None:
        """Have every worker load the file. See `weights.WeightWorker`. Raises: WeightMismatch."""
        # Until proven: a failure in between leaves vLLM with the weights of no version.
        earlier_flaw, self._flaw = self._flaw, f"weight update {update.version} did not end"
        answers = await self._llm.collective_rpc("strop_load", args=(path, update.digest))
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

    async def _load_adapter(self, update: WeightUpdate, path: str) -> None:
        """Load an adapter beside the old one, and use it from now on.

        Raises: WeightMismatch if its file does not have the promised digest; EngineError if vLLM refuses it.
        """
        from vllm.lora.request import LoRARequest

        from strop.engine.vllm.weights import require_adapter

        await asyncio.to_thread(require_adapter, path, update.digest)
        # No number twice, so that cached keys and values of two adapters never mix.
        self._num_adapters += 1
        adapter = LoRARequest(f"adapter-{self._num_adapters}", self._num_adapters, path)
        with _as_engine_errors("load the adapter"):
            await self._llm.add_lora(adapter)
        if update.mode is not UpdateMode.CONTINUE:  # Unfinished replies continue with their adapter.
            await self._forget_adapter()
        self._adapter = adapter

    async def _forget_adapter(self) -> None:
        if self._adapter is not None:
            await self._llm.remove_lora(self._adapter.lora_int_id)
            self._adapter = None

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


@contextmanager
def _as_engine_errors(action: str) -> Iterator[None]:
    """Raise EngineLost once vLLM's own process is dead, and EngineError for its other errors."""
    from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

    from strop.engine.vllm.weights import RAISED

    try:
        yield
    except EngineDeadError as error:
        raise EngineLost(
            f"vLLM's own process died ({error})",
            allowed="an engine that lives as long as the run",
            next_step="read the engine's log for the first error in it; the run resumes",
        ) from error
    except (EngineGenerateError, *RAISED) as error:
        raise EngineError(
            f"vLLM could not {action} ({describe_error(error)})",
            allowed="requests and adapters that vLLM takes",
            next_step="read the engine's log; the rollout is masked",
        ) from error


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


async def load_vllm(
    settings: EngineSettings, model_dir: Path, *, version: int
) -> tuple[VllmEngine, Tokenizer]:
    """Start vLLM with a model directory. See `load_engine`.

    Raises: ConfigError if this interpreter has no vllm, or vLLM refuses model or settings; its own words are
        in the log before.
    """
    import torch

    is_gpu = torch.cuda.is_available()
    # Offline, without reports of use, and on the cores of this process's threads alone.
    os.environ.update(HF_HUB_OFFLINE="1", VLLM_NO_USAGE_STATS="1", DO_NOT_TRACK="1")
    if not is_gpu:
        cores = sorted(os.sched_getaffinity(0))[: torch.get_num_threads()]
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", ",".join(map(str, cores)))
    size = read_model_size(model_dir)
    max_positions = settings.max_model_tokens or size.max_positions
    arguments = vllm_arguments(settings, model_dir, max_positions, is_gpu=is_gpu)
    from strop.engine.vllm.weights import RAISED

    try:
        with importing():
            from vllm.engine.arg_utils import AsyncEngineArgs
            from vllm.v1.engine.async_llm import AsyncLLM

        llm = AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments))
    except (ImportError, *RAISED) as error:
        raise ConfigError(
            f"vLLM did not start with {model_dir} in {sys.executable} ({type(error).__name__}: {error})",
            allowed="an interpreter that imports vllm 0.32, a model and settings that it takes, and memory"
            " for both",
            next_step="read the lines of vLLM above; run `make vllm-deps`, or change the engine's settings",
        ) from error
    # Each of vLLM's workers dies with the process that started it.
    await llm.collective_rpc("strop_follow_parent")
    await llm.update_weight_version(str(version))
    tokenizer = Tokenizer.load(model_dir)
    engine = VllmEngine(
        llm, tokenizer, max_positions=max_positions, vocab_size=size.vocab_size, version=version
    )
    return engine, tokenizer


def vllm_arguments(
    wanted: EngineSettings, model_dir: Path, max_positions: int, *, is_gpu: bool
) -> dict[str, Any]:
    """Return what AsyncEngineArgs takes."""
    settings: dict[str, Any] = {
        "model": str(model_dir),
        "dtype": wanted.dtype,
        "skip_tokenizer_init": True,
        "enforce_eager": (not is_gpu if wanted.is_eager is None else wanted.is_eager),
        "max_model_len": max_positions,
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
        settings["max_num_batched_tokens"] = max(_BATCHED_TOKENS, max_positions)
        settings["kv_cache_memory_bytes"] = CPU_KV_CACHE_BYTES
    if wanted.tensor_parallel == 1:
        settings["distributed_executor_backend"] = "uni"  # On a GPU one process less.
    if wanted.gpu_memory_frac is not None:
        settings["gpu_memory_utilization"] = wanted.gpu_memory_frac
    if wanted.lora_rank is not None:
        settings |= {"enable_lora": True, "max_lora_rank": wanted.lora_rank, "max_loras": _MAX_ADAPTERS}
        settings["lora_target_modules"] = list(_ADAPTED)
    return settings
