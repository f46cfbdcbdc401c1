"""`strop sagemaker submit RUN.toml [key=value ...]`, `strop sagemaker policy`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from strop.cli.arguments import EvalConfig, Json, NewRun, Overrides, RunFile, takes
from strop.cli.output import Output
from strop.cli.submit import SubmitArguments, Wait, submit_request, to_options

if TYPE_CHECKING:
    from strop.launch.container.engine import Engine
    from strop.launch.contract import JobRequest
    from strop.spec.site import SageMakerSite

Text = str | None
Site = Annotated[
    str, typer.Option("--on", metavar="SITE", help="A site of strop-sites.toml whose backend is sagemaker.")
]
NO_IMAGE = "none"
sagemaker_commands = typer.Typer(help="Training jobs of SageMaker.", no_args_is_help=True)


@dataclass(frozen=True, kw_only=True, slots=True)
class SageMakerArguments:
    """Arguments of `strop sagemaker submit`."""

    run_file: RunFile
    overrides: Overrides = None
    on: Site = "sagemaker"
    command: Annotated[str, typer.Option(help="Command of the job: train or sft.")] = "train"
    build: Annotated[bool, typer.Option("--build", help="Build the image from this environment.")] = False
    no_cache: Annotated[bool, typer.Option("--no-cache", help="With --build: rebuild all layers.")] = False
    push: Annotated[bool, typer.Option("--push", help="Push the image; the job uses its digest.")] = False
    local: Annotated[
        bool,
        typer.Option("--local", help="Run the job on this machine as the platform would; submit nothing."),
    ] = False
    gpus: Annotated[
        Text, typer.Option(metavar="0,1,2", help="With --local: GPUs, by index or UUID. Default: free ones.")
    ] = None
    instance_type: Annotated[Text, typer.Option(help="Instance type.")] = None
    instance_count: Annotated[int | None, typer.Option(min=1, help="Number of instances.")] = None
    image: Annotated[Text, typer.Option(help="Custom image; 'none' with --local: plain processes.")] = None
    image_tag: Annotated[Text, typer.Option(help="Image tag in the site's repository.")] = None
    job_name: Annotated[Text, typer.Option(help="Name of the training job. Default: prefix and time.")] = None
    name_prefix: Annotated[Text, typer.Option(help="Prefix of the job name; neutral.")] = None
    description: Annotated[
        Text, typer.Option(help="Description in the local job log; never sent to AWS.")
    ] = None
    spot: Annotated[bool | None, typer.Option(help="Use spot instances.")] = None
    max_wait: Annotated[
        Text, typer.Option(help="Limit on wall time plus waiting for spot instances: 3d.")
    ] = None
    max_runtime: Annotated[Text, typer.Option(help="Wall time limit: 12h, 5d.")] = None
    volume_gb: Annotated[int | None, typer.Option(min=1, help="Volume size per instance, GB.")] = None
    keep_alive: Annotated[int | None, typer.Option(min=0, help="Keep-alive of the warm pool, seconds.")] = (
        None
    )
    vpc: Annotated[bool | None, typer.Option(help="Use the site's subnets.")] = None
    network_isolation: Annotated[bool | None, typer.Option(help="Isolate the job from all networks.")] = None
    entrypoint: Annotated[
        Text, typer.Option(metavar="WORDS", help="Custom entry point, split as a shell would.")
    ] = None
    train_gpus: Annotated[
        Text,
        typer.Option(metavar="N|0-5", help="Number of GPUs for the learner, or indices for all of training."),
    ] = None
    infer_gpus: Annotated[int | None, typer.Option(min=1, max=7, help="GPUs for generation.")] = None
    eval_config: EvalConfig = None
    eval_gpus: Annotated[
        Text, typer.Option(metavar="N|6,7", help="GPUs for --eval-config. Default: CPUs only.")
    ] = None
    sweep: Annotated[
        list[str] | None, typer.Option(metavar="KEY=V,V", help="Run one job per value; repeatable.")
    ] = None
    env: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Environment variable to pass to the job; repeatable."),
    ] = None
    project_dir: Annotated[Path | None, typer.Option(help="Project directory. Default: the current one.")] = (
        None
    )
    wait: Wait = False
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the exact request; send nothing.")] = False
    check: Annotated[bool, typer.Option("--check", help="Only run the checks before submission.")] = False
    resume: Annotated[Text, typer.Option(metavar="REF", help="Resume a job's run in a new job.")] = None
    strict: Annotated[bool, typer.Option("--strict", help="Refuse flags that override other values.")] = False
    new: NewRun = False
    json: Json = False


_OF_BACKEND = (
    *("instance_type", "instance_count", "image", "image_tag", "job_name", "name_prefix", "description"),
    *("spot", "max_wait", "max_runtime", "volume_gb", "network_isolation"),
)
_OF_SUBMIT = (
    *("run_file", "overrides", "on", "command", "infer_gpus", "eval_config", "sweep", "env", "project_dir"),
    *("dry_run", "check", "resume", "strict", "wait", "new", "json"),
)


@sagemaker_commands.command("submit")
@takes(SageMakerArguments)
def submit(context: typer.Context, args: SageMakerArguments) -> None:
    """Submit a run to SageMaker: image, code, config, one training job. Idempotent."""
    import os
    import time

    from strop.launch.build_request import read_request
    from strop.launch.sagemaker.settings import read_gpu_shares

    output: Output = context.obj
    _refuse_contradictions(args)
    shares = read_gpu_shares(args.train_gpus, args.eval_gpus, has_split=args.infer_gpus is not None)
    said: dict[str, Any] = {name: getattr(args, name) for name in _OF_SUBMIT}
    base = SubmitArguments(**said | shares)
    options = replace(to_options(base), backend=_backend_options(args))
    request = read_request(args.run_file, options, environ=os.environ, now=time.time())
    profile = _require_profile(request.site)
    engine, local_image = _build(output, profile, args)
    if args.local:
        raise typer.Exit(_run_here(output, request, profile, args, engine, local_image))
    if args.push:
        request = _push(output, request, profile, engine, local_image)
    elif args.build and not args.dry_run:
        _say_difference(output, profile, args, engine, local_image)
    submit_request(output, request, base)


@sagemaker_commands.command("policy")
def policy(context: typer.Context, on: Site = "sagemaker") -> None:
    """Print the IAM policies that the submitting identity and the execution role need."""
    import os

    from strop.launch.sagemaker.probe import execution_policy, submitter_policy, trust_policy
    from strop.spec.site import find_site

    output: Output = context.obj
    profile = _require_profile(find_site(on, Path.cwd(), os.environ))
    output.give_json(
        {
            "submitter": submitter_policy(profile),
            "execution_role": execution_policy(profile),
            "execution_role_trust": trust_policy(),
        }
    )


def _refuse_contradictions(args: SageMakerArguments) -> None:
    from strop.errors import ConfigError

    pairs = (
        ("job_name", "name_prefix"),
        ("local", "push"),
        ("local", "wait"),
        ("image", "image_tag"),
        ("image", "build"),
    )
    for first, second in pairs:
        if getattr(args, first) and getattr(args, second):
            one, other = (f"--{name.replace('_', '-')}" for name in (first, second))
            raise ConfigError(
                f"{one} together with {other}", allowed="one of them", next_step=f"leave {other} out"
            )
    if args.gpus is not None and not args.local:
        raise ConfigError(
            f"--gpus {args.gpus} without --local",
            allowed="GPUs of this machine, with --local",
            next_step="choose an instance type for a job, or add --local",
        )


def _backend_options(args: SageMakerArguments) -> dict[str, Any]:
    import shlex

    found = {name: getattr(args, name) for name in _OF_BACKEND if getattr(args, name) is not None}
    found["config"] = args.run_file
    if args.keep_alive is not None:
        found["keep_alive_s"] = args.keep_alive
    if args.entrypoint is not None:
        found["entrypoint"] = shlex.split(args.entrypoint)
    if args.vpc is False:
        found |= {"subnets": (), "security_groups": ()}
    return found


def _require_profile(site: Any) -> SageMakerSite:
    from strop.errors import ConfigError
    from strop.spec.site import SageMakerSite

    if not isinstance(site.profile, SageMakerSite):
        raise ConfigError(
            f"--on {site.name} is a site of backend {site.profile.backend}",
            allowed="a site whose backend is sagemaker",
            next_step=f"use `strop submit --on {site.name}`, or name another site",
        )
    return site.profile


def _build(
    output: Output, profile: SageMakerSite, args: SageMakerArguments
) -> tuple[Engine | None, str | None]:
    """Return an engine and the image that it has, built if that is asked for; none where none is needed."""
    from strop.errors import CheckRefused
    from strop.launch.container.engine import locate_engine, prove_engine
    from strop.launch.container.image import build_image, find_image, plan_image
    from strop.launch.sagemaker.ecr import log_in_for_base

    is_bare = args.local and args.image == NO_IMAGE
    if is_bare or not (args.build or args.push or args.local):
        return None, None
    try:
        engine = prove_engine(locate_engine())
    except CheckRefused:
        if args.build or args.push or args.gpus:
            raise
        return None, None
    if args.image is not None:
        return engine, args.image
    image = plan_image(base_image=profile.base_image)
    if args.build:
        if args.no_cache or find_image(engine, image.name) is None:
            log_in_for_base(profile, engine)
        built = build_image(engine, image, no_cache=args.no_cache, say=output.say)
        output.say(f"image {built.name}: {built.size_bytes / 1e6:.0f} MB, built in {built.wall_s:.0f} s")
    return engine, image.name if find_image(engine, image.name) else None


def _say_difference(
    output: Output,
    profile: SageMakerSite,
    args: SageMakerArguments,
    engine: Engine | None,
    image: str | None,
) -> None:
    """Warn where the job would use another image than the one that was built here."""
    from strop import __version__
    from strop.launch.container.image import find_image
    from strop.launch.sagemaker.client import AwsClients
    from strop.launch.sagemaker.ecr import compare_images, parse_reference

    output.say("the job uses the repository's image; --push sends this one there")
    remote = parse_reference(f"{profile.repository}:{args.image_tag or f'v{__version__}'}")
    local = find_image(engine, image) if engine is not None and image is not None else None
    if remote is None or remote.registry is None or local is None:
        return
    if difference := compare_images(AwsClients(profile=profile), remote, local[0]):
        output.say(f"warning: {difference}")


def _push(
    output: Output, request: JobRequest, profile: SageMakerSite, engine: Engine | None, image: str | None
) -> JobRequest:
    """Push the image under its own tag and under this version's; name it by digest in the request."""
    from strop import __version__
    from strop.errors import ConfigError
    from strop.launch.sagemaker.client import AwsClients
    from strop.launch.sagemaker.ecr import parse_reference, push_image

    repository = parse_reference(profile.repository or "")
    if engine is None or image is None or repository is None:
        raise ConfigError(
            f"--push with image={image} and repository={profile.repository}",
            allowed="an image that was built here, and a repository of ECR in the site profile",
            next_step="add --build, and set repository",
        )
    clients = AwsClients(profile=profile)
    tag = image.rpartition(":")[2]
    for name in (tag, f"v{__version__}"):
        pushed = push_image(clients, engine, image, repository.name, name)
    output.say(f"pushed {pushed}")
    kept = {key: value for key, value in request.options.items() if key != "image_tag"}
    return replace(request, options={**kept, "image": pushed})


def _run_here(
    output: Output,
    request: JobRequest,
    profile: SageMakerSite,
    args: SageMakerArguments,
    engine: Engine | None,
    image: str | None,
) -> int:
    import os

    from strop.errors import CheckRefused
    from strop.hardware import read_gpu_users, read_gpus
    from strop.launch.job_dir import write_job_dir
    from strop.launch.launcher import Launcher
    from strop.launch.sagemaker.backend import SageMakerBackend
    from strop.launch.sagemaker.local_mode import choose_gpus, run_here

    gpus = tuple(filter(None, (args.gpus or "").split(",")))
    if gpus and image is None:
        raise CheckRefused(
            f"--gpus {args.gpus}, and the image is not on this machine",
            allowed="an image that is here, for a container with GPUs",
            next_step="add --build, or leave --gpus out for plain processes",
        )
    # A plan names some image; plain processes use none.
    options = {
        **request.options,
        "image": image or request.options.get("image") or NO_IMAGE,
        "is_local": True,
    }
    request = replace(request, options=options)
    plan = Launcher(SageMakerBackend(profile)).plan(request)
    for notice in (*plan.conflicts, *plan.notices):
        output.say(f"notice: {notice}")
    if image is not None:
        gpus = choose_gpus(plan, gpus, read_gpus(), read_gpu_users())
    write_job_dir(plan, request, os.environ)
    return run_here(
        plan, profile, gpus=gpus, engine=engine if image is not None else None, image=image, say=output.say
    )
