"""The capacity of a node: the limits of its allocation, less a reserve for the service.

The tightest limit counts: the machine's, that of this process's control groups, or Slurm's for the job.
"""

from __future__ import annotations

import os
import time

from strop.errors import ConfigError
from strop.hardware.machine import read_cgroup_memory, read_cpu_quota

RESERVED_BYTES = 512 << 20
"""For the service and the daemon that supervises its sandboxes."""
RESERVED_FRAC = 0.1


def measure_capacity() -> tuple[float, int]:
    """Return the processors and the bytes of memory that all sandboxes on this machine may use together.

    Raises: ConfigError if the reserve leaves no memory.
    """
    import psutil

    job_cpus = _read_variable("SLURM_CPUS_ON_NODE")
    # Slurm counts in MiB, per node or per CPU; 0 means all memory of the node.
    job_mib = _read_variable("SLURM_MEM_PER_NODE")
    if not job_mib:
        job_mib = (_read_variable("SLURM_MEM_PER_CPU") or 0.0) * (job_cpus or 0.0)
    sizes = (float(psutil.virtual_memory().total), read_cgroup_memory()[0], job_mib * (1 << 20) or None)
    memory_bytes = min(size for size in sizes if size is not None)
    numbers = (float(len(os.sched_getaffinity(0))), read_cpu_quota(), job_cpus)
    left_bytes = int(memory_bytes - max(RESERVED_BYTES, RESERVED_FRAC * memory_bytes))
    if left_bytes <= 0:
        raise ConfigError(
            f"this node may use {memory_bytes / (1 << 20):.0f} MiB of memory",
            allowed=f"more than the {RESERVED_BYTES >> 20} MiB that the service needs",
            next_step="give the job more memory",
        )
    return min(number for number in numbers if number is not None), left_bytes


def find_end() -> float | None:
    """Return the seconds until this job's time limit, None outside a job."""
    end_at = _read_variable("SLURM_JOB_END_TIME")
    return None if end_at is None else max(0.0, end_at - time.time())


def _read_variable(name: str) -> float | None:
    try:
        return float(os.environ.get(name, ""))
    except ValueError:
        return None
