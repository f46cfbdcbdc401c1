"""The options of SageMaker, and the hardware of instance types.

GPUs, cores and memory of instance types are from the tables on AWS's pages, for the families p4, p5, g5, g6,
g6e, m5 and c5. Left out: types without bfloat16 (p3, g4dn), accelerators of other makers, and prices, which
change.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field

from strop.launch.options import (
    KIND_HELP,
    ByLauncher,
    DeviceGrant,
    NodeHardware,
    SiteOptions,
    imply_gpus,
    split_at_commas,
)
from strop.spec.job import DURATION_HELP, DURATION_PATTERN, JobSpec

if TYPE_CHECKING:
    from strop.launch.contract import Backend


@dataclass(frozen=True, kw_only=True, slots=True)
class Instance:
    """The hardware of an instance type."""

    gpu: str | None
    """The name for `strop plan --hardware`; None: no GPU."""
    num_gpus: int
    num_cores: int
    """Physical cores: half of the vCPUs."""
    memory_gib: int


# Family and GPU | size: GPUs, vCPUs, GiB.
_ROWS = """
p4d a100-40 | 24xlarge 8 96 1152
p4de a100-80 | 24xlarge 8 96 1152
p5 h100 | 4xlarge 1 16 256, 48xlarge 8 192 2048
p5e h200 | 48xlarge 8 192 2048
p5en h200 | 48xlarge 8 192 2048
g5 a10g | xlarge 1 4 16, 2xlarge 1 8 32, 4xlarge 1 16 64, 8xlarge 1 32 128, 16xlarge 1 64 256
g5 a10g | 12xlarge 4 48 192, 24xlarge 4 96 384, 48xlarge 8 192 768
g6 l4 | xlarge 1 4 16, 2xlarge 1 8 32, 4xlarge 1 16 64, 8xlarge 1 32 128, 16xlarge 1 64 256
g6 l4 | 12xlarge 4 48 192, 24xlarge 4 96 384, 48xlarge 8 192 768
g6e l40s | xlarge 1 4 32, 2xlarge 1 8 64, 4xlarge 1 16 128, 8xlarge 1 32 256, 16xlarge 1 64 512
g6e l40s | 12xlarge 4 48 384, 24xlarge 4 96 768, 48xlarge 8 192 1536
m5 - | large 0 2 8, xlarge 0 4 16, 2xlarge 0 8 32, 4xlarge 0 16 64, 12xlarge 0 48 192, 24xlarge 0 96 384
c5 - | xlarge 0 4 8, 2xlarge 0 8 16, 4xlarge 0 16 32, 9xlarge 0 36 72, 18xlarge 0 72 144
"""


def find_instance(instance_type: str) -> Instance | None:
    """Return the hardware of an instance type such as ml.g6e.48xlarge; None if it is not in the table."""
    return _read_table().get(instance_type.removeprefix("ml."))


@cache
def _read_table() -> Mapping[str, Instance]:
    instances = {}
    for row in _ROWS.strip().splitlines():
        head, _, sizes = row.partition("|")
        family, gpu = head.split()
        for entry in sizes.split(","):
            size, num_gpus, num_vcpus, memory_gib = entry.split()
            instances[f"{family}.{size}"] = Instance(
                gpu=None if gpu == "-" else gpu,
                num_gpus=int(num_gpus),
                num_cores=int(num_vcpus) // 2,
                memory_gib=int(memory_gib),
            )
    return instances


class SageMakerSite(SiteOptions):
    """SageMaker training jobs of one AWS account."""

    has_shared_disk: ClassVar[bool] = False
    device_grant: ClassVar[DeviceGrant] = "instance"

    backend: Literal["sagemaker"] = Field(default="sagemaker", description=KIND_HELP)
    region: str | None = Field(default=None, min_length=1, description="AWS region.")
    aws_profile: str | None = Field(
        default=None, min_length=1, description="Named profile of AWS credentials."
    )
    role: str | None = Field(
        default=None, min_length=20, max_length=2048, description="Execution role, its ARN."
    )
    bucket: str | None = Field(default=None, min_length=3, max_length=63, description="S3 bucket.")
    prefix: str = Field(
        default="strop", pattern=r"^[^/\s]+(/[^/\s]+)*$", description="Prefix of every key in the bucket."
    )
    repository: str | None = Field(default=None, min_length=2, max_length=256, description="ECR repository.")
    image: str | None = Field(
        default=None,
        min_length=1,
        max_length=255,
        description="Image instead of our own. With local, 'processes' = plain processes.",
    )
    base_image: str | None = Field(
        default=None, min_length=1, description="BASE of the project's Containerfile. none = its own."
    )
    base_image_aws_profile: str | None = Field(
        default=None,
        min_length=1,
        description="Named profile of AWS credentials for the registry of base_image, where it is another"
        " account's. none = the same credentials as for everything else.",
    )
    instance_type: str = Field(default="ml.p4de.24xlarge", description="Instance type.")
    cpu_instance_type: str = Field(
        default="ml.m5.4xlarge", description="Instance type of the nodes without GPUs, where a job has some."
    )
    volume_gb: int = Field(default=100, ge=1, description="Volume size per instance, GB.")
    max_runtime: str = Field(
        default="5d", pattern=DURATION_PATTERN, description=f"Wall time of a job: {DURATION_HELP}."
    )
    max_wait: str | None = Field(
        default=None,
        pattern=DURATION_PATTERN,
        description="Limit on wall time plus waiting for spot instances. none = twice the wall time, where"
        " spot instances are used.",
    )
    spot: bool = Field(default=False, description="Use spot instances.")
    keep_alive_s: int | None = Field(
        default=None, ge=0, le=21600, description="Keep-alive of the warm pool, seconds."
    )
    subnets: tuple[str, ...] = Field(default=(), strict=False, description="Subnets, for a VPC.")
    security_groups: tuple[str, ...] = Field(default=(), strict=False, description="Security groups.")
    encrypt_traffic: bool = Field(default=False, description="Encrypt traffic between instances.")
    kms_key: str | None = Field(default=None, min_length=1, description="Key for volumes and outputs.")
    name_prefix: str = Field(default="job", max_length=47, description="Prefix of job names; neutral.")
    job_log: str = Field(default="docs/job_log.md", description="Where submitted jobs are listed.")
    secret_arns: dict[str, str] = Field(
        default_factory=dict,
        description="Environment variable to Secrets Manager ARN, fetched in the job. NAME:role,role as the"
        " name = for those roles alone.",
    )
    tags: dict[str, str] = Field(default_factory=dict, description="Tags of every job; neutral.")
    endpoint_url: str | None = Field(default=None, description="Address instead of AWS's, for rehearsals.")
    job_name: str | None = Field(
        default=None, exclude=True, description="Name of the training job. none = prefix and time."
    )
    image_tag: str | None = Field(
        default=None, exclude=True, description="Image tag in the site's repository. none = this version's."
    )
    description: str | None = Field(
        default=None, exclude=True, description="Description in the local job log; never sent to AWS."
    )
    build: bool = Field(
        default=False, exclude=True, description="Build the image from the project's Containerfile."
    )
    push: bool = Field(default=False, exclude=True, description="Push the image; the job uses its digest.")
    local: bool = Field(
        default=False,
        exclude=True,
        description="Run the job on this machine as the platform would; submit nothing.",
    )
    devices: Annotated[tuple[str, ...], BeforeValidator(split_at_commas)] = Field(
        default=(), strict=False, exclude=True, description="GPUs of this machine, with local."
    )
    run_key: Annotated[str | None, ByLauncher] = Field(
        default=None, exclude=True, description="Key of the run whose state the job goes on from."
    )
    parent: Annotated[str | None, ByLauncher] = Field(
        default=None, exclude=True, description="The job that this one goes on from."
    )

    def resource_defaults(self) -> Mapping[str, Any]:
        """Return the wall time."""
        return {"time_limit": self.max_runtime}

    def describe_node(self) -> NodeHardware:
        """Return the hardware of the instance type."""
        instance, disk_bytes = find_instance(self.instance_type), self.volume_gb * 10**9
        if instance is None:
            return NodeHardware(gpu=self.accelerator or self.instance_type, disk_bytes=disk_bytes)
        return NodeHardware(
            gpu=self.accelerator or instance.gpu,
            num_cores=instance.num_cores,
            memory_bytes=instance.memory_gib << 30,
            disk_bytes=disk_bytes,
        )

    def count_paid_gpus(self, num_nodes: int, gpus_per_node: int) -> int:
        """Return the GPUs of all instances, used or not; of an unknown type `gpus_per_node`."""
        instance = find_instance(self.instance_type)
        each = self.gpus_per_node if instance is None else instance.num_gpus
        return each * num_nodes

    def implied_settings(self, job: JobSpec) -> tuple[str, ...]:
        """Return all GPUs of an instance for a job that requests none."""
        if self.local:
            return imply_gpus(job, len(self.devices), "site.devices") if self.devices else ()
        instance = find_instance(self.instance_type)
        return () if instance is None else imply_gpus(job, instance.num_gpus, self.instance_type)

    def files_written(self, project_path: Path) -> list[Path]:
        """Return the job log, its twin and its lock."""
        path = project_path / self.job_log
        return [path, path.with_suffix(".jsonl"), path.with_suffix(".lock")]

    def open(self, site: str) -> Backend:
        """Return the backend."""
        from strop.launch.sagemaker.backend import SageMakerBackend

        return SageMakerBackend(self)
