"""The capacity of a node: the limits of its allocation, less what the node agent needs itself.

The tightest limit counts: of the machine, of this process's control groups, and of the job, as Slurm has it.
Disk is memory too, because the writable layers of sandboxes are file systems in memory; it counts once.
"""

from __future__ import annotations

import os
import resource
import time
from pathlib import Path

from strop.errors import ConfigError
from strop.hardware.machine import read_cgroup_memory, read_cpu_quota
from strop.runtime.contract import Slot

RESERVED_BYTES = 512 << 20
"""For the node agent and the daemon of its sandboxes."""
RESERVED_FRAC = 0.1
RESERVED_PROCESSES = 512


def measure_capacity() -> Slot:
    """Return what sandboxes on this machine may use together.

    Raises: ConfigError if nothing is left of its memory.
    """
    import psutil

    total_bytes = float(psutil.virtual_memory().total)
    memory_bytes = _least(total_bytes, read_cgroup_memory()[0], _read_job_memory())
    cpus = _least(float(len(os.sched_getaffinity(0))), read_cpu_quota(), _read("SLURM_CPUS_ON_NODE"))
    processes = _least(_read_file("/proc/sys/kernel/pid_max"), _read_file("/proc/sys/kernel/threads-max"))
    soft, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    if os.geteuid() and soft != resource.RLIM_INFINITY:
        processes = min(processes, float(soft))
    left_bytes = int(memory_bytes - max(RESERVED_BYTES, RESERVED_FRAC * memory_bytes))
    if left_bytes <= 0:
        raise ConfigError(
            f"this node may use {memory_bytes / (1 << 20):.0f} MiB of memory",
            allowed=f"more than {RESERVED_BYTES >> 20} MiB, which the node agent keeps for itself",
            next_step="give the job more memory",
        )
    return Slot(
        cpus=cpus,
        memory_bytes=left_bytes,
        disk_bytes=left_bytes,
        processes=max(1, int(processes) - RESERVED_PROCESSES),
    )


def find_end() -> float | None:
    """Return the seconds until this job's time is up, None where nothing ends it."""
    end_at = _read("SLURM_JOB_END_TIME")
    return None if end_at is None else max(0.0, end_at - time.time())


def _read_job_memory() -> float | None:
    """Return the bytes of this job on this node; Slurm counts in MiB, and 0 is all."""
    whole = _read("SLURM_MEM_PER_NODE")
    if whole:
        return whole * (1 << 20)
    each, cpus = _read("SLURM_MEM_PER_CPU"), _read("SLURM_CPUS_ON_NODE")
    return each * cpus * (1 << 20) if each and cpus else None


def _read(name: str) -> float | None:
    try:
        return float(os.environ.get(name, ""))
    except ValueError:
        return None


def _read_file(path: str) -> float | None:
    try:
        return float(Path(path).read_text())
    except (OSError, ValueError):
        return None


def _least(*values: float | None) -> float:
    return min(value for value in values if value is not None)
