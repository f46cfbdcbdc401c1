"""What this machine has, read from the system without torch.

What cannot be read is None or empty, never a plausible guess. Tried on Linux; elsewhere only the
portable facts are filled.
"""

from __future__ import annotations

import math
import os
import platform
import sys
from dataclasses import dataclass
from pathlib import Path

from strop.hardware.container import read_cgroup_memory, read_cpu_quota
from strop.hardware.gpus import Gpu, read_gpus


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """The facts that plans and results depend on."""

    host: str
    platform: str
    python: str
    cpu_name: str | None
    num_physical_cores: int
    """Cores that this process may use, two hyper-threads of one core counted once.

    At most as many as its container has CPU time for: more threads than that wait for each other.
    """
    num_logical_cpus: int
    """Logical CPUs that this process may use."""
    memory_bytes: int | None
    """Installed, or the limit of this container if that is lower."""
    free_memory_bytes: int | None
    """What programs can get now without swapping, and within the limit of this container."""
    load_average: float | None
    """Runnable processes over the last minute."""
    cpu_flags: tuple[str, ...]
    """What decides how fast it multiplies, as Linux names it: those of `INSTRUCTIONS` that may be used."""
    gpus: tuple[Gpu, ...]

    @property
    def has_fast_bf16(self) -> bool:
        """Whether the CPU multiplies bf16 in hardware."""
        return any(flag in self.cpu_flags for flag in BF16_INSTRUCTIONS)


BF16_INSTRUCTIONS = ("avx512_bf16", "amx_bf16", "bf16")
"""Of x86 the first two, of ARM the last."""
INSTRUCTIONS = ("avx2", "fma", "avx512f", "asimd", "amx_tile", *BF16_INSTRUCTIONS)
_TORCH_NAMES = {"fma": "fma3", "avx512f": "avx512_f"}
"""Where `torch.cpu.get_capabilities` has another name than Linux."""
_ONEDNN_LIMITS = ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA")
# Of oneDNN's documentation, "CPU Dispatcher Control": the values below AVX512_CORE_BF16.
_WITHOUT_BF16 = frozenset(
    {"SSE41", "AVX", "AVX2", "AVX2_VNNI", "AVX2_VNNI_2", "AVX512_CORE", "AVX512_CORE_VNNI"}
)


def describe_machine() -> Machine:
    """Read the facts of this machine. Takes a few milliseconds, plus nvidia-smi where there is one."""
    cpus = _read_cpus()
    allowed = _allowed_cpus()
    names = cpus[0].get("flags", cpus[0].get("Features", "")) if cpus else ""
    total_bytes = _read_meminfo().get("MemTotal")
    limit_bytes, _ = read_cgroup_memory()
    return Machine(
        host=platform.node(),
        platform=platform.platform(),
        python=platform.python_version(),
        cpu_name=(cpus[0].get("model name") if cpus else None) or platform.processor() or None,
        num_physical_cores=_within_quota(_count_physical_cores(cpus, allowed)),
        num_logical_cpus=len(allowed),
        memory_bytes=min((size for size in (total_bytes, limit_bytes) if size is not None), default=None),
        free_memory_bytes=free_memory_bytes(),
        load_average=os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
        cpu_flags=_usable_instructions(frozenset(names.split())),
        gpus=read_gpus(),
    )


def free_memory_bytes() -> int | None:
    """Return what programs can get now without swapping, here and in this container; None if unknown."""
    _, container_bytes = read_cgroup_memory()
    known = (_read_meminfo().get("MemAvailable"), container_bytes)
    return min((size for size in known if size is not None), default=None)


def _usable_instructions(flags: frozenset[str]) -> tuple[str, ...]:
    """Leave out what oneDNN is told not to use, and what PyTorch does not find where it is loaded.

    An emulator shows the flags of the machine below it; PyTorch asks the processor itself.
    """
    torch = sys.modules.get("torch")
    found = torch.cpu.get_capabilities() if torch is not None else {}
    forbidden = {flag for flag in INSTRUCTIONS if not found.get(_TORCH_NAMES.get(flag, flag), True)}
    if any(os.environ.get(name, "").upper() in _WITHOUT_BF16 for name in _ONEDNN_LIMITS):
        forbidden |= set(BF16_INSTRUCTIONS)
    return tuple(flag for flag in INSTRUCTIONS if flag in flags - forbidden)


def _read_cpus() -> list[dict[str, str]]:
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return []
    blocks = [block for block in text.split("\n\n") if block.strip()]
    return [
        {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in block.splitlines())}
        for block in blocks
    ]


def _allowed_cpus() -> set[int]:
    if hasattr(os, "sched_getaffinity"):
        return set(os.sched_getaffinity(0))
    return set(range(os.cpu_count() or 1))


def _count_physical_cores(cpus: list[dict[str, str]], allowed: set[int]) -> int:
    cores = {
        (cpu["physical id"], cpu["core id"])
        for cpu in cpus
        if "core id" in cpu and "physical id" in cpu and int(cpu.get("processor", -1)) in allowed
    }
    # ARM and some virtual machines name no cores: then each logical CPU counts as one.
    return len(cores) or len(allowed)


def _within_quota(num_cores: int) -> int:
    quota = read_cpu_quota()
    return num_cores if quota is None else min(num_cores, math.ceil(quota))


def _read_meminfo() -> dict[str, int]:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return {}
    # Lines read "MemTotal:       8042344 kB".
    return {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines if line.endswith(" kB")}
