"""From the user's options to a request, and from a request to a plan.

`read_request` reads run file, site profile, code and variables once; nothing else is read before the
submission. `make_plan` is pure: equal requests give equal plans, byte by byte.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from strop.errors import ConfigError
from strop.hardware.machine import find_user_name
from strop.launch.contract import (
    Backend,
    CodeSnapshot,
    JobEnvironment,
    JobPlan,
    JobRequest,
    Need,
    Resources,
    RolePlan,
    TrialPlan,
    VariableSource,
)
from strop.launch.environment import gather_for_run
from strop.launch.evaluating import (
    EVALUATION,
    carry_baselines,
    evaluating_role,
    read_job_file,
    refuse_unreachable,
)
from strop.launch.job_dir import name_job_dir
from strop.launch.options import SITE_PREFIX, Site, SiteOptions, read_site_words
from strop.launch.serving import (
    SERVE,
    require_shared_disk,
    resolve_service,
    runtime_role,
    service_roles,
)
from strop.launch.sites import find_site
from strop.launch.snapshot import take_snapshot
from strop.plan.known import refuse_unfit
from strop.record.prediction import PRICE_VARIABLE
from strop.spec import NOT_ASKED, ResolvedSpec, RunSpec, load_spec, spec_digest
from strop.spec.display import show_text, show_value
from strop.spec.eval_file import EvalFile, guess_command
from strop.spec.job import parse_duration_s
from strop.spec.layout import RAY_NODE_MODULE
from strop.spec.run import code_of
from strop.spec.sources import add_override
from strop.user_code import list_sources

COMMANDS = ("train", EVALUATION)
AUTO = "auto"
"""The command follows from the run file: see `guess_command`."""
SIDECAR = "sidecar"
MAX_TRIALS = 1000
TRIALS_FOLDER = "members"
TAG_PREFIX = "strop:"
"""Precedes the plan's hash in the label that a scheduler keeps with a job."""
_HASH_LENGTH = 16


@dataclass(frozen=True, kw_only=True, slots=True)
class SubmitOptions:
    """The options of the command line, without the run file."""

    site: str
    command: str = "train"
    """One of `COMMANDS`, or `AUTO`."""
    may_run_code: bool = False
    """Whether an evaluation by lm-eval may run model-written code without a sandbox."""
    overrides: tuple[str, ...] = ()
    job_name: str | None = None
    """Name of the run and the job; on SageMaker of the job alone."""
    project_path: Path | None = None
    """None: the current folder."""
    sweep: tuple[str, ...] = ()
    """`key=value,value` for each varied setting."""
    has_snapshot: bool = True
    variables: tuple[str, ...] = ()
    """Names of variables that the job gets from the submitter's environment."""
    env_file: Path | None = None
    auto_auth: bool = False
    """Pass on the token of the local hub login unless HF_TOKEN is set."""
    service_words: tuple[str, ...] = ()
    """For a job that serves sandboxes: options of `strop runtime serve` on each of its nodes."""


def read_request(
    run_file: str, options: SubmitOptions, *, environ: Mapping[str, str], now: float
) -> JobRequest:
    """Read all inputs of a plan.

    Raises: ConfigError for options that cannot work; StoreError if the code cannot be read.
    """
    project_path = (options.project_path or Path.cwd()).absolute()
    if not project_path.is_dir():
        raise ConfigError(
            f"--project-dir {project_path} is no folder",
            allowed="the folder of the project whose code the job runs",
            next_step="correct it, or leave it out for the current folder",
        )
    site = find_site(options.site, project_path, environ)
    name_key = f"{SITE_PREFIX}job_name" if "job_name" in site.profile.settable() else "name"
    words = add_override(options.overrides, name_key, options.job_name, "--job-name")
    overrides, of_site = read_site_words(words)
    options, site = replace(options, overrides=tuple(overrides)), site.for_job(of_site)
    profile, notice = site.profile, None
    python = profile.python or sys.executable
    if options.command == SERVE:
        require_shared_disk(site.name, profile)
    if options.command == AUTO:
        command, notice = guess_command(run_file, options.overrides)
        options = replace(options, command=command)
    resolved, file = _read_file(run_file, options)
    if implied := profile.implied_settings(resolved.spec.job):
        options = replace(options, overrides=(*options.overrides, *implied))
        resolved, file = _read_file(run_file, options)
    _check_options(options, resolved)
    sweep = expand_sweep(options.sweep)
    # Every trial is loaded, so that a mistake shows before anything is written.
    for trial in sweep:
        load_spec(run_file, [*options.overrides, *trial])
    if not profile.has_shared_disk and not getattr(profile, "local", False):
        # Imported here: other sites, and commands that only query, do not need it.
        from strop.run.stage import use_copies

        resolved, file = use_copies(resolved, file)
    if file is not None:
        # The model as it is named where the job runs.
        file = carry_baselines(replace(file, model_uri=resolved.spec.model.uri))
        roles = [evaluating_role(resolved.spec, file, python, may_run_code=options.may_run_code)]
    elif options.command == SERVE:
        roles = service_roles(resolved.spec, python, options.service_words)
    else:
        roles = list_roles(options.command, resolved.spec, python, site)
    root = _find_root(site, resolved)
    names, env_file, auto_auth = options.variables, options.env_file, options.auto_auth
    environment, conflicts = gather_for_run(
        resolved.spec, site, project_path, names, env_file, auto_auth, environ
    )
    if file is not None:
        refuse_unreachable(file, resolved.spec.job.nodes, site.name, profile)
    resources = _count_resources(resolved, site.name, profile)
    home = resolved.spec.output.dir or str(name_job_dir(root, resolved.spec.name, now))
    notices = (*resolved.notices, *conflicts, *(() if notice is None else (notice,)))
    resolved = replace(resolved, notices=notices)
    return JobRequest(
        resolved=resolved,
        site=site,
        command=options.command,
        resources=resources,
        roles=tuple(roles),
        environment=_add_price(environment, profile, resources),
        snapshot=_take_code(project_path, root, resolved, options, site) if options.has_snapshot else None,
        project_path=project_path,
        home=home,
        python=python,
        user=find_user_name(),
        submitted_at=now,
        sweep=sweep,
        env_file=options.env_file,
        evaluation=file,
        run_file=run_file,
    )


def _read_file(run_file: str, options: SubmitOptions) -> tuple[ResolvedSpec, EvalFile | None]:
    """Return a file's run settings, and the evaluation itself if the file is one."""
    if options.command == SERVE:
        return resolve_service(options.overrides), None
    if options.command != EVALUATION:
        return load_spec(run_file, options.overrides), None
    may_run_code, has_sweep = options.may_run_code, bool(options.sweep)
    return read_job_file(run_file, options.overrides, may_run_code=may_run_code, has_sweep=has_sweep)


def expand_sweep(texts: Sequence[str]) -> tuple[tuple[str, ...], ...]:
    """Return the overrides of every trial: all combinations, the last setting varying fastest.

    Raises: ConfigError if a text is not `key=value,value`, a key is repeated or applies to the whole job, or
        there are too many trials.
    """
    axes: dict[str, list[str]] = {}
    for text in texts:
        key, equals, values = text.partition("=")
        key = key.strip()
        listed = [value for value in split_values(values) if value]
        if not equals or not key or not listed or key in axes:
            raise ConfigError(
                f"--sweep {text!r} is not understood",
                allowed="key=value,value,... with each key once, for example optimizer.lr=1e-5,2e-5",
                next_step="correct it",
            )
        axes[key] = [f"{key}={value}" for value in listed]
    fixed = [key for key in axes if key.partition(".")[0] in {"name", *NOT_ASKED}]
    if fixed:
        raise ConfigError(
            f"--sweep varies {', '.join(fixed)}, which all trials share",
            allowed=f"settings of what is trained; name, {', '.join(sorted(NOT_ASKED))} are the whole job's",
            next_step="submit a job for each value",
        )
    trials = tuple(itertools.product(*axes.values())) if axes else ()
    if len(trials) > MAX_TRIALS:
        raise ConfigError(
            f"the sweep has {len(trials)} trials",
            allowed=f"{MAX_TRIALS} at most",
            next_step="vary less at once",
        )
    return trials


def split_values(text: str) -> list[str]:
    """Split at commas outside brackets and quotation marks."""
    parts, depth, quote = [""], 0, ""
    for character in text:
        if quote:
            quote = "" if character == quote else quote
        elif character in "\"'":
            quote = character
        elif character in "[{(":
            depth += 1
        elif character in "]})":
            depth -= 1
        if character == "," and depth == 0 and not quote:
            parts.append("")
        else:
            parts[-1] += character
    return [part.strip() for part in parts]


def _check_options(options: SubmitOptions, resolved: ResolvedSpec) -> None:
    """Refuse an unknown command, and a run whose model does not fit."""
    if options.command not in (*COMMANDS, SERVE):
        raise ConfigError(
            f"--command {show_value(options.command)} is not a command that a job runs",
            allowed=" or ".join(COMMANDS),
            next_step="choose one of them",
        )
    if options.command == "train":
        refuse_unfit(resolved.spec)


def _find_root(site: Site, resolved: ResolvedSpec) -> Path:
    """Return the folder for runs. Raises: ConfigError if the site profile's is relative."""
    root = site.profile.run_root
    if root is None:
        return Path(resolved.spec.output.root).absolute()
    path = Path(root).expanduser()
    if not path.is_absolute():
        raise ConfigError(
            f"run_root={show_value(root)} of site {site.name} is a relative path",
            allowed="an absolute one: jobs start in other folders",
            next_step="write it out in the site profile",
        )
    return path


def _take_code(
    project_path: Path, root: Path, resolved: ResolvedSpec, options: SubmitOptions, site: Site
) -> CodeSnapshot:
    """Return the project's code, without its runs and files of secrets.

    Raises: ConfigError for user code that would not be sent with the job; the errors of `take_snapshot`.
    """
    excluded = [root, Path(resolved.spec.output.root)]
    excluded += [Path(path) for path in (options.env_file, resolved.spec.output.dir) if path is not None]
    # Runs in the project itself, next to its code.
    excluded += [plan_path.parents[1] for plan_path in project_path.glob("*/job/plan.json")]
    excluded += site.profile.files_written(project_path)
    snapshot = take_snapshot(project_path, excluded=[path.absolute() for path in excluded])
    sent = {snapshot.project_path / name for name in snapshot.files}
    needed = [(ref, path) for ref in code_of(resolved.spec) for path in list_sources(ref.path)]
    for ref, path in needed:
        if path.resolve() not in sent:
            is_inside = path.resolve().is_relative_to(snapshot.project_path)
            why = "git ignores it" if is_inside else f"it lies outside of {snapshot.project_path}"
            raise ConfigError(
                f"{path}, which {ref} needs, is not sent with the job: {why}",
                allowed="files of the project, which travel in its snapshot",
                next_step="move the file into the project, or name the folder with --project-dir",
            )
    return snapshot


def list_roles(command: str, spec: RunSpec, python: str, site: Site) -> list[RolePlan]:
    """Return the processes of a job, with the GPUs that `spec.layout` gives each on its node.

    Raises: ConfigError if the run names a cluster.
    """
    job = spec.job
    if spec.ray.address is not None:
        raise ConfigError(
            f"ray.address={spec.ray.address} in a job, whose GPUs its scheduler gives it",
            allowed="`strop train` where a Ray cluster is running, or a job with a cluster of its own",
            next_step="leave ray.address out, or use `strop train`",
        )
    argv = (python, "-m", "strop.cli", command, "{run}/job/spec.toml", "output.dir={run}")
    layout = spec.layout
    roles = [RolePlan(name="train", argv=argv, gpus=layout.nodes[0].gpus)]
    below = ("--below", spec.ray.temp_dir) if spec.ray.temp_dir else ()
    join = (python, "-m", RAY_NODE_MODULE, "{logs}", *below)
    if layout.kind == "ray" and job.nodes > 1:
        first_to_generate = job.nodes - job.infer_nodes
        shares = {"others": layout.nodes[1]}
        if job.infer_nodes:
            shares = {f"{first_to_generate}-{job.nodes - 1}": layout.nodes[first_to_generate]}
            if first_to_generate > 1:
                shares[f"1-{first_to_generate - 1}"] = layout.nodes[1]
        # The run keeps track of its engines, and goes on while one of them is left.
        roles += [
            RolePlan(name="ray", argv=join, gpus=node.gpus, nodes=nodes, need=Need.NOTHING)
            for nodes, node in shares.items()
        ]
    if any(node.is_cpu for node in layout.nodes):
        roles.append(RolePlan(name="ray", argv=join, nodes="cpu", need=Need.NOTHING))
    if job.cpu_command is not None:
        if not site.profile.has_shared_disk:
            raise ConfigError(
                f"job.cpu_command={job.cpu_command} on {site.name}, whose hosts are joined by Ray alone",
                allowed="job.cpu_nodes without a command: nodes of the run's Ray",
                next_step="leave the command out, or use a site whose nodes share a disk",
            )
        words = tuple(shlex.split(job.cpu_command))
        roles.append(RolePlan(name=SIDECAR, argv=words, nodes="cpu", need=Need.PRESENCE))
    if spec.runtime.serve == "cpu-nodes":
        require_shared_disk(site.name, site.profile)
        roles.append(runtime_role(spec, python))
    return roles


def _count_resources(resolved: ResolvedSpec, site: str, profile: SiteOptions) -> Resources:
    job, defaults = resolved.spec.job, profile.resource_defaults()
    limit = job.time_limit or defaults.get("time_limit")
    if job.gpus_per_node > profile.gpus_per_node:
        shares = (f"{number} for {part}" for part, number in resolved.spec.layout.nodes[0].gpus.items())
        raise ConfigError(
            f"{job.gpus_per_node} GPUs per node are asked for ({', '.join(shares)}),"
            f" and nodes of {site} have {profile.gpus_per_node}",
            allowed=f"0 to {profile.gpus_per_node} together, as gpus_per_node of the site says",
            next_step="ask for fewer, or correct gpus_per_node in the site profile",
        )
    return Resources(
        num_nodes=job.nodes,
        gpus_per_node=job.gpus_per_node,
        is_whole_node=0 < profile.gpus_per_node == job.gpus_per_node,
        cpus_per_gpu=job.cpus_per_gpu or defaults.get("cpus_per_gpu"),
        cpus=job.cpus,
        memory=job.memory or defaults.get("memory"),
        gpu_type=defaults.get("gpu_type"),
        time_limit_s=None if limit is None else parse_duration_s(limit),
        num_cpu_nodes=job.cpu_nodes,
    )


def _add_price(environment: JobEnvironment, profile: SiteOptions, resources: Resources) -> JobEnvironment:
    """Add a variable with the price of an hour of the job, for the run's report."""
    price = profile.usd_per_gpu_hour
    num_gpus = profile.count_paid_gpus(resources.num_nodes, resources.gpus_per_node)
    if price is None or not num_gpus:
        return environment
    return replace(
        environment,
        variables={**environment.variables, PRICE_VARIABLE: f"{num_gpus * price:g}"},
        sources={**environment.sources, PRICE_VARIABLE: VariableSource.LAUNCHER.value},
    )


def make_plan(request: JobRequest, backend: Backend) -> JobPlan:
    """Return the plan of a request. No disk, network, clock or random.

    Raises: ConfigError for a plan that cannot work.
    """
    if any(ord(character) < 32 or ord(character) == 127 for character in request.home):
        raise ConfigError(
            f"the job's directory {show_text(request.home)} holds a control character",
            allowed="a path of printable characters; spaces, quotes and $ are fine",
            next_step="change output.root or output.dir",
        )
    spec, job, asked = request.resolved.spec, request.resolved.spec.job, describe_request(request)
    trials = tuple(
        TrialPlan(index=index, path=f"{request.home}/{TRIALS_FOLDER}/{index}", overrides=overrides)
        for index, overrides in enumerate(request.sweep)
    )
    resources, price = request.resources, request.site.profile.usd_per_gpu_hour
    gpu_hours: float | None = None
    if resources.time_limit_s is not None:
        num_gpus = request.site.profile.count_paid_gpus(resources.num_nodes, resources.gpus_per_node)
        gpu_hours = num_gpus * (len(trials) or 1) * resources.time_limit_s / 3600.0
    plan = JobPlan(
        name=spec.name,
        site=request.site.name,
        backend=backend.name,
        profile=request.site.profile.model_dump(mode="json"),
        command=request.command,
        home=request.home,
        trials=trials or (TrialPlan(index=0, path=request.home),),
        resources=resources,
        roles=request.roles,
        python=request.python,
        plan_hash=_digest(json.dumps(asked, sort_keys=True))[:_HASH_LENGTH],
        asked=asked,
        code_sha256=request.snapshot.sha256 if request.snapshot else None,
        spec_digest=spec_digest(spec),
        user=request.user,
        submitted_at=request.submitted_at,
        environment=request.environment,
        max_requeue=job.max_requeue,
        num_past=request.num_past,
        grace_s=job.grace_s,
        preflight=job.preflight,
        max_silence_s=job.max_silence_s,
        gpu_hours=gpu_hours,
        cost_usd=None if gpu_hours is None or price is None else gpu_hours * price,
        details={"project_path": str(request.project_path), "submitted_from": str(request.project_path)},
        notices=request.resolved.notices,
    )
    return backend.render(plan, request)


def describe_request(request: JobRequest) -> dict[str, Any]:
    """Return everything that determines the run, settings first, by which a second submission is known.

    Values of variables enter it as digests.
    """
    # Those of the profile's `env` are among the variables.
    profile = request.site.profile.model_dump(mode="json", exclude={"env"})
    content: dict[str, Any] = {
        **request.resolved.spec.model_dump(mode="json", exclude=NOT_ASKED),
        **request.resolved.spec.model_dump(mode="json", include={"job", "store", "trackers"}),
        "site": {"name": request.site.name, "profile": profile},
        "command": request.command,
        "resources": asdict(request.resources),
        "roles": [asdict(role) for role in request.roles],
        "code": request.snapshot.sha256 if request.snapshot else str(request.project_path),
        "variables": {name: _digest(value)[:8] for name, value in request.environment.variables.items()},
        "secrets": sorted(request.environment.secrets),
        "python": request.python,
        "sweep": request.sweep,
        "options": request.site.profile.of_job(),
        "evaluation": request.evaluation.to_text() if request.evaluation else None,
    }
    if (runtime := request.resolved.spec.runtime).url is not None:
        content["runtime"] = runtime.model_dump(mode="json")
    normal: dict[str, Any] = json.loads(json.dumps(content, default=str))
    return normal


def tag_of(plan_hash: str) -> str:
    """Return the label of a plan's job."""
    return TAG_PREFIX + plan_hash


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode(errors="surrogateescape")).hexdigest()
