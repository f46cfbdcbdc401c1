"""Find what would stop a job's container, or make it useless. Changes nothing.

The engine has to start one real container, which is removed at once.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from strop.errors import CheckRefused, StoreError
from strop.hardware import free_disk_bytes, read_gpus
from strop.hardware.findings import Finding, Severity, find_refusal
from strop.launch.container.command import count_cpus, mounts_of, parse_memory_bytes
from strop.launch.container.engine import Engine, locate_engine, prove_engine, quote_words
from strop.launch.container.image import Variant, find_image, list_images, plan_image
from strop.launch.container.options import ContainerSite
from strop.launch.contract import JobPlan

_MIN_STORAGE_BYTES = 1 << 30
_IMPORT_CHECK = "import strop.launch.local.supervisor"


def probe_plan(plan: JobPlan, profile: ContainerSite) -> list[Finding]:
    """Return every finding about a plan. Raises nothing that the engine or the disk does."""
    found = [*_probe_mounts(plan), *_probe_resources(plan)]
    try:
        found += _probe_engine(plan, profile)
    except CheckRefused as error:
        found.append(find_refusal("engine", error))
    except StoreError as error:
        found.append(find_refusal("engine", error, severity=Severity.UNKNOWN))
    return found


def _probe_engine(plan: JobPlan, profile: ContainerSite) -> Iterator[Finding]:
    engine = locate_engine(profile.engine)
    variant = Variant.BASE if profile.environment == "mounted" else Variant.FULL
    named = str(plan.details["image"])
    name = named or plan_image(variant, base_image=profile.base_image).name
    image = find_image(engine, name)
    if image is None:
        prove_engine(engine)
        shown = ", ".join(list_images(engine)) or "none yet"
        yield Finding(
            code="image",
            given=f"{engine.kind} has no image {name!r}",
            allowed=f"an image that it has; of this project: {shown}",
            next_step="correct `image` in the site profile, or remove it"
            if named
            else f"build it: python -m strop.launch.container --variant {variant}",
        )
        return
    proven = prove_engine(engine, image[0])
    yield from _probe_storage(proven)
    if profile.environment == "image":
        yield from _probe_python(proven, plan, name, image[0])


def _probe_python(engine: Engine, plan: JobPlan, name: str, image_id: str) -> Iterator[Finding]:
    """Check that the image has an interpreter with strop."""
    words = ("--rm", "--pull", "never", "--network", "none", "--entrypoint", plan.python, image_id)
    done = engine.ask("run", *words, "-c", _IMPORT_CHECK, limit_s=120.0)
    if done.returncode != 0:
        yield Finding(
            code="python",
            given=f"{plan.python} of image {name!r} cannot be the supervisor: {quote_words(done)}",
            allowed="an image with an interpreter that has strop",
            next_step="build the project's own image, or set `python` in the site profile",
        )


def _probe_storage(engine: Engine) -> Iterator[Finding]:
    """Check the free space where containers write outside the job's home."""
    word = "{{.Store.GraphRoot}}" if engine.kind == "podman" else "{{.DockerRootDir}}"
    done = engine.ask("info", "--format", word)
    free = free_disk_bytes(Path(done.stdout.strip())) if done.returncode == 0 else None
    shown = "an unknown amount" if free is None else f"{free / 1e9:.2f} GB"
    if free is None or free < _MIN_STORAGE_BYTES:
        yield Finding(
            code="storage",
            given=f"the storage of {engine.kind} has {shown} free",
            allowed=f"{_MIN_STORAGE_BYTES / 1e9:.1f} GB or more for what is written beside the job's home",
            next_step="free some: remove images that are not needed",
            severity=Severity.UNKNOWN if free is None else Severity.ERROR,
        )


def _probe_mounts(plan: JobPlan) -> Iterator[Finding]:
    shown = mounts_of(plan.details)
    for mount in shown:
        # The home is made when the job is submitted.
        if mount.source == plan.home or Path(mount.source).exists():
            continue
        yield Finding(
            code="mount",
            given=f"{mount.source} is not there, and was to be shown as {mount.target}",
            allowed="folders of this machine",
            next_step="make it, or correct mounts or the variable in the site profile",
            severity=Severity.WARNING if mount.is_optional else Severity.ERROR,
        )
    inside = [mount.target for mount in shown]
    for path in plan.details.get("paths", ()):
        if not Path(path).exists() or any(PurePosixPath(path).is_relative_to(target) for target in inside):
            continue
        yield Finding(
            code="path",
            given=f"the run file names {path}, which the container will not see",
            allowed="paths in the job's home or in a folder that is shown inside",
            next_step=f"add '{path}:{path}:ro' to mounts in the site profile",
            severity=Severity.WARNING,
        )


def _probe_resources(plan: JobPlan) -> Iterator[Finding]:
    num_cpus, has_cpus = count_cpus(plan), os.cpu_count() or 1
    if num_cpus is not None and num_cpus > has_cpus:
        yield Finding(
            code="cpus",
            given=f"{num_cpus} cores are asked for, and this machine has {has_cpus}",
            allowed=f"{has_cpus} at most",
            next_step="change job.cpus or job.cpus_per_gpu",
        )
    has_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if plan.resources.memory is not None and parse_memory_bytes(plan.resources.memory) > has_bytes:
        yield Finding(
            code="memory",
            given=f"{plan.resources.memory} is asked for, and this machine has {has_bytes / 1e9:.1f} GB",
            allowed="no more than there is",
            next_step="change job.memory",
        )
    num_gpus = plan.resources.gpus_per_node
    if num_gpus and num_gpus > (has_gpus := len(read_gpus())):
        yield Finding(
            code="gpus",
            given=f"{num_gpus} GPUs are asked for, and this machine has {has_gpus}",
            allowed=f"{has_gpus} at most",
            next_step="ask for fewer, or send the run to another site",
        )
