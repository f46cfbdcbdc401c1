"""Which CUDA the installed torch was built for, and whether a driver is new enough, without importing it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

OLDEST_DRIVER = {11: (450, 80), 12: (525, 60), 13: (580, 0)}
"""Major version of CUDA to the first driver branch that runs it on Linux.

Source: CUDA Toolkit release notes, 'Minimum Required Driver Version for CUDA Minor Version Compatibility'.
"""
_COMPAT_GLOB = "cuda*/compat/**/libcuda.so*"
"""NVIDIA's forward-compatibility package, which lets newer CUDA run on an older driver."""
_ASSIGNMENT = r"^{name}(?:\s*:[^=]+)?\s*=\s*(?:'([^']*)'|None)"


@dataclass(frozen=True, kw_only=True, slots=True)
class TorchBuild:
    """What torch says of itself in its file version.py."""

    version: str
    cuda: str | None
    """For example `12.6`; None if it was built without."""
    hip: str | None = None


def read_torch_build(folder: Path | None = None) -> TorchBuild | None:
    """Return how torch was built, None if there is none. `folder` is its package; None finds it."""
    if folder is None:
        spec = find_spec("torch")
        if spec is None or spec.origin is None:
            return None
        folder = Path(spec.origin).parent
    try:
        text = (folder / "version.py").read_text()
    except OSError:
        return None
    found = {name: _find_value(name, text) for name in ("__version__", "cuda", "hip")}
    return TorchBuild(version=found["__version__"] or "unknown", cuda=found["cuda"], hip=found["hip"])


def explain_misfit(build: TorchBuild, driver_version: str | None) -> str | None:
    """Say why a driver does not run what torch was built for; None if it does, or nobody can tell."""
    if build.cuda is None or driver_version is None:
        return None
    major = int(build.cuda.split(".")[0])
    driver = tuple(int(part) for part in driver_version.split(".")[:2] if part.isdigit())
    oldest = OLDEST_DRIVER.get(major)
    if oldest is None or not driver or driver >= oldest:
        return None
    needed = ".".join(map(str, oldest))
    return f"driver {driver_version} is older than {needed}, which CUDA {build.cuda} of torch needs"


def has_compat_package(root: Path = Path("/usr/local")) -> bool:
    """Whether the libraries are installed that lift the driver's limit."""
    return any(root.glob(_COMPAT_GLOB))


def _find_value(name: str, text: str) -> str | None:
    match = re.search(_ASSIGNMENT.format(name=name), text, re.MULTILINE)
    return match[1] if match else None
