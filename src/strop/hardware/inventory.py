"""What devices this machine has now, and who has them: read once, then handed to whoever decides."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from strop.hardware.gpus import Gpu, GpuReport, GpuUser, Probe, read_gpu_users, report_gpus
from strop.hardware.leases import Lease, find_living


@dataclass(frozen=True, kw_only=True, slots=True)
class Device:
    """What a process can be given: a whole GPU, or one slice of a divided one."""

    uuid: str
    gpu: Gpu
    is_slice: bool
    memory_bytes: int | None
    """All that a process on it can have."""
    free_memory_bytes: int | None
    """None where it is not told; of a slice it never is."""

    @property
    def room_bytes(self) -> int | None:
        """What a role can be promised: what is free, and of a slice all, as nobody else is on it."""
        return self.memory_bytes if self.is_slice else self.free_memory_bytes

    def __str__(self) -> str:
        """Name it for a message."""
        kind = "MIG slice" if self.is_slice else "GPU"
        return f"{kind} {self.uuid} ({self.gpu.name}, index {self.gpu.index})"


@dataclass(frozen=True, kw_only=True, slots=True)
class Inventory:
    """The GPUs of this machine, who computes on them, and the living leases of this user."""

    report: GpuReport
    users: tuple[GpuUser, ...] = ()
    leases: tuple[Lease, ...] = ()

    @property
    def devices(self) -> tuple[Device, ...]:
        """What can be given, in the order of PCI addresses. Of a divided GPU these are its slices."""
        return tuple(device for gpu in self.report.gpus for device in _divide(gpu))

    def users_of(self, device: Device, own_lease_id: str | None = None) -> tuple[GpuUser, ...]:
        """Return the processes on a device that are not of the lease."""
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
    """Ask nvidia-smi and read the leases. Takes as long as nvidia-smi, twice or three times."""
    report = report_gpus()
    users = read_gpu_users() if report.probe is Probe.ANSWERED else ()
    return Inventory(report=report, users=users, leases=tuple(find_living(folder)))


def _divide(gpu: Gpu) -> list[Device]:
    if not gpu.has_mig:
        free_bytes = gpu.free_memory_bytes
        return [_describe(gpu, gpu.uuid, gpu.memory_bytes, free_bytes, is_slice=False)]
    return [_describe(gpu, part.uuid, part.memory_bytes, None, is_slice=True) for part in gpu.slices]


def _describe(
    gpu: Gpu, uuid: str, memory_bytes: int | None, free_bytes: int | None, *, is_slice: bool
) -> Device:
    return Device(
        uuid=uuid, gpu=gpu, is_slice=is_slice, memory_bytes=memory_bytes, free_memory_bytes=free_bytes
    )
