"""Accelerators for planning a run without having one: a table, or a user's file.

Peaks are for dense matrix products; a real program reaches a fraction of them (`calibrate.Efficiency`).
The link is the bandwidth of one device to its neighbours in the same machine, in one direction.
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

from pydantic import Field, ValidationError

from strop.errors import ConfigError
from strop.spec.base import Section


class Accelerator(Section):
    """The properties of a device that a plan needs."""

    name: str = Field(min_length=1, description="How it is called.")
    bf16_tflops: float = Field(gt=0.0, description="Peak of dense bfloat16 products, 1e12 operations per s.")
    fp32_tflops: float = Field(gt=0.0, description="Peak in float32 outside tensor cores, 1e12 per s.")
    memory_gb: float = Field(gt=0.0, description="Memory, 1e9 bytes.")
    memory_gb_per_s: float = Field(gt=0.0, description="Bandwidth of the memory, 1e9 bytes per s.")
    link_gb_per_s: float = Field(gt=0.0, description="To other devices, one direction, 1e9 bytes per s.")
    learn_frac: float | None = Field(
        default=None, gt=0.0, le=1.0, description="Share of the peak that learning reaches, if it is known."
    )
    decode_frac: float | None = Field(
        default=None, gt=0.0, le=1.0, description="Share of the peak that decoding reaches, if it is known."
    )
    source: str = Field(default="the file", description="Where the numbers are from.")

    @property
    def memory_bytes(self) -> int:
        """The memory in bytes."""
        return int(self.memory_gb * 1e9)


# Peaks of data sheets, dense: bfloat16 and float32 in TFLOP/s, memory in GB and GB/s. For links, half of the
# data sheet's total, which adds both directions.
_PEAKS = {
    "gb200": (2500.0, 80.0, 186.0, 8000.0, 900.0, "NVIDIA GB200 NVL72 data sheet, one of 72"),
    "b200": (2250.0, 80.0, 180.0, 8000.0, 900.0, "NVIDIA Blackwell architecture brief, HGX B200"),
    "h200": (989.0, 67.0, 141.0, 4800.0, 450.0, "NVIDIA H200 data sheet, SXM"),
    "h100": (989.0, 67.0, 80.0, 3350.0, 450.0, "NVIDIA H100 data sheet, SXM"),
    "h100-pcie": (756.0, 51.0, 80.0, 2000.0, 64.0, "NVIDIA H100 data sheet, PCIe"),
    "h20": (148.0, 44.0, 96.0, 4000.0, 450.0, "NVIDIA H20 data sheet"),
    "a100-80": (312.0, 19.5, 80.0, 2039.0, 300.0, "NVIDIA A100 data sheet, SXM 80 GB"),
    "a100-40": (312.0, 19.5, 40.0, 1555.0, 300.0, "NVIDIA A100 data sheet, SXM 40 GB"),
    "l40s": (362.0, 91.6, 48.0, 864.0, 32.0, "NVIDIA L40S data sheet"),
    "l4": (121.0, 30.3, 24.0, 300.0, 32.0, "NVIDIA L4 data sheet"),
    "a10": (125.0, 31.2, 24.0, 600.0, 32.0, "NVIDIA A10 data sheet"),
    "a10g": (70.0, 31.5, 24.0, 600.0, 32.0, "NVIDIA A10G data sheet"),
    "5090": (209.5, 104.8, 32.0, 1792.0, 64.0, "NVIDIA RTX Blackwell GPU architecture paper, RTX 5090"),
    "4090": (165.2, 82.6, 24.0, 1008.0, 32.0, "NVIDIA Ada GPU architecture paper, RTX 4090"),
    "mi300x": (1307.4, 163.4, 192.0, 5300.0, 448.0, "AMD Instinct MI300X data sheet, 7 links"),
}
_FIELDS = ("bf16_tflops", "fp32_tflops", "memory_gb", "memory_gb_per_s", "link_gb_per_s", "source")
ACCELERATORS = {
    name: Accelerator.model_validate({"name": name, **dict(zip(_FIELDS, peaks, strict=True))})
    for name, peaks in _PEAKS.items()
}
_SLICE = re.compile(r"\d+g\.\d+gb|mig")
_MAKERS = re.compile(r"^(nvidia-|amd-|tesla-|geforce-|instinct-|rtx-)+")


def find_accelerator(text: str, *, setting: str = "--hardware") -> Accelerator:
    """Return the accelerator with a name in the table, or described in a TOML file.

    `setting`: the setting with this value, for messages.
    Raises: ConfigError if there is no such name and no such file, or the file does not describe one.
    """
    if text.lower() in ACCELERATORS:
        return ACCELERATORS[text.lower()]
    path = Path(text)
    if not path.is_file():
        raise ConfigError(
            f"{setting} {text} is no accelerator that strop knows, and no file",
            allowed=f"{', '.join(ACCELERATORS)}, or a TOML file that describes one",
            next_step="name one of these, or write its numbers into a file",
        )
    try:
        return Accelerator.model_validate(tomllib.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError) as error:
        faults = error.errors() if isinstance(error, ValidationError) else []
        first = "; ".join(f"{'.'.join(map(str, fault['loc']))}: {fault['msg']}" for fault in faults)
        raise ConfigError(
            f"the accelerator's file {path}: {first or error}",
            allowed=f"TOML with the keys {', '.join(Accelerator.model_fields)}; numbers above 0",
            next_step="correct the file",
        ) from error


def match_gpu(name: str) -> Accelerator | None:
    """Return the accelerator with a driver's or a scheduler's name: NVIDIA H100 80GB HBM3, or h100.

    None for an unknown or ambiguous name (a100), and for a slice of a GPU.
    """
    words = _MAKERS.sub("", name.lower().replace("_", "-").replace(" ", "-"))
    kind = words.partition("-")[0]
    if words in ACCELERATORS or _SLICE.search(words):
        return ACCELERATORS.get(words)
    if kind == "h100" and "pcie" in words:
        kind = "h100-pcie"
    if kind == "a100":
        sizes = [size for size in ("40", "80") if f"{size}gb" in words or words.endswith(f"-{size}")]
        kind = f"a100-{sizes[0]}" if sizes else kind
    return ACCELERATORS.get(kind)
