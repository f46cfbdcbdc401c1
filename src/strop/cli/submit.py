"""`strop submit RUN.toml --on SITE [key=value ...]` and `strop policy`."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from strop.cli.arguments import (
    Json,
    NewRun,
    OutputDir,
    Overrides,
    RunFile,
    add_output_dir,
    takes,
)
from strop.cli.output import Output
from strop.errors import EXIT_FAILED
from strop.io.notices import tell

if TYPE_CHECKING:
    from strop.launch.build_request import SubmitOptions
    from strop.launch.contract import JobPlan, JobRequest, RolePlan
    from strop.launch.launcher import Launcher
    from strop.launch.submit import Submitted

Site = Annotated[
    str,
    typer.Option("--on", metavar="SITE", help="A site of strop-sites.toml; or local, slurm, sagemaker."),
]
Text = str | None


@dataclass(frozen=True, kw_only=True, slots=True)
class SubmitArguments:
    """Arguments of `strop submit` on every site: the run, its resources, its code, the action."""

    run_file: RunFile
    overrides: Overrides = None
    on: Site = "local"
    command: Annotated[
        str,
        typer.Option(
            help="Command of the job: train or eval. Default: eval for a file that asks for an"
            " evaluation and says nothing of training, else train."
        ),
    ] = "auto"
    output_dir: OutputDir = None
    job_name: Annotated[
        Text,
        typer.Option(
            help="Name of the run and the job; on SageMaker of the job alone. {stem} stands for the name of"
            " the run file. Default: from the run file."
        ),
    ] = None
    sweep: Annotated[
        list[str] | None, typer.Option(metavar="KEY=V,V", help="Run one trial per value; repeatable.")
    ] = None
    project_dir: Annotated[Path | None, typer.Option(help="Project directory. Default: the current one.")] = (
        None
    )
    snapshot: Annotated[bool, typer.Option(help="Send a snapshot of the project's code.")] = True
    env: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Environment variable to pass to the job; repeatable."),
    ] = None
    env_file: Annotated[Path | None, typer.Option(help="File of environment variables (.env).")] = None
    auto_auth: Annotated[bool, typer.Option(help="Pass the local hub login to the job.")] = False
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run",
            help="Print what would be submitted, and with --output-dir write it; submit nothing.",
        ),
    ] = False
    check: Annotated[
        bool,
        typer.Option(
            "--check",
            help="Look for obstacles, read-only: names, rights, images, disk space; submit nothing.",
        ),
    ] = False
    confirm_run_unsafe_code: Annotated[
        bool,
        typer.Option(
            "--confirm-run-unsafe-code",
            help="In an evaluation by lm-eval: allow it to run model-written code without a sandbox.",
        ),
    ] = False
    resume: Annotated[
        Text, typer.Option(metavar="REF", help="Resume in the directory of a job that ended.")
    ] = None
    wait: Annotated[
        bool,
        typer.Option(
            "--wait",
            help="Wait for the job to end; resubmit where the site does not requeue. Stopped is no success.",
        ),
    ] = False
    new: NewRun = False
    json: Json = False


_WITHOUT_CHECK = ("dry_run", "resume", "wait", "new")


@takes(SubmitArguments)
def submit(context: typer.Context, args: SubmitArguments) -> None:
    """Submit a run to a site: this machine, SLURM, SageMaker. Idempotent."""
    given = [name for name in _WITHOUT_CHECK if getattr(args, name)]
    if args.check and given:
        raise typer.BadParameter(f"--check submits nothing: leave --{given[0].replace('_', '-')} out")
    request = read_arguments(args)
    launcher, request = prepare(context.obj, request, args)
    submit_request(context.obj, launcher, request, args)


def read_arguments(args: SubmitArguments) -> JobRequest:
    """Read run file, profile, code and variables. Raises: as `read_request`."""
    import os
    import time

    from strop.launch.build_request import read_request

    return read_request(args.run_file, to_options(args), environ=os.environ, now=time.time())


def prepare(output: Output, request: JobRequest, args: SubmitArguments) -> tuple[Launcher, JobRequest]:
    """Open the site's backend, and let it complete the request. Raises: as `Preparing.prepare`."""
    from strop.launch.backends import open_backend
    from strop.launch.contract import Preparing
    from strop.launch.launcher import Launcher

    backend = open_backend(request.site)
    if isinstance(backend, Preparing):
        prepared = backend.prepare(request, output.say, is_dry_run=args.dry_run, is_awaited=args.wait)
        if isinstance(prepared, int):
            raise typer.Exit(prepared)
        request = prepared
    return Launcher(backend), request


def submit_request(output: Output, launcher: Launcher, request: JobRequest, args: SubmitArguments) -> None:
    """Plan, then check, show or submit the plan as the arguments request."""
    import os

    from strop.launch.environment import describe_travelling
    from strop.launch.index import find_job_dir
    from strop.launch.launcher import watch
    from strop.launch.serving import SERVE

    plan = launcher.plan(request)
    for notice in plan.notices:
        tell(notice)
    for line in describe_travelling(plan.environment):
        output.say(line)
    if request.command != SERVE:
        output.say(f"placement {request.resolved.spec.layout.describe()}")
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
        from strop.hardware.findings import require_none

        findings = launcher.check(plan)
        if args.json:
            output.give_json([asdict(finding) for finding in findings])
        else:
            for finding in findings:
                output.give(f"{finding.severity}: {finding}")
        require_none(findings)
        if not args.json:
            output.give(
                "nothing was found that would stop this job" if not findings else "no error was found"
            )
        return
    if args.resume is not None:
        job_dir = find_job_dir(args.resume, [Path(request.home).parent], os.environ)
        submitted = launcher.resume(job_dir, request)
    else:
        submitted = launcher.submit(request, is_new=args.new)
    _show_submitted(output, submitted, is_json=args.json)
    if args.wait:
        watch(launcher, Path(submitted.ref.home), output.say)
    if submitted.warnings:
        # The job is submitted, but the user must act on the warnings.
        raise typer.Exit(EXIT_FAILED)


def _describe_place(role: RolePlan) -> str:
    nodes = {
        "first": "the first node",
        "all": "every node",
        "others": "every other node",
        "cpu": "the nodes without GPUs",
    }.get(role.nodes, f"nodes {role.nodes}")
    shares = [f"{number} for {part}" for part, number in role.gpus.items()]
    gpus = f"{role.num_gpus} GPUs ({', '.join(shares)}), no other role's" if shares else "no GPU"
    return f"{nodes}, {gpus}"


def to_options(args: SubmitArguments) -> SubmitOptions:
    """Return the arguments as options of the launcher."""
    from strop.launch.build_request import SubmitOptions

    job_name = args.job_name
    if job_name is not None and "{stem}" in job_name:
        stem = re.sub(r"[\W_]", "-", Path(args.run_file).stem.lower())
        job_name = job_name.replace("{stem}", stem.strip("-")[:36] or "run")
    return SubmitOptions(
        site=args.on,
        command=args.command,
        may_run_code=args.confirm_run_unsafe_code,
        overrides=tuple(add_output_dir(args.overrides, args.output_dir)),
        job_name=job_name,
        project_path=args.project_dir,
        sweep=tuple(args.sweep or ()),
        has_snapshot=args.snapshot,
        variables=tuple(args.env or ()),
        env_file=args.env_file,
        auto_auth=args.auto_auth,
    )


def _show_dry_run(output: Output, plan: JobPlan, request: JobRequest, *, is_json: bool) -> None:
    import shlex

    from strop.launch.job_dir import SPEC_NAME, job_path_of, plan_to_json, write_preview
    from strop.launch.serving import SERVE
    from strop.spec import write_spec

    if request.resolved.spec.output.dir is not None:
        write_preview(plan, request)
        output.say(f"written to {job_path_of(plan.home)}")
    if is_json:
        output.give(plan_to_json(plan))
        return
    spec = {} if request.command == SERVE else {SPEC_NAME: write_spec(request.resolved)}
    for name, content in (spec | dict(plan.files)).items():
        output.give(f"--- {name}")
        output.give(content.rstrip("\n"))
    for role in plan.roles:
        output.give(f"--- role {role.name}: {shlex.join(role.argv)}")
    if plan.argv:
        output.give(f"--- command: {shlex.join(plan.argv)}")
    if price := _describe_price(plan):
        output.say(price)
    output.say("nothing was submitted")


def _describe_price(plan: JobPlan) -> str:
    """Describe the most that a job costs; '' without GPUs or without a time limit."""
    if not plan.gpu_hours:
        return ""
    price = ", no price in the site's profile" if plan.cost_usd is None else f", {plan.cost_usd:.2f} USD"
    return f"at most {plan.gpu_hours:.1f} GPU hours{price}"


def _show_submitted(output: Output, submitted: Submitted, *, is_json: bool) -> None:
    import shlex

    ref = submitted.ref
    for notice in filter(None, (submitted.notice, *submitted.warnings)):
        tell(notice)
    if is_json:
        output.give_json(asdict(ref) | {"is_new": submitted.is_new})
        return
    if not submitted.is_new:
        output.say(
            "this very plan is a job already; where it has ended, --resume goes on in it, --new repeats it"
        )
    word = "submitted" if submitted.is_new else "was submitted before:"
    output.give(f"{ref.name} {word} to {ref.site} as job {ref.job_id}")
    if price := _describe_price(submitted.plan):
        output.give(price)
    # A job that is missing in the list is only found by its directory.
    name = shlex.quote(ref.home) if submitted.notice else ref.job_id
    output.give(f"  directory      {ref.home}")
    output.give(f"  strop status   {name}")
    output.give(f"  strop logs -f  {name}")
    output.give(f"  strop cancel   {name}")


def policy(
    context: typer.Context,
    on: Annotated[
        str,
        typer.Option("--on", metavar="SITE", help="A site of strop-sites.toml whose backend is sagemaker."),
    ] = "sagemaker",
) -> None:
    """Print the IAM policies that the submitting identity and the execution role need."""
    import os

    from strop.errors import ConfigError
    from strop.launch.sagemaker.options import SageMakerSite
    from strop.launch.sagemaker.probe import execution_policy, submitter_policy, trust_policy
    from strop.launch.sites import find_site

    output: Output = context.obj
    profile = find_site(on, Path.cwd(), os.environ).profile
    if not isinstance(profile, SageMakerSite):
        raise ConfigError(
            f"--on {on} is a site of backend {profile.kind()}",
            allowed="a site whose backend is sagemaker",
            next_step="name another site",
        )
    output.give_json(
        {
            "submitter": submitter_policy(profile),
            "execution_role": execution_policy(profile),
            "execution_role_trust": trust_policy(),
        }
    )
