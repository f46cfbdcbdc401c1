"""What a part of the check found, as values that JSON holds."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from benchmarks.gpu.device import DevicePeaks


@dataclass(kw_only=True, slots=True)
class PartResult:
    """Everything that one part found."""

    checks: list[dict[str, Any]] = field(default_factory=list)
    """What must hold: `name`, `is_passed`, `found`."""
    measures: list[dict[str, Any]] = field(default_factory=list)
    """Values which nothing is held against: `name`, `value`, `unit`."""
    details: dict[str, Any] = field(default_factory=dict)

    def check(self, name: str, is_passed: bool, found: str) -> None:
        """Add a check."""
        self.checks.append({"name": name, "is_passed": bool(is_passed), "found": found})

    def measure(self, name: str, value: float, unit: str) -> None:
        """Add a measured value."""
        self.measures.append({"name": name, "value": float(value), "unit": unit})


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """What every part is told."""

    device: torch.device
    is_quick: bool
    work_dir: Path
    model_dir: Path | None
    """A real model's directory, where one is at hand."""
    peaks: DevicePeaks | None
    """None only for the part that measures them."""
    limit_s: float
    """How long the part may take; longer ones are stopped."""

    @property
    def is_gpu(self) -> bool:
        """Whether real sizes are run; on a CPU the same code runs tiny ones."""
        return self.device.type == "cuda"
