"""A sandbox service as a job: its settings, and the processes on its nodes."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from strop.errors import ConfigError
from strop.launch.contract import JobRequest, Need, RolePlan
from strop.launch.options import SiteOptions
from strop.runtime.service_dir import backend_words, serve_argv
from strop.spec import ResolvedSpec, RunSpec
from strop.spec.reader import Flag, resolve_sources
from strop.spec.sources import read_sources

SERVE = "serve"
"""The command of a job that only serves sandboxes."""
RUNTIME = "runtime"
"""The role that serves sandboxes."""
POOL = "pool"
"""The role that submits further nodes."""
FOLDER = "{run}/runtime"
_WORDS = (
    "name=sandboxes",
    # A run file must have these two; a service does not read them.
    "task.name=arithmetic",
    "train.prompts_per_step=1",
    # A requeued service would lack its sandboxes, and clients would have an old address.
    "job.max_requeue=0",
    # Sandboxes end this long before the job; the node agents take nothing new from two minutes before.
    "job.grace_s=30",
)

_MOST_JOBS = 1000


@dataclass(frozen=True, kw_only=True, slots=True)
class ServiceOptions:
    """The options of a service, apart from those of its job."""

    words: tuple[str, ...] = ()
    """Options of `strop runtime serve` on each of its nodes."""
    max_jobs: int = 0
    """How many additional jobs of one node may be submitted while sandboxes wait."""


def read_max_jobs(words: Sequence[str]) -> tuple[int, list[str]]:
    """Return N of `max_jobs=N`, 0 by default, and the other words. Raises: ConfigError for an invalid N."""
    key = "max_jobs="
    numbers = [word.removeprefix(key) for word in words if word.startswith(key)]
    for text in numbers:
        if not text.isdecimal() or int(text) > _MOST_JOBS:
            raise ConfigError(
                f"{key}{text} is not allowed",
                allowed=f"0 to {_MOST_JOBS} jobs of one node",
                next_step="correct max_jobs",
            )
    return int(numbers[-1]) if numbers else 0, [word for word in words if not word.startswith(key)]


def resolve_service(overrides: Sequence[str], flags: Sequence[Flag]) -> ResolvedSpec:
    """Return the settings of a service's job: `name`, `job`, `output` and `runtime.backend`.

    Raises: ConfigError for other settings, and for resources that a service cannot use.
    """
    sources = read_sources(None, overrides)
    foreign = [
        ".".join(place) for source in sources for place in source if place[0] not in ("name", "job", "output")
    ]
    if foreign:
        raise ConfigError(
            f"{', '.join(foreign)} in a job that serves sandboxes",
            allowed="name, job and output",
            next_step="remove it",
        )
    resolved = resolve_sources([*read_sources(None, _WORDS), *sources], flags)
    job = resolved.spec.job
    if job.gpus_per_node or job.cpu_nodes:
        raise ConfigError(
            "GPUs or CPU nodes in a job that serves sandboxes",
            allowed="job.nodes, job.cpus, job.memory and job.time_limit",
            next_step="remove them",
        )
    return resolved


def service_roles(
    spec: RunSpec, python: str, site: str, options: ServiceOptions, of_site: Sequence[Flag] = ()
) -> list[RolePlan]:
    """Return the processes of a service: a node agent on each node, the controller on the first.

    `of_site`: the words `site.KEY=VALUE` of its job, which the jobs of its pool get too.
    """
    argv = serve_argv(python, FOLDER, "--node", "{node}/0", *options.words)
    roles = [RolePlan(name=RUNTIME, argv=argv)]
    if spec.job.nodes > 1:
        # The service goes on without a lost node.
        roles.append(RolePlan(name="sandboxes", argv=argv, nodes="others", need=Need.NOTHING))
    if options.max_jobs:
        pool = (python, "-m", "strop.launch.pool", "--dir", FOLDER, "--on", site)
        more = ("--max-jobs", str(options.max_jobs), "--words", shlex.join(options.words))
        # Each job of the pool requests the same resources as the service's own.
        job = spec.job
        resources = {"job.cpus": job.cpus, "job.memory": job.memory, "job.time_limit": job.time_limit}
        limits = (f"{key}={value}" for key, value in resources.items() if value is not None)
        settings = (f"name={spec.name}-pool", *limits, *(f"{flag.name}={flag.value}" for flag in of_site))
        roles.append(RolePlan(name=POOL, argv=(*pool, *more, *settings), need=Need.PRESENCE))
    return roles


def joining_request(request: JobRequest, folder: Path, options: ServiceOptions) -> JobRequest:
    """Turn the request for a service into that of a one-node job that joins the service in `folder`."""
    argv = serve_argv(request.python, str(folder), "--node", "1/0", *options.words)
    return replace(request, roles=(RolePlan(name=RUNTIME, argv=argv),))


def runtime_role(spec: RunSpec, python: str) -> RolePlan:
    """Return the process on each CPU node of a run's job; the first one has the controller."""
    # Nodes are numbered over both parts.
    words = ("--node", f"{{node}}/{spec.job.nodes}", *backend_words(spec.runtime.backend))
    return RolePlan(name=RUNTIME, argv=serve_argv(python, FOLDER, *words), nodes="cpu", need=Need.PRESENCE)


def require_shared_disk(site: str, profile: SiteOptions) -> None:
    """Refuse a site whose nodes would not find the service. Raises: ConfigError."""
    if not profile.has_shared_disk:
        raise ConfigError(
            f"a sandbox service on {site}, whose hosts see no common disk",
            allowed="a site with a shared disk, by which nodes and clients find its address and key",
            next_step="serve on another site, or on one machine with `strop runtime serve`",
        )
