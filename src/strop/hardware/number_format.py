"""The choice of a run's number format for `model.dtype = "auto"`, and the cost of the other format.

bfloat16 where the hardware multiplies it: processors with avx512_bf16, AMX or ARM's bf16, GPUs of compute
capability 8.0 and above. Elsewhere float32, because bfloat16 is emulated there, an order of magnitude slower.
Masters and moments are always float32.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from strop.errors import CheckRefused
from strop.hardware.accelerators import Accelerator
from strop.hardware.gpus import Gpu, read_torch_build
from strop.hardware.machine import BF16_INSTRUCTIONS, Machine
from strop.hardware.visible_devices import VISIBLE_DEVICES, DeviceForm, parse_visible_devices
from strop.spec.run import RunSpec

AUTO = "auto"
DTYPE_FACT, REASON_FACT = "dtype", "dtype_reason"
"""Keys of run.json; a resumed run keeps its number format."""
_BF16_CAPABILITY = 8.0


@dataclass(frozen=True, kw_only=True, slots=True)
class NumberFormat:
    """A number format and the reason for it."""

    dtype: Literal["bfloat16", "float32"]
    reason: str
    """For messages, for example 'the processor has no instructions for bfloat16'."""
    cost: str | None = None
    """The cost of a requested format on hardware without it."""

    def __str__(self) -> str:
        """Format it as one line."""
        return f"{self.dtype}: {self.reason}" + (f"; {self.cost}" if self.cost else "")


def choose_format(requested: str, machine: Machine, device: Gpu | Accelerator | None) -> NumberFormat:
    """Return the format for `model.dtype` on a device; None is the machine's processor."""
    is_fast, why = _has_fast_bf16(machine, device)
    if requested == AUTO:
        return NumberFormat(dtype="bfloat16" if is_fast else "float32", reason=why)
    dtype: Literal["bfloat16", "float32"] = "bfloat16" if requested == "bfloat16" else "float32"
    cost = f"{why}, and emulates it: products take many times as long, as `strop doctor` measures"
    is_emulated = dtype == "bfloat16" and not is_fast
    return NumberFormat(dtype=dtype, reason="the run file says so", cost=cost if is_emulated else None)


def settle_format(
    spec: RunSpec,
    machine: Machine,
    device: Gpu | Accelerator | None,
    *,
    facts: Mapping[str, object] | None = None,
) -> tuple[RunSpec, NumberFormat]:
    """Return the spec with a number format in place of 'auto', and the format with its reason.

    `facts`: those of a resumed run, which keeps its format on every machine.
    """
    kept = (facts or {}).get(DTYPE_FACT)
    chosen = choose_format(str(kept or spec.model.dtype), machine, device)
    if kept is not None and spec.model.dtype == AUTO:
        chosen = NumberFormat(dtype=chosen.dtype, reason="the run began with it", cost=chosen.cost)
    return spec.model_copy(update={"model": spec.model.model_copy(update={"dtype": chosen.dtype})}), chosen


def _has_fast_bf16(machine: Machine, device: Gpu | Accelerator | None) -> tuple[bool, str]:
    """Return whether bfloat16 is fast on a device, and the fact that decides it."""
    if isinstance(device, Accelerator):
        is_fast = device.bf16_tflops > device.fp32_tflops
        return is_fast, f"{device.name} is {'faster' if is_fast else 'not faster'} in bfloat16"
    if device is not None:
        capability = device.compute_capability
        if capability is None or capability >= _BF16_CAPABILITY:
            return True, f"{device.name} multiplies bfloat16"
        return False, f"{device.name} (compute capability {capability}) has no instructions for bfloat16"
    instructions = [flag for flag in BF16_INSTRUCTIONS if flag in machine.cpu_flags]
    if instructions:
        return True, f"the processor has {instructions[0]}"
    return False, "the processor has no instructions for bfloat16"


def compute_device(machine: Machine) -> Gpu | None:
    """Return the GPU that PyTorch computes on in this process; None for the processor.

    If PyTorch is loaded, it decides; otherwise the installed build and the driver do.

    Raises: CheckRefused if CUDA_VISIBLE_DEVICES names a GPU or a slice by its UUID, and PyTorch sees none.
    """
    text = os.environ.get(VISIBLE_DEVICES)
    form = parse_visible_devices(text).form
    torch = sys.modules.get("torch")
    gpu = None if form is DeviceForm.NONE else next(iter(machine.gpus), None)
    if torch is None:
        build = read_torch_build()
        gpu = gpu if build is not None and build.cuda is not None else None
    elif not torch.cuda.is_available():
        gpu = None
    elif gpu is None:
        # A GPU that NVML does not know. Only then, since this call takes GPU memory.
        capability = float(".".join(map(str, torch.cuda.get_device_capability())))
        name = torch.cuda.get_device_name()
        gpu = Gpu(index="0", uuid="", name=name, memory_bytes=None, compute_capability=capability)
    if gpu is None and form in (DeviceForm.GPU_UUID, DeviceForm.MIG_UUID):
        raise CheckRefused(
            f"{VISIBLE_DEVICES}={text}, and PyTorch sees no GPU here: the run would compute on the processor",
            allowed="a GPU or a slice that `nvidia-smi -L` lists, with PyTorch for CUDA; or no variable",
            next_step="correct the variable, or install PyTorch for CUDA",
        )
    return gpu
