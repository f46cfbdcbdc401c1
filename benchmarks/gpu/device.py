"""The device under test: its peaks, what it reaches right now, its memory.

Rates in this package are FLOP/s and bytes/s; bf16 peaks are dense, with accumulation in fp32.
"""

from __future__ import annotations

import dataclasses
import resource
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.result import PartResult, Setting
from benchmarks.machine import git_revision, machine_facts
from strop.hardware.accelerators import match_gpu

_MATRIX_SIZE = 8192
_CPU_MATRIX_SIZE = 512


@dataclass(frozen=True, kw_only=True, slots=True)
class DevicePeaks:
    """What a device can do at most, and where that is from."""

    name: str
    flop_per_s: float
    bytes_per_s: float
    measured_flop_per_s: float
    measured_bytes_per_s: float
    """Of a copy, bytes read and written."""
    source: str
    """'datasheet', or 'measured' for a device that the table does not name."""
    memory_bytes: int


def synchronize(device: torch.device) -> None:
    """Wait for everything that was asked of the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def measure_peaks(device: torch.device) -> DevicePeaks:
    """Look the device up and measure it: the best of ten products and copies."""
    size = _MATRIX_SIZE if device.type == "cuda" else _CPU_MATRIX_SIZE
    left, right = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    flop_per_s = 2 * size**3 / _best_seconds(device, lambda: left @ right)
    source = torch.ones(2**30 if device.type == "cuda" else 2**26, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    bytes_per_s = 2 * source.numel() / _best_seconds(device, lambda: target.copy_(source))
    name, memory = "cpu", 0
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        name, memory = properties.name, int(properties.total_memory)
    known = match_gpu(name) if device.type == "cuda" else None
    return DevicePeaks(
        name=name,
        flop_per_s=known.bf16_tflops * 1e12 if known else flop_per_s,
        bytes_per_s=known.memory_gb_per_s * 1e9 if known else bytes_per_s,
        measured_flop_per_s=flop_per_s,
        measured_bytes_per_s=bytes_per_s,
        source="datasheet" if known else "measured",
        memory_bytes=memory,
    )


def _best_seconds(device: torch.device, work: Callable[[], object]) -> float:
    best = float("inf")
    for _ in range(10):
        synchronize(device)
        begun_at = time.perf_counter()
        work()
        synchronize(device)
        best = min(best, time.perf_counter() - begun_at)
    return best


class MemoryMeter:
    """Peak memory from here on: the allocator's on a GPU, the resident set's elsewhere."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.base_bytes = 0
        if device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(device)
            self.base_bytes = torch.cuda.memory_allocated(device)

    def peak_bytes(self) -> int:
        """Return the peak since the meter was made; on a CPU that of the process."""
        if self._device.type == "cuda":
            return int(torch.cuda.max_memory_allocated(self._device))
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def software_facts() -> dict[str, Any]:
    """Return versions that decide what is measured."""
    import platform

    import transformers

    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "transformers": transformers.__version__,
    }


def run_device(setting: Setting) -> PartResult:
    """Name the device and measure its products and copies; the other parts are told."""
    result = PartResult()
    peaks = measure_peaks(setting.device)
    result.measure("matrix product, bf16", peaks.measured_flop_per_s / 1e12, "TFLOP/s")
    result.measure("copy, read and written", peaks.measured_bytes_per_s / 1e12, "TB/s")
    result.measure("peak that shares are of", peaks.flop_per_s / 1e12, "TFLOP/s")
    result.measure("bandwidth that shares are of", peaks.bytes_per_s / 1e12, "TB/s")
    root = Path(__file__).parents[2]
    result.details = dataclasses.asdict(peaks) | {
        "software": software_facts(),
        "machine": machine_facts(),
        "git_rev": git_revision(root),
    }
    return result
