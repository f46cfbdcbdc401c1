"""What this machine has, and what runs on it because of us.

`describe_machine` reads CPUs, memory and GPUs; `calibrate_machine` measures, `read_calibration` reads.
`peak_rss_bytes`, `free_memory_bytes`, `require_free_disk` and others say what is used and what is left.
`spawn` and `terminate` run child processes that end with their parent and leave nothing behind.
Not here: placing roles on devices (cluster), untrusted code (sandbox).
"""

from strop.hardware.allocator import keep_freed_memory
from strop.hardware.calibrate import Calibration, calibrate_machine, read_calibration
from strop.hardware.machine import Gpu, Machine, describe_machine, free_memory_bytes
from strop.hardware.memory import (
    free_disk_bytes,
    peak_rss_bytes,
    require_free_disk,
    require_writable,
    reset_peak_rss,
    rss_bytes,
)
from strop.hardware.process import ChildProcess, spawn, tail, terminate

__all__ = [
    "Calibration",
    "ChildProcess",
    "Gpu",
    "Machine",
    "calibrate_machine",
    "describe_machine",
    "free_disk_bytes",
    "free_memory_bytes",
    "keep_freed_memory",
    "peak_rss_bytes",
    "read_calibration",
    "require_free_disk",
    "require_writable",
    "reset_peak_rss",
    "rss_bytes",
    "spawn",
    "tail",
    "terminate",
]
