"""Processors that the machine at hand is not: the same run, and the same numbers, on each of them.

Emulated ones stand for x86 without AVX2 (Nehalem), for Intel before AVX-512 (Haswell) and for ARM, the last
two for the kernels alone; variables leave out what PyTorch and oneDNN would use here. An emulated process
computes about ten times slower.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

from benchmarks.machine import AVX2
from strop.kernels import kernel_status, library
from tests.conftest import require_system_part
from tests.fixtures.kernels import needs_kernels

ROOT = Path(__file__).parents[1]
KERNELS = ROOT / "src" / "strop" / "kernels"
X86 = "qemu-x86_64-static"
ARM, ARM_COMPILER, ARM_ROOT = "qemu-aarch64-static", "aarch64-linux-gnu-gcc", "/usr/aarch64-linux-gnu"
COMPILER = (os.environ.get("CC", "cc"),)
LIMIT_S = 3600.0
ALONE = "import sys, pathlib, tests.fixtures.tiny_model as tiny; tiny.tiny_model(pathlib.Path(sys.argv[1]))"
"""A program without strop's own code: PyTorch and transformers make a model."""
needs_x86 = pytest.mark.skipif(os.uname().machine != "x86_64", reason="an x86 interpreter, to emulate")


def run_whole(
    folder: Path,
    *,
    emulator: tuple[str, ...] = (),
    words: tuple[str, ...] = (),
    variables: Mapping[str, str] = MappingProxyType({}),
) -> list[dict[str, Any]]:
    """Train, interrupt, resume and evaluate in one process; return what it says of each run.

    `words` are settings of the training, `--once` where one attempt is enough, and `and` before another's.
    """
    # What the tests may be started with: an emulated processor can do less than it promises.
    inherited = {name: value for name, value in os.environ.items() if name not in AVX2}
    environment = {**inherited, **variables, "STROP_CACHE": str(folder / "cache")}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
    environment["PYTHONFAULTHANDLER"] = "1"

    def call(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [*emulator, sys.executable, *arguments]
        return subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=LIMIT_S, check=False
        )

    done = call("-m", "tests.fixtures.whole_run", str(folder), *words)
    if emulator and done.returncode == -signal.SIGILL:
        # What needs an instruction that is not there dies each time. QEMU 7.2 did once before the run's first
        # output and in none of 18 runs after it; where PyTorch alone dies as well, strop has no part in it.
        done = call("-m", "tests.fixtures.whole_run", str(folder / "again"), *words)
        if done.returncode == -signal.SIGILL and call("-c", ALONE, str(folder)).returncode == -signal.SIGILL:
            pytest.skip(f"{emulator[-1]}: PyTorch and transformers alone die here: {done.stderr[-1000:]}")
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


@pytest.fixture(scope="module")
def by_avx2(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """By AVX2 and no more: the run in the format that all processors have, and in bfloat16."""
    limits = {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2"}
    return run_whole(tmp_path_factory.mktemp("here"), words=("and", "model.dtype=bfloat16"), variables=limits)


def require_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    """Compare the steps: the same tokens, rewards and gradients up to rounding."""
    assert found["dtype"] == "float32"
    assert "no instructions for bfloat16" in found["dtype_reason"]
    for mine, theirs in zip(found["steps"], expected["steps"], strict=False):
        assert mine == pytest.approx(theirs, rel=2e-3)


@pytest.mark.slow
def test_a_run_is_the_same_without_avx_and_without_a_compiler(
    tmp_path: Path, by_avx2: list[dict[str, Any]]
) -> None:
    limits = {"ATEN_CPU_CAPABILITY": "default", "ONEDNN_MAX_CPU_ISA": "SSE41", "CC": "no-such-compiler"}
    (found,) = run_whole(tmp_path, variables=limits)
    require_same(found, by_avx2[0])
    assert len(found["steps"]) == len(by_avx2[0]["steps"]) == 2
    assert found["num_attempts"] == by_avx2[0]["num_attempts"] == 2
    assert found["result_dtype"] == "float32"
    assert found["evaluated"] == pytest.approx(by_avx2[0]["evaluated"])
    assert found["capability"] == "DEFAULT"
    assert "not compiled" in found["kernels"]


@pytest.mark.slow
@needs_x86
def test_bfloat16_on_a_processor_without_it_is_announced_and_works(by_avx2: list[dict[str, Any]]) -> None:
    found = by_avx2[1]
    assert (found["capability"], found["dtype"]) == ("AVX2", "bfloat16")
    cost = "the processor has no instructions for bfloat16, and emulates it"
    # Of each attempt: the second one goes on in the same format.
    told = [notice for notice in found["notices"] if notice.startswith("model.dtype: bfloat16: ")]
    assert len(told) == 2
    assert all(cost in notice for notice in told)
    assert [step["step"] for step in found["steps"]] == [1, 2]
    assert all(math.isfinite(step["grad_norm"]) and step["grad_norm"] > 0 for step in found["steps"])


@pytest.mark.slow
@needs_x86
def test_a_run_is_the_same_on_an_emulated_processor(tmp_path: Path, by_avx2: list[dict[str, Any]]) -> None:
    """Nehalem has neither AVX nor AVX2.

    One attempt of one step, with kernels: that a run goes on, and is evaluated, in the format of such a
    processor is tried above.
    QEMU takes nine times as long for MKL's products with fused additions: MKL and oneDNN leave them out,
    which the run on this machine has. PyTorch's own code has them here.
    """
    require_system_part("qemu-user-static", shutil.which(X86) is not None)
    # One thread: two would spin for each other under emulation.
    (found,) = run_whole(
        tmp_path,
        emulator=(X86, "-cpu", "Nehalem"),
        words=("--once", "train.steps=1", "eval.num_examples=1", "eval.num_samples=none"),
        variables={"ONEDNN_MAX_CPU_ISA": "SSE41", "MKL_ENABLE_INSTRUCTIONS": "SSE4_2"},
    )
    assert found["capability"] == "DEFAULT"
    assert len(found["steps"]) == 1
    require_same(found, by_avx2[0])


def show_kernels(folder: Path, command: tuple[str, ...], runner: tuple[str, ...] = ()) -> dict[str, float]:
    """Compile the kernels with a program that runs each of them; return the numbers that it prints."""
    program = folder / "every_kernel"
    flags = ("-fopenmp", "-fno-math-errno", "-fno-trapping-math", "-w", "-I", str(KERNELS))
    source = Path(__file__).parent / "kernels" / "every_kernel.c"
    subprocess.run([*command, *flags, str(source), "-o", str(program), "-lm"], check=True, timeout=LIMIT_S)
    done = subprocess.run(
        [*runner, str(program)], capture_output=True, text=True, check=True, timeout=LIMIT_S
    )
    pairs = [line.split() for line in done.stdout.splitlines()]
    assert len(pairs) > 1000
    return {f"{index} {name}": float(value) for index, (name, value) in enumerate(pairs)}


@pytest.fixture(scope="module")
def kernels_here(tmp_path_factory: pytest.TempPathFactory) -> dict[str, float]:
    """What the kernels compute on this machine, compiled in a third of the time."""
    assert kernel_status().path is not None
    return show_kernels(tmp_path_factory.mktemp("here"), (*COMPILER, "-O1"))


@pytest.mark.slow
@needs_kernels
@needs_x86
def test_the_kernels_for_avx2_run_where_there_is_no_avx512(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kernels_here: dict[str, float]
) -> None:
    """Haswell has AVX2 and no AVX-512: an instruction too many would end the program."""
    require_system_part("qemu-user-static", shutil.which(X86) is not None)
    monkeypatch.setattr("torch.backends.cpu.get_cpu_capability", lambda: "AVX2")
    flags = library._instruction_flags()
    assert "-mavx2" in flags
    on_haswell = show_kernels(tmp_path, (*COMPILER, "-O3", *flags), (X86, "-cpu", "Haswell"))
    assert on_haswell == pytest.approx(kernels_here, rel=2**-7, abs=1e-6)


@pytest.mark.slow
@needs_kernels
def test_the_kernels_give_the_same_numbers_on_arm(tmp_path: Path, kernels_here: dict[str, float]) -> None:
    has_all = shutil.which(ARM) is not None and shutil.which(ARM_COMPILER) is not None
    require_system_part("qemu-user-static and gcc-aarch64-linux-gnu", has_all)
    on_arm = show_kernels(tmp_path, (ARM_COMPILER, "-O3"), (ARM, "-L", ARM_ROOT))
    # One unit in the last place of bfloat16 is 2^-8 of a value.
    assert on_arm == pytest.approx(kernels_here, rel=2**-7, abs=1e-6)
    exact = [
        name for name, value in kernels_here.items() if abs(on_arm[name] - value) > 1e-5 * abs(value) + 1e-7
    ]
    assert len(exact) < len(kernels_here) / 100
