"""GPUs, their MIG slices and the processes on them, as nvidia-smi reports them.

Ids stay strings: an index, a GPU's UUID and a slice's UUID are all names, and none is ever a number. What
cannot be read is None or missing, never a plausible guess. Where there is no nvidia-smi, or it fails, there
are no GPUs. Text is parsed instead of a call of NVML, so that a program can stand in for it in tests.
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
"""A profile such as `1g.10gb` or `1g.10gb+me` names its memory, a little more than a program can have."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MigSlice:
    """A part of a GPU that a program sees as a whole one. A program sees one at most."""

    uuid: str
    profile: str
    """Compute and memory, for example `1g.10gb`."""
    index: str = field(default="", compare=False)
    """Its place among those of its GPU."""

    @property
    def memory_bytes(self) -> int | None:
        """What its profile names; nvidia-smi tells the memory of the whole GPU only."""
        match = _PROFILE_GIGABYTES.search(self.profile)
        return int(match[1]) * 10**9 if match else None


@dataclass(frozen=True, kw_only=True, slots=True)
class Gpu:
    """One GPU as nvidia-smi names it."""

    index: str
    """Its place in the order of PCI addresses."""
    uuid: str
    name: str
    memory_bytes: int | None
    free_memory_bytes: int | None = None
    """Of the whole GPU, also where it is divided into slices."""
    has_mig: bool = False
    """Whether it is divided: then only its slices can be used."""
    slices: tuple[MigSlice, ...] = ()
    driver_version: str | None = None
    compute_capability: float | None = None
    """What its instructions are, for example 8.0 of an A100; None where it is not reported."""

    @property
    def used_bytes(self) -> int | None:
        """What programs and the driver hold of it; None where that is not reported."""
        if self.memory_bytes is None or self.free_memory_bytes is None:
            return None
        return self.memory_bytes - self.free_memory_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuUser:
    """A process that computes on a GPU."""

    gpu_uuid: str
    pid: int
    """In the process-id namespace of the driver, which inside a container is another than ours."""
    memory_bytes: int | None
    user: str | None
    command: str | None
    """Both None where this machine does not show the process."""
    lease_id: str | None = None
    """Of the run that it belongs to, if it is one of ours."""

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
    """There is no such program here."""
    FAILED = "failed"
    """It ended with an error, or not in time."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """The output of nvidia-smi for one query."""

    probe: Probe
    lines: tuple[str, ...] = ()
    complaint: str = ""
    """Its own words where it failed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuReport:
    """The GPUs, and whether the answer can be trusted to be all."""

    gpus: tuple[Gpu, ...]
    probe: Probe
    complaint: str = ""


def read_gpus() -> tuple[Gpu, ...]:
    """Ask nvidia-smi for the GPUs, in the order of PCI addresses, with their slices."""
    return report_gpus().gpus


def report_gpus() -> GpuReport:
    """Do as `read_gpus`, and tell a machine without GPUs from one whose driver is broken."""
    answer = ask_nvidia_smi(f"--query-gpu={','.join(_GPU_FIELDS)}", "--format=csv,noheader,nounits")
    gpus = [gpu for line in answer.lines if (gpu := parse_gpu_line(line)) is not None]
    if any(gpu.has_mig for gpu in gpus):
        slices = parse_slices(ask_nvidia_smi("-L").lines)
        gpus = [replace(gpu, slices=slices.get(gpu.uuid, ())) for gpu in gpus]
    return GpuReport(gpus=tuple(gpus), probe=answer.probe, complaint=answer.complaint)


def read_gpu_work() -> dict[str, float]:
    """Ask nvidia-smi in which share of the last second or so each GPU computed, by its UUID; [0, 1].

    Divided ones do not tell, and are missing.
    """
    found = {}
    for line in ask_nvidia_smi("--query-gpu=uuid,utilization.gpu", "--format=csv,noheader,nounits").lines:
        uuid, _, percent = (part.strip() for part in line.partition(","))
        if percent.isdigit():
            found[uuid] = int(percent) / 100.0
    return found


def read_gpu_users() -> tuple[GpuUser, ...]:
    """Ask nvidia-smi which processes compute. In a container the answer may be empty, or name strangers."""
    question = f"--query-compute-apps={','.join(_USER_FIELDS)}"
    found = []
    for line in ask_nvidia_smi(question, "--format=csv,noheader,nounits").lines:
        parts = [part.strip() for part in line.split(",")]
        if len(parts) == len(_USER_FIELDS) and parts[1].isdigit():
            uuid, pid, used = parts[0], int(parts[1]), parts[2]
            user, command = describe_process(pid)
            memory_bytes, lease_id = _read_mebibytes(used), read_lease_id(pid)
            found.append(
                GpuUser(
                    gpu_uuid=uuid,
                    pid=pid,
                    memory_bytes=memory_bytes,
                    user=user,
                    command=command,
                    lease_id=lease_id,
                )
            )
    return tuple(found)


def parse_gpu_line(line: str) -> Gpu | None:
    """Read `index, uuid, name, MiB, MiB, MIG mode, driver, capability`; None if the line has another form.

    '[N/A]' memory is unknown, and a GPU that knows no MIG says '[N/A]' too.
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
    """Read what `nvidia-smi -L` lists; return the slices of each GPU that has some, by its UUID."""
    found: dict[str, tuple[MigSlice, ...]] = {}
    gpu_uuid = ""
    for line in lines:
        if gpu := _GPU_LINE.fullmatch(line):
            gpu_uuid = gpu["uuid"]
        elif part := _SLICE_LINE.fullmatch(line):
            mine = MigSlice(uuid=part["uuid"], profile=part["profile"], index=part["index"])
            found[gpu_uuid] = (*found.get(gpu_uuid, ()), mine)
    return found


def _read_mebibytes(text: str) -> int | None:
    return int(text) << 20 if text.isdigit() else None


def ask_nvidia_smi(*words: str) -> Answer:
    """Put one question to nvidia-smi, and wait ten seconds at most."""
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
        # Not without a limit, as `subprocess.run` does: one that hangs in the driver does not even die.
        with suppress(subprocess.TimeoutExpired):
            process.wait(_DEATH_LIMIT_S)
        for pipe in (process.stdout, process.stderr):
            if pipe is not None:
                pipe.close()
        return Answer(probe=Probe.FAILED, complaint=str(error))
    if process.returncode != 0:
        said = " ".join((errors or output).split()) or f"exit code {process.returncode}"
        return Answer(probe=Probe.FAILED, complaint=said)
    return Answer(probe=Probe.ANSWERED, lines=tuple(output.splitlines()))


# Whether the driver runs what torch was built for, without importing torch.

OLDEST_DRIVER = {11: (450, 80), 12: (525, 60), 13: (580, 0)}
"""Major version of CUDA to the first driver branch that runs it on Linux.

Source: CUDA Toolkit release notes, 'Minimum Required Driver Version for CUDA Minor Version Compatibility'.
"""
_COMPAT_GLOB = "cuda*/compat/**/libcuda.so*"
"""NVIDIA's forward-compatibility package, which lets newer CUDA run on an older driver."""
_ASSIGNMENT = r"^{name}(?:\s*:[^=]+)?\s*=\s*(?:'([^']*)'|None)"


@dataclass(frozen=True, kw_only=True, slots=True)
class TorchBuild:
    """What torch says of itself in its file version.py."""

    version: str
    cuda: str | None
    """For example `12.6`; None if it was built without."""
    hip: str | None = None


def read_torch_build(folder: Path | None = None) -> TorchBuild | None:
    """Return how torch was built, None if there is none. `folder` is its package; None finds it."""
    if folder is None:
        spec = find_spec("torch")
        if spec is None or spec.origin is None:
            return None
        folder = Path(spec.origin).parent
    try:
        text = (folder / "version.py").read_text()
    except OSError:
        return None
    found: dict[str, str | None] = {}
    for name in ("__version__", "cuda", "hip"):
        match = re.search(_ASSIGNMENT.format(name=name), text, re.MULTILINE)
        found[name] = match[1] if match else None
    return TorchBuild(version=found["__version__"] or "unknown", cuda=found["cuda"], hip=found["hip"])


def explain_misfit(build: TorchBuild, driver_version: str | None) -> str | None:
    """Say why a driver does not run what torch was built for; None if it does, or if that is unknown."""
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
    """Whether the libraries are installed that lift the driver's limit."""
    return any(root.glob(_COMPAT_GLOB))
