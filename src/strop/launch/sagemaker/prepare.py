"""What `--build`, `--push` and `--local` do before a plan is made, or instead of a submission."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace

from strop import __version__
from strop.errors import CheckRefused, ConfigError
from strop.hardware import read_gpu_users, read_gpus
from strop.launch.build_request import make_plan
from strop.launch.container.engine import Engine, locate_engine, prove_engine
from strop.launch.container.image import build_image, find_image, plan_image
from strop.launch.contract import Backend, JobRequest
from strop.launch.job_dir import write_job_dir
from strop.launch.sagemaker.client import AwsClients
from strop.launch.sagemaker.ecr import compare_images, log_in_for_base, parse_reference, push_image
from strop.launch.sagemaker.options import SageMakerSite

NO_IMAGE = "none"
"""Value of `--image`, with `--local`: plain processes."""
_STEPS = ("build", "no_cache", "push", "local", "devices")
Say = Callable[[str], None]


def prepare_image(
    request: JobRequest, options: SageMakerSite, backend: Backend, say: Say, *, is_dry_run: bool
) -> JobRequest | int:
    """Build and push an image where that is asked for, or run the job here.

    Returns: the request that is submitted; the exit code of a job that ran here.
    Raises: CheckRefused without a container engine, or an image that a GPU needs; ConfigError for a push
        without an image or a repository; StoreError if AWS does not answer.
    """
    engine, image = _find_image(options, request.options.get("image"), say)
    plain = replace(request, options={k: v for k, v in request.options.items() if k not in _STEPS})
    if options.local:
        return _run_here(plain, options, backend, engine, image, say)
    if options.push:
        return push_for(plain, options, engine, image, say)
    if options.build and not is_dry_run:
        say("the job uses the repository's image; --push sends this one there")
        remote = parse_reference(f"{options.repository}:{options.image_tag or f'v{__version__}'}")
        local = find_image(engine, image) if engine is not None and image is not None else None
        if remote is not None and remote.registry is not None and local is not None:
            difference = compare_images(AwsClients(profile=options), remote, local[0])
            if difference:
                say(f"warning: {difference}")
    return plain


def _find_image(options: SageMakerSite, given: str | None, say: Say) -> tuple[Engine | None, str | None]:
    """Return an engine and the image that it has, built if that is asked for; none where none is needed.

    `given`: the image of `--image`. The profile's is AWS's to fetch.
    """
    is_bare = options.local and given == NO_IMAGE
    if is_bare or not (options.build or options.push or options.local):
        return None, None
    try:
        engine = prove_engine(locate_engine())
    except CheckRefused:
        if options.build or options.push or options.devices:
            raise
        return None, None
    if given is not None:
        return engine, given
    image = plan_image(base_image=options.base_image)
    if options.build:
        if options.no_cache or find_image(engine, image.name) is None:
            log_in_for_base(options, engine)
        built = build_image(engine, image, no_cache=options.no_cache, say=say)
        say(f"image {built.name}: {built.size_bytes / 1e6:.0f} MB, built in {built.wall_s:.0f} s")
    return engine, image.name if find_image(engine, image.name) else None


def push_for(
    request: JobRequest, options: SageMakerSite, engine: Engine | None, image: str | None, say: Say
) -> JobRequest:
    """Push the image under its own tag and under this version's; name it by digest in the request."""
    repository = parse_reference(options.repository or "")
    if engine is None or image is None or repository is None:
        raise ConfigError(
            f"--push with image={image} and repository={options.repository}",
            allowed="an image that was built here, and a repository of ECR in the site profile",
            next_step="add --build, and set repository",
        )
    clients = AwsClients(profile=options)
    for name in (image.rpartition(":")[2], f"v{__version__}"):
        pushed = push_image(clients, engine, image, repository.name, name)
    say(f"pushed {pushed}")
    kept = {key: value for key, value in request.options.items() if key != "image_tag"}
    return replace(request, options={**kept, "image": pushed})


def _run_here(
    request: JobRequest,
    options: SageMakerSite,
    backend: Backend,
    engine: Engine | None,
    image: str | None,
    say: Say,
) -> int:
    from strop.launch.sagemaker.local_mode import choose_gpus, run_here

    gpus = options.devices
    if gpus and image is None:
        raise CheckRefused(
            f"--gpus {','.join(gpus)}, and the image is not on this machine",
            allowed="an image that is here, for a container with GPUs",
            next_step="add --build, or leave --gpus out for plain processes",
        )
    # A plan names some image; plain processes use none.
    named = {**request.options, "image": image or request.options.get("image") or NO_IMAGE, "local": True}
    request = replace(request, options=named)
    plan = make_plan(request, backend)
    for notice in (*plan.conflicts, *plan.notices):
        say(f"notice: {notice}")
    if image is not None:
        gpus = choose_gpus(plan, gpus, read_gpus(), read_gpu_users())
    write_job_dir(plan, request, os.environ)
    return run_here(
        plan, options, gpus=gpus, engine=engine if image is not None else None, image=image, say=say
    )
