"""Site profiles: what differs between places that runs are sent to, and stands in no run file and no code.

`strop-sites.toml` in the project, and `strop/sites.toml` in the user's configuration folder (XDG_CONFIG_HOME,
else ~/.config), have one table per site, told apart by `backend`. Where both name a site, the project's
settings win, one by one. A backend's own name is a site without a profile.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from strop.spec.base import Section
from strop.spec.durations import DURATION_HELP, DURATION_PATTERN

_KIND = "What kind of site it is."


class SiteSection(Section):
    """What every kind of site has."""

    run_root: str | None = Field(
        default=None,
        min_length=1,
        description="Folder for runs on the site, absolute. none = output.root of the run file.",
    )
    python: str | None = Field(
        default=None,
        min_length=1,
        description="Interpreter of the environment that has strop, as the site sees it. none = the one that"
        " submits; in an image, the image's own.",
    )
    env: dict[str, str] = Field(default_factory=dict, description="Environment variables of every job.")
    secrets: tuple[str, ...] = Field(
        default=(),
        strict=False,
        description="Names of environment variables whose values are read when a job is submitted, kept in a"
        " file that nobody else can read, and removed when it ends.",
    )
    hf_home: str | None = Field(default=None, min_length=1, description="Model cache, as HF_HOME.")
    store: str | None = Field(
        default=None,
        min_length=1,
        description="Root of the store that runs are mirrored to and models come from.",
    )
    offline: bool = Field(default=False, description="Whether jobs may not ask a model hub.")
    gpus_per_node: int = Field(default=8, ge=0, le=64, description="GPUs that one node has.")
    usd_per_gpu_hour: float | None = Field(
        default=None, ge=0.0, description="Price, for the plan's estimate."
    )


class LocalSite(SiteSection):
    """This machine: the job goes on when the terminal closes."""

    backend: Literal["local"] = Field(default="local", description=_KIND)


class ContainerSite(SiteSection):
    """A container on this machine, by podman or docker."""

    backend: Literal["container"] = Field(default="container", description=_KIND)
    image: str | None = Field(
        default=None,
        min_length=1,
        description="Image, by name or digest. none = the project's own, made from the environment that"
        " submits; its tag is a hash of what is in it.",
    )
    base_image: str | None = Field(
        default=None,
        min_length=1,
        description="What our own image is built from, for example 'python:3.11-slim'. none = a Debian"
        " base made on the spot, with this machine's interpreter and packages: no registry is needed.",
    )
    environment: Literal["image", "mounted"] = Field(
        default="image",
        description="Where Python and its packages come from: 'image', or 'mounted': those of this machine,"
        " shown read-only in an image that has libraries alone.",
    )
    engine: Literal["auto", "podman", "docker"] = Field(default="auto", description="Which program runs it.")
    mounts: tuple[str, ...] = Field(
        default=(), strict=False, description="Folders to show inside as they are: SOURCE:TARGET[:ro]."
    )
    network: bool = Field(
        default=False, description="Whether the job may use the network; then it is this machine's own."
    )
    sandboxes: bool = Field(
        default=False,
        description="Whether the job may make sandboxes inside, for model-written code: then all of /proc is"
        " shown to it. Without this such a run is refused there.",
    )
    shm: str = Field(
        default="8G",
        pattern=r"^\d+[KMGT]?$",
        description="Shared memory at most, which loaders of data and collectives use.",
    )


class SlurmSite(SiteSection):
    """A SLURM cluster whose login node this is."""

    backend: Literal["slurm"] = Field(default="slurm", description=_KIND)
    partition: str | None = Field(default=None, min_length=1, description="Partition of the main part.")
    cpu_partition: str | None = Field(default=None, min_length=1, description="Partition of the CPU part.")
    account: str | None = Field(
        default=None,
        min_length=1,
        description="Account that pays. none = SBATCH_ACCOUNT, then SLURM_ACCOUNT, then the site's default.",
    )
    qos: str | None = Field(default=None, min_length=1, description="Quality of service.")
    constraint: str | None = Field(default=None, min_length=1, description="Features that nodes must have.")
    reservation: str | None = Field(default=None, min_length=1, description="Reservation to run in.")
    nodelist: str | None = Field(
        default=None, min_length=1, description="Nodes that must be among the job's."
    )
    exclude: str | None = Field(default=None, min_length=1, description="Nodes that must not.")
    gpu_type: str | None = Field(
        default=None, min_length=1, description="Type in the request, as in gpu:TYPE:4."
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
    container_mounts: tuple[str, ...] = Field(
        default=(),
        strict=False,
        description="Folders to show inside besides the job's: SOURCE or SOURCE:TARGET[:ro].",
    )
    sbatch_args: tuple[str, ...] = Field(default=(), strict=False, description="Further options of sbatch.")


class SageMakerSite(SiteSection):
    """SageMaker training jobs of one AWS account."""

    backend: Literal["sagemaker"] = Field(default="sagemaker", description=_KIND)
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
        default=None, min_length=1, max_length=255, description="Image instead of ours."
    )
    base_image: str | None = Field(default=None, min_length=1, description="What our image is built from.")
    base_image_aws_profile: str | None = Field(
        default=None,
        min_length=1,
        description="Named profile of AWS credentials for the registry of base_image, where it is another"
        " account's. none = the same credentials as for everything else.",
    )
    instance_type: str = Field(default="ml.p4de.24xlarge", description="Instance type.")
    instance_count: int = Field(default=1, ge=1, le=256, description="Instances of a job.")
    cpu_instance_type: str = Field(
        default="ml.m5.4xlarge", description="Instance type of the nodes without GPUs, where a job has some."
    )
    volume_gb: int = Field(default=100, ge=1, description="Disk of an instance.")
    max_runtime: str = Field(
        default="5d", pattern=DURATION_PATTERN, description=f"Wall time of a job: {DURATION_HELP}."
    )
    max_wait: str | None = Field(
        default=None,
        pattern=DURATION_PATTERN,
        description="Wall time and waiting for spot instances together. none = twice the wall time, where"
        " spot instances are used.",
    )
    spot: bool = Field(default=False, description="Whether spot instances are used.")
    internal_retries: int = Field(
        default=0,
        ge=0,
        le=30,
        description="How often the platform starts a job again after an error of its own. Both time limits"
        " then hold for all starts together.",
    )
    keep_alive_s: int | None = Field(default=None, ge=0, le=21600, description="Warm pool, seconds.")
    subnets: tuple[str, ...] = Field(default=(), strict=False, description="Subnets, for a VPC.")
    security_groups: tuple[str, ...] = Field(default=(), strict=False, description="Security groups.")
    network_isolation: bool = Field(default=False, description="Whether jobs have no network at all.")
    encrypt_traffic: bool = Field(default=False, description="Encrypt traffic between instances.")
    kms_key: str | None = Field(default=None, min_length=1, description="Key for volumes and outputs.")
    name_prefix: str = Field(default="job", max_length=47, description="First part of job names; neutral.")
    job_log: str = Field(default="docs/job_log.md", description="Where submitted jobs are listed.")
    secret_arns: dict[str, str] = Field(
        default_factory=dict,
        description="Environment variable to Secrets Manager ARN, fetched in the job. NAME:role,role as the"
        " name = for those roles alone.",
    )
    tags: dict[str, str] = Field(default_factory=dict, description="Tags of every job; neutral.")
    endpoint_url: str | None = Field(default=None, description="Address instead of AWS's, for rehearsals.")


SiteProfile = Annotated[LocalSite | ContainerSite | SlurmSite | SageMakerSite, Field(discriminator="backend")]


class Site(Section):
    """A profile under its name."""

    name: str = Field(description="As a file or a command names it.")
    profile: SiteProfile = Field(description="What the files say of it.")
