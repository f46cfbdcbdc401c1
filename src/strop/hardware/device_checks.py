"""Whether a device has room for a role, and is nobody else's: the reasons, in words.

Nothing is ended to make room. Memory that is used by no process that can be seen (another container's, or
one that hangs in the driver) is named as that, and is never freed by force.
"""

from __future__ import annotations

from collections.abc import Iterator

from strop.hardware.findings import Finding, Severity
from strop.hardware.inventory import Device, Inventory

_IDLE_BYTES = 2 << 30
"""What a driver may keep of a GPU that nobody uses; a measured H100 keeps about 0.6 GiB."""


def check_device(
    device: Device, inventory: Inventory, *, need_bytes: int | None = None, own_lease_id: str | None = None
) -> Iterator[Finding]:
    """Yield why a device cannot be given: held, used, or too full. `need_bytes` None asks for no amount."""
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
    named = "; ".join(map(str, users))
    if users:
        yield Finding(
            code="foreign_process",
            given=f"{device} is used by {named}; {_say_room(device, need_bytes)}",
            allowed="a GPU that nobody else computes on; strop ends no process that it did not start",
            next_step="end that process yourself, or choose other GPUs with CUDA_VISIBLE_DEVICES",
            where=device.uuid,
        )
    elif need_bytes is not None:
        yield from check_room(device, need_bytes)


def check_room(device: Device, need_bytes: int) -> Iterator[Finding]:
    """Yield why a role that needs so much does not fit on a device, or that nobody can tell."""
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
            given=f"{device}: {_say_room(device, need_bytes)}{hidden}",
            allowed="a GPU with that much memory free now",
            next_step="wait, choose another GPU, or ask for less: a smaller model or a smaller engine share",
            where=device.uuid,
        )


def _say_room(device: Device, need_bytes: int | None) -> str:
    total = "an unknown total" if device.memory_bytes is None else _gib(device.memory_bytes)
    free = "" if device.free_memory_bytes is None else f"{_gib(device.free_memory_bytes)} free of "
    need = "" if need_bytes is None else f", {_gib(need_bytes)} needed"
    return f"{free}{total}{need}"


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / (1 << 30):.2f} GiB"
