"""Which number format a run computes in, by what the hardware has and by what the run file says."""

from __future__ import annotations

from dataclasses import replace

import pytest

from strop.hardware import Calibration, Gpu, describe_machine
from strop.hardware.accelerators import find_accelerator
from strop.hardware.number_format import DTYPE_FACT, choose_format, settle_format
from strop.spec.run import RunSpec

WITHOUT = "the processor has no instructions for bfloat16"


def make_gpu(capability: float | None) -> Gpu:
    return Gpu(index="0", uuid="u", name="G", memory_bytes=None, compute_capability=capability)


@pytest.mark.parametrize(
    ("flags", "dtype", "reason"),
    [
        (("avx2", "avx512f", "avx512_bf16"), "bfloat16", "the processor has avx512_bf16"),
        (("avx2", "amx_tile", "amx_bf16"), "bfloat16", "the processor has amx_bf16"),
        (("asimd", "bf16"), "bfloat16", "the processor has bf16"),
        (("avx2", "fma", "avx512f"), "float32", WITHOUT),
        ((), "float32", WITHOUT),
    ],
)
def test_a_processor_decides_by_its_instructions(flags: tuple[str, ...], dtype: str, reason: str) -> None:
    found = choose_format("auto", replace(describe_machine(), cpu_flags=flags), None)
    assert (found.dtype, found.reason, found.cost) == (dtype, reason, None)


@pytest.mark.parametrize(("capability", "dtype"), [(7.5, "float32"), (8.0, "bfloat16"), (None, "bfloat16")])
def test_a_gpu_decides_by_its_compute_capability(capability: float | None, dtype: str) -> None:
    assert choose_format("auto", describe_machine(), make_gpu(capability)).dtype == dtype


def test_a_planned_accelerator_decides_by_its_peaks() -> None:
    assert choose_format("auto", describe_machine(), find_accelerator("l4")).dtype == "bfloat16"


def test_what_the_run_file_asks_for_stays_and_has_its_cost() -> None:
    machine = replace(describe_machine(), cpu_flags=("avx2",))
    measured = Calibration(
        measured_at=0.0,
        cpu_name=None,
        num_threads=2,
        torch_version="2",
        gemm_fp32_gflops=90.0,
        gemm_bf16_gflops=1.5,
        copy_gb_per_s=8.0,
    )
    found = choose_format("bfloat16", machine, None, measured)
    # 90 / 1.5.
    assert str(found) == (
        f"bfloat16: the run file says so; {WITHOUT}, and emulates it:"
        " a product takes 60.0 times as long as in float32, by `strop doctor`"
    )
    assert choose_format("float32", machine, None).cost is None


def test_a_run_that_goes_on_elsewhere_keeps_its_format() -> None:
    machine = replace(describe_machine(), cpu_flags=("avx2",))
    given = RunSpec.model_validate({"name": "x", "task": {"name": "arithmetic"}})
    facts = {DTYPE_FACT: "bfloat16"}
    spec, found = settle_format(given, machine, None, facts=facts)
    assert (spec.model.dtype, found.reason) == ("bfloat16", "the run began with it")
    assert found.cost is not None
