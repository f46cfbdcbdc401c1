"""The devices of this machine with their users, read once; and the checks whether a device fits a role."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from strop.hardware.findings import Finding, Severity
from strop.hardware.gpus import Gpu, GpuReport, GpuUser, Probe, read_gpu_users, report_gpus
from strop.hardware.leases import Lease, find_living


@dataclass(frozen=True, kw_only=True, slots=True)
class Device:
    """The unit of allocation: a whole GPU, or one slice of a divided one."""

    uuid: str
    gpu: Gpu
    is_slice: bool
    memory_bytes: int | None
    """Total memory for processes on it."""
    free_memory_bytes: int | None
    """None if it is not reported, as always for a slice."""

    @property
    def room_bytes(self) -> int | None:
        """Memory available to a role: the free memory, or all of a slice, which has one user."""
        return self.memory_bytes if self.is_slice else self.free_memory_bytes

    def __str__(self) -> str:
        """Name it for a message."""
        kind = "MIG slice" if self.is_slice else "GPU"
        return f"{kind} {self.uuid} ({self.gpu.name}, index {self.gpu.index})"


@dataclass(frozen=True, kw_only=True, slots=True)
class Inventory:
    """The GPUs of this machine, the processes on them, and the living leases of this user."""

    report: GpuReport
    users: tuple[GpuUser, ...] = ()
    leases: tuple[Lease, ...] = ()

    @property
    def devices(self) -> tuple[Device, ...]:
        """The devices in the order of PCI addresses. A divided GPU is represented by its slices."""
        devices: list[Device] = []
        for gpu in self.report.gpus:
            # nvidia-smi never reports the free memory of a slice.
            parts = [(part.uuid, part.memory_bytes) for part in gpu.slices]
            devices += [
                Device(
                    uuid=uuid,
                    gpu=gpu,
                    is_slice=gpu.has_mig,
                    memory_bytes=memory_bytes,
                    free_memory_bytes=None if gpu.has_mig else gpu.free_memory_bytes,
                )
                for uuid, memory_bytes in (parts if gpu.has_mig else [(gpu.uuid, gpu.memory_bytes)])
            ]
        return tuple(devices)

    def users_of(self, device: Device, own_lease_id: str | None = None) -> tuple[GpuUser, ...]:
        """Return the processes on a device that do not belong to the lease."""
        return tuple(
            user
            for user in self.users
            if user.gpu_uuid == device.uuid and (own_lease_id is None or user.lease_id != own_lease_id)
        )

    def lease_on(self, uuid: str, own_lease_id: str | None = None) -> Lease | None:
        """Return the living lease of another run that holds a device."""
        others = (lease for lease in self.leases if lease.lease_id != own_lease_id)
        return next((lease for lease in others if uuid in lease.gpus), None)


def read_inventory(folder: Path | None = None) -> Inventory:
    """Run nvidia-smi, two or three times, and read the leases."""
    report = report_gpus()
    users = read_gpu_users() if report.probe is Probe.ANSWERED else ()
    return Inventory(report=report, users=users, leases=tuple(find_living(folder)))


# Checks whether a device has room for a role. No process is ended to make room: memory without a visible
# process (of another container, or of one that hangs in the driver) is reported and never freed by force.

_IDLE_BYTES = 2 << 30
"""Memory that a driver may use on an idle GPU; a measured H100 uses about 0.6 GiB."""


def check_device(
    device: Device, inventory: Inventory, *, need_bytes: int | None = None, own_lease_id: str | None = None
) -> Iterator[Finding]:
    """Yield why a device is not available: held, used, or too full. `need_bytes` None: no memory check."""
    holder = inventory.lease_on(device.uuid, own_lease_id)
    if holder is not None:
        yield Finding(
            code="gpu_held",
            given=f"{device} is held by {holder}",
            allowed="a GPU that no living run holds",
            next_step="wait for that run, end it, or choose another GPU",
            where=device.uuid,
        )
        return
    users = inventory.users_of(device, own_lease_id)
    if users:
        names = "; ".join(map(str, users))
        yield Finding(
            code="foreign_process",
            given=f"{device} is used by {names}; {_describe_room(device, need_bytes)}",
            allowed="a GPU without other users; strop ends no process that it did not start",
            next_step="end that process yourself, or choose other GPUs with CUDA_VISIBLE_DEVICES",
            where=device.uuid,
        )
    elif need_bytes is not None:
        yield from check_room(device, need_bytes)


def check_room(device: Device, need_bytes: int) -> Iterator[Finding]:
    """Yield why a device has too little memory, or that its memory is unknown."""
    room_bytes = device.room_bytes
    if room_bytes is None:
        yield Finding(
            code="free_memory",
            given=f"{device} does not tell its memory, and {_gib(need_bytes)} are needed",
            allowed="a GPU whose memory nvidia-smi shows",
            next_step="look at the first steps: a run that does not fit ends there",
            where=device.uuid,
            severity=Severity.UNKNOWN,
        )
    elif room_bytes < need_bytes:
        used_bytes = device.gpu.used_bytes or 0
        hidden = (
            f"; {_gib(used_bytes)} are used by no process that can be seen, which strop never frees"
            if used_bytes > _IDLE_BYTES and not device.is_slice
            else ""
        )
        yield Finding(
            code="free_memory",
            given=f"{device}: {_describe_room(device, need_bytes)}{hidden}",
            allowed="a GPU with that much memory free now",
            next_step="wait, choose another GPU, or ask for less: a smaller model or a smaller engine share",
            where=device.uuid,
        )


def _describe_room(device: Device, need_bytes: int | None) -> str:
    total = "an unknown total" if device.memory_bytes is None else _gib(device.memory_bytes)
    free = "" if device.free_memory_bytes is None else f"{_gib(device.free_memory_bytes)} free of "
    need = "" if need_bytes is None else f", {_gib(need_bytes)} needed"
    return f"{free}{total}{need}"


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / (1 << 30):.2f} GiB"
