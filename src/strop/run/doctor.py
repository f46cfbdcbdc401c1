"""Whether this machine is ready, and how fast it is: facts, disks, packages, GPUs, and who has them.

The speeds that are measured here are kept in the user's cache and used by `plan` from then on.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from strop.hardware import Calibration, Machine, calibrate_machine, describe_machine, free_disk_bytes
from strop.hardware.disks import Disk, describe_disk
from strop.hardware.inventory import Device, read_inventory
from strop.hardware.leases import Lease, LeaseState, find_leases, state_of
from strop.hardware.leftovers import find_processes, find_strays
from strop.hardware.ports import ListeningPort, read_listening_ports
from strop.io import user_cache_dir
from strop.kernels import kernel_status
from strop.plan.locate import find_model
from strop.run.training import set_threads
from strop.spec import ModelSpec
from strop.store import list_models

EXTRAS = {
    "server": ("fastapi", "uvicorn", "httpx"),
    "tasks": ("reasoning-gym", "math-verify"),
    "ray": ("ray",),
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
class DeviceUse:
    """A GPU or a MIG slice, and who has it."""

    device: Device
    users: tuple[str, ...]
    """Processes that compute on it, as far as they can be seen."""
    holder: str | None
    """The living run that holds it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Holding:
    """A lease of this user, and what belongs to it."""

    lease: Lease
    state: LeaseState
    processes: tuple[int, ...]
    """Those that carry its id. Of a dead run they are leftovers."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Diagnosis:
    """Everything that `strop doctor` found."""

    machine: Machine
    calibration: Calibration
    checks: tuple[Check, ...]
    devices: tuple[DeviceUse, ...]
    holdings: tuple[Holding, ...]
    strays: dict[int, str]
    """Processes that carry the id of a lease that is not there, with that id. They are never ended."""
    disks: tuple[Disk, ...]
    ports: tuple[ListeningPort, ...]


def diagnose(runs_path: Path, *, cache_dir: Path | None = None, time_limit_s: float = 0.5) -> Diagnosis:
    """Look at this machine and measure it, in at most about five times `time_limit_s`.

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
    return Diagnosis(
        machine=describe_machine(),
        calibration=calibration,
        checks=checks,
        devices=find_device_uses(),
        holdings=find_holdings(),
        strays=find_strays(),
        disks=tuple(describe_disk(path) for path in (cache_dir or user_cache_dir(), runs_path, Path("/tmp"))),
        ports=tuple(read_listening_ports()),
    )


def find_device_uses() -> tuple[DeviceUse, ...]:
    """Say of each GPU and slice who computes on it, and which living run of this user holds it."""
    inventory = read_inventory()
    return tuple(
        DeviceUse(
            device=device,
            users=tuple(map(str, inventory.users_of(device))),
            holder=None if (lease := inventory.lease_on(device.uuid)) is None else str(lease),
        )
        for device in inventory.devices
    )


def find_holdings() -> tuple[Holding, ...]:
    """Say of each lease of this user whether it holds, and what carries its id."""
    return tuple(
        Holding(lease=lease, state=state_of(lease), processes=tuple(find_processes(lease.lease_id)))
        for lease in find_leases()
    )


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
