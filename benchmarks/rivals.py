"""Which arms there are, and which rival stands against strop in which case."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from benchmarks.cases import Case
from benchmarks.environments import TRL, VLLM, ensure_environment
from benchmarks.harness import Arm
from strop.hardware.python_environment import PythonEnvironment

KV_CACHE_GIB = 2
"""vLLM's cache: 64 rows of 512 tokens of the 135M model take 0.75 GB."""

RIVALS = {"grpo": ("trl",), "generate": ("vllm-compiled", "vllm-eager")}


def _environment(environment: PythonEnvironment) -> Path:
    return ensure_environment(environment, say=lambda text: print(text, file=sys.stderr))


def strop_arm() -> Arm:
    """Return the arm under test, on the interpreter that runs the harness."""
    return Arm(name="strop", python=Path(sys.executable), module="benchmarks.arms.strop_arm")


def _trl_arm() -> Arm:
    return Arm(name="trl", python=_environment(TRL), module="benchmarks.arms.trl_arm")


def _vllm_arm(name: str, threads: int, *, eager: bool) -> Arm:
    cores = ",".join(str(core) for core in sorted(os.sched_getaffinity(0))[:threads])
    return Arm(
        name=name,
        python=_environment(VLLM),
        module="benchmarks.arms.vllm_arm",
        settings={"eager": eager},
        environment={
            "VLLM_CPU_KVCACHE_SPACE": str(KV_CACHE_GIB),
            "VLLM_CPU_OMP_THREADS_BIND": cores,
            "VLLM_NO_USAGE_STATS": "1",
            "DO_NOT_TRACK": "1",
        },
    )


def rival_arm(name: str, threads: int) -> Arm:
    """Return a rival's arm; makes its environment first if that does not exist.

    Raises: KeyError if there is no such rival.
    """
    if name == "trl":
        return _trl_arm()
    is_eager = {"vllm-compiled": False, "vllm-eager": True}
    return _vllm_arm(name, threads, eager=is_eager[name])


def rivals_of(case: Case) -> tuple[str, ...]:
    """Return the names of the rivals that can do a case; the fastest of them is the rival."""
    return RIVALS[case.kind]
