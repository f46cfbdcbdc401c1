"""How fast this machine multiplies and copies: measured once, kept in the cache, read by the planner.

Reading needs no torch. A measurement counts for the CPU and thread count it was taken with.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from strop.hardware.machine import describe_machine
from strop.io.atomic import explain_write_failure, write_bytes_atomically
from strop.io.variables import user_cache_dir

Action = Callable[[], object]
CALIBRATION_NAME = "hardware.json"
SMALLEST_GEMM, GEMM_SIZE = 128, 2048
"""Rows and columns of the products that are timed. Emulated bfloat16 takes half a minute for the last."""
COPY_BYTES = 256 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class Calibration:
    """Speeds of one machine, each the best of several tries."""

    measured_at: float
    """Unix seconds."""
    cpu_name: str | None
    num_threads: int
    torch_version: str
    gemm_fp32_gflops: float
    """Billions of floating-point operations per second, square float32 product of `GEMM_SIZE` or less."""
    gemm_bf16_gflops: float
    copy_gb_per_s: float
    """Billions of bytes copied per second (each byte read once and written once, counted once)."""


def calibrate_machine(
    *,
    cache_dir: Path | None = None,
    gemm_size: int = GEMM_SIZE,
    copy_bytes: int = COPY_BYTES,
    time_limit_s: float = 0.5,
) -> Calibration:
    """Measure and remember. Takes at most about five times `time_limit_s` and torch's import.

    Raises: StoreError if the result cannot be written to the cache.
    """
    import torch

    source = torch.ones(copy_bytes, dtype=torch.uint8)
    target = torch.empty_like(source)
    result = Calibration(
        measured_at=time.time(),
        cpu_name=describe_machine().cpu_name,
        num_threads=torch.get_num_threads(),
        torch_version=str(torch.__version__),
        gemm_fp32_gflops=measure_gemm("float32", time_limit_s, largest=gemm_size) / 1e9,
        gemm_bf16_gflops=measure_gemm("bfloat16", time_limit_s, largest=gemm_size) / 1e9,
        copy_gb_per_s=copy_bytes / _best_s(lambda: target.copy_(source), time_limit_s) / 1e9,
    )
    parent = cache_dir or user_cache_dir()
    try:
        parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise explain_write_failure(error, parent / CALIBRATION_NAME) from error
    write_bytes_atomically(parent / CALIBRATION_NAME, json.dumps(asdict(result), indent=1).encode())
    return result


def read_calibration(cache_dir: Path | None = None) -> Calibration | None:
    """Return what was measured on this CPU before, or None. Without torch."""
    path = (cache_dir or user_cache_dir()) / CALIBRATION_NAME
    try:
        found = Calibration(**json.loads(path.read_bytes()))
    except (OSError, ValueError, TypeError):
        # Not measured, or by another version of strop: the same to a planner.
        return None
    # A cache on a shared home directory may come from another machine.
    return found if found.cpu_name == describe_machine().cpu_name else None


def measure_gemm(dtype: str, time_limit_s: float, *, largest: int = GEMM_SIZE) -> float:
    """Return the operations per second of a square product; takes at most about twice the limit."""
    import torch

    def prepare(size: int) -> Action:
        left, right = (torch.ones(size, size, dtype=getattr(torch, dtype)) for _ in range(2))
        out = torch.empty_like(left)
        return lambda: torch.mm(left, right, out=out)

    return best_rate(prepare, time_limit_s, largest=largest)


def best_rate(
    prepare: Callable[[int], Action],
    time_limit_s: float,
    *,
    largest: int,
    clock: Callable[[], float] = time.perf_counter,
) -> float:
    """Return the operations per second of the largest square product that the time allows.

    `prepare` returns what multiplies matrices of a size. Sizes double from `SMALLEST_GEMM` to `largest`
    for as long as a product of the next one, made twice, would fit into what is left of the limit.
    """
    ends_at = clock() + time_limit_s
    size = min(SMALLEST_GEMM, largest)
    while True:
        multiply = prepare(size)
        seconds = _best_s(multiply, 0.0, clock)
        if size * 2 > largest or clock() + 2 * 8 * seconds > ends_at:
            # Not only what was left of the limit: of many tries, one is undisturbed.
            return 2.0 * size**3 / min(seconds, _best_s(multiply, time_limit_s, clock))
        size *= 2


def _best_s(action: Action, time_limit_s: float, clock: Callable[[], float] = time.perf_counter) -> float:
    """Return the shortest of several tries; at least one after a first that warms up."""
    action()
    best, ends_at = float("inf"), clock() + time_limit_s
    while True:
        started_at = clock()
        action()
        finished_at = clock()
        best = min(best, finished_at - started_at)
        if finished_at >= ends_at:
            return best


# Shares of those speeds that generation and learning reach. They depend on the program and not on the model's
# size; `strop plan --measure` measures them, and the defaults below name their measurement.

EFFICIENCY_NAME = "efficiency.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class Efficiency:
    """What real work reaches of the speeds of one large product and one large copy."""

    learn_frac: float
    """Of the product's rate, in forward and backward passes."""
    decode_frac: float
    """Of the product's rate, in prefill and decoding of many rows."""
    decode_layer_s: float
    """Seconds that every layer adds to every decode step, however few its rows."""
    update_frac: float
    """Of the copy's rate, in the optimizer's pass over masters, moments, gradients and copies."""
    cpu_name: str | None
    """Where it was measured; None for an accelerator."""
    source: str
    """The measurement, in words."""
    is_measured: bool = False
    """Whether it was measured on the machine that is planned for."""


CPU_EFFICIENCY = Efficiency(
    learn_frac=0.77,
    decode_frac=0.66,
    decode_layer_s=0.0002,
    update_frac=0.36,
    cpu_name=None,
    source="SmolLM2-135M in bfloat16 on two AMD EPYC cores with 425 GFLOP/s, fitted to the steps in"
    " benchmarks/results/grpo-*-2026-11-21 and generate-*-2026-11-21",
)
"""Of processors."""
GPU_EFFICIENCY = Efficiency(
    learn_frac=0.3,
    decode_frac=0.5,
    decode_layer_s=0.00004,
    update_frac=0.7,
    cpu_name=None,
    source="not measured by strop: published shares of peak of small dense models on H100 and H200 (prime-rl:"
    " 0.11 to 0.36 in learning), ten kernels of 4 us per layer and decode step",
)
"""Of accelerators."""


def read_efficiency(cache_dir: Path | None = None) -> Efficiency | None:
    """Return what was measured on this processor before, or None. Without torch."""
    path = (cache_dir or user_cache_dir()) / EFFICIENCY_NAME
    try:
        found = Efficiency(**json.loads(path.read_bytes()))
    except (OSError, ValueError, TypeError):
        # Not measured, or by another version of strop: the same to a planner.
        return None
    # A cache on a shared home directory may come from another machine.
    return found if found.cpu_name == describe_machine().cpu_name else None


def write_efficiency(found: Efficiency, cache_dir: Path | None = None) -> Path:
    """Remember a measurement; return the file.

    Raises: StoreError if the cache cannot be written.
    """
    path = (cache_dir or user_cache_dir()) / EFFICIENCY_NAME
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise explain_write_failure(error, path) from error
    write_bytes_atomically(path, json.dumps(asdict(found), indent=1).encode())
    return path
