"""`strop submit RUN.toml --on SITE [key=value ...]`."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from strop.cli.arguments import (
    EvalConfig,
    EvalGpus,
    Gpus,
    InferGpus,
    Json,
    NewRun,
    OutputDir,
    Overrides,
    RunFile,
    SingleGpu,
    TrainGpus,
    takes,
)
from strop.cli.brief import brief, lasting
from strop.cli.output import Output
from strop.errors import EXIT_FAILED

if TYPE_CHECKING:
    from strop.launch.build_request import SubmitOptions
    from strop.launch.contract import JobPlan, JobRequest, RolePlan
    from strop.launch.submit import Submitted

Site = Annotated[
    str,
    typer.Option(
        "--on", metavar="SITE", help="A site of strop-sites.toml; or local, container, slurm, sagemaker."
    ),
]
Text = str | None
Wait = Annotated[
    bool,
    typer.Option(
        "--wait",
        help="Wait for the job to end; resubmit where the site does not requeue. Stopped is no success.",
    ),
]


@dataclass(frozen=True, kw_only=True, slots=True)
class SubmitArguments:
    """Arguments of `strop submit`: the run, its resources, the site's own options, how to submit."""

    run_file: RunFile
    overrides: Overrides = None
    on: Site = "local"
    command: Annotated[str, typer.Option(help="Command of the job: train or sft.")] = "train"
    output_dir: OutputDir = None
    job_name: Annotated[
        Text, typer.Option(help="Name of the run and the job. Default: from the run file.")
    ] = None
    gpus: Gpus = None
    train_gpus: TrainGpus = None
    infer_gpus: InferGpus = None
    single_gpu: SingleGpu = False
    eval_config: EvalConfig = None
    eval_gpus: EvalGpus = None
    nodes: Annotated[int | None, typer.Option(min=1, help="Number of nodes.")] = None
    cpus_per_gpu: Annotated[int | None, typer.Option(min=1, max=32, help="CPU cores per GPU.")] = None
    cpus: Annotated[int | None, typer.Option(min=1, help="CPU cores of a job without GPUs.")] = None
    mem: Annotated[Text, typer.Option(help="Memory per node, such as 64G.")] = None
    time: Annotated[Text, typer.Option(help="Wall time limit: 90m, 12h, 2d, HH:MM:SS or D-HH:MM:SS.")] = None
    max_requeue: Annotated[int | None, typer.Option(min=0, help="Max requeues.")] = None
    requeue: Annotated[bool, typer.Option(help="Requeue after a checkpointed exit.")] = True
    grace: Annotated[
        float | None, typer.Option(min=1, help="Seconds of warning before the job is stopped.")
    ] = None
    gpu_type: Annotated[Text, typer.Option(help="SLURM: GPU type.")] = None
    partition: Annotated[Text, typer.Option(help="SLURM: partition.")] = None
    account: Annotated[Text, typer.Option(help="SLURM: account to charge.")] = None
    qos: Annotated[Text, typer.Option(help="SLURM: quality of service.")] = None
    constraint: Annotated[Text, typer.Option(help="SLURM: required node features.")] = None
    reservation: Annotated[Text, typer.Option(help="SLURM: reservation.")] = None
    nodelist: Annotated[Text, typer.Option(help="SLURM: nodes that must be included.")] = None
    exclude: Annotated[Text, typer.Option(help="SLURM: nodes to exclude.")] = None
    dependency: Annotated[Text, typer.Option(help="SLURM: job dependency, such as afterok:123.")] = None
    comment: Annotated[Text, typer.Option(help="SLURM: job comment.")] = None
    container_image: Annotated[Text, typer.Option(help="Container image of the job.")] = None
    devices: Annotated[
        Text, typer.Option(metavar="0,1", help="Container: GPUs of this machine, by index or UUID.")
    ] = None
    sweep: Annotated[
        list[str] | None, typer.Option(metavar="KEY=V,V", help="Run one trial per value; repeatable.")
    ] = None
    array: Annotated[int | None, typer.Option(min=1, help="Max trials of a sweep that run at once.")] = None
    instance_type: Annotated[Text, typer.Option(help="SageMaker: instance type.")] = None
    instance_count: Annotated[int | None, typer.Option(min=1, help="SageMaker: number of instances.")] = None
    spot: Annotated[bool | None, typer.Option(help="SageMaker: use spot instances.")] = None
    description: Annotated[Text, typer.Option(help="SageMaker: description in the job log.")] = None
    project_dir: Annotated[Path | None, typer.Option(help="Project directory. Default: the current one.")] = (
        None
    )
    snapshot: Annotated[bool, typer.Option(help="Send a snapshot of the project's code.")] = True
    env: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Environment variable to pass to the job; repeatable."),
    ] = None
    env_file: Annotated[Path | None, typer.Option(help="File of environment variables (.env).")] = None
    hf_cache_dir: Annotated[Text, typer.Option(help="HF_HOME of the job.")] = None
    hf_hub_offline: Annotated[bool | None, typer.Option(help="Never contact the hub.")] = None
    auto_auth: Annotated[bool, typer.Option(help="Pass the local hub login to the job.")] = False
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Write and print everything; submit nothing.")
    ] = False
    check: Annotated[bool, typer.Option("--check", help="Only run the checks before submission.")] = False
    resume: Annotated[
        Text, typer.Option(metavar="REF", help="Resume in the directory of a job that ended.")
    ] = None
    strict: Annotated[bool, typer.Option("--strict", help="Refuse flags that override other values.")] = False
    wait: Wait = False
    new: NewRun = False
    json: Json = False


_OF_BACKEND = (
    *("gpu_type", "partition", "account", "qos", "constraint", "reservation", "nodelist", "exclude"),
    *("dependency", "comment", "container_image", "devices", "array"),
    *("instance_type", "instance_count", "spot", "description"),
)


@takes(SubmitArguments)
@brief
def submit(context: typer.Context, args: SubmitArguments) -> None:
    """Submit a run to a site: this machine, a container, SLURM, SageMaker. Idempotent."""
    send(context.obj, args)


@brief
def check(
    context: typer.Context,
    run_file: RunFile,
    overrides: Overrides = None,
    on: Site = "local",
    json: Json = False,
) -> None:
    """Check what would stop a job on a site, read-only: names, rights, images, disk space."""
    send(
        context.obj,
        SubmitArguments(run_file=run_file, overrides=overrides, on=on, check=True, json=json),
    )


def send(output: Output, args: SubmitArguments) -> None:
    """Do what the arguments ask for. Raises: as `read_request` and `Launcher.submit` do."""
    import os
    import time

    from strop.launch.build_request import read_request

    request = read_request(args.run_file, to_options(args), environ=os.environ, now=time.time())
    submit_request(output, request, args)


def submit_request(output: Output, request: JobRequest, args: SubmitArguments) -> None:
    """Plan, and do with the plan what the arguments ask for."""
    import os

    from strop.launch.backends import open_backend
    from strop.launch.environment import describe_auth
    from strop.launch.index import find_job_dir
    from strop.launch.launcher import Launcher, watch

    launcher = Launcher(open_backend(request.site))
    plan = launcher.plan(request)
    for conflict in plan.conflicts:
        output.say(conflict)
    for notice in plan.notices:
        output.say(f"notice: {notice}")
    if (auth := describe_auth(plan.environment)) is not None:
        output.say(auth)
    if len(plan.roles) > 1:
        for role in plan.roles:
            output.say(f"role {role.name}: {_describe_place(role)}")
    if request.snapshot is not None:
        output.say(f"code {request.snapshot.sha256[:12]}: {len(request.snapshot.files)} files")
        output.say(request.snapshot.diffstat)
    if args.dry_run:
        _show_dry_run(output, plan, request, is_json=args.json)
        return
    if args.check:
        _show_findings(output, launcher, plan, is_json=args.json)
        return
    if args.resume is not None:
        job_dir = find_job_dir(args.resume, [Path(request.home).parent], os.environ)
        submitted = launcher.resume(job_dir, request)
    else:
        submitted = launcher.submit(request, is_new=args.new)
    _show_submitted(output, submitted, is_json=args.json)
    if args.wait:
        with lasting():
            watch(launcher, Path(submitted.ref.home), output.say)
    if submitted.warnings:
        # It is submitted; what is left to do is the reader's.
        raise typer.Exit(EXIT_FAILED)


def _describe_place(role: RolePlan) -> str:
    nodes = {
        "first": "the first node",
        "all": "every node",
        "others": "every other node",
        "cpu": "the nodes without GPUs",
    }[role.nodes]
    shares = [f"{number} for {part}" for part, number in role.gpus.items()]
    gpus = f"{role.num_gpus} GPUs ({', '.join(shares)}), no other role's" if shares else "no GPU"
    return f"{nodes}, {gpus}"


def to_options(args: SubmitArguments) -> SubmitOptions:
    """Return the options as the launcher reads them."""
    from strop.cli.flags import to_flags
    from strop.errors import ConfigError
    from strop.launch.build_request import SubmitOptions
    from strop.launch.environment import EnvironmentFlags

    if not args.requeue and args.max_requeue:
        raise ConfigError(
            f"--no-requeue and --max-requeue {args.max_requeue} contradict each other",
            allowed="one of them",
            next_step="remove the other one",
        )
    backend = {name: getattr(args, name) for name in _OF_BACKEND if getattr(args, name) is not None}
    return SubmitOptions(
        site=args.on,
        command=args.command,
        overrides=tuple(args.overrides or ()),
        flags=to_flags(args),
        project_path=args.project_dir,
        sweep=tuple(args.sweep or ()),
        has_snapshot=args.snapshot,
        variables=tuple(args.env or ()),
        env_file=args.env_file,
        environment=EnvironmentFlags(
            hf_cache_dir=args.hf_cache_dir, hf_hub_offline=args.hf_hub_offline, auto_auth=args.auto_auth
        ),
        is_strict=args.strict,
        backend=backend,
    )


def _show_dry_run(output: Output, plan: JobPlan, request: JobRequest, *, is_json: bool) -> None:
    import shlex

    from strop.launch.job_dir import job_path_of, plan_to_json, write_preview

    if request.resolved.spec.output.dir is not None:
        write_preview(plan, request)
        output.say(f"written to {job_path_of(plan.home)}")
    if is_json:
        output.give(plan_to_json(plan))
        return
    for name, content in plan.files.items():
        output.give(f"--- {name}")
        output.give(content.rstrip("\n"))
    if plan.argv:
        output.give(f"--- command: {shlex.join(plan.argv)}")
    output.say("nothing was submitted")


def _show_findings(output: Output, launcher: Any, plan: JobPlan, *, is_json: bool) -> None:
    from strop.hardware.findings import require_none

    findings = launcher.check(plan)
    if is_json:
        output.give_json([asdict(finding) for finding in findings])
    for finding in findings if not is_json else ():
        output.give(f"{finding.severity}: {finding}")
    require_none(findings)
    if not is_json:
        output.give("nothing was found that would stop this job" if not findings else "no error was found")


def _show_submitted(output: Output, submitted: Submitted, *, is_json: bool) -> None:
    import shlex

    ref = submitted.ref
    for notice in filter(None, (submitted.notice, *submitted.warnings)):
        output.say(f"notice: {notice}")
    if is_json:
        output.give_json(asdict(ref) | {"is_new": submitted.is_new})
        return
    if not submitted.is_new:
        output.say(
            "this very plan is a job already; where it has ended, --resume goes on in it, --new repeats it"
        )
    word = "submitted" if submitted.is_new else "was submitted before:"
    output.give(f"{ref.name} {word} to {ref.site} as job {ref.job_id}")
    if submitted.plan.gpu_hours:
        price = "" if submitted.plan.cost_usd is None else f", {submitted.plan.cost_usd:.2f} USD"
        output.give(f"at most {submitted.plan.gpu_hours:.1f} GPU hours{price}")
    # Without its line in the list of jobs, only its directory finds it from everywhere.
    name = shlex.quote(ref.home) if submitted.notice else ref.job_id
    output.give(f"  directory      {ref.home}")
    output.give(f"  strop status   {name}")
    output.give(f"  strop logs -f  {name}")
    output.give(f"  strop cancel   {name}")


# `strop slurm sft|rl RUN.toml`: `strop submit --on slurm` for those who know it by these names.

slurm_commands = typer.Typer(
    no_args_is_help=True, help="Submit a run to a SLURM cluster: `strop submit --on slurm`."
)


@dataclass(frozen=True, kw_only=True, slots=True)
class SlurmArguments(SubmitArguments):
    """As for `strop submit`; the site is a SLURM cluster unless another one is named."""

    on: Site = "slurm"


@slurm_commands.command("sft")
@takes(SlurmArguments)
def slurm_sft(context: typer.Context, args: SlurmArguments) -> None:
    """Submit fine-tuning on demonstrations (SFT) to a SLURM cluster; overrides follow after --."""
    send(context.obj, _named(replace(args, command="sft")))


@slurm_commands.command("rl")
@takes(SlurmArguments)
def slurm_rl(context: typer.Context, args: SlurmArguments) -> None:
    """Submit reinforcement learning to a SLURM cluster; overrides follow after --."""
    send(context.obj, _named(replace(args, command="train")))


def _named(args: SlurmArguments) -> SlurmArguments:
    """Return the arguments with the name that this launcher gives jobs."""
    if args.job_name is not None:
        return args
    from pathlib import Path

    kind = "sft" if args.command == "sft" else "rl"
    stem = "".join(
        character if character.isalnum() else "-" for character in Path(args.run_file).stem.lower()
    )
    return replace(args, job_name=f"{stem.strip('-')[:36] or 'run'}-{kind}")
