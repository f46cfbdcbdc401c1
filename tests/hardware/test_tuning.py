"""The C library keeps freed memory, and OpenMP spins for a bounded time, once they were told to."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import os, resource, sys
from strop.hardware.tuning import tune_process
if sys.argv[1] == "kept":
    tune_process()
    assert os.environ["THP_MEM_ALLOC_ENABLE"] == "1"
def churn():
    for _ in range(8):
        blocks = [bytearray(4 << 20) for _ in range(16)]
        del blocks
churn()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
churn()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def count_page_faults(mode: str) -> int:
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM, mode], capture_output=True, text=True, check=True, timeout=240
    )
    return int(run.stdout)


def test_freed_memory_is_taken_again_without_page_faults() -> None:
    # 8 rounds of 64 MiB are 131,072 pages of 4 KiB; kept memory is touched without a fault.
    assert count_page_faults("kept") < count_page_faults("given back") / 4
