"""Site profiles: what differs between places that runs are sent to, and stands in no run file and no code.

`strop-sites.toml` in the project, and `strop/sites.toml` in the user's configuration folder (XDG_CONFIG_HOME,
else ~/.config), have one table per site, told apart by `backend`. Where both name a site, the project's
settings win, one by one. A backend's own name is a site without a profile.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import Field, TypeAdapter, ValidationError

from strop.errors import ConfigError, format_error
from strop.spec.base import Section
from strop.spec.display import credential_form, dotted, show_value, walk_values
from strop.spec.job import DURATION_HELP, DURATION_PATTERN
from strop.spec.tree import Tree, read_tree

PROJECT_FILE = "strop-sites.toml"
USER_FILE = "sites.toml"
SITES_TABLE = "sites"
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


_PROFILE: TypeAdapter[SiteProfile] = TypeAdapter(SiteProfile)
SECTIONS: dict[str, type[SiteSection]] = {
    get_args(section.model_fields["backend"].annotation)[0]: section
    for section in get_args(get_args(SiteProfile)[0])
}
BACKENDS = tuple(SECTIONS)
"""Kinds of sites, each also the name of a site without a profile."""


@dataclass(frozen=True, kw_only=True, slots=True)
class KnownSite:
    """A site that a file names."""

    name: str
    backend: str
    files: tuple[str, ...]


def find_site(name: str, project_path: Path, environ: Mapping[str, str]) -> Site:
    """Return a site's profile.

    Raises: ConfigError if no file and no backend is called so, or a setting is not allowed.
    """
    trees = _read_trees(project_path, environ)
    tables = [tree.values[SITES_TABLE][name] for tree in trees if name in tree.values[SITES_TABLE]]
    if not tables and name not in BACKENDS:
        raise _unknown_site(name, trees, project_path, environ)
    merged: dict[str, Any] = {}
    for table in tables:
        merged |= table
    merged.setdefault("backend", name if name in BACKENDS else None)
    origins = {
        path: tree.origin((SITES_TABLE, name, *path))
        for tree in trees
        if name in tree.values[SITES_TABLE]
        for path, _ in walk_values(tree.values[SITES_TABLE][name])
    }
    _refuse_credentials(merged, name, origins)
    try:
        return Site(name=name, profile=_PROFILE.validate_python(merged))
    except ValidationError as error:
        problems = [_explain(detail, merged, name, origins) for detail in error.errors(include_url=False)]
        raise ConfigError("\n".join(dict.fromkeys(problems))) from error


def list_sites(project_path: Path, environ: Mapping[str, str]) -> list[KnownSite]:
    """Return the sites that files name, by name. Raises: ConfigError if a file cannot be read."""
    trees = _read_trees(project_path, environ)
    names = sorted({name for tree in trees for name in tree.values[SITES_TABLE]})
    return [
        KnownSite(
            name=name,
            backend=next(
                (
                    str(tree.values[SITES_TABLE][name]["backend"])
                    for tree in reversed(trees)
                    if "backend" in tree.values[SITES_TABLE].get(name, {})
                ),
                name,
            ),
            files=tuple(tree.shown for tree in trees if name in tree.values[SITES_TABLE]),
        )
        for name in names
    ]


def site_files(project_path: Path, environ: Mapping[str, str]) -> tuple[Path, Path]:
    """Return where profiles may be: the user's file, then the project's."""
    home = environ.get("XDG_CONFIG_HOME") or os.path.join(environ.get("HOME", "/"), ".config")
    return Path(home) / "strop" / USER_FILE, project_path / PROJECT_FILE


def _read_trees(project_path: Path, environ: Mapping[str, str]) -> list[Tree]:
    """Read the files that there are, the stronger last."""
    trees = [read_tree(str(path)) for path in site_files(project_path, environ) if path.is_file()]
    for tree in trees:
        tables = tree.values.get(SITES_TABLE)
        strange = [key for key in tree.values if key != SITES_TABLE]
        if (
            strange
            or not isinstance(tables, dict)
            or not all(isinstance(one, dict) for one in tables.values())
        ):
            raise ConfigError(
                f"{tree.origin((strange[0],)) if strange else tree.shown} holds no table of sites",
                allowed=f"tables [{SITES_TABLE}.NAME], one for each site",
                next_step="correct the file",
            )
    return trees


def _unknown_site(
    name: str, trees: list[Tree], project_path: Path, environ: Mapping[str, str]
) -> ConfigError:
    known = [*dict.fromkeys(site for tree in trees for site in tree.values[SITES_TABLE]), *BACKENDS]
    near = difflib.get_close_matches(name, known, n=1)
    looked = " and ".join(str(path) for path in site_files(project_path, environ))
    return ConfigError(
        f"there is no site {show_value(name)}; looked in {looked}",
        allowed=", ".join(dict.fromkeys(known)),
        next_step=f"did you mean {near[0]}?"
        if near
        else f"write a table [{SITES_TABLE}.{name}] in one of them",
    )


def _refuse_credentials(table: Mapping[str, Any], name: str, origins: Mapping[Any, str]) -> None:
    for path, value in walk_values(table):
        texts = [text for text in (value if isinstance(value, list) else [value]) if isinstance(text, str)]
        form = next(filter(None, map(credential_form, texts)), None)
        if form is not None:
            raise ConfigError(
                f"{SITES_TABLE}.{name}.{dotted(path)} ({origins.get(path, '')}) looks like {form}",
                allowed="the name of an environment variable in `secrets`; no secret itself",
                next_step="put the value into your environment, and its name into `secrets`",
            )


def _explain(detail: Any, table: Mapping[str, Any], name: str, origins: Mapping[Any, str]) -> str:
    backend = table.get("backend")
    path = tuple(str(part) for part in detail["loc"] if str(part) != backend or len(detail["loc"]) == 1)
    section = SECTIONS.get(str(backend))
    shown = f"{SITES_TABLE}.{name}" + (f".{dotted(path)}" if path else "")
    where = origins.get(path) or next((text for key, text in origins.items() if key[:1] == path[:1]), "")
    where = f" ({where})" if where else ""
    if section is None:
        return format_error(
            f"{SITES_TABLE}.{name}.backend={show_value(backend)} is no kind of site",
            allowed=", ".join(BACKENDS),
            next_step="set backend",
        )
    if detail["type"] == "extra_forbidden":
        near = difflib.get_close_matches(path[-1], section.model_fields, n=1)
        return format_error(
            f"unknown key {shown}{where}",
            allowed=", ".join(section.model_fields),
            next_step=f"did you mean {near[0]}?" if near else "remove it",
        )
    field = section.model_fields.get(path[0]) if path else None
    return format_error(
        f"{shown}={show_value(detail['input'])}{where} is not allowed: {detail['msg']}",
        allowed=(field.description if field and field.description else "what the profile's setting says"),
        next_step="correct it",
    )
