"""What a sandbox has used and done, counted by its supervisor."""

from __future__ import annotations

import os
from collections import deque
from typing import Any

from strop.sandbox.family import cpu_s, find_grandchildren, memory_bytes
from strop.sandbox.place import Place
from strop.sandbox.runner import measure_tree

_NUM_DURATIONS = 256
_MEDIAN, _TAIL = 0.5, 0.99


class Accounts:
    """The counts of one sandbox."""

    def __init__(self) -> None:
        self._num_commands = 0
        self._cpu_s = 0.0
        self._oom_kills = 0
        self._durations: deque[float] = deque(maxlen=_NUM_DURATIONS)

    def add(self, duration_s: float, *, oom_kills: int) -> None:
        """Count a command that has ended."""
        self._num_commands += 1
        self._oom_kills += oom_kills
        self._durations.append(duration_s)

    def add_cpu(self, used_s: float) -> None:
        """Count the processor time of a process tree that has ended."""
        self._cpu_s += used_s

    def describe(self, place: Place) -> dict[str, Any]:
        """Return the fields of `SandboxStats`, but for whether it is paused."""
        pids = find_grandchildren(os.getpid())
        counted = place.cgroup.read_memory()
        now, peak = counted if counted is not None else (memory_bytes(pids, 0), None)
        if place.has_own_disk:
            disk = os.statvfs(place.changes)
            num_bytes = (disk.f_blocks - disk.f_bfree) * disk.f_frsize
            num_files = disk.f_files - disk.f_ffree
        else:
            num_bytes, num_files = measure_tree(place.changes)
        return {
            "cpu_s": self._cpu_s + cpu_s(pids),
            "memory_bytes": now,
            "memory_peak_bytes": peak,
            "processes": len(pids),
            "disk_bytes": num_bytes,
            "disk_files": num_files,
            "oom_kills": max(self._oom_kills, place.cgroup.count_oom_kills()),
            "commands": self._num_commands,
            "exec_p50_s": self._quantile(_MEDIAN),
            "exec_p99_s": self._quantile(_TAIL),
        }

    def _quantile(self, share: float) -> float | None:
        ordered = sorted(self._durations)
        return ordered[int(share * (len(ordered) - 1))] if ordered else None
