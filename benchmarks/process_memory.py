"""The memory of a process and all its descendants, sampled while it runs. Linux only."""

from __future__ import annotations

import contextlib
import subprocess
import threading
from collections.abc import Sequence
from pathlib import Path

import psutil

SAMPLE_INTERVAL_S = 0.2


def _tree(pid: int) -> list[psutil.Process]:
    process = psutil.Process(pid)
    return [process, *process.children(recursive=True)]


def tree_bytes(pid: int) -> int:
    """Return the proportional set size of a process and all its descendants; 0 if it is gone."""
    total = 0
    with contextlib.suppress(psutil.NoSuchProcess):
        for process in _tree(pid):
            with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                total += process.memory_full_info().pss
    return total


def tree_peak_bytes(pid: int) -> int:
    """Return the sum of the largest resident sets of a process and all its live descendants.

    An upper bound: the peaks need not coincide, and shared pages count in each process.
    """
    total = 0
    for process in _tree(pid):
        with contextlib.suppress(OSError):  # The process ended.
            lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
            total += sum(int(line.split()[1]) for line in lines if line.startswith("VmHWM:")) * 1024
    return total


def run_watched(command: Sequence[str], cwd: Path, environment: dict[str, str]) -> tuple[int, int]:
    """Run a command to its end, with its output passed through; return its exit code and peak of memory.

    The peak is the largest sampled sum over the process tree; shared pages count once. Whatever ends this
    process ends the command: left alone it would disturb every later measurement.
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
    return exit_code, peak
