"""The levels of a preflight."""

from __future__ import annotations

import os
import socket
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from strop.errors import CheckRefused, NodeRefused, split_error
from strop.hardware.disks import free_disk_bytes, require_writable
from strop.hardware.findings import Finding, Severity, require_none
from strop.hardware.gpus import (
    GpuReport,
    Probe,
    TorchBuild,
    explain_misfit,
    has_compat_package,
    read_torch_build,
)
from strop.hardware.inventory import Inventory, check_device, read_inventory
from strop.hardware.machine import free_memory_bytes
from strop.hardware.preflight.request import FOLDER_NAME, Level, PreflightRequest, await_probes, start_probe
from strop.hardware.visible_devices import VISIBLE_DEVICES
from strop.io.atomic import nearest_existing

# Level a: readings of a node that take under a second.

MAX_SKEW_S = 30.0
"""A larger difference between clocks breaks the order of records, and soon the validity of signatures."""


def check_readings(request: PreflightRequest) -> list[Finding]:
    """Compare a run's requirements with the system's readings."""
    findings = [*_check_place(request), *_check_memory(request), *_check_interfaces(request)]
    if request.num_gpus:
        inventory = read_inventory()
        findings += check_driver(
            inventory.report,
            read_torch_build(),
            needs_cuda=request.device == "cuda" and any(role.visible.ids for role in request.devices),
            has_compat=has_compat_package(),
        )
        if inventory.report.probe is Probe.ANSWERED:
            findings += _check_devices(request, inventory)
    return findings


def check_driver(
    report: GpuReport, build: TorchBuild | None, *, needs_cuda: bool, has_compat: bool = False
) -> Iterator[Finding]:
    """Check that the driver answers, and supports torch's CUDA version.

    `needs_cuda`: whether torch must compute on the GPUs. `has_compat`: whether NVIDIA's forward-compatibility
    package is installed.
    """
    if report.probe is Probe.MISSING:
        yield Finding(
            code="nvidia_smi",
            given="there is no nvidia-smi here, so nothing is known of the GPUs",
            allowed="a node, or a container with the driver's tools, that has it",
            next_step="let level b compute on them, or add the driver's 'utility' part to the container",
            severity=Severity.UNKNOWN,
        )
    elif report.probe is Probe.FAILED:
        yield Finding(
            code="driver",
            given=f"nvidia-smi fails: {report.complaint}",
            allowed="a driver that answers",
            next_step="exclude this node and tell its administrators",
        )
    if not needs_cuda or build is None or build.hip is not None:
        return
    if build.cuda is None:
        yield Finding(
            code="torch_build",
            given=f"torch {build.version} computes on CPUs only, and GPUs are asked for",
            allowed="a torch that was built for CUDA",
            next_step="install one in this environment, or ask for no GPUs",
        )
    for version in sorted({gpu.driver_version for gpu in report.gpus if gpu.driver_version}):
        misfit = explain_misfit(build, version)
        if misfit is not None:
            yield Finding(
                code="driver_version",
                given=misfit,
                allowed="a driver that is new enough",
                next_step="install a torch for an older CUDA, or use a node with a newer driver",
                severity=Severity.UNKNOWN if has_compat else Severity.ERROR,
            )


def _check_devices(request: PreflightRequest, inventory: Inventory) -> Iterator[Finding]:
    assert request.allocation is not None, "there are GPUs only where some were given"
    devices = {device.uuid: device for device in inventory.devices}
    for name, role in request.allocation.roles.items():
        for uuid in role.uuids:
            device = devices.get(uuid)
            # nvidia-smi does not list the old spelling of a slice.
            if device is None and not uuid.startswith("MIG-GPU-"):
                yield Finding(
                    code="gpu_missing",
                    given=f"{uuid}, which is for {name}, is not among the GPUs of this node any more",
                    allowed=f"one of {', '.join(devices) or 'none'}",
                    next_step="exclude this node; a GPU that disappears has failed",
                    where=uuid,
                )
            if device is not None:
                need_bytes = request.gpu_need_bytes.get(name)
                yield from check_device(
                    device, inventory, need_bytes=need_bytes, own_lease_id=request.own_lease_id
                )
    slices = [uuid for role in request.devices for uuid in role.uuids if uuid.startswith("MIG-")]
    if slices and request.num_nodes > 1:
        yield Finding(
            code="mig_mode",
            given=f"{request.num_nodes} nodes are to compute together on MIG slices",
            allowed="whole GPUs: NCCL connects no slices",
            next_step="ask for whole GPUs, or for one node with one slice",
            where=slices[0],
        )


def _check_place(request: PreflightRequest) -> Iterator[Finding]:
    try:
        require_writable(request.run_path, "this run")
    except CheckRefused as refusal:
        yield Finding(
            code="run_directory",
            given=split_error(str(refusal))[0],
            allowed="a directory that this node can write to",
            next_step="see that it is mounted here with write access, or exclude this node",
            where=request.node,
        )
        return
    free_bytes = free_disk_bytes(request.run_path)
    if free_bytes < request.disk_need_bytes:
        yield Finding(
            code="free_disk",
            given=f"{request.run_path} has {free_bytes / 1e9:.1f} GB free, and the run writes"
            f" {request.disk_need_bytes / 1e9:.1f} GB",
            allowed="a disk that holds all of it from the start",
            next_step="free space there, keep fewer checkpoints, or put runs on another disk",
            where=request.node,
        )
    yield from _check_clock(request)


def _check_clock(request: PreflightRequest) -> Iterator[Finding]:
    now = time.time()
    clocks = {f"the file system of {request.run_path}": _ask_clock(request.run_path)}
    clocks["the first node"] = request.reference_at
    for name, instant in clocks.items():
        if instant is not None and abs(now - instant) > MAX_SKEW_S:
            ahead = "ahead of" if now > instant else "behind"
            yield Finding(
                code="clock_skew",
                given=f"the clock of {request.node} is {abs(now - instant):.0f} s {ahead} {name}",
                allowed=f"clocks that differ by {MAX_SKEW_S:.0f} s at most",
                next_step="exclude this node, or have its clock set (chrony, ntpd)",
                where=request.node,
            )


def _ask_clock(path: Path) -> float | None:
    """Return the current time of the file system; on a network disk that is its server's clock."""
    try:
        with tempfile.TemporaryFile(dir=nearest_existing(path)) as file:
            file.write(b"now")
            file.flush()
            return os.fstat(file.fileno()).st_mtime
    except OSError:
        return None


def _check_memory(request: PreflightRequest) -> Iterator[Finding]:
    free_bytes = free_memory_bytes()
    if free_bytes is not None and free_bytes < request.memory_need_bytes:
        yield Finding(
            code="free_host_memory",
            given=f"{free_bytes / 1e9:.1f} GB of memory are free, and the run needs"
            f" {request.memory_need_bytes / 1e9:.1f} GB",
            allowed="a node, or a job's share of one, with that much free",
            next_step="ask the scheduler for more memory, or end other programs",
            where=request.node,
        )


def _check_interfaces(request: PreflightRequest) -> Iterator[Finding]:
    present = [name for _, name in socket.if_nameindex()]
    for variable, value in request.interfaces.items():
        # NCCL's syntax: '=' means exactly, '^' means all but; otherwise the names are prefixes.
        names = [] if value.startswith("^") else [name.lstrip("=") for name in value.split(",") if name]
        if names and not any(interface.startswith(name) for name in names for interface in present):
            yield Finding(
                code="interface",
                given=f"{variable}={value} names no network interface of this node",
                allowed=f"one of {', '.join(present)}",
                next_step="correct it in the site profile, or leave it out",
                where=request.node,
            )


# Level b: whether each GPU multiplies correctly, and copies data unchanged.

CHECKSUM = 32_212_178_127
"""The expected output of `gpu_probe`: the weighted sum of its product."""
PROBE_LIMIT_S = 60.0
"""Mostly for importing torch from a cold network disk."""


def check_compute(request: PreflightRequest, *, limit_s: float = PROBE_LIMIT_S) -> list[Finding]:
    """Let all GPUs of the allocation compute at the same time, each in a process that sees only this GPU.

    This also works with slices, since a process can use only one.
    """
    if request.allocation is None or not request.num_gpus:
        return []
    # Each device's UUID, or its entry in the variable if that is unknown, and the variables that show only
    # it.
    devices = [
        (role.uuids[number] if role.uuids else entry, {**role.variables, VISIBLE_DEVICES: entry})
        for role in request.allocation.roles.values()
        for number, entry in enumerate(role.visible.ids)
    ]
    probes = []
    for number, (_, variables) in enumerate(devices):
        words = ["--device", request.device]
        log_path = request.run_path / FOLDER_NAME / f"{request.node}-gpu-{number}.log"
        probes.append(start_probe(f"{__package__}.gpu_probe", words, log_path, variables))
    answers = await_probes(probes, limit_s)
    return [
        finding
        for (uuid, _), answer in zip(devices, answers, strict=True)
        for finding in _judge(uuid, answer, limit_s)
    ]


def _judge(uuid: str, answer: dict[str, Any] | None, limit_s: float) -> Iterator[Finding]:
    next_step = "exclude this node and tell its administrators"
    if answer is None or "error" in answer:
        error = f"it did not answer within {limit_s:g} s" if answer is None else answer["error"]
        yield Finding(
            code="gpu_compute",
            given=f"a small product could not be computed: {error}",
            allowed="a GPU that computes",
            next_step=next_step,
            where=uuid,
        )
    elif answer["checksum"] != CHECKSUM:
        yield Finding(
            code="gpu_checksum",
            given=f"a product of known numbers has the checksum {answer['checksum']}",
            allowed=f"{CHECKSUM}, which is exact in float32",
            next_step=next_step,
            where=uuid,
        )
    elif not answer["is_copied"]:
        yield Finding(
            code="gpu_copy",
            given="16 MiB came back from the GPU with other bytes",
            allowed="the bytes that went there",
            next_step=next_step,
            where=uuid,
        )


_LEVELS = {
    Level.READ: check_readings,
    Level.COMPUTE: check_compute,
}


_OF_THE_JOB = frozenset({"torch_build", "free_disk", "mig_mode"})
"""Errors of the job's environment, disk and request, which no other node would mend."""


def run_preflight(request: PreflightRequest) -> list[Finding]:
    """Check a node, level by level, up to the first level with an error."""
    findings: list[Finding] = []
    for level, check in _LEVELS.items():
        if level not in request.levels:
            continue
        findings += check(request)
        if any(finding.severity is Severity.ERROR for finding in findings):
            break
    return findings


def require_ready(request: PreflightRequest) -> list[Finding]:
    """Run the preflight; return the findings that do not forbid a start.

    Raises: NodeRefused (exit code 76) naming all errors, each with its code; CheckRefused (76) if one of them
        would be found on every node.
    """
    findings = run_preflight(request)
    errors = [finding for finding in findings if finding.severity is Severity.ERROR]
    if errors and not any(finding.code in _OF_THE_JOB for finding in errors):
        raise NodeRefused("\n".join(f"{finding.code}: {finding}" for finding in errors))
    return require_none(findings)
