"""The options of a SLURM cluster."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field

from strop.launch.options import (
    KIND_HELP,
    WRAP_HELP,
    DeviceGrant,
    NodeHardware,
    SiteOptions,
)
from strop.spec.job import DURATION_HELP, DURATION_PATTERN

if TYPE_CHECKING:
    from strop.launch.contract import Backend


class SlurmSite(SiteOptions):
    """A SLURM cluster whose login node this is."""

    device_grant: ClassVar[DeviceGrant] = "named"

    backend: Literal["slurm"] = Field(default="slurm", description=KIND_HELP)
    partition: str | None = Field(default=None, min_length=1, description="Partition of the main part.")
    cpu_partition: str | None = Field(default=None, min_length=1, description="Partition of the CPU part.")
    account: str | None = Field(
        default=None,
        min_length=1,
        description="Account to charge. none = SBATCH_ACCOUNT, then SLURM_ACCOUNT, then the site's default.",
    )
    qos: str | None = Field(default=None, min_length=1, description="Quality of service.")
    constraint: str | None = Field(default=None, min_length=1, description="Features that nodes must have.")
    reservation: str | None = Field(default=None, min_length=1, description="Reservation to run in.")
    nodelist: str | None = Field(
        default=None, min_length=1, description="Nodes that must be among the job's."
    )
    exclude: str | None = Field(default=None, min_length=1, description="Nodes to exclude.")
    gpu_type: str | None = Field(
        default=None, min_length=1, description="GPU type in the request, as in gpu:TYPE:4."
    )
    time_limit: str | None = Field(
        default=None,
        pattern=DURATION_PATTERN,
        description=f"Wall time of jobs that name none: {DURATION_HELP}.",
    )
    memory: str | None = Field(
        default=None, pattern=r"^\d+[KMGT]?$", description="Memory per node; none = ask for none."
    )
    cpus_per_gpu: int = Field(default=8, ge=1, le=32, description="Cores for each GPU, on shared nodes.")
    signal: Literal["USR2", "USR1", "TERM"] = Field(
        default="USR2", description="Signal that announces the end. NCCL may take USR1."
    )
    setup: tuple[str, ...] = Field(
        default=(), strict=False, description="Shell lines before the job, for example 'module load cuda'."
    )
    container_image: str | None = Field(
        default=None,
        min_length=1,
        description="Image that the steps run in: by pyxis where srun has it, else podman, else apptainer.",
    )
    wrap: tuple[str, ...] = Field(default=(), strict=False, description=WRAP_HELP)
    container_mounts: tuple[str, ...] = Field(
        default=(),
        strict=False,
        description="Folders to show inside besides the job's: SOURCE or SOURCE:TARGET[:ro].",
    )
    sbatch_args: tuple[str, ...] = Field(default=(), strict=False, description="Further options of sbatch.")
    dependency: str | None = Field(
        default=None, min_length=1, exclude=True, description="Job dependency, such as afterok:123."
    )
    comment: str | None = Field(
        default=None, min_length=1, exclude=True, description="Job comment, behind strop's own."
    )
    array: int | None = Field(
        default=None, ge=1, exclude=True, description="Max trials of a sweep that run at once."
    )

    def resource_defaults(self) -> Mapping[str, Any]:
        """Return the profile's limits, and the type of GPU."""
        return {
            "time_limit": self.time_limit,
            "gpu_type": self.gpu_type,
            "cpus_per_gpu": self.cpus_per_gpu,
            "memory": self.memory,
        }

    def describe_node(self) -> NodeHardware:
        """Return the GPU of a node."""
        return NodeHardware(gpu=self.accelerator or self.gpu_type)

    def open(self, site: str) -> Backend:
        """Return the backend."""
        from strop.launch.slurm.backend import SlurmBackend

        return SlurmBackend(self, site=site)
