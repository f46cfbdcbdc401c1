"""What computes beside the event loop leaves no threads of OpenMP's behind."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from strop.cluster import local_learner
from strop.train import gate_model

COMPUTING = """
import asyncio, functools, os, time
from strop.hardware.compute_thread import compute_in_thread
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


def test_no_room_that_trains_computes_in_a_pool_of_asyncio() -> None:
    """Hashing the weights in asyncio's own threads, which stay, cost every later step 7 to 9 %."""
    for module in (local_learner, gate_model):
        assert module.__file__ is not None
        assert "to_thread" not in Path(module.__file__).read_text()
