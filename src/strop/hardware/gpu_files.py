"""The files that programs with a private /dev need to use GPUs: device files, and the driver's libraries.

A program can use the GPUs whose device files it has, and sees those of them in CUDA_VISIBLE_DEVICES. A MIG
slice needs its GPU's file and two of /dev/nvidia-caps, which open only this slice. Source: MIG User Guide,
'Device Nodes and Capabilities', and the files that nvidia-container-toolkit adds to a container.

Not covered: switches between GPUs and channels between machines (NVSwitch, IMEX), other makers' GPUs, WSL.
Tried with fake device files, not yet on a real GPU.
"""

from __future__ import annotations

import os
import re
import shutil
import stat
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from xml.etree import ElementTree as ET

from strop.errors import CheckRefused
from strop.hardware.gpus import ask_nvidia_smi, parse_slices

_DEV = Path("/dev")
_CAPABILITIES = Path("/proc/driver/nvidia/capabilities")
_OLD_SLICE = re.compile(r"MIG-(GPU-[0-9A-Za-z-]+)/(\d+)/(\d+)")
_READ, _WRITE = 0o4, 0o2
_LIBRARY = re.compile(
    r"lib(cuda|cudadebugger|nvidia-(ml|cfg|nvvm|ptxjitcompiler|gpucomp|fatbinaryloader|allocator|compiler"
    r"|opencl))\.so\.[0-9.]+"
)
"""The driver's libraries that computing programs load."""
_LINKED = re.compile(r"\s*(\S+) \(([^)]*)\) => (\S+)")
_MACHINES = ("x86-64", "AArch64")
IMAGE_LIBRARIES = "/usr/local/nvidia/lib64"
"""The library path of images that are made for GPUs, and of a container around this process."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuFiles:
    """The files and settings with which a program can use certain GPUs, and no others."""

    visible: str
    """CUDA_VISIBLE_DEVICES by UUID, since an index depends on the device files that a program has."""
    devices: Mapping[str, str]
    """From the path of each device file here to its path for the program."""
    libraries: Mapping[str, str]
    """From the name of each driver library to its path; empty if none is found."""
    is_linked: bool
    """Whether this machine's loader finds the libraries."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _NumberedGpu:
    """A GPU and its numbers in the driver."""

    uuid: str
    minor: str
    slices: Mapping[str, tuple[str, str]]
    """From the UUID of each slice to the numbers of its GPU instance and its compute instance."""


@cache
def find_gpu_files(names: tuple[str, ...]) -> GpuFiles:
    """Return the files of GPUs or MIG slices, named as in CUDA_VISIBLE_DEVICES. Runs nvidia-smi once.

    Raises: CheckRefused if a GPU does not exist, or its files are missing or closed to programs in sandboxes.
    """
    gpus = _read_numbered()
    selected = [_files_of(name, gpus) for name in names]
    paths = {path: mode for _, files in selected for path, mode in files.items()}
    both = _READ | _WRITE
    paths |= {_DEV / "nvidiactl": both, _DEV / "nvidia-uvm": both}
    for path, mode in paths.items():
        _require_open(path, mode)
    if (tools := _DEV / "nvidia-uvm-tools").exists():
        paths[tools] = both
    libraries, is_linked = _find_libraries()
    return GpuFiles(
        visible=",".join(uuid for uuid, _ in selected),
        devices={str(path): f"/dev/{path.relative_to(_DEV)}" for path in paths},
        libraries=libraries,
        is_linked=is_linked,
    )


def _read_numbered() -> list[_NumberedGpu]:
    answer = ask_nvidia_smi("-q", "-x")
    try:
        root = ET.fromstring("\n".join(answer.lines))
    except ET.ParseError:
        return []
    listed = parse_slices(ask_nvidia_smi("-L").lines) if root.find(".//mig_device") is not None else {}
    gpus = []
    for gpu in root.iter("gpu"):
        uuid = gpu.findtext("uuid", "").strip()
        numbers = {
            device.findtext("index", "").strip(): (
                device.findtext("gpu_instance_id", "").strip(),
                device.findtext("compute_instance_id", "").strip(),
            )
            for device in gpu.iter("mig_device")
        }
        slices = {part.uuid: numbers[part.index] for part in listed.get(uuid, ()) if part.index in numbers}
        gpus.append(_NumberedGpu(uuid=uuid, minor=gpu.findtext("minor_number", "").strip(), slices=slices))
    return gpus


def _files_of(name: str, gpus: list[_NumberedGpu]) -> tuple[str, dict[Path, int]]:
    """Return a device's UUID, and its own device files with the required permission bits."""
    matches: list[tuple[_NumberedGpu, str, tuple[str, str] | None]]
    if old := _OLD_SLICE.fullmatch(name):
        matches = [(gpu, name, (old[2], old[3])) for gpu in gpus if gpu.uuid == old[1]]
    elif name.isdigit():
        matches = [(gpu, gpu.uuid, None) for gpu in gpus[int(name) : int(name) + 1]]
    else:
        matches = [(gpu, gpu.uuid, None) for gpu in gpus if gpu.uuid.startswith(name)]
        matches += [
            (gpu, uuid, numbers)
            for gpu in gpus
            for uuid, numbers in gpu.slices.items()
            if uuid.startswith(name)
        ]
    if len(matches) != 1 or not matches[0][0].minor.isdigit():
        listed = ", ".join(uuid for gpu in gpus for uuid in (gpu.uuid, *gpu.slices))
        raise CheckRefused(
            f"the device files of GPU {name} are not known: nvidia-smi -q tells of {listed or 'no GPU'}",
            allowed="a GPU or MIG slice of this machine, as CUDA_VISIBLE_DEVICES names it",
            next_step="look at nvidia-smi -q and nvidia-smi -L",
        )
    gpu, uuid, instances = matches[0]
    files = {_DEV / f"nvidia{gpu.minor}": _READ | _WRITE}
    if instances is not None:
        folder = _CAPABILITIES / f"gpu{gpu.minor}" / "mig" / f"gi{instances[0]}"
        for place in (folder / "access", folder / f"ci{instances[1]}" / "access"):
            files[_DEV / "nvidia-caps" / f"nvidia-cap{_read_minor(place)}"] = _READ
    return uuid, files


def _read_minor(place: Path) -> str:
    try:
        match = re.search(r"^DeviceFileMinor:\s*(\d+)", place.read_text(), re.MULTILINE)
    except OSError:
        match = None
    if match is None:
        raise CheckRefused(
            f"{place} does not tell the device file of a MIG slice",
            allowed="a driver that shows its capabilities below /proc, 450 or newer",
            next_step="see that /proc/driver/nvidia is shown here, or use whole GPUs",
        )
    return match[1]


def _require_open(path: Path, needed: int) -> None:
    """Refuse a device file that is missing, or closed to programs in sandboxes."""
    try:
        mode = path.stat().st_mode
    except OSError:
        mode = 0
    # For root, programs in sandboxes run as private users.
    is_open = mode & needed == needed if os.geteuid() == 0 else os.access(path, needed)
    if not stat.S_ISCHR(mode) or not is_open:
        why = f"closed to others (mode {mode & 0o777:o})" if stat.S_ISCHR(mode) else "no device file"
        raise CheckRefused(
            f"{path} is {why}, and programs in sandboxes reach a GPU by it",
            allowed="device files of the driver that every user may open",
            next_step="run nvidia-modprobe -u -c=0 as root, or ask the machine's administrators",
        )


def _find_libraries() -> tuple[dict[str, str], bool]:
    """Return the driver's libraries by name, and whether the loader finds them."""
    linked = dict(_list_linked())
    if linked:
        return linked, True
    folders = [*os.environ.get("LD_LIBRARY_PATH", "").split(os.pathsep), IMAGE_LIBRARIES]
    paths = [path for folder in folders if folder for path in sorted(Path(folder).glob("lib*.so.*"))]
    return {path.name: str(path) for path in paths if _LIBRARY.fullmatch(path.name)}, False


def _list_linked() -> Iterator[tuple[str, str]]:
    program = shutil.which("ldconfig", path="/sbin:/usr/sbin:/bin:/usr/bin")
    if program is None:
        return
    done = subprocess.run([program, "-p"], capture_output=True, text=True, check=False, timeout=60)
    for line in done.stdout.splitlines():
        match = _LINKED.fullmatch(line)
        if match and _LIBRARY.fullmatch(match[1]) and any(machine in match[2] for machine in _MACHINES):
            yield match[1], match[3]
