"""Check that this node meets the requirements of a run, before anything is started.

Level a reads (under a second), b multiplies on each GPU (about ten). `run_preflight` returns the problems;
`require_ready` refuses with exit code 76, for a fault of the node, so that it is excluded, or of the job. The
checks can be tried without a GPU: `PreflightRequest.device`.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from strop.errors import CheckRefused, NodeRefused
from strop.hardware.allocation import Allocation, check_device
from strop.hardware.disks import free_disk_bytes, require_writable
from strop.hardware.findings import Finding, Severity, find_refusal, require_none
from strop.hardware.gpu_probe import CHECKSUM
from strop.hardware.gpus import (
    GpuReport,
    TorchBuild,
    explain_misfit,
    match_devices,
    read_torch_build,
    report_gpus,
)
from strop.hardware.process import spawn, terminate
from strop.hardware.visible_devices import VISIBLE_DEVICES
from strop.io.atomic import nearest_existing

MAX_SKEW_S = 30.0
"""A larger difference between clocks breaks the order of records, and soon the validity of signatures."""
PROBE_LIMIT_S = 60.0
"""Mostly for importing torch from a cold network disk."""
_FOLDER = "preflight"
"""Folder of the probes' logs, below the run's directory."""
_POLL_S = 0.05
_OF_THE_JOB = frozenset({"torch_build", "free_disk", "mig_mode"})
"""Errors of the job's environment, disk and request, which no other node would mend."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PreflightRequest:
    """The requirements of one node of a run."""

    run_path: Path
    """The run's directory; logs of probes go below it."""
    allocation: Allocation | None = None
    """Its GPUs, on which it has a lease; None if it needs none."""
    computes: bool = False
    """Whether level b follows."""
    node: str = field(default_factory=socket.gethostname)
    gpu_need_bytes: Mapping[str, int] = field(default_factory=dict)
    """Free memory that a role needs on each of its GPUs."""
    disk_need_bytes: int = 0
    device: str = "cuda"
    """Device of the probes. `cpu` tries the checks themselves with a torch without CUDA."""
    num_nodes: int = 1
    """Nodes that compute together."""

    @property
    def devices(self) -> list[tuple[str, str, str]]:
        """The role, the UUID and the entry in CUDA_VISIBLE_DEVICES of each device; else the entry twice."""
        roles = {} if self.allocation is None else self.allocation.roles
        return [
            (name, role.uuids[number] if role.uuids else entry, entry)
            for name, role in roles.items()
            for number, entry in enumerate(role.visible.ids)
        ]


def run_preflight(request: PreflightRequest) -> list[Finding]:
    """Read a node's facts, and if they allow a run and the request says so, compute on its GPUs."""
    findings = check_readings(request)
    if request.computes and all(finding.severity is not Severity.ERROR for finding in findings):
        findings += check_compute(request)
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


# Level a.


def check_readings(request: PreflightRequest) -> list[Finding]:
    """Compare a run's requirements with the system's readings."""
    findings = [*_check_place(request)]
    if request.devices:
        report = report_gpus()
        build = read_torch_build() if request.device == "cuda" else None
        findings += [*check_driver(report, build), *_check_devices(request, report)]
    return findings


def check_driver(report: GpuReport, build: TorchBuild | None) -> Iterator[Finding]:
    """Check that the driver answers, and supports torch's CUDA version. None: torch need not use it."""
    if report.complaint:
        yield Finding(
            code="driver",
            given=f"nothing is known of the GPUs here: {report.complaint}",
            allowed="a driver that answers; in a container its 'utility' part",
            next_step="exclude this node and tell its administrators, or let level b compute on the GPUs",
            severity=Severity.ERROR if report.has_driver else Severity.UNKNOWN,
        )
    if build is None or build.hip is not None:
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
                allowed="a driver that is new enough, or NVIDIA's forward-compatibility package",
                next_step="install a torch for an older CUDA, or use a node with a newer driver",
                # The package cannot be seen from here.
                severity=Severity.WARNING,
            )


def _check_devices(request: PreflightRequest, report: GpuReport) -> Iterator[Finding]:
    for name, uuid, _ in request.devices if report.gpus else ():
        matches = match_devices(uuid, report.gpus)
        if not matches:
            yield Finding(
                code="gpu_missing",
                given=f"{uuid}, which is for {name}, is not among the GPUs of this node any more",
                allowed=f"one of {', '.join(device.uuid for device in report.devices) or 'none'}",
                next_step="exclude this node; a GPU that disappears has failed",
                where=uuid,
            )
        for device in matches:
            yield from check_device(device, request.gpu_need_bytes.get(name))
    slices = [uuid for _, uuid, _ in request.devices if uuid.startswith("MIG-")]
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
        yield find_refusal("run_directory", refusal, where=request.node)
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
        return
    with tempfile.TemporaryFile(dir=nearest_existing(request.run_path)) as file:
        file.write(b"now")
        file.flush()
        # On a network disk that is its server's clock, which all nodes share.
        skew_s = time.time() - os.fstat(file.fileno()).st_mtime
    if abs(skew_s) > MAX_SKEW_S:
        yield Finding(
            code="clock_skew",
            given=f"the clock of {request.node} differs by {skew_s:.0f} s from that of {request.run_path}",
            allowed=f"clocks that differ by {MAX_SKEW_S:.0f} s at most",
            next_step="exclude this node, or have its clock set (chrony, ntpd)",
            where=request.node,
        )


# Level b.


def check_compute(request: PreflightRequest, *, limit_s: float = PROBE_LIMIT_S) -> list[Finding]:
    """Let all GPUs of the allocation compute at the same time, each in a process that sees only this GPU.

    This also works with slices, since a process can use only one.
    """
    probes = []
    for number, (_, _, entry) in enumerate(request.devices):
        log_path = request.run_path / _FOLDER / f"{request.node}-gpu-{number}.log"
        log_path.unlink(missing_ok=True)
        # -P: a file in the current directory must not shadow strop's modules.
        words = [sys.executable, "-P", "-m", "strop.hardware.gpu_probe", "--device", request.device]
        variables = {"OMP_NUM_THREADS": "1", "CUDA_DEVICE_ORDER": "PCI_BUS_ID", VISIBLE_DEVICES: entry}
        probes.append(spawn(words, log_path, {**os.environ, **variables}))
    deadline = time.monotonic() + limit_s
    while any(probe.poll() is None for probe in probes) and time.monotonic() < deadline:
        time.sleep(_POLL_S)
    findings: list[Finding] = []
    for (_, uuid, _), probe in zip(request.devices, probes, strict=True):
        exit_code = probe.poll()
        end = f"ended with {exit_code}" if exit_code is not None else f"did not answer within {limit_s:g} s"
        answer: dict[str, Any] = {"error": f"the probe {end}: {' / '.join(probe.tail(3).splitlines())}"}
        for line in probe.tail(50).splitlines() if exit_code is not None else ():
            answer = json.loads(line) if line.startswith("{") else answer
        terminate(probe, 0.0)
        findings += _judge(uuid, answer)
    return findings


def _judge(uuid: str, answer: Mapping[str, Any]) -> Iterator[Finding]:
    if "error" in answer:
        code, given = "gpu_compute", f"a small product could not be computed: {answer['error']}"
    elif answer["checksum"] != CHECKSUM:
        code, given = "gpu_checksum", f"a product of known numbers has the checksum {answer['checksum']}"
    elif not answer["is_copied"]:
        code, given = "gpu_copy", "16 MiB came back from the GPU with other bytes"
    else:
        return
    yield Finding(
        code=code,
        given=given,
        allowed=f"a GPU that computes: the checksum is {CHECKSUM}, exact in float32",
        next_step="exclude this node and tell its administrators",
        where=uuid,
    )
