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


def _device(
    name: str,
    peaks: tuple[float, float],
    memory: tuple[float, float],
    link_gb_per_s: float,
    source: str,
) -> Accelerator:
    """Make a row of the table: (bf16, fp32) in TFLOP/s, (GB, GB/s), GB/s."""
    return Accelerator(
        name=name,
        bf16_tflops=peaks[0],
        fp32_tflops=peaks[1],
        memory_gb=memory[0],
        memory_gb_per_s=memory[1],
        link_gb_per_s=link_gb_per_s,
        source=source,
    )


# For links, half of the data sheet's total, which adds both directions.
ACCELERATORS = (
    _device("h200", (989.0, 67.0), (141.0, 4800.0), 450.0, "NVIDIA H200 data sheet, SXM"),
    _device("h100", (989.0, 67.0), (80.0, 3350.0), 450.0, "NVIDIA H100 data sheet, SXM"),
    _device("h100-pcie", (756.0, 51.0), (80.0, 2000.0), 64.0, "NVIDIA H100 data sheet, PCIe"),
    _device("a100-80", (312.0, 19.5), (80.0, 2039.0), 300.0, "NVIDIA A100 data sheet, SXM 80 GB"),
    _device("a100-40", (312.0, 19.5), (40.0, 1555.0), 300.0, "NVIDIA A100 data sheet, SXM 40 GB"),
    _device("l40s", (362.0, 91.6), (48.0, 864.0), 32.0, "NVIDIA L40S data sheet"),
    _device("l4", (121.0, 30.3), (24.0, 300.0), 32.0, "NVIDIA L4 data sheet"),
    _device("a10", (125.0, 31.2), (24.0, 600.0), 32.0, "NVIDIA A10 data sheet"),
    _device("a10g", (70.0, 31.5), (24.0, 600.0), 32.0, "NVIDIA A10G data sheet"),
    _device("4090", (165.2, 82.6), (24.0, 1008.0), 32.0, "NVIDIA Ada GPU architecture paper, RTX 4090"),
)
_SLICE = re.compile(r"\d+g\.\d+gb|mig")
_NAMES_OF_DRIVER = (
    *(("H200", "h200"), ("H100 PCIe", "h100-pcie"), ("H100", "h100"), ("L40S", "l40s"), ("RTX 4090", "4090")),
    *(
        ("A100-SXM4-80GB", "a100-80"),
        ("A100-SXM4-40GB", "a100-40"),
        ("NVIDIA L4", "l4"),
        ("NVIDIA A10", "a10"),
        ("NVIDIA A10G", "a10g"),
    ),
)
"""From names of nvidia-smi. The first match counts: a full name with 'NVIDIA ', or a prefix without it."""


def find_accelerator(text: str, *, setting: str = "--hardware") -> Accelerator:
    """Return the accelerator with a name in the table, or described in a TOML file.

    `setting`: the setting with this value, for messages.
    Raises: ConfigError if there is no such name and no such file, or the file does not describe one.
    """
    by_name = {device.name: device for device in ACCELERATORS}
    known = ", ".join(by_name)
    if text.lower() in by_name:
        return by_name[text.lower()]
    path = Path(text)
    if not path.is_file():
        raise ConfigError(
            f"{setting} {text} is no accelerator that strop knows, and no file",
            allowed=f"{known}, or a TOML file that describes one",
            next_step="name one of these, or write its numbers into a file",
        )
    allowed = ", ".join(Accelerator.model_fields)
    try:
        return Accelerator.model_validate(tomllib.loads(path.read_text(encoding="utf-8")))
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, first["loc"]))
        what = {
            "extra_forbidden": f"{key} is no key that strop knows",
            "missing": f"{key} is missing",
        }.get(first["type"], f"{key}={first['input']!r}: {first['msg'].lower()}")
        raise _refuse_file(path, what, f"the keys {allowed}; numbers above 0") from error
    except (OSError, ValueError) as error:
        raise _refuse_file(path, str(error), f"TOML with the keys {allowed}") from error


def match_gpu(driver_name: str) -> Accelerator | None:
    """Return the accelerator with a name of nvidia-smi; None if it is not in the table."""
    bare = driver_name.removeprefix("NVIDIA ").removeprefix("GeForce ")
    for beginning, name in _NAMES_OF_DRIVER:
        wanted = beginning.removeprefix("NVIDIA ")
        if bare == wanted or (not beginning.startswith("NVIDIA ") and bare.startswith(wanted)):
            return find_accelerator(name)
    return None


def match_gpu_type(name: str) -> Accelerator | None:
    """Return the accelerator with a scheduler's name, such as h100 or nvidia_a100-sxm4-80gb.

    None for an unknown or ambiguous name (a100), and for a slice of a GPU.
    """
    words = name.lower().replace("_", "-").removeprefix("nvidia-").removeprefix("tesla-")
    by_name = {device.name: device for device in ACCELERATORS}
    if words in by_name:
        return by_name[words]
    if _SLICE.search(words):
        return None
    kind = words.removeprefix("rtx-").partition("-")[0]
    if kind == "h100" and "pcie" in words:
        return by_name["h100-pcie"]
    if kind == "a100":
        sizes = [size for size in ("40", "80") if f"{size}gb" in words or words.endswith(f"-{size}")]
        return by_name[f"a100-{sizes[0]}"] if sizes else None
    return by_name.get(kind)


def _refuse_file(path: Path, what: str, allowed: str) -> ConfigError:
    return ConfigError(
        f"the accelerator's file {path}: {what}", allowed=allowed, next_step="correct the file"
    )
