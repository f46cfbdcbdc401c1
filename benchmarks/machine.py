"""Facts about the machine, and what it can do right now.

The calibration (matrix products) runs in a process of its own before and after the
measured pairs. Two readings that differ by more than `CALIBRATION_DRIFT_FRAC` mean that something
else used the machine in between; the result is then marked as not quiet.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from strop.hardware import describe_machine

CALIBRATION_LIMIT_S = 1.0
CALIBRATION_DRIFT_FRAC = 0.05
QUIET_LOAD_PER_CORE = 0.2
AVX2 = {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2", "MKL_ENABLE_INSTRUCTIONS": "AVX2"}
"""Variables with which PyTorch, oneDNN and MKL use nothing that a processor has beyond AVX2."""


def load_average() -> float:
    """Return the number of runnable processes, averaged over the last minute."""
    return os.getloadavg()[0]


def num_cores() -> int:
    """Return the cores that this process may use."""
    return len(os.sched_getaffinity(0))


def machine_facts() -> dict[str, Any]:
    """Return what a reader needs to judge absolute numbers. Names no host."""
    facts = asdict(describe_machine())
    del facts["host"]
    return {**facts, "limited_to": limits()}


def limits() -> dict[str, str]:
    """Return the variables that keep programs from instructions that the processor has."""
    return {name: os.environ[name].lower() for name in AVX2 if name in os.environ}


def git_revision(root: Path) -> str:
    """Return the commit that is checked out, with '+changes' if files differ from it."""
    changes = _git(root, "status", "--porcelain", "--untracked-files=no")
    return (_git(root, "rev-parse", "HEAD") or "unknown") + ("+changes" if changes else "")


def _git(root: Path, *words: str) -> str:
    """Return what git says, nothing where it refuses."""
    done = subprocess.run(["git", *words], cwd=root, check=False, capture_output=True, text=True)
    return done.stdout.rstrip() if done.returncode == 0 else ""


def _measure(threads: int) -> dict[str, float]:
    import torch

    from strop.hardware.calibrate import measure_gemm

    torch.set_num_threads(threads)
    return {
        name: measure_gemm(dtype, CALIBRATION_LIMIT_S) / 1e9
        for name, dtype in (("gemm_bf16_gf", "bfloat16"), ("gemm_fp32_gf", "float32"))
    }


def calibrate(threads: int) -> dict[str, float]:
    """Measure matrix products (GFLOP/s), the best of many tries."""
    command = [sys.executable, "-m", "benchmarks.machine", str(threads)]
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    root = Path(__file__).parents[1]
    done = subprocess.run(command, env=environment, cwd=root, check=True, capture_output=True, text=True)
    rates: dict[str, float] = json.loads(done.stdout)
    return rates


def calibration_drift(before: dict[str, float], after: dict[str, float]) -> float:
    """Return the largest relative change of any calibrated rate."""
    return max(abs(after[name] / before[name] - 1.0) for name in before)


def wait_until_quiet(limit_s: float) -> float:
    """Wait until the load is below `QUIET_LOAD_PER_CORE` per core; return the load at the end."""
    ends_at = time.monotonic() + limit_s
    while load_average() > QUIET_LOAD_PER_CORE * num_cores() and time.monotonic() < ends_at:
        time.sleep(2.0)
    return load_average()


if __name__ == "__main__":
    print(json.dumps(_measure(int(sys.argv[1]))))
