"""GPUs, their MIG slices and the processes on them, as the driver's library NVML tells of them.

Ids stay strings: an index, a GPU's UUID and a slice's UUID are all names. Unreadable values are None or
missing, never a plausible guess. Without a driver there are no GPUs.
"""

from __future__ import annotations

import queue
import re
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

NVML_LIMIT_S = 10.0
_DEV = Path("/dev")
_CAPABILITIES = Path("/proc/driver/nvidia/capabilities")


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuUser:
    """A process that computes on a GPU."""

    pid: int
    """In the pid namespace of the driver, which differs from that of a container."""
    name: str
    """Its user and command line, as far as they are visible here."""

    def __str__(self) -> str:
        """Name it for a message."""
        return f"process {self.pid} ({self.name})"


@dataclass(frozen=True, kw_only=True, slots=True)
class Gpu:
    """A whole GPU, or a MIG slice: a part that a program sees as a whole one, and sees at most one of."""

    index: str
    """Its position in the order of PCI addresses; of a slice that of its GPU."""
    uuid: str
    name: str
    memory_bytes: int | None
    free_memory_bytes: int | None = None
    is_slice: bool = False
    has_mig: bool = False
    """Whether it is divided into slices, and only these can be used."""
    slices: tuple[Gpu, ...] = ()
    users: tuple[GpuUser, ...] = ()
    driver_version: str | None = None
    compute_capability: float | None = None
    """For example 8.0 of an A100."""
    numbers: tuple[int, ...] = ()
    """Those of its device file, and of a slice's GPU instance and compute instance."""

    def __str__(self) -> str:
        """Name it for a message."""
        kind = "MIG slice" if self.is_slice else "GPU"
        return f"{kind} {self.uuid} ({self.name}, index {self.index})"


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuReport:
    """The GPUs of this machine, or why they are unknown."""

    gpus: tuple[Gpu, ...] = ()
    has_driver: bool = True
    """False if there is no NVML: a machine without GPUs, or a container without the driver's tools."""
    complaint: str = ""
    """Why the driver told nothing."""

    @property
    def devices(self) -> tuple[Gpu, ...]:
        """The units of allocation: whole GPUs, and the slices of divided ones."""
        return tuple(one for gpu in self.gpus for one in (gpu.slices if gpu.has_mig else (gpu,)))


def read_gpus() -> tuple[Gpu, ...]:
    """Return the GPUs with their slices and users, in the order of PCI addresses."""
    return report_gpus().gpus


def report_gpus() -> GpuReport:
    """Like `read_gpus`, but distinguish a machine without GPUs from one with a broken driver."""
    answers: queue.SimpleQueue[GpuReport] = queue.SimpleQueue()
    # A call that hangs in a broken driver cannot be ended: its thread must not hold up the process's end.
    threading.Thread(target=lambda: answers.put(_ask_nvml()), name="strop-nvml", daemon=True).start()
    try:
        return answers.get(timeout=NVML_LIMIT_S)
    except queue.Empty:
        return GpuReport(complaint=f"NVML did not answer within {NVML_LIMIT_S:g} s")


def match_devices(entry: str, gpus: Iterable[Gpu]) -> list[Gpu]:
    """Return what an entry of CUDA_VISIBLE_DEVICES names: an index, or the beginning of a UUID.

    A slice's old name, MIG-GPU-UUID/INSTANCE/INSTANCE, names it too.
    """
    if entry.isdigit():
        return [gpu for gpu in gpus if gpu.index == entry]
    named = {}
    for gpu in gpus:
        named[gpu.uuid] = gpu
        for part in gpu.slices:
            named[part.uuid] = part
            named["/".join([f"MIG-{gpu.uuid}", *map(str, part.numbers[1:])])] = part
    matches = {gpu.uuid: gpu for name, gpu in named.items() if name.startswith(entry)}
    return [named[entry]] if entry in named else list(matches.values())


def list_device_files(devices: Iterable[Gpu]) -> list[str]:
    """Return the device files with which a program can use these devices, and no others.

    A slice is opened by its GPU's file and two of /dev/nvidia-caps. Source: MIG User Guide, 'Device Nodes and
    Capabilities'. Raises: OSError, LookupError or ValueError if the driver does not tell them.
    """
    paths = [_DEV / "nvidiactl", _DEV / "nvidia-uvm"]
    for device in devices:
        minor, *instances = device.numbers
        paths.append(_DEV / f"nvidia{minor}")
        if instances:
            folder = _CAPABILITIES / f"gpu{minor}" / "mig" / f"gi{instances[0]}"
            for place in (folder / "access", folder / f"ci{instances[1]}" / "access"):
                lines = dict(line.split(":") for line in place.read_text().splitlines() if ":" in line)
                paths.append(_DEV / "nvidia-caps" / f"nvidia-cap{int(lines['DeviceFileMinor'])}")
    if lacking := [path for path in paths if not path.is_char_device()]:
        raise FileNotFoundError(f"{lacking[0]} is no device file")
    return [str(path) for path in dict.fromkeys(paths)]


def describe_process(pid: int) -> str:
    """Return a process's user and command line, as far as the system shows them."""
    import psutil

    try:
        process = psutil.Process(pid)
        return f"of {process.username()}: {' '.join(process.cmdline()) or 'command unknown'}"
    except psutil.Error:
        return "not visible from here"


def _ask_nvml() -> GpuReport:
    import pynvml as nvml

    def ask(call: Callable[..., Any], *arguments: object) -> Any:
        """Return None where the driver does not know, or this GPU has failed."""
        with suppress(nvml.NVMLError):
            return call(*arguments)
        return None

    def read(handle: object, index: str, number: Any, *, is_slice: bool) -> Gpu:
        memory = ask(nvml.nvmlDeviceGetMemoryInfo, handle)
        capability = ask(nvml.nvmlDeviceGetCudaComputeCapability, handle)
        mode = None if is_slice else ask(nvml.nvmlDeviceGetMigMode, handle)
        has_mig = bool(mode and mode[0])
        numbers = [number]
        if is_slice:
            calls = (nvml.nvmlDeviceGetGpuInstanceId, nvml.nvmlDeviceGetComputeInstanceId)
            numbers += [ask(call, handle) for call in calls]
        limit = ask(nvml.nvmlDeviceGetMaxMigDeviceCount, handle) or 0 if has_mig else 0
        parts = [ask(nvml.nvmlDeviceGetMigDeviceHandleByIndex, handle, place) for place in range(limit)]
        # With slices these are the processes of all, and each slice has its own.
        running = [] if has_mig else ask(nvml.nvmlDeviceGetComputeRunningProcesses, handle) or []
        return Gpu(
            index=index,
            uuid=nvml.nvmlDeviceGetUUID(handle),
            name=ask(nvml.nvmlDeviceGetName, handle) or "unknown",
            memory_bytes=None if memory is None else int(memory.total),
            free_memory_bytes=None if memory is None else int(memory.free),
            is_slice=is_slice,
            has_mig=has_mig,
            slices=tuple(read(part, index, number, is_slice=True) for part in parts if part is not None),
            users=tuple(GpuUser(pid=user.pid, name=describe_process(user.pid)) for user in running),
            driver_version=driver,
            compute_capability=None if capability is None else float(".".join(map(str, capability))),
            numbers=() if None in numbers else tuple(numbers),
        )

    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        return GpuReport(
            has_driver=error.value != nvml.NVML_ERROR_LIBRARY_NOT_FOUND, complaint=f"NVML says: {error}"
        )
    driver = ask(nvml.nvmlSystemGetDriverVersion)
    gpus = []
    for place in range(ask(nvml.nvmlDeviceGetCount) or 0):
        handle = ask(nvml.nvmlDeviceGetHandleByIndex, place)
        # A failed GPU is left out, as nvidia-smi does.
        with suppress(nvml.NVMLError):
            gpus.append(read(handle, str(place), ask(nvml.nvmlDeviceGetMinorNumber, handle), is_slice=False))
    nvml.nvmlShutdown()
    return GpuReport(gpus=tuple(gpus))


# Whether the driver runs what torch was built for, without importing torch.

OLDEST_DRIVER = {11: (450, 80), 12: (525, 60), 13: (580, 0)}
"""From a major version of CUDA to the first driver branch that runs it on Linux.

Source: CUDA Toolkit release notes, 'Minimum Required Driver Version for CUDA Minor Version Compatibility'.
"""


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
    found = dict(re.findall(r"^(\w+)(?:\s*:[^=]+)?\s*=\s*'([^']*)'", text, re.MULTILINE))
    return TorchBuild(
        version=found.get("__version__", "unknown"), cuda=found.get("cuda"), hip=found.get("hip")
    )


def explain_misfit(build: TorchBuild, driver_version: str | None) -> str | None:
    """Explain why a driver cannot run torch's CUDA version; None if it can, or if that is unknown."""
    if build.cuda is None or driver_version is None:
        return None
    driver = tuple(int(part) for part in driver_version.split(".")[:2] if part.isdigit())
    oldest = OLDEST_DRIVER.get(int(build.cuda.split(".")[0]))
    if oldest is None or not driver or driver >= oldest:
        return None
    needed = ".".join(map(str, oldest))
    return f"driver {driver_version} is older than {needed}, which CUDA {build.cuda} of torch needs"
