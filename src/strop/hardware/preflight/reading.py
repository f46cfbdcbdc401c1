"""Level a: what can be read of a node in under a second."""

from __future__ import annotations

import os
import socket
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from strop.errors import CheckRefused, split_refusal
from strop.hardware.device_checks import check_device
from strop.hardware.findings import Finding, Severity
from strop.hardware.gpus import GpuReport, Probe
from strop.hardware.inventory import Inventory, read_inventory
from strop.hardware.machine import free_memory_bytes
from strop.hardware.memory import free_disk_bytes, require_writable
from strop.hardware.preflight.request import PreflightRequest
from strop.hardware.torch_build import TorchBuild, explain_misfit, has_compat_package, read_torch_build
from strop.io.atomic import nearest_existing

MAX_SKEW_S = 30.0
"""Clocks that differ by more make the order of records wrong, and soon signatures invalid."""


def check_readings(request: PreflightRequest) -> list[Finding]:
    """Compare what a run needs with what the system says it has."""
    findings = [*_check_place(request), *_check_memory(request), *_check_interfaces(request)]
    if request.num_gpus:
        inventory = read_inventory()
        findings += check_driver(
            inventory.report,
            read_torch_build(),
            needs_cuda=request.device == "cuda",
            has_compat=has_compat_package(),
        )
        if inventory.report.probe is Probe.ANSWERED:
            findings += _check_devices(request, inventory)
    return findings


def check_driver(
    report: GpuReport, build: TorchBuild | None, *, needs_cuda: bool, has_compat: bool = False
) -> Iterator[Finding]:
    """Say whether the driver answers, and runs what torch was built for.

    `needs_cuda`: whether torch has to compute on them. `has_compat`: libraries are installed that may
    lift the driver's limit.
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
            # The old spelling of a slice is never listed.
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
    slices = [uuid for uuid in request.allocation.uuids if uuid.startswith("MIG-")]
    if slices and request.group is not None and len(request.group.names) > 1:
        yield Finding(
            code="mig_mode",
            given=f"{len(request.group.names)} nodes are to compute together on MIG slices",
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
            given=split_refusal(str(refusal))[0],
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
    """Return what the file system calls now; on a network that is its server's clock."""
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
        # '=' and '^' are NCCL's ways to say 'exactly' and 'all but'; several are prefixes to try.
        names = [] if value.startswith("^") else [name.lstrip("=") for name in value.split(",") if name]
        if names and not any(found.startswith(name) for name in names for found in present):
            yield Finding(
                code="interface",
                given=f"{variable}={value} names no network interface of this node",
                allowed=f"one of {', '.join(present)}",
                next_step="correct it in the site profile, or leave it out",
                where=request.node,
            )
