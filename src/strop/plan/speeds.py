"""The speeds that a plan assumes: measured on this machine, or from an accelerator's data sheet."""

from __future__ import annotations

from dataclasses import dataclass, replace

from strop.hardware import Calibration, Machine
from strop.hardware.accelerators import Accelerator, match_gpu
from strop.hardware.calibrate import CPU_EFFICIENCY, GPU_EFFICIENCY, Efficiency
from strop.spec import RunSpec

# Without a measurement, of one core in a large product. Measured: 212 in bf16 (avx512_bf16, Zen 4), 132 and
# 87 in float32 (AVX-512 and AVX2, a Xeon of 2.6 GHz), 1 in emulated bf16. AMX multiplies faster, and the rest
# of a step does not.
FAST_GFLOPS_PER_CORE = 200.0
FLOAT32_GFLOPS_PER_CORE = {"avx512f": 130.0, "avx2": 85.0}
PLAIN_GFLOPS_PER_CORE = 50.0
"""In float32 without either of these, or of a processor that is not known."""
EMULATED_GFLOPS_PER_CORE = 1.0
COPY_GB_PER_S = 10.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Speeds:
    """The assumed speeds of one device."""

    device: str
    """Its name, for people."""
    gflops: float
    """Billions of operations per second of a large product in the run's number format."""
    copy_gb_per_s: float
    link_gb_per_s: float
    """To a neighbouring device, in one direction."""
    efficiency: Efficiency
    memory_bytes: int | None
    """Of the device; None if it is unknown or the machine's memory."""
    is_processor: bool
    """Whether all roles share the cores of one machine."""
    source: str
    """The origin of the numbers: a measurement with its conditions, a data sheet, or 'assumed'."""
    is_measured: bool


def choose_speeds(
    spec: RunSpec,
    machine: Machine,
    calibration: Calibration | None,
    efficiency: Efficiency | None = None,
    accelerator: Accelerator | None = None,
) -> Speeds:
    """Return the speeds of the accelerator, else of the machine's GPU, else of its cores."""
    is_bf16 = spec.model.dtype == "bfloat16"
    if accelerator is None and machine.gpus:
        accelerator = match_gpu(machine.gpus[0].name)
    if accelerator is not None:
        return _of_accelerator(accelerator, is_bf16=is_bf16)
    if calibration is None:
        cores = spec.placement.threads or machine.num_physical_cores
        bf16_gflops = FAST_GFLOPS_PER_CORE if machine.has_fast_bf16 else EMULATED_GFLOPS_PER_CORE
        known = (FLOAT32_GFLOPS_PER_CORE[f] for f in FLOAT32_GFLOPS_PER_CORE if f in machine.cpu_flags)
        gflops = bf16_gflops if is_bf16 else next(known, PLAIN_GFLOPS_PER_CORE)
        source = f"assumed: {gflops:g} GFLOP/s for each of {cores} cores; `strop doctor` measures"
        gflops, copy_gb_per_s = gflops * cores, COPY_GB_PER_S
    else:
        gflops = calibration.gemm_bf16_gflops if is_bf16 else calibration.gemm_fp32_gflops
        copy_gb_per_s = calibration.copy_gb_per_s
        source = f"measured by `strop doctor` with {calibration.num_threads} threads"
    return Speeds(
        device=machine.cpu_name or "this machine",
        gflops=gflops,
        copy_gb_per_s=copy_gb_per_s,
        link_gb_per_s=copy_gb_per_s,
        efficiency=efficiency or CPU_EFFICIENCY,
        memory_bytes=None,
        is_processor=True,
        source=source,
        is_measured=calibration is not None,
    )


def _of_accelerator(accelerator: Accelerator, *, is_bf16: bool) -> Speeds:
    tflops = accelerator.bf16_tflops if is_bf16 else accelerator.fp32_tflops
    own = [name for name in ("learn_frac", "decode_frac") if getattr(accelerator, name) is not None]
    efficiency = GPU_EFFICIENCY
    if own:
        efficiency = replace(
            GPU_EFFICIENCY,
            **{name: getattr(accelerator, name) for name in own},
            source=f"{' and '.join(own)} from {accelerator.source}; else {GPU_EFFICIENCY.source}",
        )
    return Speeds(
        device=accelerator.name,
        gflops=1e3 * tflops,
        copy_gb_per_s=accelerator.memory_gb_per_s,
        link_gb_per_s=accelerator.link_gb_per_s,
        efficiency=efficiency,
        memory_bytes=accelerator.memory_bytes,
        is_processor=False,
        source=f"peak by {accelerator.source}",
        is_measured=False,
    )
