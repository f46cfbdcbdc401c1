"""`strop submit RUN.toml --on SITE [key=value ...]` and `strop policy`."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand

from strop.cli.arguments import (
    Json,
    NewRun,
    OutputDir,
    Overrides,
    RunFile,
    SingleGpu,
    brief,
    lasting,
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
    from strop.spec.reader import Flag

Site = Annotated[
    str,
    typer.Option("--on", metavar="SITE", help="A site of strop-sites.toml; or local, slurm, sagemaker."),
]
Text = str | None
GpuNumber = Annotated[Text, typer.Option(metavar="N", help="GPUs per node, all for the learner.")]


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
    gpus: GpuNumber = None
    train_gpus: Annotated[int | None, typer.Option(metavar="N", help="GPUs for the learner.")] = None
    infer_gpus: Annotated[int | None, typer.Option(metavar="N", help="GPUs for generation.")] = None
    single_gpu: SingleGpu = False
    nodes: Annotated[int | None, typer.Option(min=1, help="Number of nodes.")] = None
    cpus_per_gpu: Annotated[int | None, typer.Option(min=1, max=32, help="CPU cores per GPU.")] = None
    time: Annotated[Text, typer.Option(help="Wall time limit: 90m, 12h, 2d, HH:MM:SS or D-HH:MM:SS.")] = None
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
    hf_cache_dir: Annotated[Text, typer.Option(help="HF_HOME of the job.")] = None
    hf_hub_offline: Annotated[bool | None, typer.Option(help="Never contact the hub.")] = None
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
    strict: Annotated[bool, typer.Option("--strict", help="Refuse flags that override other values.")] = False
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
_FLAGS = "strop.flags"


def flag_params() -> dict[tuple[str, ...], list[Any]]:
    """Return the options from the backends' models, by the kinds of sites that have them."""
    from inspect import Parameter, Signature
    from typing import get_args

    from strop.launch.backends import BACKENDS

    kinds: dict[str, tuple[str, ...]] = {}
    parameters: dict[str, Parameter] = {}
    for kind, section in BACKENDS.items():
        for field, mark in section.flags().items():
            name = mark.names[0]
            kinds[name] = (*kinds.get(name, ()), kind)
            info = section.model_fields[field]
            allowed = {info.annotation, *get_args(info.annotation)}
            # The model checks the value further, with a message that names the allowed ones.
            value: Any = next((kind for kind in (bool, int, float) if kind in allowed), str)
            is_pair = value is bool and not mark.is_switch
            option = typer.Option(
                *(f"{flag}/--no-{flag[2:]}" if is_pair else flag for flag in mark.names),
                metavar=mark.metavar,
                help=(info.description or "").partition(". ")[0].rstrip(".") + ".",
            )
            parameters.setdefault(
                name,
                Parameter(
                    name[2:].replace("-", "_"),
                    Parameter.KEYWORD_ONLY,
                    default=None,
                    annotation=Annotated[value | None, option],
                ),
            )

    def take() -> None: ...

    take.__signature__ = Signature([*parameters.values()])  # type: ignore[attr-defined]
    alone = typer.Typer(add_completion=False)
    alone.command()(take)
    by_kinds: dict[tuple[str, ...], list[Any]] = {}
    for name, param in zip(parameters, typer.main.get_command(alone).params, strict=True):
        by_kinds.setdefault(kinds[name], []).append(param)
    return by_kinds


class SubmitCommand(TyperCommand):
    """`strop submit`. Options of backends are created on use: other commands do not load the models."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Read the options. An unknown one may be a setting, which the refusal then names."""
        params = self.get_params(ctx)
        names = {name for param in params for name in (*param.opts, *param.secondary_opts)}
        words = (word.partition("=")[0] for word in itertools.takewhile(lambda word: word != "--", args))
        for name in (word for word in words if word.startswith("--") and word not in names):
            if instead := _words_instead(name):
                raise typer.BadParameter(
                    f"No such option: {name}. Write {' or '.join(instead)};"
                    " `strop explain` says what it means."
                )
        return super().parse_args(ctx, args)

    def get_params(self, ctx: Any) -> list[Any]:
        """Return the options of every site and those of backends."""
        return [*super().get_params(ctx), *itertools.chain(*self._of_backends(ctx).values())]

    def _of_backends(self, ctx: Any) -> dict[tuple[str, ...], list[Any]]:
        """Return the options of backends, except those with the name of a common one, such as --job-name."""
        common = {name for param in super().get_params(ctx) for name in param.opts}
        return {
            kinds: [param for param in params if param.opts[0] not in common]
            for kinds, params in flag_params().items()
        }

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the options of each kind of site in a section."""
        common = super().get_params(ctx)
        sections = {
            "Arguments": [param for param in common if param.param_type_name == "argument"],
            "Options": [param for param in common if param.param_type_name == "option"],
        }
        for kinds, own in self._of_backends(ctx).items():
            sections[f"Options where the backend is {' or '.join(kinds)}"] = own
        for title, params in sections.items():
            with formatter.section(title):
                rows = (param.get_help_record(ctx) for param in params)
                formatter.write_dl([row for row in rows if row is not None])

    def invoke(self, ctx: Any) -> Any:
        """Pass the options of backends on as flags, apart from settings of the run file."""
        from strop.spec.reader import Flag

        params = itertools.chain(*self._of_backends(ctx).values())
        flags = [Flag(key="", name=param.opts[0], value=ctx.params.pop(param.name)) for param in params]
        ctx.meta[_FLAGS] = tuple(flag for flag in flags if flag.value is not None)
        return super().invoke(ctx)


def _words_instead(option: str) -> list[str]:
    """Return settings with the name of an unknown option: job.grace_s=VALUE, ..."""
    from strop.launch.backends import BACKENDS
    from strop.spec.job import JobSpec

    settings = [f"job.{name}" for name in JobSpec.model_fields]
    settings += dict.fromkeys(word for section in BACKENDS.values() for word in section.settable().values())
    name = re.escape(option.removeprefix("--").removeprefix("no-").replace("-", "_"))
    return [f"{word}=VALUE" for word in settings if re.fullmatch(rf"\w+\.(max_)?{name}(_s)?", word)]


@takes(SubmitArguments)
@brief
def submit(context: typer.Context, args: SubmitArguments) -> None:
    """Submit a run to a site: this machine, SLURM, SageMaker. Idempotent."""
    given = [name for name in _WITHOUT_CHECK if getattr(args, name)]
    if args.check and given:
        raise typer.BadParameter(f"--check submits nothing: leave --{given[0].replace('_', '-')} out")
    request = read_arguments(args, context.meta.get(_FLAGS, ()))
    launcher, request = prepare(context.obj, request, args)
    submit_request(context.obj, launcher, request, args)


def read_arguments(args: SubmitArguments, flags: Sequence[Flag] = ()) -> JobRequest:
    """Read run file, profile, code and variables. Raises: as `read_request`."""
    import os
    import time

    from strop.launch.build_request import read_request

    return read_request(args.run_file, to_options(args, flags), environ=os.environ, now=time.time())


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
    for conflict in plan.conflicts:
        output.say(conflict)
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
        with lasting():
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


def to_options(args: SubmitArguments, flags: Sequence[Flag]) -> SubmitOptions:
    """Return the arguments as options of the launcher."""
    from strop.cli.arguments import to_flags
    from strop.launch.build_request import SubmitOptions
    from strop.launch.environment import EnvironmentFlags

    if args.job_name is not None and "{stem}" in args.job_name:
        stem = re.sub(r"[\W_]", "-", Path(args.run_file).stem.lower())
        args = replace(args, job_name=args.job_name.replace("{stem}", stem.strip("-")[:36] or "run"))
    return SubmitOptions(
        site=args.on,
        command=args.command,
        may_run_code=args.confirm_run_unsafe_code,
        overrides=tuple(args.overrides or ()),
        flags=(*to_flags(args), *flags),
        project_path=args.project_dir,
        sweep=tuple(args.sweep or ()),
        has_snapshot=args.snapshot,
        variables=tuple(args.env or ()),
        env_file=args.env_file,
        environment=EnvironmentFlags(
            hf_cache_dir=args.hf_cache_dir, hf_hub_offline=args.hf_hub_offline, auto_auth=args.auto_auth
        ),
        is_strict=args.strict,
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
