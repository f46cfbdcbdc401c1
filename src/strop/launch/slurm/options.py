"""What a job asks of Slurm: flags over the site profile, checked before anything is written."""

from __future__ import annotations

import re
from dataclasses import replace
from difflib import get_close_matches
from typing import Any

from pydantic import Field, ValidationError

from strop.errors import ConfigError, explain_refusal
from strop.launch.contract import JobPlan, JobRequest, Resources
from strop.launch.planning import TAG_PREFIX
from strop.spec.base import Section
from strop.spec.site import SlurmSite

# What the script and the launcher rest on; the option of strop that is meant instead, where there is one.
_OWNED_ARGS = {
    "--array": "a sweep, and --array for its limit",
    "--chdir": "--output-dir",
    "--comment": "--comment",
    "--dependency": "--dependency",
    "--error": "--output-dir",
    "--exclude": "--exclude",
    "--export": "env in the site profile",
    "--export-file": "env in the site profile",
    "--gpus": "--gpus",
    "--gpus-per-node": "--gpus",
    "--gres": "--gpus and --gpu-type",
    "--job-name": "--job-name",
    "--mem": "--mem",
    "--nodes": "--nodes",
    "--ntasks": "--nodes",
    "--ntasks-per-node": "--nodes",
    "--no-requeue": "--no-requeue",
    "--open-mode": "",
    "--output": "--output-dir",
    "--parsable": "",
    "--requeue": "--requeue",
    "--signal": "--grace, and signal in the site profile",
    "--test-only": "strop check",
    "--time": "--time",
    "--wait": "",
    "--wrap": "",
}
_MAX_NAME = 200
_ARRAY = re.compile(r"(?P<tasks>\d+(-\d+(:\d+)?)?(,\d+(-\d+(:\d+)?)?)*)?(%(?P<limit>[1-9]\d*))?")


class SlurmOptions(Section):
    """Settings of one job: names as the flags have them. None = the profile's, or Slurm's own default."""

    partition: str | None = Field(default=None, min_length=1)
    cpu_partition: str | None = Field(default=None, min_length=1)
    account: str | None = Field(default=None, min_length=1)
    qos: str | None = Field(default=None, min_length=1)
    constraint: str | None = Field(default=None, min_length=1)
    reservation: str | None = Field(default=None, min_length=1)
    nodelist: str | None = Field(default=None, min_length=1)
    exclude: str | None = Field(default=None, min_length=1)
    gpu_type: str | None = Field(default=None, min_length=1)
    dependency: str | None = Field(default=None, min_length=1)
    array: str | int | None = None
    """Tasks and limit as Slurm writes them, `0-3%2`; or the limit alone, `%2` or 2."""
    comment: str | None = Field(default=None, min_length=1)
    requeue: bool = True
    container_image: str | None = Field(default=None, min_length=1)
    sbatch_args: tuple[str, ...] = Field(default=(), strict=False)


def read_options(request: JobRequest, profile: SlurmSite) -> SlurmOptions:
    """Return a job's settings: flags over the profile.

    Raises: ConfigError for a name that is none, or a value that Slurm could not be given.
    """
    given = {name: value for name, value in request.options.items() if value is not None}
    unknown = sorted(given.keys() - SlurmOptions.model_fields.keys())
    if unknown:
        _refuse_unknown(unknown[0])
    try:
        options = SlurmOptions.model_validate({**_from_profile(profile, request.resources), **given})
    except ValidationError as error:
        raise _explain_invalid(error) from error
    for name, value in options:
        for text in value if isinstance(value, tuple) else (value,):
            if isinstance(text, str):
                _require_one_line(f"{name}={text!r}", text)
    _check_forms(options)
    return options


def fit_plan(plan: JobPlan, options: SlurmOptions) -> JobPlan:
    """Return a plan with the settings' budget. Raises: ConfigError for what Slurm cannot be given."""
    if not options.requeue:
        plan = replace(plan, max_requeue=0)
    _require_one_line(f"job name {plan.name!r}", plan.name)
    if not plan.name.strip() or len(plan.name) > _MAX_NAME:
        raise _refusal(
            f"job name {plan.name!r}", f"1 to {_MAX_NAME} characters, not all blank", "name it anew"
        )
    if "\\" in plan.home or "\0" in plan.home:
        # Slurm takes a backslash in a log's path as the end of all patterns, and drops it.
        raise _refusal(f"run folder {plan.home!r}", "a path without a backslash", "give another --output-dir")
    if plan.resources.num_cpu_nodes and is_array(plan):
        raise _refusal(
            f"a sweep whose runs have {plan.resources.num_cpu_nodes} CPU nodes beside them",
            "a sweep of jobs without a CPU part, or one job with it: Slurm has no arrays of such jobs",
            "submit the combinations one by one",
        )
    return plan


def is_array(plan: JobPlan) -> bool:
    """Whether the plan's members are tasks of an array: all but a single run in its home."""
    return [member.path for member in plan.members] != [plan.home]


def read_array(plan: JobPlan, options: SlurmOptions) -> str | None:
    """Return what `--array` says, None for a single run. Raises: ConfigError if tasks are no members."""
    members = [member.index for member in plan.members]
    if not is_array(plan):
        if options.array is None:
            return None
        raise _refusal(
            f"array={options.array!r} without a sweep", "a sweep of two or more runs", "leave it out"
        )
    wanted = f"%{options.array}" if isinstance(options.array, int) else options.array or ""
    found = _ARRAY.fullmatch(wanted)
    if found is None:
        raise _bad_array(wanted, members)
    limit = f"%{found['limit']}" if found["limit"] else ""
    if not found["tasks"]:
        return _list_numbers(members) + limit
    tasks = {
        number
        for first, last, step in re.findall(r"(\d+)(?:-(\d+)(?::(\d+))?)?", found["tasks"])
        for number in range(int(first), int(last or first) + 1, int(step or 1) or 1)
    }
    if not tasks <= set(members):
        raise _bad_array(wanted, members)
    return found["tasks"] + limit


def plan_hash_in(comment: str) -> str | None:
    """Return the plan of a job's comment; None if it is no job of ours."""
    word = comment.split(" ", 1)[0]
    return word.removeprefix(TAG_PREFIX) if word.startswith(TAG_PREFIX) and word != TAG_PREFIX else None


def _from_profile(profile: SlurmSite, resources: Resources) -> dict[str, Any]:
    values = {
        "partition": profile.partition,
        "cpu_partition": profile.cpu_partition,
        "account": profile.account,
        "qos": profile.qos,
        "constraint": profile.constraint,
        "reservation": profile.reservation,
        "nodelist": profile.nodelist,
        "exclude": profile.exclude,
        "gpu_type": resources.gpu_type or profile.gpu_type,
        "container_image": profile.container_image,
        "sbatch_args": profile.sbatch_args,
    }
    return {name: value for name, value in values.items() if value is not None}


def _check_forms(options: SlurmOptions) -> None:
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


def _list_numbers(members: list[int]) -> str:
    if members == list(range(members[0], members[0] + len(members))) and len(members) > 1:
        return f"{members[0]}-{members[-1]}"
    return ",".join(map(str, members))


def _bad_array(given: str, members: list[int]) -> ConfigError:
    allowed = f"tasks among {_list_numbers(members)} and a limit, such as {_list_numbers(members)}%2, or %2"
    return _refusal(f"array={given!r}", allowed, "leave the tasks out to run them all")


def _require_one_line(given: str, value: str) -> None:
    if any(ord(character) < 32 or ord(character) == 127 for character in value):
        raise _refusal(given, "one line without control characters", "leave them out")


def _refuse_unknown(name: str) -> None:
    known = sorted(SlurmOptions.model_fields)
    near = get_close_matches(name, known, n=1)
    raise _refusal(
        f"unknown SLURM setting {name}",
        ", ".join(known),
        f"did you mean {near[0]}?" if near else "leave it out",
    )


def _explain_invalid(error: ValidationError) -> ConfigError:
    first = error.errors()[0]
    name = ".".join(map(str, first["loc"]))
    return _refusal(f"{name}={first['input']!r}: {first['msg']}", "a value of that kind", f"change {name}")


def _refusal(given: str, allowed: str, next_step: str) -> ConfigError:
    return ConfigError(explain_refusal(given, allowed=allowed, next_step=next_step))
