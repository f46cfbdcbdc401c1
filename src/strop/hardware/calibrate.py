"""How fast this machine multiplies and copies: measured once, kept in the cache, read by the planner.

Reading needs no torch. A measurement counts for the CPU and thread count it was taken with.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from strop.hardware.machine import describe_machine
from strop.store.atomic import explain_write_failure, write_bytes_atomically
from strop.store.cache import user_cache_dir

if TYPE_CHECKING:
    import torch

CALIBRATION_NAME = "hardware.json"
GEMM_SIZE = 2048
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
    """Billions of floating-point operations per second, square float32 product of `GEMM_SIZE`."""
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
    """Measure and remember. Takes about three times `time_limit_s` and torch's import.

    Raises: StoreError if the result cannot be written to the cache.
    """
    import torch

    num_operations = 2.0 * gemm_size**3
    source = torch.ones(copy_bytes, dtype=torch.uint8)
    target = torch.empty_like(source)
    result = Calibration(
        measured_at=time.time(),
        cpu_name=describe_machine().cpu_name,
        num_threads=torch.get_num_threads(),
        torch_version=str(torch.__version__),
        gemm_fp32_gflops=num_operations / _time_gemm(gemm_size, torch.float32, time_limit_s) / 1e9,
        gemm_bf16_gflops=num_operations / _time_gemm(gemm_size, torch.bfloat16, time_limit_s) / 1e9,
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


def _time_gemm(size: int, dtype: torch.dtype, time_limit_s: float) -> float:
    import torch

    left, right = (torch.ones(size, size, dtype=dtype) for _ in range(2))
    out = torch.empty_like(left)
    return _best_s(lambda: torch.mm(left, right, out=out), time_limit_s)


def _best_s(action: Callable[[], object], time_limit_s: float) -> float:
    """Return the shortest of several tries; at least one after a first that warms up."""
    action()
    best, ends_at = float("inf"), time.perf_counter() + time_limit_s
    while True:
        started_at = time.perf_counter()
        action()
        finished_at = time.perf_counter()
        best = min(best, finished_at - started_at)
        if finished_at >= ends_at:
            return best
