"""Whether this machine is ready, and how fast it is: its facts, its cache, its disk, its packages.

The speeds that are measured here are kept in the user's cache and used by `plan` from then on.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from strop.hardware import Calibration, Machine, calibrate_machine, describe_machine, free_disk_bytes
from strop.kernels import kernel_status
from strop.launch.locate import find_model
from strop.launch.training import set_threads
from strop.spec import ModelSpec
from strop.store import list_models, user_cache_dir

EXTRAS = {
    "server": ("fastapi", "uvicorn", "httpx"),
    "tasks": ("reasoning-gym", "math-verify"),
    "query": ("duckdb",),
    "s3": ("boto3",),
}
"""Optional parts of strop and the packages that each needs."""
WANTED_DISK_BYTES = 6_000_000_000
"""What a run of the demo writes at most: three checkpoints of a 135M-parameter model."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Check:
    """One thing that was looked at."""

    name: str
    is_ok: bool
    detail: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Diagnosis:
    """Everything that `strop doctor` found."""

    machine: Machine
    calibration: Calibration
    checks: tuple[Check, ...]


def diagnose(runs_path: Path, *, cache_dir: Path | None = None, time_limit_s: float = 0.5) -> Diagnosis:
    """Look at this machine and measure it, in about three times `time_limit_s`.

    Raises: StoreError if the measurement cannot be written to the cache.
    """
    # As a run would: a measurement with other threads would promise another speed.
    set_threads(None)
    calibration = calibrate_machine(cache_dir=cache_dir, time_limit_s=time_limit_s)
    checks = (
        _check_models(cache_dir),
        Check(
            name="compiled kernels",
            is_ok=kernel_status().path is not None,
            detail=kernel_status().describe(),
        ),
        _check_disk("cache", cache_dir or user_cache_dir()),
        _check_disk("runs", runs_path),
        *(_check_extra(name) for name in EXTRAS),
    )
    return Diagnosis(machine=describe_machine(), calibration=calibration, checks=checks)


def _check_models(cache_dir: Path | None) -> Check:
    uri = ModelSpec().uri
    path = find_model(uri, cache_dir)
    num_models = len(list_models(cache_dir))
    if path is None:
        detail = f"{uri} is not on this machine; `strop model get {uri}` fetches it"
        return Check(name="default model", is_ok=False, detail=detail)
    return Check(name="default model", is_ok=True, detail=f"{path} ({num_models} converted in the cache)")


def _check_disk(name: str, path: Path) -> Check:
    free_bytes = free_disk_bytes(path)
    detail = f"{free_bytes / 1e9:.1f} GB free at {path}; the demo writes {WANTED_DISK_BYTES / 1e9:.1f} GB"
    return Check(name=f"disk of {name}", is_ok=free_bytes >= WANTED_DISK_BYTES, detail=detail)


def _check_extra(name: str) -> Check:
    missing = [package for package in EXTRAS[name] if not _is_installed(package)]
    if missing:
        detail = f"{', '.join(missing)} missing; pip install 'strop[{name}]' adds it"
        return Check(name=f"extra {name}", is_ok=False, detail=detail)
    return Check(name=f"extra {name}", is_ok=True, detail=", ".join(EXTRAS[name]))


def _is_installed(package: str) -> bool:
    try:
        version(package)
    except PackageNotFoundError:
        return False
    return True
