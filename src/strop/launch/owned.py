"""Variables that are the launcher's own, and an environment that is no other job's."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from strop.hardware.job_variables import (
    ADDRESS_VARIABLE,
    NAMES_VARIABLE,
    NODE_VARIABLE,
    NUM_NODES_VARIABLE,
)
from strop.hardware.leases import LEASE_VARIABLE
from strop.record.fence import ATTEMPT_VARIABLE, GRACE_VARIABLE, NUMBER_VARIABLE

_OF_RANKS = frozenset(
    {
        *("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
        *("NODE_RANK", "GROUP_RANK", "ROLE_RANK", "GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE", "ROLE_NAME"),
    }
)
_OF_AGENTS = frozenset(
    {
        *(ATTEMPT_VARIABLE, NUMBER_VARIABLE, GRACE_VARIABLE, LEASE_VARIABLE),
        *(NODE_VARIABLE, NUM_NODES_VARIABLE, ADDRESS_VARIABLE, NAMES_VARIABLE),
    }
)
_OF_PROCESSES = frozenset(
    {
        *("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "NVIDIA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"),
        *("XDG_CACHE_HOME", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "PYTHONUNBUFFERED"),
    }
)
"""Set for each role, but also the user's own: a local run slices the devices that it is given."""
_OTHER_JOBS = (
    *("SLURM_", "SLURMD_", "SRUN_", "SALLOC_", "PMI_", "PMIX_", "OMPI_", "MASTER_", "TORCHELASTIC_"),
    *("LOCAL_WORLD", "ROLE_", "GROUP_RANK", "GROUP_WORLD"),
)
"""Beginnings of what a process inherits from the job, launcher or rank that it happens to be started in."""


def is_owned(name: str) -> bool:
    """Whether only the launcher or a node's agent sets a variable."""
    return name in _OF_RANKS | _OF_AGENTS | _OF_PROCESSES or name.startswith(_OTHER_JOBS)


def clean_inherited(environ: Mapping[str, str], *, secrets: Iterable[str] = ()) -> dict[str, str]:
    """Return an environment without what belongs to another job or rank, and without the job's secrets.

    For the start of an agent from a shell that may itself run inside a job. Without that job's lease, too:
    what carries it is ended with that job's leftovers.
    """
    dropped = _OF_RANKS | _OF_AGENTS | set(secrets)
    return {
        name: value
        for name, value in environ.items()
        if name not in dropped and not name.startswith(_OTHER_JOBS)
    }
