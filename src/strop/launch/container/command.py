"""The command line of a job's container, and the GPUs it gets. Pure, but for `leased_devices`.

Words in braces stand for values of the host, which `fill_argv` fills in. The command line holds no value of
the job's variables: those are in `job/env.json` and `job/secrets.json`, which the agent inside reads. Paths
are CSV fields, so that they may contain commas, colons and quotes.
"""

from __future__ import annotations

import csv
import hashlib
import io
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import PurePosixPath
from typing import Any

from strop.errors import CheckRefused, ConfigError
from strop.hardware import Gpu, GpuUser
from strop.hardware.leases import find_living
from strop.launch.container.options import ContainerSite
from strop.launch.contract import JobPlan, JobRequest
from strop.launch.job_dir import job_path_of
from strop.spec.display import dotted, walk_values
from strop.spec.task import PROMPTING

LABEL = "strop"
"""The label with the plan's hash. The other labels are `strop.<name>`."""
LABEL_DEVICES = "strop.devices"
IMAGE = "{image}"
DEVICES = "{devices}"
HOST = "{host}"
"""Placeholder for the flags that depend on the engine and the user."""
INSIDE_PYTHON = "python"
SUPERVISOR = ("-m", "strop.launch.local.supervisor")
MAX_PROCESSES = 32768
"""Threads count as processes, and a learner has hundreds."""
_CACHE_VARIABLES = ("HF_HOME", "STROP_CACHE")
_UNITS = {"": 1 << 20, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
_MEMORY = re.compile(r"(?P<number>\d+)(?P<unit>[KMGT]?)\Z")
_MAX_NAME = 63


@dataclass(frozen=True, kw_only=True, slots=True)
class Mount:
    """A folder or file of this machine that is mounted into the container."""

    source: str
    target: str
    is_read_only: bool = False
    is_optional: bool = False
    """Whether the mount is left out if its source does not exist."""

    def to_words(self) -> tuple[str, str]:
        """Return the option and its value."""
        fields = ["type=bind", f"src={self.source}", f"dst={self.target}"]
        text = io.StringIO()
        csv.writer(text, lineterminator="").writerow([*fields, *(["readonly"] if self.is_read_only else [])])
        return "--mount", text.getvalue()


def complete_plan(plan: JobPlan, request: JobRequest, profile: ContainerSite) -> JobPlan:
    """Add the command line, and the details for filling it in.

    Raises: ConfigError for several nodes, and for an invalid mount or memory limit.
    """
    profile = profile.with_options(request.options)
    if plan.resources.num_nodes > 1 or plan.resources.num_cpu_nodes:
        raise ConfigError(
            f"job.nodes={plan.resources.num_nodes} and job.cpu_nodes={plan.resources.num_cpu_nodes} at"
            f" site {plan.site!r}, which is one machine",
            allowed="one node",
            next_step="send the run to a cluster, or remove these settings",
        )
    is_own = profile.python is None and profile.environment == "image"
    python = INSIDE_PYTHON if is_own else plan.python
    roles = tuple(
        replace(role, argv=(python, *role.argv[1:])) if role.argv[:1] == (request.python,) else role
        for role in plan.roles
    )
    mounts = list_mounts(plan, request, profile)
    plan = replace(plan, python=python, roles=roles)
    argv = build_argv(plan, profile, mounts)
    # Collect absolute paths in the settings that are outside of the run's home.
    values = [*walk_values(request.resolved.spec.model_dump(mode="json"))]
    values += request.evaluation.values.items() if request.evaluation else ()
    # The evaluation's file travels in the job's home.
    skipped = ("output.",)
    details = {
        **plan.details,
        "container": name_container(plan),
        "image": profile.image or "",
        "mounts": [[mount.source, mount.target, mount.is_read_only, mount.is_optional] for mount in mounts],
        "devices": list(profile.devices),
        "paths": sorted(
            {
                value
                for path, value in values
                if isinstance(value, str)
                and value.startswith("/")
                and not dotted(path).startswith(skipped)
                # '/no_think' is an instruction for some models, not a path.
                and path[-1] not in PROMPTING
                and not PurePosixPath(value).is_relative_to(plan.home)
            }
        ),
    }
    return replace(plan, argv=argv, details=details)


def build_argv(plan: JobPlan, profile: ContainerSite, mounts: Sequence[Mount]) -> tuple[str, ...]:
    """Return the command line; words in braces are filled in by `fill_argv`."""
    name = name_container(plan)
    engine = "podman" if profile.engine == "auto" else profile.engine
    words = [engine, "run", "--detach", "--name", name, "--hostname", name, "--init=false", "--pull", "never"]
    labels = {
        LABEL: plan.plan_hash,
        "strop.name": plan.name,
        "strop.site": plan.site,
        "strop.home": plan.home,
        "strop.user": plan.user,
        "strop.submitted": repr(plan.submitted_at),
    }
    for key, value in labels.items():
        words += ["--label", f"{key}={value}"]
    words += ["--network", "host" if profile.network else "none", HOST]
    words += ["--stop-signal", "SIGTERM", "--stop-timeout", str(int(plan.grace_s))]
    words += ["--pids-limit", str(MAX_PROCESSES), "--shm-size", str(parse_memory_bytes(profile.shm))]
    if plan.resources.memory is not None:
        words += ["--memory", str(parse_memory_bytes(plan.resources.memory))]
    num_cpus = count_cpus(plan)
    if num_cpus is not None:
        words += ["--cpus", str(num_cpus)]
    if plan.resources.gpus_per_node:
        words.append(DEVICES)
    for mount in mounts:
        words += mount.to_words()
    # The image's entry point runs one attempt; the supervisor runs them one after the other.
    words += ["--workdir", plan.home, "--entrypoint", plan.python, IMAGE, *SUPERVISOR]
    return (*words, "--job", str(job_path_of(plan.home)), "--job-id", name)


def fill_argv(argv: Sequence[str], places: Mapping[str, Sequence[str]], missing: Sequence[str]) -> list[str]:
    """Replace the placeholders, and leave out missing mounts."""
    words: list[str] = []
    for word in argv:
        if words[-1:] == ["--mount"] and word in missing:
            words.pop()
        else:
            words += places.get(word, [word])
    return words


def list_mounts(plan: JobPlan, request: JobRequest, profile: ContainerSite) -> list[Mount]:
    """Return mounts of home, profile's folders and model caches, and of a project without a snapshot."""
    mounts = [Mount(source=plan.home, target=plan.home)]
    mounts += [_parse_mount(text) for text in profile.mounts]
    if request.snapshot is None:
        project = str(request.project_path)
        mounts.append(Mount(source=project, target=project, is_read_only=True))
    for name in _CACHE_VARIABLES:
        path = plan.environment.variables.get(name, "")
        if path.startswith("/"):
            mounts.append(Mount(source=path, target=path, is_optional=True))
    return list({mount.target: mount for mount in mounts}.values())


def name_container(plan: JobPlan) -> str:
    """Return the container's name, unique for the home, so that no job is started twice."""
    digest = hashlib.sha256(plan.home.encode()).hexdigest()[:8]
    stem = re.sub(r"[^a-z0-9.-]+", "-", PurePosixPath(plan.home).name.lower()).strip("-.") or "job"
    return f"strop-{stem}"[: _MAX_NAME - 9].rstrip("-.") + f"-{digest}"


def count_cpus(plan: JobPlan) -> int | None:
    """Return the container's number of cores; None for all."""
    resources = plan.resources
    if resources.gpus_per_node and resources.cpus_per_gpu is not None:
        return resources.gpus_per_node * resources.cpus_per_gpu
    return resources.cpus


def parse_memory_bytes(text: str) -> int:
    """Return the bytes of '64G', and of '100' in MiB as SLURM reads it. Raises: ConfigError."""
    match = _MEMORY.match(text)
    if match is None or int(match["number"]) == 0:
        raise ConfigError(
            f"memory {text!r} is no amount of memory",
            allowed="a number above 0, and K, M, G or T: '64G'",
            next_step="correct job.memory or the site profile",
        )
    return int(match["number"]) * _UNITS[match["unit"]]


def mounts_of(details: Mapping[str, Any]) -> list[Mount]:
    """Return the mounts of a plan."""
    return [
        Mount(source=source, target=target, is_read_only=is_read_only, is_optional=is_optional)
        for source, target, is_read_only, is_optional in details["mounts"]
    ]


def _parse_mount(text: str) -> Mount:
    source, _, rest = text.partition(":")
    target, _, mode = rest.partition(":")
    if not source.startswith("/") or not target.startswith("/") or mode not in {"", "ro", "rw"}:
        raise ConfigError(
            f"mount {text!r} of the site profile is not understood",
            allowed="SOURCE:TARGET or SOURCE:TARGET:ro, both absolute",
            next_step="correct mounts in the site profile",
        )
    return Mount(source=source, target=target, is_read_only=mode == "ro")


# podman gets devices by the container device interface (`nvidia.com/gpu=UUID`, since 4.1), docker by
# `--gpus`. Inside, CUDA_VISIBLE_DEVICES has the same ids, so that roles share them. Not tried with GPUs.


def choose_devices(
    gpus: Sequence[Gpu],
    users: Iterable[GpuUser],
    *,
    num_wanted: int,
    requested: Sequence[str],
    taken: Collection[str],
) -> tuple[str, ...]:
    """Return the ids of the GPUs or slices that a container gets.

    `requested`: indices or UUIDs, () for any; `taken`: devices of other jobs.

    Raises: CheckRefused if too few are free, or a requested one is unknown or in use.
    """
    if not num_wanted and not requested:
        return ()
    busy = {*taken, *(user.gpu_uuid for user in users)}
    # Maps each name of a device, UUID or index, to its id.
    names: dict[str, str] = {}
    for gpu in gpus:
        if gpu.has_mig:
            names |= {part.uuid: part.uuid for part in gpu.slices}
        else:
            names |= {gpu.uuid: gpu.uuid, gpu.index: gpu.uuid}
    if requested:
        unknown = [name for name in requested if name not in names]
        in_use = [name for name in requested if names.get(name) in busy]
        if unknown or in_use or len(requested) < num_wanted:
            why = f"{', '.join(unknown)} not known here" if unknown else f"{', '.join(in_use)} in use"
            if not unknown and not in_use:
                why = f"the run asks for {num_wanted}"
            raise CheckRefused(
                f"devices {','.join(requested)}: {why}",
                allowed=f"free ones of: {', '.join(names) or 'none, this machine has no GPU'}",
                next_step="name others, or none for any that are free",
            )
        return tuple(names[name] for name in requested)
    free = [device for device in dict.fromkeys(names.values()) if device not in busy]
    # A role cannot use several slices, and one container has one kind of device.
    free = [device for device in free if not device.startswith("MIG-")] if num_wanted > 1 else free
    if len(free) < num_wanted:
        raise CheckRefused(
            f"{num_wanted} GPUs are asked for, and {len(free)} of {len(gpus)} here are free",
            allowed="as many as are free",
            next_step="wait for other jobs, or ask for fewer",
        )
    return tuple(free[:num_wanted])


def leased_devices() -> set[str]:
    """Return the GPUs of this user's running jobs on this machine."""
    return {device for lease in find_living() for device in lease.gpus}


def device_words(kind: str, devices: Sequence[str]) -> list[str]:
    """Return the engine's options that pass devices to a container."""
    if not devices:
        return []
    if kind == "docker":
        words = ["--gpus", f'"device={",".join(devices)}"']
    else:
        words = [word for device in devices for word in ("--device", f"nvidia.com/gpu={device}")]
    return [*words, "--env", f"CUDA_VISIBLE_DEVICES={','.join(devices)}"]
