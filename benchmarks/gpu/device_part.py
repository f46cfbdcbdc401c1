"""The first part: which device this is, and what it reaches."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from benchmarks.gpu.device import measure_peaks, software_facts
from benchmarks.gpu.result import PartResult, Setting
from benchmarks.machine import git_revision, machine_facts


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
