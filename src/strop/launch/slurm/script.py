"""Writing the batch script: every value quoted, nothing left to a shell to expand.

The script is short because agents do the work: it starts one on each node, waits, makes their codes one
verdict, writes it, and asks for another life where that helps. The header says what is asked for; where the
job lives is said to sbatch itself, because a path may hold what no line of a header can.
"""

from __future__ import annotations

import math
import shlex
from functools import cache
from importlib.resources import files

from strop.launch.contract import JobPlan
from strop.launch.planning import tag_of
from strop.launch.slurm.options import SlurmOptions, is_array, read_array
from strop.spec.durations import format_duration
from strop.spec.site import SlurmSite

SCRIPT_NAME = "job.sh"


@cache
def _read_templates() -> dict[str, str]:
    """Return the templates, read once as a module is: a plan itself reads nothing."""
    package = files("strop.launch.slurm")
    return {name: (package / name).read_text(encoding="utf-8") for name in ("job.sh.j2", "image.sh.j2")}


def write_script(plan: JobPlan, options: SlurmOptions, profile: SlurmSite) -> str:
    """Return the batch script of a plan.

    Raises: ConfigError if the array asked for is not among the plan's members.
    """
    from jinja2 import DictLoader, Environment, StrictUndefined

    templates = Environment(
        loader=DictLoader(_read_templates()),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        # A script is no page: quoting is shlex's, value by value.
        autoescape=False,
    )
    templates.filters["q"] = shlex.quote
    resources = plan.resources
    mounts = [*profile.container_mounts, *([profile.hf_home] if profile.hf_home else [])]
    return templates.get_template("job.sh.j2").render(
        parts=write_header(plan, options, profile),
        node_lists=_node_lists(plan),
        setup=profile.setup,
        home=plan.home,
        is_array=is_array(plan),
        python=plan.python,
        num_nodes=resources.num_nodes,
        num_cpu_nodes=resources.num_cpu_nodes,
        has_gpus=resources.gpus_per_node > 0,
        grace_s=f"{plan.grace_s:g}",
        may_requeue=plan.max_requeue > 0,
        num_past=plan.num_past,
        last_number=plan.num_past + plan.max_requeue,
        exclude=options.exclude or "",
        image=options.container_image,
        mounts=mounts,
    )


def write_header(plan: JobPlan, options: SlurmOptions, profile: SlurmSite) -> list[list[str]]:
    """Return the options of each part of a job, quoted: one part, or the GPU part and the CPU part."""
    resources = plan.resources
    main = [
        _option("--job-name", plan.name),
        *_shared(plan, options, profile),
        *_optional(
            ("--partition", options.partition),
            ("--constraint", options.constraint),
            ("--nodelist", options.nodelist),
            ("--exclude", options.exclude),
            ("--mem", resources.memory or profile.memory),
            ("--array", read_array(plan, options)),
        ),
        f"--nodes={resources.num_nodes} --ntasks-per-node=1",
        *_devices_and_cores(plan, options, profile),
        *(f"{shlex.quote(argument)}" for argument in options.sbatch_args),
    ]
    if not resources.num_cpu_nodes:
        return [main]
    cores = f"--cpus-per-task={resources.cpus}" if resources.cpus else "--exclusive"
    beside = [
        *_shared(plan, options, profile),
        *_optional(
            ("--partition", options.cpu_partition or options.partition), ("--exclude", options.exclude)
        ),
        f"--nodes={resources.num_cpu_nodes} --ntasks-per-node=1",
        cores,
    ]
    return [main, beside]


def _shared(plan: JobPlan, options: SlurmOptions, profile: SlurmSite) -> list[str]:
    """Return what both parts of a heterogeneous job must say: Slurm does not hand it on."""
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
        # A dependency that cannot be met any more would wait for ever.
        *(["--kill-on-invalid-dep=yes"] if options.dependency else []),
        "--requeue" if plan.max_requeue else "--no-requeue",
        "--open-mode=append",
        f"--signal={profile.signal}@{math.ceil(plan.grace_s)}",
    ]


def _devices_and_cores(plan: JobPlan, options: SlurmOptions, profile: SlurmSite) -> list[str]:
    resources = plan.resources
    lines = []
    if resources.gpus_per_node:
        device = f"gpu:{options.gpu_type}" if options.gpu_type else "gpu"
        lines.append(_option("--gres", f"{device}:{resources.gpus_per_node}"))
    if resources.is_whole_node:
        # Only then: it shows every GPU of the node, whatever was asked for.
        return [*lines, "--exclusive"]
    if resources.gpus_per_node and resources.cpus is None:
        return [*lines, f"--cpus-per-gpu={resources.cpus_per_gpu or profile.cpus_per_gpu}"]
    if resources.cpus and not resources.num_cpu_nodes:
        lines.append(f"--cpus-per-task={resources.cpus}")
    return lines


def _node_lists(plan: JobPlan) -> list[str]:
    """Return the variables in which Slurm names the nodes of each part."""
    if not plan.resources.num_cpu_nodes:
        return ["SLURM_JOB_NODELIST"]
    return ["SLURM_JOB_NODELIST_HET_GROUP_0", "SLURM_JOB_NODELIST_HET_GROUP_1"]


def _option(name: str, value: str) -> str:
    return f"{name}={shlex.quote(value)}"


def _optional(*options: tuple[str, str | None]) -> list[str]:
    return [_option(name, value) for name, value in options if value is not None]
