"""`strop submit RUN.toml --on SITE [key=value ...]`."""

from __future__ import annotations

from dataclasses import asdict, dataclass
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
)
from strop.cli.brief import brief, lasting
from strop.cli.options import takes
from strop.cli.output import Output
from strop.errors import EXIT_FAILED

if TYPE_CHECKING:
    from strop.launch.contract import JobPlan, JobRequest, RolePlan
    from strop.launch.requesting import SubmitOptions
    from strop.launch.submitting import Submitted

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
        "--wait", help="Wait for the end; stopped is no success. Submits again where the site does not."
    ),
]


@dataclass(frozen=True, kw_only=True, slots=True)
class SubmitArguments:
    """What `strop submit` takes: the run, its resources, the site's own words, the manner of submitting."""

    run_file: RunFile
    overrides: Overrides = None
    on: Site = "local"
    command: Annotated[str, typer.Option(help="What runs there: train or sft.")] = "train"
    output_dir: OutputDir = None
    job_name: Annotated[Text, typer.Option(help="Name of run and job; none: the run file's.")] = None
    gpus: Gpus = None
    train_gpus: TrainGpus = None
    infer_gpus: InferGpus = None
    single_gpu: SingleGpu = False
    eval_config: EvalConfig = None
    eval_gpus: EvalGpus = None
    nodes: Annotated[int | None, typer.Option(min=1, help="Nodes.")] = None
    cpus_per_gpu: Annotated[int | None, typer.Option(min=1, max=32, help="Cores for each GPU.")] = None
    cpus: Annotated[int | None, typer.Option(min=1, help="Cores of a job without GPUs.")] = None
    mem: Annotated[Text, typer.Option(help="Memory per node, as 64G.")] = None
    time: Annotated[Text, typer.Option(help="Wall time: 90m, 12h, 2d, HH:MM:SS or D-HH:MM:SS.")] = None
    max_requeue: Annotated[int | None, typer.Option(min=0, help="How often it may live again.")] = None
    requeue: Annotated[bool, typer.Option(help="Whether it lives again after an orderly end.")] = True
    grace: Annotated[float | None, typer.Option(min=1, help="Seconds of warning before its end.")] = None
    gpu_type: Annotated[Text, typer.Option(help="SLURM: type of GPU.")] = None
    partition: Annotated[Text, typer.Option(help="SLURM: partition.")] = None
    account: Annotated[Text, typer.Option(help="SLURM: account that pays.")] = None
    qos: Annotated[Text, typer.Option(help="SLURM: quality of service.")] = None
    constraint: Annotated[Text, typer.Option(help="SLURM: features of nodes.")] = None
    reservation: Annotated[Text, typer.Option(help="SLURM: reservation.")] = None
    nodelist: Annotated[Text, typer.Option(help="SLURM: nodes that must be among the job's.")] = None
    exclude: Annotated[Text, typer.Option(help="SLURM: nodes that must not.")] = None
    dependency: Annotated[Text, typer.Option(help="SLURM: jobs to wait for, as afterok:123.")] = None
    comment: Annotated[Text, typer.Option(help="SLURM: words for the job's comment.")] = None
    container_image: Annotated[Text, typer.Option(help="Image that the job runs in.")] = None
    devices: Annotated[
        Text, typer.Option(metavar="0,1", help="Container: these GPUs of this machine, by index or UUID.")
    ] = None
    sweep: Annotated[
        list[str] | None, typer.Option(metavar="KEY=V,V", help="One member for each value; repeatable.")
    ] = None
    array: Annotated[int | None, typer.Option(min=1, help="Members of a sweep at one time.")] = None
    instance_type: Annotated[Text, typer.Option(help="SageMaker: instance type.")] = None
    instance_count: Annotated[int | None, typer.Option(min=1, help="SageMaker: instances.")] = None
    spot: Annotated[bool | None, typer.Option(help="SageMaker: spot instances.")] = None
    description: Annotated[Text, typer.Option(help="SageMaker: words for the job log.")] = None
    project_dir: Annotated[Path | None, typer.Option(help="Whose code runs; none: this folder.")] = None
    snapshot: Annotated[bool, typer.Option(help="Whether the code is packed and sent along.")] = True
    env: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="A variable of yours that the job gets; repeatable."),
    ] = None
    env_file: Annotated[Path | None, typer.Option(help="File of variables, as .env.")] = None
    hf_cache_dir: Annotated[Text, typer.Option(help="Model cache of the job, HF_HOME.")] = None
    hf_hub_offline: Annotated[bool | None, typer.Option(help="Whether the hub may not be asked.")] = None
    auto_auth: Annotated[bool, typer.Option(help="Take the hub's local login along.")] = False
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Write and show everything; submit nothing.")] = (
        False
    )
    check: Annotated[bool, typer.Option("--check", help="Only look for what would stop the job.")] = False
    resume: Annotated[Text, typer.Option(metavar="REF", help="Go on in the home of a job that ended.")] = None
    strict: Annotated[bool, typer.Option("--strict", help="Refuse flags that beat other values.")] = False
    wait: Wait = False
    new: NewRun = False
    json: Json = False


_OF_BACKEND = (
    "gpu_type",
    "partition",
    "account",
    "qos",
    "constraint",
    "reservation",
    "nodelist",
    "exclude",
    "dependency",
    "comment",
    "container_image",
    "devices",
    "array",
    "instance_type",
    "instance_count",
    "spot",
    "description",
)


@takes(SubmitArguments)
@brief
def submit(context: typer.Context, given: SubmitArguments) -> None:
    """Send a run to a site: this machine, a container, SLURM, SageMaker. The same again changes nothing."""
    send(context.obj, given)


@brief
def check(
    context: typer.Context,
    run_file: RunFile,
    overrides: Overrides = None,
    on: Site = "local",
    json: Json = False,
) -> None:
    """Look for what would stop a job on a site, reading only: names, rights, images, room."""
    send(
        context.obj,
        SubmitArguments(run_file=run_file, overrides=overrides, on=on, check=True, json=json),
    )


def send(output: Output, given: SubmitArguments) -> None:
    """Do what the arguments ask for. Raises: as `read_request` and `Launcher.submit` do."""
    import os
    import time

    from strop.launch.requesting import read_request

    request = read_request(given.run_file, to_options(given), environ=os.environ, now=time.time())
    submit_request(output, request, given)


def submit_request(output: Output, request: JobRequest, given: SubmitArguments) -> None:
    """Plan, and do with the plan what the arguments ask for."""
    from strop.launch.backends import open_backend
    from strop.launch.environment import describe_auth
    from strop.launch.launcher import Launcher
    from strop.launch.watching import watch

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
    if given.dry_run:
        _show_dry_run(output, plan, request, is_json=given.json)
        return
    if given.check:
        _show_findings(output, launcher, plan, is_json=given.json)
        return
    if given.resume is not None:
        submitted = launcher.resume(_find(given.resume, request), request)
    else:
        submitted = launcher.submit(request, is_new=given.new)
    _show_submitted(output, submitted, is_json=given.json)
    if given.wait:
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


def to_options(given: SubmitArguments) -> SubmitOptions:
    """Return the options as the launcher reads them."""
    from strop.cli.flags import to_flags
    from strop.launch.environment import EnvironmentFlags
    from strop.launch.requesting import SubmitOptions

    if not given.requeue:
        _refuse_two_limits(given)
    backend = {name: getattr(given, name) for name in _OF_BACKEND if getattr(given, name) is not None}
    return SubmitOptions(
        site=given.on,
        command=given.command,
        overrides=tuple(given.overrides or ()),
        flags=to_flags(given),
        project_path=given.project_dir,
        sweep=tuple(given.sweep or ()),
        has_snapshot=given.snapshot,
        variables=tuple(given.env or ()),
        env_file=given.env_file,
        environment=EnvironmentFlags(
            hf_cache_dir=given.hf_cache_dir, hf_hub_offline=given.hf_hub_offline, auto_auth=given.auto_auth
        ),
        is_strict=given.strict,
        backend=backend,
    )


def _refuse_two_limits(given: SubmitArguments) -> None:
    from strop.errors import ConfigError, explain_refusal

    if given.max_requeue:
        raise ConfigError(
            explain_refusal(
                f"--no-requeue and --max-requeue {given.max_requeue} contradict each other",
                allowed="one of them",
                next_step="remove the other one",
            )
        )


def _find(reference: str, request: JobRequest) -> Path:
    import os

    from strop.launch.index import find_home

    return find_home(reference, [Path(request.home).parent], os.environ)


def _show_dry_run(output: Output, plan: JobPlan, request: JobRequest, *, is_json: bool) -> None:
    import shlex

    from strop.launch.filling import write_preview
    from strop.launch.home import job_path_of, plan_to_json

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
