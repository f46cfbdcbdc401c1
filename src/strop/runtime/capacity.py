"""The capacity of a node: the limits of its allocation, less a reserve for the service.

The tightest limit counts: the machine's, that of this process's control groups, or Slurm's for the job.
The writable layers of sandboxes are file systems in memory, so a node offers as much disk as memory.
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
"""For the service and the daemon that supervises its sandboxes."""
RESERVED_FRAC = 0.1
RESERVED_PROCESSES = 512


def measure_capacity() -> Slot:
    """Return the resources that all sandboxes on this machine may use together.

    Raises: ConfigError if the reserve leaves no memory.
    """
    import psutil

    total_bytes = float(psutil.virtual_memory().total)
    job_cpus = _read_variable("SLURM_CPUS_ON_NODE")
    # Slurm counts in MiB, per node or per CPU; 0 means all memory of the node.
    job_mib = _read_variable("SLURM_MEM_PER_NODE")
    if not job_mib:
        job_mib = (_read_variable("SLURM_MEM_PER_CPU") or 0.0) * (job_cpus or 0.0)
    job_bytes = job_mib * (1 << 20) if job_mib else None
    memory_bytes = _least(total_bytes, read_cgroup_memory()[0], job_bytes)
    cpus = _least(float(len(os.sched_getaffinity(0))), read_cpu_quota(), job_cpus)
    processes = _least(_read_file("/proc/sys/kernel/pid_max"), _read_file("/proc/sys/kernel/threads-max"))
    soft, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    if os.geteuid() and soft != resource.RLIM_INFINITY:
        processes = min(processes, float(soft))
    left_bytes = int(memory_bytes - max(RESERVED_BYTES, RESERVED_FRAC * memory_bytes))
    if left_bytes <= 0:
        raise ConfigError(
            f"this node may use {memory_bytes / (1 << 20):.0f} MiB of memory",
            allowed=f"more than the {RESERVED_BYTES >> 20} MiB that the service needs",
            next_step="give the job more memory",
        )
    return Slot(
        cpus=cpus,
        memory_bytes=left_bytes,
        disk_bytes=left_bytes,
        processes=max(1, int(processes) - RESERVED_PROCESSES),
    )


def find_end() -> float | None:
    """Return the seconds until this job's time limit, None outside a job."""
    end_at = _read_variable("SLURM_JOB_END_TIME")
    return None if end_at is None else max(0.0, end_at - time.time())


def _read_variable(name: str) -> float | None:
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
