"""Which GPUs of this machine a container gets: those that are asked for, or the first ones that nobody uses.

Devices are passed by the container device interface (`nvidia.com/gpu=UUID`), which podman knows since 4.1;
docker is asked by its own option. Inside, the same ids are in CUDA_VISIBLE_DEVICES, so that roles share them.
Not tried on a machine with GPUs.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from strop.errors import CheckRefused, explain_refusal
from strop.hardware import Gpu, GpuUser
from strop.hardware.leases import find_living

LABEL_DEVICES = "strop.devices"


def choose_devices(
    gpus: Sequence[Gpu],
    users: Iterable[GpuUser],
    *,
    num_wanted: int,
    asked: Sequence[str],
    taken: Collection[str],
) -> tuple[str, ...]:
    """Return the ids of the GPUs or slices that a container gets.

    `asked`: indices or UUIDs, () for any; `taken`: what other jobs hold.

    Raises: CheckRefused if there are too few, or if one of those asked for is unknown or taken.
    """
    if not num_wanted and not asked:
        return ()
    busy = {*taken, *(user.gpu_uuid for user in users)}
    names = _name_devices(gpus)
    if asked:
        return _choose_asked(asked, names, busy, num_wanted)
    free = [device for device in dict.fromkeys(names.values()) if device not in busy]
    # Several slices are never one role's, and one container has one kind.
    free = [device for device in free if not device.startswith("MIG-")] if num_wanted > 1 else free
    if len(free) < num_wanted:
        raise CheckRefused(
            explain_refusal(
                f"{num_wanted} GPUs are asked for, and {len(free)} of {len(gpus)} here are free",
                allowed="as many as are free",
                next_step="wait for other jobs, or ask for fewer",
            )
        )
    return tuple(free[:num_wanted])


def leased_devices() -> set[str]:
    """Return what living runs of this user hold on this machine."""
    return {device for lease in find_living() for device in lease.gpus}


def device_words(kind: str, devices: Sequence[str]) -> list[str]:
    """Return the options of an engine that give devices to a container."""
    if not devices:
        return []
    if kind == "docker":
        words = ["--gpus", f'"device={",".join(devices)}"']
    else:
        words = [word for device in devices for word in ("--device", f"nvidia.com/gpu={device}")]
    return [*words, "--env", f"CUDA_VISIBLE_DEVICES={','.join(devices)}"]


def _name_devices(gpus: Sequence[Gpu]) -> dict[str, str]:
    """Return every name that a device can be asked for by, and its id."""
    names: dict[str, str] = {}
    for gpu in gpus:
        if gpu.has_mig:
            names |= {part.uuid: part.uuid for part in gpu.slices}
        else:
            names |= {gpu.uuid: gpu.uuid, gpu.index: gpu.uuid}
    return names


def _choose_asked(
    asked: Sequence[str], names: dict[str, str], busy: Collection[str], num_wanted: int
) -> tuple[str, ...]:
    unknown = [name for name in asked if name not in names]
    taken = [name for name in asked if names.get(name) in busy]
    if unknown or taken or len(asked) < num_wanted:
        why = f"{', '.join(unknown)} not known here" if unknown else f"{', '.join(taken)} in use"
        if not unknown and not taken:
            why = f"the run asks for {num_wanted}"
        raise CheckRefused(
            explain_refusal(
                f"devices {','.join(asked)}: {why}",
                allowed=f"free ones of: {', '.join(names) or 'none, this machine has no GPU'}",
                next_step="name others, or none for any that are free",
            )
        )
    return tuple(names[name] for name in asked)
