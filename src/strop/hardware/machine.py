"""The facts of this machine, read from the system without torch.

Unreadable facts are None or empty, never a plausible guess. Tried on Linux; elsewhere only the portable facts
are filled.
"""

from __future__ import annotations

import getpass
import math
import os
import platform
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from strop.hardware.gpus import Gpu, read_gpus


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """The facts that plans and results depend on."""

    host: str
    platform: str
    python: str
    cpu_name: str | None
    num_physical_cores: int
    """Physical cores that this process may use.

    Bounded by the container's CPU quota, since more threads than that would wait for each other.
    """
    num_logical_cpus: int
    """Logical CPUs that this process may use."""
    memory_bytes: int | None
    """Installed memory, or the limit of this container if that is lower."""
    free_memory_bytes: int | None
    """Memory available now without swapping, within the limit of this container."""
    cpu_flags: tuple[str, ...]
    """The usable instruction sets among `INSTRUCTIONS`, by Linux' names."""
    gpus: tuple[Gpu, ...]

    @property
    def has_fast_bf16(self) -> bool:
        """Whether the CPU multiplies bf16 in hardware."""
        return any(flag in self.cpu_flags for flag in BF16_INSTRUCTIONS)


BF16_INSTRUCTIONS = ("avx512_bf16", "amx_bf16", "bf16")
"""The first two are of x86, the last of ARM."""
INSTRUCTIONS = ("avx2", "fma", "avx512f", "asimd", "amx_tile", *BF16_INSTRUCTIONS)
_TORCH_NAMES = {"fma": "fma3", "avx512f": "avx512_f"}
"""Where `torch.cpu.get_capabilities` has another name than Linux."""
_CPUS = Path("/sys/devices/system/cpu")
_ONEDNN_LIMITS = ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA")
# The values below AVX512_CORE_BF16 in oneDNN's documentation, "CPU Dispatcher Control".
_WITHOUT_BF16 = frozenset(
    {"SSE41", "AVX", "AVX2", "AVX2_VNNI", "AVX2_VNNI_2", "AVX512_CORE", "AVX512_CORE_VNNI"}
)


def describe_machine() -> Machine:
    """Read the facts of this machine. Takes a few milliseconds, plus the driver's answer if there is one."""
    is_limited = hasattr(os, "sched_getaffinity")
    allowed = os.sched_getaffinity(0) if is_limited else set(range(os.cpu_count() or 1))
    # Logical CPUs of one core name the same siblings; where none are named, each counts as a core.
    siblings = [_read(_CPUS / f"cpu{number}" / "topology" / "thread_siblings_list") for number in allowed]
    num_cores, quota = len(set(siblings)) if all(siblings) else len(allowed), read_cpu_quota()
    first = _read(Path("/proc/cpuinfo")).partition("\n\n")[0]
    facts = {
        key.strip(): value.strip() for key, _, value in (line.partition(":") for line in first.splitlines())
    }
    limit_bytes, _ = read_cgroup_memory()
    # Exclude instructions that oneDNN's settings forbid, and those that a loaded PyTorch does not find: an
    # emulator shows the flags of the machine below it, but PyTorch asks the processor itself.
    torch = sys.modules.get("torch")
    capabilities = torch.cpu.get_capabilities() if torch is not None else {}
    forbidden = {flag for flag in INSTRUCTIONS if not capabilities.get(_TORCH_NAMES.get(flag, flag), True)}
    if any(os.environ.get(name, "").upper() in _WITHOUT_BF16 for name in _ONEDNN_LIMITS):
        forbidden |= set(BF16_INSTRUCTIONS)
    usable = {*facts.get("flags", facts.get("Features", "")).split()} - forbidden
    sizes = (_read_memory("total"), limit_bytes)
    return Machine(
        host=platform.node(),
        platform=platform.platform(),
        python=platform.python_version(),
        cpu_name=facts.get("model name") or platform.processor() or None,
        num_physical_cores=num_cores if quota is None else min(num_cores, math.ceil(quota)),
        num_logical_cpus=len(allowed),
        memory_bytes=min((size for size in sizes if size is not None), default=None),
        free_memory_bytes=free_memory_bytes(),
        cpu_flags=tuple(flag for flag in INSTRUCTIONS if flag in usable),
        gpus=read_gpus(),
    )


def find_user_name() -> str:
    """Return this user's name, or the user id if the machine has no name for it, as in many containers."""
    try:
        return getpass.getuser()
    except (OSError, KeyError):
        return str(os.getuid())


def free_memory_bytes() -> int | None:
    """Return the memory available now without swapping, in this container; None if unknown."""
    _, container_bytes = read_cgroup_memory()
    sizes = (_read_memory("available"), container_bytes)
    return min((size for size in sizes if size is not None), default=None)


def rss_bytes() -> int:
    """Return the resident memory of this process."""
    import psutil

    return int(psutil.Process().memory_info().rss)


def peak_rss_bytes() -> int:
    """Return the largest resident memory of this process since its start."""
    # Not `getrusage`: its figure is inherited from the process that started this one.
    lines = _read(Path("/proc/self/status")).splitlines()
    # Lines read "VmHWM:    123456 kB".
    peaks = [int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:")]
    return max([*peaks, rss_bytes()])


def _read_memory(name: str) -> int | None:
    import psutil

    try:
        return int(getattr(psutil.virtual_memory(), name))
    except (psutil.Error, OSError, ValueError, LookupError):
        # Some containers show /proc/meminfo empty, or not at all.
        return None


# Limits of this process's control groups: those of a container or of a scheduler's job. The limits of all
# parent groups apply as well, and the tightest counts. Inside a container a process's group usually appears
# as the root. Version 2 has memory.max, memory.current and cpu.max; see cgroups(7) for version 1.

GROUPS = Path("/sys/fs/cgroup")


def group_dirs(controller: str, *, root: Path = GROUPS, membership: str | None = None) -> list[Path]:
    """Return the possible directories of the groups that apply to this process, the innermost first.

    `membership`: the text of /proc/self/cgroup; if it is empty, only the roots are left.
    """
    text = _read(Path("/proc/self/cgroup")) if membership is None else membership
    dirs: list[Path] = []
    for line in text.splitlines():
        _, names, inside = [*line.split(":", 2), "", ""][:3]
        if names and controller not in names.split(","):
            continue
        top = root / controller if names else root
        own = top / inside.strip("/")
        dirs += [path for path in (own, *own.parents) if path.is_relative_to(top)]
    return list(dict.fromkeys([*dirs, root, root / controller]))


def read_cgroup_memory(dirs: Sequence[Path] | None = None) -> tuple[int | None, int | None]:
    """Return the memory limit of this process and the rest below it, in bytes; each None if unknown."""
    limits, left = [], []
    for path in group_dirs("memory") if dirs is None else dirs:
        for limit_name, used_name in (
            ("memory.max", "memory.current"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes"),
        ):
            limit_bytes, used_bytes = _read_number(path / limit_name), _read_number(path / used_name)
            if limit_bytes is None:
                continue
            limits.append(limit_bytes)
            if used_bytes is not None:
                # Cached files count as used, but are dropped before an allocation fails.
                lines = _read(path / "memory.stat").splitlines()
                cached = [int(line.split()[1]) for line in lines if line.startswith("inactive_file ")]
                reclaimable_bytes = cached[0] if cached else 0
                left.append(max(limit_bytes - used_bytes + reclaimable_bytes, 0))
    return min(limits, default=None), min(left, default=None)


def read_cpu_quota(dirs: Sequence[Path] | None = None) -> float | None:
    """Return this process's CPU quota as a number of CPUs; None if there is no limit."""
    quotas = []
    for path in group_dirs("cpu") if dirs is None else dirs:
        # Version 2 has 'QUOTA PERIOD' in one file, with 'max' for no limit; version 1 has -1 for no limit.
        version_2 = _read(path / "cpu.max").split()
        version_1 = [_read(path / f"cpu.cfs_{name}_us").strip() for name in ("quota", "period")]
        quotas += [
            int(words[0]) / int(words[1])
            for words in (version_2, version_1)
            if len(words) == 2 and all(word.isdigit() for word in words) and int(words[1]) > 0
        ]
    return min(quotas, default=None)


def _read_number(path: Path) -> int | None:
    """Read a file with one number; None for "max", version 2's word for no limit."""
    text = _read(path).strip()
    return int(text) if text.isdigit() else None


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
