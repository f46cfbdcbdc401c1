"""The C library keeps freed memory, and OpenMP spins for a bounded time, once they were told to."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from strop.hardware import tuning

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


CHILD = "import os; print(*map(os.environ.get, ('GOMP_SPINCOUNT', 'OMP_WAIT_POLICY')))"
SPAWNING = f"""
import sys
from pathlib import Path
from strop.hardware import spawn, tune_process
tune_process()
assert spawn([sys.executable, "-c", {CHILD!r}], Path(sys.argv[1])).wait(240) == 0
"""


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, f"{tuning.SPIN_COUNT} None"),
        ({"OMP_WAIT_POLICY": "active"}, "None active"),
        ({"GOMP_SPINCOUNT": "7"}, "7 None"),
    ],
)
def test_child_processes_spin_as_long_as_a_run_and_what_the_user_set_stays(
    tmp_path: Path, given: dict[str, str], expected: str
) -> None:
    inherited = {
        name: value for name, value in os.environ.items() if not name.startswith(("GOMP_", "OMP_WAIT"))
    }
    log_path = tmp_path / "child.log"
    subprocess.run([sys.executable, "-c", SPAWNING, str(log_path)], env=inherited | given, check=True)
    assert re.fullmatch(expected, log_path.read_text().strip())


COMPUTING = """
import asyncio, functools, os, time
from strop.hardware.tuning import compute_in_thread
import torch

def count():
    return len(os.listdir("/proc/self/task"))

def work():
    # Long enough that PyTorch shares it out among the threads of a team.
    values = torch.arange(1 << 22, dtype=torch.float32)
    for _ in range(3):
        values = values * 1.5
    return count()

async def main():
    # Starts threads of its own, which stay.
    torch.set_num_threads(3)
    before = count()
    meanwhile = await compute_in_thread(work)
    for _ in range(200):
        if count() == before:
            break
        time.sleep(0.05)
    print(before, meanwhile, count())
asyncio.run(main())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="threads are counted in /proc")
def test_a_thread_that_computed_ends_with_its_team() -> None:
    """A team that stays keeps GNU's OpenMP from spinning in every other one, for the rest of the run."""
    ended = subprocess.run([sys.executable, "-c", COMPUTING], capture_output=True, text=True, check=True)
    before, meanwhile, after = map(int, ended.stdout.split())
    assert meanwhile >= before + 3
    assert after == before


IMPORTING = """
import gc, sys
from strop.hardware.tuning import importing
with importing():
    assert not gc.isenabled()
assert gc.get_freeze_count() == 0, "nothing was imported"
with importing():
    import email.mime.text
assert gc.isenabled()
gc.collect()
# What is frozen is in no generation.
assert not any(one is vars(email.mime.text) for one in gc.get_objects())
gc.unfreeze()
gc.disable()
with importing():
    import email.mime.image
assert not gc.isenabled(), "as it was"
class Cycle:
    def __del__(self): print("walked")
sys.cycle = Cycle()
sys.cycle.self = sys.cycle
gc.unfreeze()
"""


def test_what_is_imported_is_never_looked_at_as_garbage() -> None:
    run = subprocess.run(
        [sys.executable, "-c", IMPORTING], capture_output=True, text=True, check=False, timeout=240
    )
    # Nor at the interpreter's end, even if it was thawed meanwhile.
    assert (run.returncode, run.stdout, run.stderr) == (0, "", "")
