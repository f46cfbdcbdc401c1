"""Run all tests: the fast part, and beside it the slow part where there is room for both.

The fast part is shown as it runs. What the slow part says is shown after it, and from then on as it
comes. Where the fast part fails, the slow one is ended. Each mostly waits for one core.

Usage: python -m tools.test_parts
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

NEEDED_CORES = 2
NEEDED_BYTES = 6 << 30
"""Free memory for two parts: each holds up to 2 GB, and their models and servers as much again."""
END_LIMIT_S = 60.0


def main() -> int:
    """Run both parts; return the exit code of the first that fails."""
    fast, slow = ([sys.executable, "-m", "pytest", "-m", marks] for marks in ("not slow", "slow"))
    if has_room(num_cores(), free_bytes()):
        return run_beside(fast, slow)
    return subprocess.call(fast) or subprocess.call(slow)


def has_room(cores: int, memory_bytes: int | None) -> bool:
    """Whether both parts may run at once; not where nothing tells how much memory is free."""
    return cores >= NEEDED_CORES and memory_bytes is not None and memory_bytes >= NEEDED_BYTES


def run_beside(shown: Sequence[str], kept: Sequence[str]) -> int:
    """Run two commands at once, and show the second's output after the first; return what `main` does."""
    with tempfile.TemporaryFile() as output:
        beside = subprocess.Popen(kept, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT)
        try:
            code = subprocess.call(shown)
            if code == 0:
                show_until_end(beside, output.fileno())
                code = beside.wait()
        finally:
            end(beside)
    return code


def show_until_end(process: subprocess.Popen[bytes], output: int) -> None:
    """Copy a process's output to standard output until there is no more."""
    offset = 0
    while True:
        has_ended = process.poll() is not None
        text = os.pread(output, 1 << 16, offset)
        offset += len(text)
        sys.stdout.buffer.write(text)
        sys.stdout.buffer.flush()
        if not text:
            if has_ended:
                return
            time.sleep(0.2)


def end(process: subprocess.Popen[bytes]) -> None:
    """End a process as Ctrl-C does, so that it ends what it has started; by force if it does not."""
    if process.poll() is not None:
        return
    process.send_signal(signal.SIGINT)
    try:
        process.wait(END_LIMIT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def num_cores() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def free_bytes() -> int | None:
    """Return the memory that is free here, or None where Linux's file of it is missing."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        # Lines read "MemAvailable:    8042344 kB".
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):
        return None


if __name__ == "__main__":
    sys.exit(main())
