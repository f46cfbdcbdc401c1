"""What this machine has, read from the system without torch.

What cannot be read is None or empty, never a plausible guess. Tried on Linux; elsewhere only the
portable facts are filled.
"""

from __future__ import annotations

import math
import os
import platform
import resource
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
    is_limited = hasattr(os, "sched_getaffinity")
    allowed = set(os.sched_getaffinity(0)) if is_limited else set(range(os.cpu_count() or 1))
    cores = {
        (cpu["physical id"], cpu["core id"])
        for cpu in cpus
        if "core id" in cpu and "physical id" in cpu and int(cpu.get("processor", -1)) in allowed
    }
    # ARM and some virtual machines name no cores: then each logical CPU counts as one.
    num_cores, quota = len(cores) or len(allowed), read_cpu_quota()
    names = cpus[0].get("flags", cpus[0].get("Features", "")) if cpus else ""
    limit_bytes, _ = read_cgroup_memory()
    # Left out is what oneDNN may not use by its settings, and what PyTorch does not find if it is loaded.
    # An emulator shows the flags of the machine below it; PyTorch asks the processor itself.
    torch = sys.modules.get("torch")
    found = torch.cpu.get_capabilities() if torch is not None else {}
    forbidden = {flag for flag in INSTRUCTIONS if not found.get(_TORCH_NAMES.get(flag, flag), True)}
    if any(os.environ.get(name, "").upper() in _WITHOUT_BF16 for name in _ONEDNN_LIMITS):
        forbidden |= set(BF16_INSTRUCTIONS)
    usable = frozenset(names.split()) - forbidden
    return Machine(
        host=platform.node(),
        platform=platform.platform(),
        python=platform.python_version(),
        cpu_name=(cpus[0].get("model name") if cpus else None) or platform.processor() or None,
        num_physical_cores=num_cores if quota is None else min(num_cores, math.ceil(quota)),
        num_logical_cpus=len(allowed),
        memory_bytes=min(
            (size for size in (_read_memory("total"), limit_bytes) if size is not None), default=None
        ),
        free_memory_bytes=free_memory_bytes(),
        load_average=os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
        cpu_flags=tuple(flag for flag in INSTRUCTIONS if flag in usable),
        gpus=read_gpus(),
    )


def free_memory_bytes() -> int | None:
    """Return what programs can get now without swapping, here and in this container; None if unknown."""
    _, container_bytes = read_cgroup_memory()
    known = (_read_memory("available"), container_bytes)
    return min((size for size in known if size is not None), default=None)


def rss_bytes() -> int | None:
    """Return the resident memory of this process, or None where it cannot be read."""
    return _read_status("VmRSS")


def peak_rss_bytes() -> int:
    """Return the largest resident memory of this process since its start or `reset_peak_rss`."""
    peak = _read_status("VmHWM")
    if peak is not None:
        return peak
    # macOS counts in bytes, other systems in KiB.
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def reset_peak_rss() -> bool:
    """Start measuring the peak anew; False where the system cannot."""
    try:
        # 5 resets the high-water mark (proc(5)); it touches nothing else of the process.
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


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


def _read_memory(name: str) -> int | None:
    import psutil

    try:
        return int(getattr(psutil.virtual_memory(), name))
    except (psutil.Error, OSError, ValueError, LookupError):
        # Some containers show /proc/meminfo empty, or not at all.
        return None


def _read_status(name: str) -> int | None:
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return None
    # Lines read "VmHWM:    123456 kB".
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:")), None)


# Limits of this process's control groups: those of a container or of a scheduler's job. The limits of every
# group above hold as well, and the tightest counts. Inside a container a process's group is mostly shown as
# the root. Version 2 has memory.max, memory.current and cpu.max; see cgroups(7) for version 1.

GROUPS = Path("/sys/fs/cgroup")


def group_dirs(controller: str, *, root: Path = GROUPS, membership: str | None = None) -> list[Path]:
    """Return where the groups that hold for this process may be, its own before those above.

    `membership` is the text of /proc/self/cgroup; without one, only the roots are left.
    """
    text = _read(Path("/proc/self/cgroup")) if membership is None else membership
    found = []
    for line in text.splitlines():
        _, names, inside = [*line.split(":", 2), "", ""][:3]
        if names and controller not in names.split(","):
            continue
        top = root / controller if names else root
        own = top / inside.strip("/")
        found += [path for path in (own, *own.parents) if path.is_relative_to(top)]
    return list(dict.fromkeys([*found, root, root / controller]))


def read_cgroup_memory(dirs: Sequence[Path] | None = None) -> tuple[int | None, int | None]:
    """Return the memory limit (bytes) of this process and what is left of it, None each where unknown."""
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
                # Files read lately count as used, and are dropped before anything fails.
                lines = _read(path / "memory.stat").splitlines()
                cached = [int(line.split()[1]) for line in lines if line.startswith("inactive_file ")]
                reclaimable_bytes = cached[0] if cached else 0
                left.append(max(limit_bytes - used_bytes + reclaimable_bytes, 0))
    return min(limits, default=None), min(left, default=None)


def read_cpu_quota(dirs: Sequence[Path] | None = None) -> float | None:
    """Return how many CPUs' worth of time this process may use, or None if there is no such limit."""
    quotas = []
    for path in group_dirs("cpu") if dirs is None else dirs:
        # Version 2 writes 'QUOTA PERIOD' in one file, with 'max' for none; version 1 has -1 for none.
        version_2 = _read(path / "cpu.max").split()
        version_1 = [_read(path / f"cpu.cfs_{name}_us").strip() for name in ("quota", "period")]
        quotas += [
            int(words[0]) / int(words[1])
            for words in (version_2, version_1)
            if len(words) == 2 and all(word.isdigit() for word in words) and int(words[1]) > 0
        ]
    return min(quotas, default=None)


def _read_number(path: Path) -> int | None:
    """Read a file of one number. "max" is how groups of version 2 say that there is no limit."""
    text = _read(path).strip()
    return int(text) if text.isdigit() else None


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
