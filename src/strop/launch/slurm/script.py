"""The batch script of a plan. Pure.

The script is short because the agents do the work: it starts one on each node, waits, asks `verdict` what
follows, and requeues the job if that says so. The header holds the options. The job's
folder is an argument of sbatch, because a path may hold characters that a header line cannot.
"""

from __future__ import annotations

import math
import re
import shlex
from functools import cache
from importlib.resources import files

from strop.errors import ConfigError
from strop.launch.build_request import TAG_PREFIX, tag_of
from strop.launch.contract import JobPlan
from strop.launch.slurm.options import SlurmSite
from strop.spec.job import format_duration

# Options that the launcher sets, and strop's option to use instead, if any.
_OWNED_ARGS = {
    "--array": "a sweep, and site.array for its limit",
    "--chdir": "--output-dir",
    "--comment": "site.comment",
    "--dependency": "site.dependency",
    "--error": "--output-dir",
    "--exclude": "site.exclude",
    "--export": "env in the site profile",
    "--export-file": "env in the site profile",
    "--gpus": "job.gpus",
    "--gpus-per-node": "job.gpus",
    "--gres": "job.gpus and site.gpu_type",
    "--job-name": "--job-name",
    "--mem": "job.memory",
    "--nodes": "job.nodes",
    "--ntasks": "job.nodes",
    "--ntasks-per-node": "job.nodes",
    "--no-requeue": "job.max_requeue=0",
    "--open-mode": "",
    "--output": "--output-dir",
    "--parsable": "",
    "--requeue": "job.max_requeue",
    "--signal": "job.grace_s, and signal in the site profile",
    "--test-only": "strop submit --check",
    "--time": "job.time_limit",
    "--wait": "",
    "--wrap": "",
}
SCRIPT_NAME = "job.sh"
_MAX_NAME = 200
_WRITTEN = (
    *("partition", "cpu_partition", "account", "qos", "constraint", "reservation", "nodelist", "exclude"),
    *("gpu_type", "dependency", "comment", "container_image", "sbatch_args"),
)
"""Options in the script's header."""


def require_writable(options: SlurmSite) -> None:
    """Refuse values that Slurm cannot take. Raises: ConfigError."""
    for name in _WRITTEN:
        value = getattr(options, name)
        for text in value if isinstance(value, tuple) else (value,):
            if isinstance(text, str):
                _require_one_line(f"{name}={text!r}", text)
    if options.gpu_type and re.search(r"[:,\s]", options.gpu_type):
        raise _refusal(
            f"gpu_type={options.gpu_type!r}", "one type of the site, such as h100", "read it from sinfo -o %G"
        )
    for argument in options.sbatch_args:
        name = argument.split("=", 1)[0]
        if not re.match(r"--?[A-Za-z]", argument):
            raise _refusal(
                f"sbatch_args has {argument!r}", "options such as --mail-type=END", "write NAME=VALUE as one"
            )
        if name in _OWNED_ARGS:
            instead = _OWNED_ARGS[name]
            raise _refusal(
                f"sbatch_args has {argument!r}, which the launcher itself decides",
                "options that strop has no setting for",
                f"use {instead}" if instead else "leave it out",
            )


def require_fit(plan: JobPlan) -> None:
    """Refuse a plan that Slurm cannot take. Raises: ConfigError."""
    _require_one_line(f"job name {plan.name!r}", plan.name)
    if not plan.name.strip() or len(plan.name) > _MAX_NAME:
        raise _refusal(
            f"job name {plan.name!r}", f"1 to {_MAX_NAME} characters, not all blank", "choose another name"
        )
    if "\\" in plan.home or "\0" in plan.home:
        # A backslash in a log's path makes Slurm ignore all patterns; Slurm drops it too.
        raise _refusal(f"run folder {plan.home!r}", "a path without a backslash", "give another --output-dir")
    if plan.resources.num_cpu_nodes and is_array(plan):
        raise _refusal(
            f"a sweep whose runs have {plan.resources.num_cpu_nodes} CPU nodes beside them",
            "a sweep of jobs without a CPU part, or one job with it: Slurm has no arrays of such jobs",
            "submit the combinations one by one",
        )


def is_array(plan: JobPlan) -> bool:
    """Whether the plan's trials are tasks of an array: all but a single run in its home are."""
    return [trial.path for trial in plan.trials] != [plan.home]


def read_array(plan: JobPlan, options: SlurmSite) -> str | None:
    """Return the value of `--array`, None for a single run. Raises: ConfigError without a sweep."""
    trials = [trial.index for trial in plan.trials]
    limit = f"%{options.array}" if options.array else ""
    if is_array(plan):
        first, last = trials[0], trials[-1]
        is_range = len(trials) > 1 and trials == list(range(first, first + len(trials)))
        return (f"{first}-{last}" if is_range else ",".join(map(str, trials))) + limit
    if limit:
        raise _refusal(
            f"site.array={options.array} without a sweep", "a sweep of two or more runs", "leave it out"
        )
    return None


def plan_hash_in(comment: str) -> str | None:
    """Return the plan hash in a job's comment; None if strop did not submit the job."""
    word = comment.split(" ", 1)[0]
    return word.removeprefix(TAG_PREFIX) if word.startswith(TAG_PREFIX) and word != TAG_PREFIX else None


def _require_one_line(setting: str, value: str) -> None:
    if any(ord(character) < 32 or ord(character) == 127 for character in value):
        raise _refusal(setting, "one line without control characters", "leave them out")


def _refusal(problem: str, allowed: str, next_step: str) -> ConfigError:
    return ConfigError(problem, allowed=allowed, next_step=next_step)


@cache
def _read_templates() -> dict[str, str]:
    """Return the templates by name; they are read once per process."""
    package = files("strop.launch.slurm")
    return {name: (package / name).read_text(encoding="utf-8") for name in ("job.sh.j2", "image.sh.j2")}


def write_script(plan: JobPlan, options: SlurmSite) -> str:
    """Return the batch script of a plan.

    Raises: ConfigError if the plan's trials do not fit the requested array.
    """
    from jinja2 import DictLoader, Environment, StrictUndefined

    templates = Environment(
        loader=DictLoader(_read_templates()),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        # A script is not HTML: each value is quoted by shlex.
        autoescape=False,
    )
    templates.filters["q"] = shlex.quote
    if options.wrap and options.container_image:
        raise _refusal("site.wrap together with site.container_image", "one of them", "leave one out")
    resources = plan.resources
    node_lists = ["SLURM_JOB_NODELIST"]
    if resources.num_cpu_nodes:
        node_lists = ["SLURM_JOB_NODELIST_HET_GROUP_0", "SLURM_JOB_NODELIST_HET_GROUP_1"]
    mounts = [*options.container_mounts, *([options.hf_home] if options.hf_home else [])]
    return templates.get_template("job.sh.j2").render(
        parts=write_header(plan, options),
        node_lists=node_lists,
        setup=options.setup,
        home=plan.home,
        is_array=is_array(plan),
        python=plan.python,
        num_nodes=resources.num_nodes,
        num_cpu_nodes=resources.num_cpu_nodes,
        has_gpus=resources.gpus_per_node > 0,
        grace_s=f"{plan.grace_s:g}",
        num_past=plan.num_past,
        image=options.container_image,
        wrap=options.wrap,
        mounts=mounts,
    )


def write_header(plan: JobPlan, options: SlurmSite) -> list[list[str]]:
    """Return the options of each part of a job, quoted: one part, or a GPU part and a CPU part."""
    resources = plan.resources
    devices = []
    if resources.gpus_per_node:
        gpu_type = resources.gpu_type or options.gpu_type
        device = f"gpu:{gpu_type}" if gpu_type else "gpu"
        devices.append(_option("--gres", f"{device}:{resources.gpus_per_node}"))
    if resources.is_whole_node:
        # Only for whole nodes: it shows every GPU of the node, even more than requested.
        devices.append("--exclusive")
    elif resources.gpus_per_node and resources.cpus is None:
        devices.append(f"--cpus-per-gpu={resources.cpus_per_gpu or options.cpus_per_gpu}")
    elif resources.cpus and not resources.num_cpu_nodes:
        devices.append(f"--cpus-per-task={resources.cpus}")
    main = [
        _option("--job-name", plan.name),
        *_shared(plan, options),
        *_optional(
            ("--partition", options.partition),
            ("--constraint", options.constraint),
            ("--nodelist", options.nodelist),
            ("--exclude", options.exclude),
            ("--mem", resources.memory or options.memory),
            ("--array", read_array(plan, options)),
        ),
        f"--nodes={resources.num_nodes} --ntasks-per-node=1",
        *devices,
        *(f"{shlex.quote(argument)}" for argument in options.sbatch_args),
    ]
    if not resources.num_cpu_nodes:
        return [main]
    cores = f"--cpus-per-task={resources.cpus}" if resources.cpus else "--exclusive"
    beside = [
        *_shared(plan, options),
        *_optional(
            ("--partition", options.cpu_partition or options.partition), ("--exclude", options.exclude)
        ),
        f"--nodes={resources.num_cpu_nodes} --ntasks-per-node=1",
        cores,
    ]
    return [main, beside]


def _shared(plan: JobPlan, options: SlurmSite) -> list[str]:
    """Return the options that every part of a heterogeneous job must have."""
    limit_s = plan.resources.time_limit_s
    comment = " ".join(filter(None, [tag_of(plan.plan_hash), options.comment]))
    return [
        _option("--comment", comment),
        *_optional(
            ("--account", options.account),
            ("--qos", options.qos),
            ("--reservation", options.reservation),
            ("--time", None if limit_s is None else format_duration(limit_s)),
            ("--dependency", options.dependency),
        ),
        # Without this a job with a dependency that can no longer be met waits forever.
        *(["--kill-on-invalid-dep=yes"] if options.dependency else []),
        "--requeue" if plan.max_requeue else "--no-requeue",
        "--open-mode=append",
        f"--signal={options.signal}@{math.ceil(plan.grace_s)}",
    ]


def _option(name: str, value: str) -> str:
    return f"{name}={shlex.quote(value)}"


def _optional(*options: tuple[str, str | None]) -> list[str]:
    return [_option(name, value) for name, value in options if value is not None]
