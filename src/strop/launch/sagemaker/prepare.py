"""The work of `site.build`, `site.push` and `site.local` before planning, or instead of a submission.

With `site.local` the buckets are folders in the job's home, `local/s3`; a run still fetches models and data
from the places that the run file and STROP_STORE_URI name.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from dataclasses import replace

from strop import __version__
from strop.errors import EXIT_INTERRUPTED, CheckRefused, ConfigError
from strop.hardware.allocation import GpuRequest, allocate_gpus
from strop.launch.build_request import make_plan
from strop.launch.contract import JobPlan, JobRequest
from strop.launch.job_dir import job_path_of, write_job_dir
from strop.launch.sagemaker.backend import SageMakerBackend
from strop.launch.sagemaker.client import AwsClients
from strop.launch.sagemaker.ecr import log_in_for_base, parse_reference, push_image
from strop.launch.sagemaker.engine import IMAGE, Engine, build_image, find_image, locate_engine
from strop.launch.sagemaker.local_mode import Emulator, EmulatorSettings
from strop.launch.sagemaker.local_platform import FolderObjects
from strop.launch.sagemaker.options import SageMakerSite
from strop.store.policy import OFFLINE_VARIABLES, ORDER_VARIABLE, URI_VARIABLE

NO_IMAGE = "processes"
"""Value of `site.image` for plain processes with `site.local`."""
_FOLLOW_PAUSE_S = 0.2
_KEPT = (URI_VARIABLE, ORDER_VARIABLE, *OFFLINE_VARIABLES, "STROP_CACHE", "HF_HOME", "PYTHONPATH")
"""Variables of this shell that a run on this machine needs to find its inputs."""
Say = Callable[[str], None]


def prepare_image(
    request: JobRequest, options: SageMakerSite, backend: SageMakerBackend, say: Say, *, is_dry_run: bool
) -> JobRequest | int:
    """Build and push an image as requested, or run the job on this machine.

    Returns: the request to submit, or the exit code of a job that ran here.
    Raises: CheckRefused without a container engine, or without an image for a job with GPUs; ConfigError for
        a push without an image or a repository; StoreError if AWS does not answer.
    """
    engine, image = _find_image(request, options, say)
    plain = replace(request, site=request.site.changed(build=False, push=False, local=False, devices=()))
    if options.local:
        return _run_here(plain, options, backend, engine, image, say)
    if options.push:
        return push_for(plain, options, engine, image, say)
    if options.build and not is_dry_run:
        say("the job uses the repository's image; site.push=true sends this one there")
    return plain


def _find_image(request: JobRequest, options: SageMakerSite, say: Say) -> tuple[Engine | None, str | None]:
    """Return an engine and its image, built if requested; (None, None) if none is needed."""
    is_bare = options.local and options.image == NO_IMAGE
    if is_bare or not (options.build or options.push or options.local):
        return None, None
    try:
        engine = locate_engine()
    except CheckRefused:
        if options.build or options.push or options.devices:
            raise
        return None, None
    if options.image is not None:
        return engine, options.image
    if not options.build:
        return engine, IMAGE if find_image(engine, IMAGE) else None
    containerfile = request.project_path / "Containerfile"
    if not containerfile.is_file():
        raise ConfigError(
            f"site.build, and there is no {containerfile}",
            allowed="a Containerfile in the project's folder, as in docs/container.md",
            next_step="write one, or name an image with site.image",
        )
    log_in_for_base(options, engine)
    name = build_image(engine, containerfile, options.base_image)
    say(f"image {name} is built")
    return engine, name


def push_for(
    request: JobRequest, options: SageMakerSite, engine: Engine | None, image: str | None, say: Say
) -> JobRequest:
    """Push the image under its tag and this version's; name it by digest in the request."""
    repository = parse_reference(options.repository or "")
    if engine is None or image is None or repository is None:
        raise ConfigError(
            f"site.push with image={image} and repository={options.repository}",
            allowed="an image that was built here, and a repository of ECR in the site profile",
            next_step="add site.build=true, and set repository",
        )
    clients = AwsClients(profile=options)
    for name in (image.rpartition(":")[2], f"v{__version__}"):
        pushed = push_image(clients, engine, image, repository.name, name)
    say(f"pushed {pushed}")
    return replace(request, site=request.site.changed(image_tag=None, image=pushed))


def _run_here(
    request: JobRequest,
    options: SageMakerSite,
    backend: SageMakerBackend,
    engine: Engine | None,
    image: str | None,
    say: Say,
) -> int:
    """Write the job's folder and run its first trial on this machine; return its exit code."""
    gpus = options.devices
    if gpus and image is None:
        raise CheckRefused(
            f"site.devices={','.join(gpus)}, and the image is not on this machine",
            allowed="an image that is here, for a container with GPUs",
            next_step="add site.build=true, or leave site.devices out for plain processes",
        )
    # A plan must name an image, even if plain processes use none.
    site = request.site.changed(image=image or options.image or NO_IMAGE, local=True)
    request = replace(request, site=site)
    plan = make_plan(request, backend)
    for notice in plan.notices:
        say(f"notice: {notice}")
    if image is None:
        engine = None
    else:
        gpus = _choose_gpus(plan.resources.gpus_per_node, gpus)
    write_job_dir(plan, request, os.environ)
    return _emulate(plan, options, gpus, engine, image, say)


def _choose_gpus(number: int, requested: tuple[str, ...]) -> tuple[str, ...]:
    """Return the GPUs of a container: those requested, or free ones. Raises: CheckRefused if they are not."""
    if not number:
        return ()
    asked = GpuRequest(wanted={"all": number}, inherited=",".join(requested) or None)
    return allocate_gpus(asked).roles["all"].uuids


def _emulate(
    plan: JobPlan,
    options: SageMakerSite,
    gpus: tuple[str, ...],
    engine: Engine | None,
    image: str | None,
    say: Say,
) -> int:
    """Run the first trial of a plan with a complete job folder; return its exit code. Ctrl-C stops it.

    Raises: CheckRefused, StoreError and ConfigError as a submission does.
    """
    folder = job_path_of(plan.home).parent / "local"
    objects = FolderObjects(folder / "s3")
    request = SageMakerBackend(options, objects=objects).send_locally(plan)
    environment = {name: os.environ[name] for name in _KEPT if name in os.environ}
    # On the platform the role's credentials reach the job; here those of who submits do.
    named = (*environment.values(), (job_path_of(plan.home) / "spec.toml").read_text(encoding="utf-8"))
    if any("s3://" in text for text in named):
        environment |= AwsClients(profile=options).credential_variables()
    # Without the plan's bucket: a rehearsal accesses AWS only if the user names it.
    environment.setdefault(URI_VARIABLE, "")
    settings = EmulatorSettings(
        engine=engine,
        image=image,
        gpus=gpus,
        python=None if engine is not None else sys.executable,
        stop_window_s=plan.grace_s,
        environment=environment,
    )
    what = (
        f"a container of {image}" if engine is not None else "plain processes on this machine, no container"
    )
    say(f"local: {what}; its buckets are in {folder / 's3'}")
    emulator = Emulator(folder / "hosts", objects, settings)
    emulator.start(request)
    try:
        code = _follow(emulator, say)
    except KeyboardInterrupt:
        say("stopping: SIGTERM, then the window")
        code = emulator.stop() or EXIT_INTERRUPTED
    finally:
        emulator.kill()
    for sentence in emulator.check_end():
        say(f"check: {sentence}")
    if failure := emulator.failure():
        say(f"failure file: {failure}")
    return code


def _follow(emulator: Emulator, say: Say) -> int:
    shown = dict.fromkeys(emulator.hosts, 0)
    while True:
        code = emulator.poll()
        for host in emulator.hosts:
            text = emulator.log_of(host)[shown[host] :]
            whole = text if code is not None else text[: text.rfind("\n") + 1]
            shown[host] += len(whole)
            for line in whole.splitlines():
                say(f"{host}: {line}")
        if code is not None:
            return code
        time.sleep(_FOLLOW_PAUSE_S)
