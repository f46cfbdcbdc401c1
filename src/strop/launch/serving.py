"""A sandbox service as a job: its settings, and the processes on its nodes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from strop.errors import ConfigError
from strop.launch.contract import Need, RolePlan
from strop.launch.options import SiteOptions
from strop.runtime.service_dir import backend_words, serve_argv
from strop.spec import ResolvedSpec, RunSpec
from strop.spec.reader import resolve_sources
from strop.spec.sources import read_sources

SERVE = "serve"
"""The command of a job that only serves sandboxes."""
RUNTIME = "runtime"
"""The role that serves sandboxes."""
FOLDER = "{run}/runtime"
_WORDS = (
    "name=sandboxes",
    # A run file must have these two; a service does not read them.
    "task.name=arithmetic",
    "train.prompts_per_step=1",
    # A requeued service would lack its sandboxes, and clients would have an old address.
    "job.max_requeue=0",
    # Sandboxes end this long before the job; hosts take nothing new from two minutes before.
    "job.grace_s=30",
)


def resolve_service(overrides: Sequence[str]) -> ResolvedSpec:
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
    resolved = resolve_sources([*read_sources(None, _WORDS), *sources])
    job = resolved.spec.job
    if job.gpus_per_node or job.cpu_nodes:
        raise ConfigError(
            "GPUs or CPU nodes in a job that serves sandboxes",
            allowed="job.nodes, job.cpus, job.memory and job.time_limit",
            next_step="remove them",
        )
    return resolved


def service_roles(spec: RunSpec, python: str, words: Sequence[str]) -> list[RolePlan]:
    """Return the processes of a service: the service, and nodes of its Ray, which it can lose.

    `words`: options of `strop runtime serve`.
    """
    place = ("--nodes", str(spec.job.nodes), "--node", "{node}/0")
    roles = [RolePlan(name=RUNTIME, argv=serve_argv(python, FOLDER, *place, *words))]
    if spec.job.nodes > 1:
        roles.append(replace(roles[0], name="sandboxes", nodes="others", need=Need.NOTHING))
    return roles


def runtime_role(spec: RunSpec, python: str) -> RolePlan:
    """Return the process on each CPU node of a run's job; they come after the others, the service first."""
    place = ("--nodes", str(spec.job.cpu_nodes), "--node", f"{{node}}/{spec.job.nodes}")
    argv = serve_argv(python, FOLDER, *place, *backend_words(spec.runtime.backend))
    return RolePlan(name=RUNTIME, argv=argv, nodes="cpu", need=Need.PRESENCE)


def require_shared_disk(site: str, profile: SiteOptions) -> None:
    """Refuse a site whose nodes would not find the service. Raises: ConfigError."""
    if not profile.has_shared_disk:
        raise ConfigError(
            f"a sandbox service on {site}, whose hosts see no common disk",
            allowed="a site with a shared disk, by which nodes and clients find its address and key",
            next_step="serve on another site, or on one machine with `strop runtime serve`",
        )
