"""The limits of this process's control groups: those of a container, or of a scheduler's job.

A process stands in one group, and the limits of every group above hold as well: the tightest counts.
Inside a container its group is mostly shown as the root; on a host with a scheduler it lies deeper.
Files: memory.max, memory.current and cpu.max of version 2, and their names of version 1; see cgroups(7).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

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
                reclaimable_bytes = _read_inactive_file(path / "memory.stat")
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


def _read_inactive_file(path: Path) -> int:
    lines = _read(path).splitlines()
    return next((int(line.split()[1]) for line in lines if line.startswith("inactive_file ")), 0)


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
