"""GPUs, their MIG slices and the processes on them, as nvidia-smi reports them.

Ids stay strings: an index, a GPU's UUID and a slice's UUID are all names. Unreadable values are None or
missing, never a plausible guess. If nvidia-smi is missing or fails, there are no GPUs. Its text is parsed
instead of calling NVML, so that a fake program can replace it in tests.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from enum import StrEnum
from importlib.util import find_spec
from pathlib import Path

from strop.hardware.identity import describe_process
from strop.hardware.leftovers import read_lease_id

NVIDIA_SMI = "nvidia-smi"
NVIDIA_SMI_LIMIT_S = 10.0
_DEATH_LIMIT_S = 1.0
_GPU_FIELDS = (
    *("index", "uuid", "name"),
    *("memory.total", "memory.free", "mig.mode.current", "driver_version", "compute_cap"),
)
_USER_FIELDS = ("gpu_uuid", "pid", "used_memory")
_GPU_LINE = re.compile(r"GPU (?P<index>\S+): .*\(UUID: (?P<uuid>[^)]+)\)\s*")
_SLICE_LINE = re.compile(r"\s+MIG (?P<profile>\S+)\s+Device\s+(?P<index>\S+): \(UUID: (?P<uuid>[^)]+)\)\s*")
_PROFILE_GIGABYTES = re.compile(r"\.(\d+)gb")
"""A profile such as `1g.10gb` or `1g.10gb+me` names its memory, a little more than a program can use."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MigSlice:
    """A part of a GPU that a program sees as a whole one. A program sees at most one."""

    uuid: str
    profile: str
    """Compute and memory, for example `1g.10gb`."""
    index: str = field(default="", compare=False)
    """Its position among the slices of its GPU."""

    @property
    def memory_bytes(self) -> int | None:
        """The memory in the profile's name; nvidia-smi only reports that of the whole GPU."""
        match = _PROFILE_GIGABYTES.search(self.profile)
        return int(match[1]) * 10**9 if match else None


@dataclass(frozen=True, kw_only=True, slots=True)
class Gpu:
    """A GPU as reported by nvidia-smi."""

    index: str
    """Its position in the order of PCI addresses."""
    uuid: str
    name: str
    memory_bytes: int | None
    free_memory_bytes: int | None = None
    """Free memory of the whole GPU, also if it is divided into slices."""
    has_mig: bool = False
    """Whether it is divided into slices, and only these can be used."""
    slices: tuple[MigSlice, ...] = ()
    driver_version: str | None = None
    compute_capability: float | None = None
    """For example 8.0 of an A100; None if it is not reported."""

    @property
    def used_bytes(self) -> int | None:
        """Memory used by programs and the driver; None if it is not reported."""
        if self.memory_bytes is None or self.free_memory_bytes is None:
            return None
        return self.memory_bytes - self.free_memory_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuUser:
    """A process that computes on a GPU."""

    gpu_uuid: str
    pid: int
    """In the pid namespace of the driver, which differs from that of a container."""
    memory_bytes: int | None
    user: str | None
    command: str | None
    """Both None if the process is not visible here."""
    lease_id: str | None = None
    """The lease of the strop run that it belongs to, if any."""

    def __str__(self) -> str:
        """Name it for a message."""
        shown = (
            f"of {self.user}: {self.command or 'command unknown'}" if self.user else "not visible from here"
        )
        return f"process {self.pid} ({shown})"


class Probe(StrEnum):
    """How nvidia-smi answered."""

    ANSWERED = "answered"
    MISSING = "missing"
    """The program is not installed."""
    FAILED = "failed"
    """It ended with an error, or not in time."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """The output of nvidia-smi for one query."""

    probe: Probe
    lines: tuple[str, ...] = ()
    complaint: str = ""
    """Its error message if it failed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuReport:
    """The GPUs, and how nvidia-smi answered."""

    gpus: tuple[Gpu, ...]
    probe: Probe
    complaint: str = ""


def read_gpus() -> tuple[Gpu, ...]:
    """Return the GPUs with their slices, in the order of PCI addresses. Runs nvidia-smi."""
    return report_gpus().gpus


def report_gpus() -> GpuReport:
    """Like `read_gpus`, but distinguish a machine without GPUs from one with a broken driver."""
    answer = ask_nvidia_smi(f"--query-gpu={','.join(_GPU_FIELDS)}", "--format=csv,noheader,nounits")
    gpus = [gpu for line in answer.lines if (gpu := parse_gpu_line(line)) is not None]
    if any(gpu.has_mig for gpu in gpus):
        slices = parse_slices(ask_nvidia_smi("-L").lines)
        gpus = [replace(gpu, slices=slices.get(gpu.uuid, ())) for gpu in gpus]
    return GpuReport(gpus=tuple(gpus), probe=answer.probe, complaint=answer.complaint)


def read_gpu_users() -> tuple[GpuUser, ...]:
    """Return the computing processes. In a container there may be none, or ids of another namespace."""
    query = f"--query-compute-apps={','.join(_USER_FIELDS)}"
    users = []
    for line in ask_nvidia_smi(query, "--format=csv,noheader,nounits").lines:
        parts = [part.strip() for part in line.split(",")]
        if len(parts) == len(_USER_FIELDS) and parts[1].isdigit():
            uuid, pid, used = parts[0], int(parts[1]), parts[2]
            user, command = describe_process(pid)
            users.append(
                GpuUser(
                    gpu_uuid=uuid,
                    pid=pid,
                    memory_bytes=_read_mebibytes(used),
                    user=user,
                    command=command,
                    lease_id=read_lease_id(pid),
                )
            )
    return tuple(users)


def parse_gpu_line(line: str) -> Gpu | None:
    """Parse `index, uuid, name, MiB, MiB, MIG mode, driver, capability`; None for another format.

    '[N/A]' is unknown memory; it is also the MIG mode of a GPU without MIG.
    """
    parts = [part.strip() for part in line.split(",")]
    if len(parts) < len(_GPU_FIELDS):
        return None
    index, uuid, *name, total, free, mig_mode, driver, capability = parts
    return Gpu(
        index=index,
        uuid=uuid,
        name=", ".join(name),
        memory_bytes=_read_mebibytes(total),
        free_memory_bytes=_read_mebibytes(free),
        has_mig=mig_mode == "Enabled",
        driver_version=None if driver.startswith("[") else driver,
        compute_capability=None if capability.startswith("[") else float(capability),
    )


def parse_slices(lines: Sequence[str]) -> dict[str, tuple[MigSlice, ...]]:
    """Parse the output of `nvidia-smi -L`; return the slices of each divided GPU, by its UUID."""
    slices: dict[str, tuple[MigSlice, ...]] = {}
    gpu_uuid = ""
    for line in lines:
        if gpu := _GPU_LINE.fullmatch(line):
            gpu_uuid = gpu["uuid"]
        elif part := _SLICE_LINE.fullmatch(line):
            mig_slice = MigSlice(uuid=part["uuid"], profile=part["profile"], index=part["index"])
            slices[gpu_uuid] = (*slices.get(gpu_uuid, ()), mig_slice)
    return slices


def _read_mebibytes(text: str) -> int | None:
    return int(text) << 20 if text.isdigit() else None


def ask_nvidia_smi(*words: str) -> Answer:
    """Run nvidia-smi for at most ten seconds."""
    program = shutil.which(NVIDIA_SMI)
    if program is None:
        return Answer(probe=Probe.MISSING)
    try:
        process = subprocess.Popen(
            [program, *words],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
    except OSError as error:
        return Answer(probe=Probe.FAILED, complaint=str(error))
    try:
        output, errors = process.communicate(timeout=NVIDIA_SMI_LIMIT_S)
    except subprocess.TimeoutExpired as error:
        process.kill()
        # With a limit, unlike `subprocess.run`: a process that hangs in the driver does not even die.
        with suppress(subprocess.TimeoutExpired):
            process.wait(_DEATH_LIMIT_S)
        for pipe in (process.stdout, process.stderr):
            if pipe is not None:
                pipe.close()
        return Answer(probe=Probe.FAILED, complaint=str(error))
    if process.returncode != 0:
        complaint = " ".join((errors or output).split()) or f"exit code {process.returncode}"
        return Answer(probe=Probe.FAILED, complaint=complaint)
    return Answer(probe=Probe.ANSWERED, lines=tuple(output.splitlines()))


# Whether the driver runs what torch was built for, without importing torch.

OLDEST_DRIVER = {11: (450, 80), 12: (525, 60), 13: (580, 0)}
"""From a major version of CUDA to the first driver branch that runs it on Linux.

Source: CUDA Toolkit release notes, 'Minimum Required Driver Version for CUDA Minor Version Compatibility'.
"""
_COMPAT_GLOB = "cuda*/compat/**/libcuda.so*"
"""NVIDIA's forward-compatibility package, which lets newer CUDA run on an older driver."""
_ASSIGNMENT = r"^{name}(?:\s*:[^=]+)?\s*=\s*(?:'([^']*)'|None)"


@dataclass(frozen=True, kw_only=True, slots=True)
class TorchBuild:
    """The contents of torch's version.py."""

    version: str
    cuda: str | None
    """For example `12.6`; None for a build without CUDA."""
    hip: str | None = None


def read_torch_build(folder: Path | None = None) -> TorchBuild | None:
    """Return torch's build; None if torch is not installed. `folder`: its package; None finds it."""
    if folder is None:
        spec = find_spec("torch")
        if spec is None or spec.origin is None:
            return None
        folder = Path(spec.origin).parent
    try:
        text = (folder / "version.py").read_text()
    except OSError:
        return None
    values: dict[str, str | None] = {}
    for name in ("__version__", "cuda", "hip"):
        match = re.search(_ASSIGNMENT.format(name=name), text, re.MULTILINE)
        values[name] = match[1] if match else None
    return TorchBuild(version=values["__version__"] or "unknown", cuda=values["cuda"], hip=values["hip"])


def explain_misfit(build: TorchBuild, driver_version: str | None) -> str | None:
    """Explain why a driver cannot run torch's CUDA version; None if it can, or if that is unknown."""
    if build.cuda is None or driver_version is None:
        return None
    major = int(build.cuda.split(".")[0])
    driver = tuple(int(part) for part in driver_version.split(".")[:2] if part.isdigit())
    oldest = OLDEST_DRIVER.get(major)
    if oldest is None or not driver or driver >= oldest:
        return None
    needed = ".".join(map(str, oldest))
    return f"driver {driver_version} is older than {needed}, which CUDA {build.cuda} of torch needs"


def has_compat_package(root: Path = Path("/usr/local")) -> bool:
    """Whether NVIDIA's forward-compatibility package is installed."""
    return any(root.glob(_COMPAT_GLOB))
