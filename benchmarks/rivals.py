"""Which arms there are, and which rival stands against strop in which case."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from benchmarks.cases import Case
from benchmarks.harness import Arm
from strop.engine.vllm.environment import VLLM
from strop.hardware import describe_machine
from strop.hardware.number_format import AUTO, choose_format, compute_device
from strop.hardware.tuning import SPIN_COUNT
from strop.store.python_environment import PythonEnvironment, ensure_environment

TRL = PythonEnvironment(
    name="trl-1.16.0", folder="bench", pip_steps=(("torch==2.13.0",), ("trl==1.16.0", "gguf"))
)
"""An environment of its own, as vLLM's is: pins that a benchmark bends would measure what nobody runs."""
KV_CACHE_GIB = 2
"""vLLM's cache: 64 rows of 512 tokens of the 135M model take 0.75 GB."""

RIVALS = {"grpo": ("trl",), "generate": ("vllm-compiled", "vllm-eager")}


def _environment(environment: PythonEnvironment) -> Path:
    return ensure_environment(environment, say=lambda text: print(text, file=sys.stderr))


def settled_dtype() -> str:
    """Return the number format that a run takes here where its file leaves it open; every arm takes it."""
    machine = describe_machine()
    return choose_format(AUTO, machine, compute_device(machine)).dtype


def strop_arm() -> Arm:
    """Return the arm under test, on the interpreter that runs the harness."""
    return Arm(
        name="strop",
        python=Path(sys.executable),
        module="benchmarks.arms.strop_arm",
        settings={"dtype": settled_dtype()},
        # As a run has it: read when torch is imported, so it must be there before the worker is.
        environment={"GOMP_SPINCOUNT": str(SPIN_COUNT)},
    )


def _trl_arm() -> Arm:
    return Arm(
        name="trl",
        python=_environment(TRL),
        module="benchmarks.arms.trl_arm",
        # Its weights are float32 either way; products are in bfloat16 where strop's are.
        settings={"autocast": settled_dtype() == "bfloat16"},
    )


def _vllm_arm(name: str, threads: int, *, eager: bool) -> Arm:
    cores = ",".join(str(core) for core in sorted(os.sched_getaffinity(0))[:threads])
    return Arm(
        name=name,
        python=_environment(VLLM),
        module="benchmarks.arms.vllm_arm",
        settings={"eager": eager, "dtype": settled_dtype()},
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
