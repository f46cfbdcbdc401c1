"""The speed of this machine's matrix products and copies: measured once, cached, read by the planner.

Reading needs no torch. A measurement is valid for the CPU and thread count of its run.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TypeVar

from strop.hardware.machine import describe_machine
from strop.io.atomic import explain_write_failure, write_bytes_atomically
from strop.io.variables import user_cache_dir

Action = Callable[[], object]
CALIBRATION_NAME, EFFICIENCY_NAME = "hardware.json", "efficiency.json"
SMALLEST_GEMM, GEMM_SIZE = 128, 2048
"""Rows and columns of the timed products. Emulated bfloat16 takes half a minute for the largest."""
COPY_BYTES = 256 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class Calibration:
    """Speeds of one machine, each the best of several tries."""

    cpu_name: str | None
    num_threads: int
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
    """Measure, and write the result to the cache. Takes about five times `time_limit_s`, plus torch's import.

    Raises: StoreError if the result cannot be written to the cache.
    """
    import torch

    source = torch.ones(copy_bytes, dtype=torch.uint8)
    target = torch.empty_like(source)
    result = Calibration(
        cpu_name=describe_machine().cpu_name,
        num_threads=torch.get_num_threads(),
        gemm_fp32_gflops=measure_gemm("float32", time_limit_s, largest=gemm_size) / 1e9,
        gemm_bf16_gflops=measure_gemm("bfloat16", time_limit_s, largest=gemm_size) / 1e9,
        copy_gb_per_s=copy_bytes / _best_s(lambda: target.copy_(source), time_limit_s) / 1e9,
    )
    _write_measured(result, cache_dir, CALIBRATION_NAME)
    return result


def read_calibration(cache_dir: Path | None = None) -> Calibration | None:
    """Return the cached calibration of this CPU, or None. Without torch."""
    return _read_measured(Calibration, cache_dir, CALIBRATION_NAME)


def measure_gemm(dtype: str, time_limit_s: float, *, largest: int = GEMM_SIZE) -> float:
    """Return the operations per second of a square product. Takes at most about twice the limit."""
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

    `prepare` returns a function that multiplies matrices of a size. Sizes double from `SMALLEST_GEMM` to
    `largest` as long as two products of the next size would fit into the rest of the limit.
    """
    ends_at = clock() + time_limit_s
    size = min(SMALLEST_GEMM, largest)
    while True:
        multiply = prepare(size)
        seconds = _best_s(multiply, 0.0, clock)
        if size * 2 > largest or clock() + 2 * 8 * seconds > ends_at:
            # The full limit again, because one of many tries is undisturbed.
            return 2.0 * size**3 / min(seconds, _best_s(multiply, time_limit_s, clock))
        size *= 2


def _best_s(action: Action, time_limit_s: float, clock: Callable[[], float] = time.perf_counter) -> float:
    """Return the shortest duration of several tries: at least one, after a warm-up."""
    action()
    best, ends_at = float("inf"), clock() + time_limit_s
    while True:
        started_at = clock()
        action()
        finished_at = clock()
        best = min(best, finished_at - started_at)
        if finished_at >= ends_at:
            return best


# Fractions of those speeds that generation and learning reach. They depend on the program, not on the model's
# size; `strop plan --measure` measures them, and the defaults below name their measurement.


@dataclass(frozen=True, kw_only=True, slots=True)
class Efficiency:
    """Fractions of the speeds of a large product and a large copy that real programs reach."""

    learn_frac: float
    """Fraction of the product's rate in forward and backward passes."""
    decode_frac: float
    """Fraction of the product's rate in prefill and in decoding many rows."""
    decode_layer_s: float
    """Seconds that every layer adds to every decode step, independent of the number of rows."""
    update_frac: float
    """Fraction of the copy's rate in the optimizer's pass over masters, moments, gradients and copies."""
    cpu_name: str | None
    """The measured CPU; None for an accelerator."""
    source: str
    """A description of the measurement."""
    is_measured: bool = False
    """Whether it was measured on the planned machine."""


CPU_EFFICIENCY = Efficiency(
    learn_frac=0.77,
    decode_frac=0.66,
    decode_layer_s=0.0002,
    update_frac=0.36,
    cpu_name=None,
    source="SmolLM2-135M in bfloat16 on two AMD EPYC cores with 425 GFLOP/s, fitted to the steps in"
    " benchmarks/results/grpo-*-2026-11-21 and generate-*-2026-11-21",
)
"""Default for processors."""
GPU_EFFICIENCY = Efficiency(
    learn_frac=0.3,
    decode_frac=0.5,
    decode_layer_s=0.00004,
    update_frac=0.7,
    cpu_name=None,
    source="not measured by strop: published shares of peak of small dense models on H100 and H200 (prime-rl:"
    " 0.11 to 0.36 in learning), ten kernels of 4 us per layer and decode step",
)
"""Default for accelerators."""


def read_efficiency(cache_dir: Path | None = None) -> Efficiency | None:
    """Return the cached measurement of this CPU, or None. Without torch."""
    return _read_measured(Efficiency, cache_dir, EFFICIENCY_NAME)


def write_efficiency(measured: Efficiency, cache_dir: Path | None = None) -> Path:
    """Write a measurement to the cache; return the file.

    Raises: StoreError if the cache cannot be written.
    """
    return _write_measured(measured, cache_dir, EFFICIENCY_NAME)


Measured = TypeVar("Measured", Calibration, Efficiency)


def _read_measured(kind: type[Measured], cache_dir: Path | None, name: str) -> Measured | None:
    try:
        measured = kind(**json.loads(((cache_dir or user_cache_dir()) / name).read_bytes()))
    except (OSError, ValueError, TypeError):
        # Not measured, or written by another version of strop, which is the same to a planner.
        return None
    # A cache on a shared home directory may come from another machine.
    return measured if measured.cpu_name == describe_machine().cpu_name else None


def _write_measured(measured: Calibration | Efficiency, cache_dir: Path | None, name: str) -> Path:
    path = (cache_dir or user_cache_dir()) / name
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise explain_write_failure(error, path) from error
    write_bytes_atomically(path, json.dumps(asdict(measured), indent=1).encode())
    return path
