"""The command line that starts a job's container. Pure; what only the host knows stands in braces.

No value of a variable of the job is on it: those arrive in `job/env.json` and `job/secrets.json` of the home,
which the agent inside reads. Paths are given as CSV fields, so that commas, colons and quotes are theirs.
"""

from __future__ import annotations

import csv
import hashlib
import io
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import PurePosixPath
from typing import Any

from strop.errors import ConfigError, explain_refusal
from strop.launch.contract import JobPlan, JobRequest, RolePlan
from strop.launch.home import job_path_of
from strop.spec.display import dotted, walk_values
from strop.spec.site import ContainerSite
from strop.spec.task_base import PROMPTING

LABEL = "strop"
"""Its value is the plan's hash. The others are `strop.<name>`."""
IMAGE = "{image}"
DEVICES = "{devices}"
HOST = "{host}"
"""A word that stands for all flags that depend on the engine and the user."""
INSIDE_PYTHON = "python"
SUPERVISOR = ("-m", "strop.launch.local.supervisor")
MAX_PROCESSES = 32768
"""Threads count too, and a learner has hundreds."""
_CACHE_VARIABLES = ("HF_HOME", "STROP_CACHE")
_UNITS = {"": 1 << 20, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
_MEMORY = re.compile(r"(?P<number>\d+)(?P<unit>[KMGT]?)\Z")
_MAX_NAME = 63


@dataclass(frozen=True, kw_only=True, slots=True)
class Mount:
    """A folder or file of this machine that is shown inside."""

    source: str
    target: str
    is_read_only: bool = False
    is_optional: bool = False
    """Whether it is left out where it does not exist."""

    def to_words(self) -> tuple[str, str]:
        """Return the option and its value."""
        fields = ["type=bind", f"src={self.source}", f"dst={self.target}"]
        text = io.StringIO()
        csv.writer(text, lineterminator="").writerow([*fields, *(["readonly"] if self.is_read_only else [])])
        return "--mount", text.getvalue()


def complete_plan(plan: JobPlan, request: JobRequest, profile: ContainerSite) -> JobPlan:
    """Add the command line and what `hand_over` needs to fill it in.

    Raises: ConfigError for several nodes, and for a mount or a memory limit that is not understood.
    """
    if plan.resources.num_nodes > 1 or plan.resources.num_cpu_nodes:
        raise ConfigError(
            explain_refusal(
                f"job.nodes={plan.resources.num_nodes} and job.cpu_nodes={plan.resources.num_cpu_nodes} at"
                f" site {plan.site!r}, which is one machine",
                allowed="one node",
                next_step="send the run to a cluster, or remove these settings",
            )
        )
    is_own = profile.python is None and profile.environment == "image"
    python = INSIDE_PYTHON if is_own else plan.python
    roles = tuple(_with_python(role, request.python, python) for role in plan.roles)
    mounts = list_mounts(plan, request, profile)
    plan = replace(plan, python=python, roles=roles)
    argv = build_argv(plan, profile, mounts)
    details = {
        **plan.details,
        "container": name_container(plan),
        "image": str(request.options.get("container_image") or profile.image or ""),
        "mounts": [[mount.source, mount.target, mount.is_read_only, mount.is_optional] for mount in mounts],
        "devices": _split_devices(request.options.get("devices")),
        "paths": list(_find_paths(request, plan)),
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
    # The image's own entry is the agent of one attempt; above it is who starts one after the other.
    words += ["--workdir", plan.home, "--entrypoint", plan.python, IMAGE, *SUPERVISOR]
    return (*words, "--job", str(job_path_of(plan.home)), "--job-id", name)


def fill_argv(argv: Sequence[str], places: Mapping[str, Sequence[str]], missing: Sequence[str]) -> list[str]:
    """Put the host's flags, the devices and the image in their places, and leave out missing mounts."""
    words: list[str] = []
    for word in argv:
        if words[-1:] == ["--mount"] and word in missing:
            words.pop()
        else:
            words += places.get(word, [word])
    return words


def list_mounts(plan: JobPlan, request: JobRequest, profile: ContainerSite) -> list[Mount]:
    """Return the home, the profile's folders, the model caches, and the project where no copy is sent."""
    found = [Mount(source=plan.home, target=plan.home)]
    found += [_parse_mount(text) for text in profile.mounts]
    if request.snapshot is None:
        project = str(request.project_path)
        found.append(Mount(source=project, target=project, is_read_only=True))
    for name in _CACHE_VARIABLES:
        path = plan.environment.variables.get(name, "")
        if path.startswith("/"):
            found.append(Mount(source=path, target=path, is_optional=True))
    return list({mount.target: mount for mount in found}.values())


def name_container(plan: JobPlan) -> str:
    """Return the container's name: one for each home, so that no job is started twice."""
    digest = hashlib.sha256(plan.home.encode()).hexdigest()[:8]
    stem = re.sub(r"[^a-z0-9.-]+", "-", PurePosixPath(plan.home).name.lower()).strip("-.") or "job"
    return f"strop-{stem}"[: _MAX_NAME - 9].rstrip("-.") + f"-{digest}"


def count_cpus(plan: JobPlan) -> int | None:
    """Return how many cores the container may use; None for all."""
    resources = plan.resources
    if resources.gpus_per_node and resources.cpus_per_gpu is not None:
        return resources.gpus_per_node * resources.cpus_per_gpu
    return resources.cpus


def parse_memory_bytes(text: str) -> int:
    """Return the bytes of '64G', and of '100' in MiB as SLURM reads it. Raises: ConfigError."""
    match = _MEMORY.match(text)
    if match is None or int(match["number"]) == 0:
        raise ConfigError(
            explain_refusal(
                f"memory {text!r} is no amount of memory",
                allowed="a number above 0, and K, M, G or T: '64G'",
                next_step="correct job.memory or the site profile",
            )
        )
    return int(match["number"]) * _UNITS[match["unit"]]


def mounts_of(details: Mapping[str, Any]) -> list[Mount]:
    """Return the mounts of a plan."""
    return [
        Mount(source=source, target=target, is_read_only=is_read_only, is_optional=is_optional)
        for source, target, is_read_only, is_optional in details["mounts"]
    ]


def _split_devices(given: object) -> list[str]:
    """Return devices that are asked for as '0,1' or as a list."""
    words = given.split(",") if isinstance(given, str) else list(given or ())  # type: ignore[call-overload]
    return [str(word).strip() for word in words if str(word).strip()]


def _with_python(role: RolePlan, outside: str, inside: str) -> RolePlan:
    if role.argv[:1] != (outside,):
        return role
    return replace(role, argv=(inside, *role.argv[1:]))


def _parse_mount(text: str) -> Mount:
    source, _, rest = text.partition(":")
    target, _, mode = rest.partition(":")
    if not source.startswith("/") or not target.startswith("/") or mode not in {"", "ro", "rw"}:
        raise ConfigError(
            explain_refusal(
                f"mount {text!r} of the site profile is not understood",
                allowed="SOURCE:TARGET or SOURCE:TARGET:ro, both absolute",
                next_step="correct mounts in the site profile",
            )
        )
    return Mount(source=source, target=target, is_read_only=mode == "ro")


def _find_paths(request: JobRequest, plan: JobPlan) -> list[str]:
    """Return absolute paths among the run's settings that lie outside of its home."""
    values = [*walk_values(request.resolved.spec.model_dump(mode="json"))]
    values += request.evaluation.values.items() if request.evaluation else ()
    # The evaluation's file travels in the job's home.
    skipped = ("output.", "job.eval_config")
    return sorted(
        {
            value
            for path, value in values
            if isinstance(value, str)
            and value.startswith("/")
            and not dotted(path).startswith(skipped)
            # '/no_think' is what some models are told, and no path.
            and path[-1] not in PROMPTING
            and not PurePosixPath(value).is_relative_to(plan.home)
        }
    )
