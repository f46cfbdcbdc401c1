"""Whether memory and disk still suffice while a run goes on.

Before a run the gate compares plans with what is free; here is what no plan foresees: memory that
leaks, and a disk that others fill.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

from strop.hardware import free_disk_bytes, free_memory_bytes
from strop.io.walking import walk_files
from strop.record.events import Event, EventKind
from strop.record.run_dir import RunDir

NUM_WARM_UP = 8
"""Steps of a process whose growth counts for nothing: caches and pools fill in them."""
NUM_BLOCKS = 6
BLOCK_STEPS = 4
"""A leak shows in every one of so many blocks of so many steps; a pool that fills up does not."""
LOW_DISK_FACTOR = 1.25
"""Room for so many checkpoints, or the run ends while one more can still be written."""


class MemoryWatch:
    """Tells a leak from memory that fills up and stays."""

    def __init__(self, max_growth_bytes: int | None) -> None:
        self._max_growth_bytes = max_growth_bytes
        self._num_seen = 0
        self._sizes: list[float] = []

    def find_growth(self, step: int, memory_bytes: float) -> list[Event]:
        """Take the resident memory after a step; return an alarm where it grows without end.

        A leak is named `NUM_WARM_UP + NUM_BLOCKS * BLOCK_STEPS + 1` steps after the start of the
        process, and again in every step that follows.
        """
        self._num_seen += 1
        if self._max_growth_bytes is None or self._num_seen <= NUM_WARM_UP:
            return []
        window = NUM_BLOCKS * BLOCK_STEPS + 1
        self._sizes = [*self._sizes, memory_bytes][-window:]
        if len(self._sizes) < window or not is_steady_growth(self._sizes):
            return []
        growth = (self._sizes[-1] - self._sizes[0]) / (window - 1)
        if growth <= self._max_growth_bytes:
            return []
        free_bytes = free_memory_bytes()
        left = "" if free_bytes is None else f", {free_bytes / growth:.0f} steps before memory is full"
        detail = (
            f"resident memory grew by {growth / 2**20:.1f} MiB in each of the last {window - 1} steps, to"
            f" {memory_bytes / 2**20:.0f} MiB{left}; tripwires.max_memory_growth_bytes="
            f"{self._max_growth_bytes}: something is kept that should be dropped, most often by the"
            " task's verifier"
        )
        return [Event(kind=EventKind.TRIPWIRE, step=step, cause="memory_growth", detail=detail)]


def is_steady_growth(sizes: Sequence[float]) -> bool:
    """Whether sizes after each of `NUM_BLOCKS * BLOCK_STEPS` steps, and before, grow in every block.

    What was given back later is no growth: each size is replaced by the smallest from there on. Each
    block must grow at least half as much as blocks do on average, so one big jump is no leak.
    """
    floors = [min(sizes[index:]) for index in range(0, len(sizes), BLOCK_STEPS)]
    growths = [after - before for before, after in pairwise(floors)]
    return min(growths) > 0 and min(growths) >= 0.5 * sum(growths) / len(growths)


class DiskWatch:
    """Knows whether the next checkpoint still fits."""

    def __init__(self, run_dir: RunDir, expected_bytes: int) -> None:
        self._run_dir = run_dir
        self._expected_bytes = expected_bytes

    def needed_bytes(self) -> int:
        """Return the size of the last checkpoint, or what one is expected to take."""
        latest = self._run_dir.latest_checkpoint()
        return self._expected_bytes if latest is None else directory_bytes(latest[1])

    def find_low(self, step: int) -> tuple[Event, bool] | None:
        """Return an alarm where the disk is nearly full, and whether one more checkpoint fits."""
        free_bytes, needed_bytes = free_disk_bytes(self._run_dir.path), self.needed_bytes()
        if free_bytes >= LOW_DISK_FACTOR * needed_bytes:
            return None
        detail = (
            f"{free_bytes / 1e6:.1f} MB are free at {self._run_dir.path} and a checkpoint takes"
            f" {needed_bytes / 1e6:.1f} MB; free space there, or keep fewer checkpoints"
        )
        event = Event(kind=EventKind.TRIPWIRE, step=step, cause="disk_low", detail=detail)
        return event, free_bytes >= needed_bytes


def directory_bytes(path: Path) -> int:
    """Return the size of all files below a directory."""
    return sum(found.st_size for _, found in walk_files(path))
