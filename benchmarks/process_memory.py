"""The memory of a process and all its descendants, sampled while it runs. Linux only."""

from __future__ import annotations

import subprocess
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

SAMPLE_INTERVAL_S = 0.2


@dataclass(frozen=True, kw_only=True, slots=True)
class FinishedProcess:
    """How a watched command ended."""

    exit_code: int
    peak_bytes: int
    """Largest sampled sum over the process tree. Shared pages count once (proportional set size)."""


def _children(pid: int) -> list[int]:
    children = []
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            children += [int(word) for word in path.read_text().split()]
        except OSError:  # The thread ended between the listing and the read.
            continue
    return children


def _own_bytes(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:  # The process ended.
        return 0
    sizes_kib = [int(line.split()[1]) for line in lines if line.startswith("Pss:")]
    return sum(sizes_kib) * 1024


def tree_bytes(pid: int) -> int:
    """Return the proportional set size of a process and all its descendants; 0 if it is gone."""
    return _own_bytes(pid) + sum(tree_bytes(child) for child in _children(pid))


def _own_peak_bytes(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:  # The process ended.
        return 0
    return sum(int(line.split()[1]) for line in lines if line.startswith("VmHWM:")) * 1024


def tree_peak_bytes(pid: int) -> int:
    """Return the sum of the largest resident sets of a process and all its live descendants.

    An upper bound: the peaks need not coincide, and shared pages count in each process.
    """
    return _own_peak_bytes(pid) + sum(tree_peak_bytes(child) for child in _children(pid))


def run_watched(command: Sequence[str], cwd: Path, environment: dict[str, str]) -> FinishedProcess:
    """Run a command to its end, with its output passed through, and sample its memory.

    Whatever ends this process ends the command: left alone it would disturb every later measurement.
    """
    process = subprocess.Popen(command, cwd=cwd, env=environment)
    peak = 0
    ended = threading.Event()

    def sample() -> None:
        nonlocal peak
        while not ended.wait(SAMPLE_INTERVAL_S):
            peak = max(peak, tree_bytes(process.pid))

    sampler = threading.Thread(target=sample, daemon=True)
    sampler.start()
    try:
        exit_code = process.wait()
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait()
        ended.set()
        sampler.join()
    return FinishedProcess(exit_code=exit_code, peak_bytes=peak)
