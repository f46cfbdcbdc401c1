"""The hardware that `strop plan` assumes for a site: from the site's profile, never from this machine."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from strop.hardware import Machine, describe_machine, free_disk_bytes
from strop.hardware.accelerators import Accelerator, find_accelerator, match_gpu
from strop.launch.contract import JobRequest
from strop.launch.options import NodeHardware, SiteOptions
from strop.plan.plan import Rate, Target
from strop.spec.job import parse_memory_bytes


def describe_target(request: JobRequest, accelerator: Accelerator | None = None) -> Target:
    """Return the hardware of a job. `accelerator`: the GPU that the user named.

    Raises: ConfigError for an unknown `accelerator` in the profile.
    """
    site, resources = request.site, request.resources
    profile = site.profile
    node = profile.describe_node()
    is_here = profile.is_here and node.gpu is None and accelerator is None
    machine, unknown = describe_machine() if profile.is_here else _describe_node(request, node), ""
    if accelerator is None and resources.gpus_per_node and not is_here:
        accelerator, unknown = _find_gpu(site.name, profile, node)
    return Target(
        site=site.name,
        machine=machine,
        accelerator=accelerator,
        unknown=unknown,
        free_disk_bytes=node.disk_bytes
        if node.disk_bytes is not None
        else _free_bytes(Path(request.home), profile),
        is_here=is_here,
        rate=Rate(
            num_gpus=profile.count_paid_gpus(resources.num_nodes, resources.gpus_per_node),
            usd_per_gpu_hour=profile.usd_per_gpu_hour,
            time_limit_s=resources.time_limit_s,
        ),
    )


def _find_gpu(site: str, profile: SiteOptions, node: NodeHardware) -> tuple[Accelerator, str]:
    """Return the GPU of a site's nodes and '', or a stand-in and a notice if the GPU is unknown."""
    if profile.accelerator is not None:
        return find_accelerator(profile.accelerator, setting=f"site {site}: accelerator"), ""
    matched = None if node.gpu is None else match_gpu(node.gpu)
    if matched is not None:
        return matched, ""
    problem = f"names {node.gpu}, which strop knows no numbers of" if node.gpu else "does not say"
    # Only its name is used, and that it is a GPU; its numbers are not.
    stand_in = find_accelerator("h100").model_copy(update={"name": f"GPU of {site}"})
    return stand_in, (
        f"memory and time: site {site} {problem}, and a plan needs the GPU of its nodes; set `accelerator` in"
        " its profile, or name it with --hardware"
    )


def _describe_node(request: JobRequest, node: NodeHardware) -> Machine:
    """Return a node of a site from profile and request, without the GPUs of this machine."""
    resources = request.resources
    cores = resources.cpus or resources.gpus_per_node * (resources.cpus_per_gpu or 0)
    # A scheduler gives one core to a job that requests none.
    cores = node.num_cores or cores or 1
    memory = parse_memory_bytes(resources.memory) if resources.memory else node.memory_bytes
    word = "core" if cores == 1 else "cores"
    return replace(
        describe_machine(),
        host=request.site.name,
        cpu_name=f"{cores} {word} of {request.site.name}",
        num_physical_cores=cores,
        num_logical_cpus=cores,
        memory_bytes=memory,
        free_memory_bytes=None,
        cpu_flags=(),
        gpus=(),
    )


def _free_bytes(home: Path, profile: SiteOptions) -> int | None:
    """Return the free bytes for the run's directory; None if this machine does not see that disk."""
    if not (profile.has_shared_disk or profile.is_here):
        return None
    there = next((path for path in (home, *home.parents) if path.is_dir()), None)
    # The profile may name a folder that exists only on the site.
    is_seen = there is not None and (profile.is_here or profile.run_root is None or home.parent.is_dir())
    return free_disk_bytes(there) if is_seen and there is not None else None
