"""The allocation of GPUs to the roles of a run: from those of its job, or from the free ones of this machine.

The caller names the roles, mostly learner, engine and environments; a role without GPUs sees none. Inside a
job the list in CUDA_VISIBLE_DEVICES is divided in its order. If it is not set, the GPUs are chosen that no
living run holds and no process uses, the emptiest first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from strop.errors import CheckRefused, ConfigError
from strop.hardware.findings import Severity
from strop.hardware.inventory import Device, Inventory, check_device, check_room, read_inventory
from strop.hardware.leases import HeldLease, take_lease
from strop.hardware.visible_devices import (
    PART_DEVICES,
    VISIBLE_DEVICES,
    DeviceForm,
    VisibleDevices,
    count_gpus,
    parse_visible_devices,
    share_out,
)
from strop.spec.layout import DeviceShare

DEVICE_ORDER = "CUDA_DEVICE_ORDER"
PCI_BUS_ID = "PCI_BUS_ID"
"""nvidia-smi's order. CUDA's default puts the fastest GPU first."""
_NUM_TRIES = 5


@dataclass(frozen=True, kw_only=True, slots=True)
class RoleDevices:
    """The devices of one role."""

    visible: VisibleDevices
    uuids: tuple[str, ...]
    """UUIDs of GPUs or slices; empty if nvidia-smi does not list them."""

    @property
    def variables(self) -> Mapping[str, str]:
        """Its environment variables; a role without GPUs needs them too, or it would see all GPUs."""
        return {VISIBLE_DEVICES: self.visible.text or "", DEVICE_ORDER: PCI_BUS_ID}


@dataclass(frozen=True, kw_only=True, slots=True)
class Allocation:
    """The GPUs of each role."""

    roles: Mapping[str, RoleDevices]
    inherited: str | None = None
    """The previous value of CUDA_VISIBLE_DEVICES; None if it was not set."""
    notices: tuple[str, ...] = ()

    @property
    def uuids(self) -> tuple[str, ...]:
        """All UUIDs, as a lease lists them."""
        return tuple(uuid for role in self.roles.values() for uuid in role.uuids)

    def record(self) -> dict[str, object]:
        """Return the entry of a start record: UUIDs, since an index means another GPU elsewhere."""
        return {
            "inherited": self.inherited,
            "roles": {
                name: {"uuids": list(role.uuids), "visible": role.visible.text}
                for name, role in self.roles.items()
            },
            "notices": list(self.notices),
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuRequest:
    """The number of GPUs of each role, and the GPUs to choose from."""

    wanted: Mapping[str, int]
    """From role to number, in the order of allocation."""
    inherited: str | None = None
    """CUDA_VISIBLE_DEVICES; None if it is not set."""
    is_granted: bool = False
    """Whether a scheduler was asked for these GPUs, so that it must list them."""
    need_bytes: Mapping[str, int] = field(default_factory=dict)
    """Free memory that a role needs on each of its GPUs; a missing role has no requirement."""
    own_lease_id: str | None = None
    """The lease of the caller's own processes."""


def allocate_gpus(request: GpuRequest, inventory: Inventory) -> Allocation:
    """Divide GPUs among roles.

    Raises: CheckRefused if there are too few, naming their users where they are chosen here, if the variable
        is missing in a job that asked for GPUs, if a role would get several slices, or slices and whole GPUs
        are mixed; ConfigError if the variable is malformed, or names no GPU of this machine.
    """
    total = sum(request.wanted.values())
    visible = parse_visible_devices(request.inherited)
    if total == 0:
        roles = {name: _nothing() for name in request.wanted}
        return Allocation(roles=roles, inherited=request.inherited)
    if visible.form is DeviceForm.UNSET:
        if request.is_granted:
            raise CheckRefused(
                f"{count_gpus(total)} asked for, and {VISIBLE_DEVICES} is not set in this job, so that"
                " CUDA would see every GPU of the node",
                allowed="a job whose scheduler names its GPUs",
                next_step="see that the job asks its scheduler for GPUs, and that nothing unsets it",
            )
        return _take_free(request, inventory)
    shares = share_out(visible, request.wanted)
    used = visible.ids[:total]
    by_id = {entry: _resolve(entry, visible.form, inventory) for entry in used}
    # A GPU may be listed under two names: a UUID and its beginning.
    uuids = [uuid for uuid in by_id.values() if uuid is not None]
    if len(set(uuids)) < len(uuids):
        raise ConfigError(
            f"{VISIBLE_DEVICES}={visible.text} names one GPU twice",
            allowed="each GPU once",
            next_step="correct the variable",
        )
    notices = []
    if len(visible.ids) > total:
        notices.append(
            f"{count_gpus(len(visible.ids))} visible and {total} asked for: the first are used, "
            f"{', '.join(used)}, and {', '.join(visible.ids[total:])} stay unused"
        )
    roles = {
        name: RoleDevices(
            visible=share,
            uuids=tuple(uuid for entry in share.ids if (uuid := by_id[entry]) is not None),
        )
        for name, share in shares.items()
    }
    return Allocation(roles=roles, inherited=request.inherited, notices=tuple(notices))


def lease_gpus(
    run: str, attempt: str, request: GpuRequest, *, folder: Path | None = None
) -> tuple[HeldLease, Allocation]:
    """Divide GPUs among roles and take a lease on them.

    If another run takes one in between, the choice is repeated.
    Raises: as `allocate_gpus` and `take_lease` do.
    """
    num_left = _NUM_TRIES
    while True:
        num_left -= 1
        allocation = allocate_gpus(request, read_inventory(folder))
        try:
            return take_lease(run, attempt, gpus=allocation.uuids, folder=folder), allocation
        except CheckRefused:
            if request.inherited is not None or num_left == 0:
                raise


def take_devices(role: str, share: DeviceShare, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that show a role only its GPUs.

    Raises: CheckRefused naming the role if its node shows fewer.
    """
    name = PART_DEVICES.get(share.part, VISIBLE_DEVICES)
    if name not in environ:
        # A node that only generates shows only these GPUs.
        name = VISIBLE_DEVICES
    visible = parse_visible_devices(environ.get(name))
    chosen = visible.ids[share.first : share.first + share.count]
    if len(chosen) < share.count:
        raise CheckRefused(
            f"role {role} is to have GPU {share.first} to {share.first + share.count - 1} of its node,"
            f" and {name} there names {len(visible.ids)}: {visible.text or 'none'}",
            allowed="as many GPUs on every node as the run file asks for",
            next_step="ask the scheduler for as many as the job section says",
        )
    return {VISIBLE_DEVICES: ",".join(chosen), DEVICE_ORDER: PCI_BUS_ID}


def _nothing() -> RoleDevices:
    return RoleDevices(visible=VisibleDevices(form=DeviceForm.NONE), uuids=())


def _resolve(entry: str, form: DeviceForm, inventory: Inventory) -> str | None:
    """Return the UUID of an entry; None if nvidia-smi lists no GPU at all."""
    gpus = inventory.report.gpus
    if not gpus:
        return None
    for gpu in gpus:
        is_named = gpu.index == entry if form is DeviceForm.INDEX else gpu.uuid == entry
        if gpu.has_mig and is_named:
            listed = ", ".join(part.uuid for part in gpu.slices) or "none yet"
            raise CheckRefused(
                f"{VISIBLE_DEVICES} names GPU {entry}, which is divided into MIG slices",
                allowed=f"the UUID of one of its slices ({listed}), or a GPU that is whole",
                next_step="put a slice's UUID into the variable, or ask for a whole GPU",
            )
    matches = [device.uuid for device in inventory.devices if _is_named(device, entry, form)]
    if not matches and any(gpu.has_mig and entry.startswith(f"MIG-{gpu.uuid}/") for gpu in gpus):
        # The old spelling of a slice, which newer drivers accept but do not list.
        return entry
    if len(matches) != 1:
        listed = ", ".join(device.uuid for device in inventory.devices)
        what = "several GPUs" if matches else "no GPU of this machine"
        raise ConfigError(
            f"{VISIBLE_DEVICES} names {entry}, which is {what}: CUDA drops it and all that follow",
            allowed=f"indices below {len(gpus)}, or one of {listed}",
            next_step="correct the variable",
        )
    return matches[0]


def _is_named(device: Device, entry: str, form: DeviceForm) -> bool:
    if form is DeviceForm.INDEX:
        return not device.is_slice and device.gpu.index == entry
    if form is DeviceForm.GPU_UUID:
        # CUDA also accepts an unambiguous beginning of a UUID.
        return not device.is_slice and device.uuid.startswith(entry)
    return device.is_slice and device.uuid.startswith(entry)


def _take_free(request: GpuRequest, inventory: Inventory) -> Allocation:
    """Choose among the GPUs of a machine without a scheduler."""
    total = sum(request.wanted.values())
    whole = [device for device in inventory.devices if not device.is_slice]
    slices = [device for device in inventory.devices if device.is_slice]
    refusals = []
    # Whole GPUs first, and never both: NCCL connects no slices, and their memory differs.
    for candidates in filter(None, (whole, slices)):
        chosen, reasons = _fill(request, candidates, inventory)
        if chosen is not None:
            return Allocation(roles=chosen)
        refusals += reasons
    kinds = f"{len(whole)} whole GPUs and {len(slices)} MIG slices" if slices else f"{len(whole)} GPUs"
    complaint = f"{inventory.report.probe}: {inventory.report.complaint}".rstrip(": ")
    present = f"this machine has {kinds}" if inventory.devices else f"nvidia-smi shows none ({complaint})"
    raise CheckRefused(
        "; ".join([f"{count_gpus(total)} asked for and {present}", *refusals]),
        allowed="as many free GPUs as the roles ask for, all whole or all slices, one slice for a role",
        next_step="wait, end those processes yourself, or ask for fewer GPUs",
    )


def _fill(
    request: GpuRequest, candidates: Sequence[Device], inventory: Inventory
) -> tuple[dict[str, RoleDevices] | None, list[str]]:
    """Give the emptiest devices to the roles that need most; if some lack devices, return None and why."""
    reasons, free = [], []
    for device in candidates:
        problems = list(check_device(device, inventory, own_lease_id=request.own_lease_id))
        reasons += [finding.given for finding in problems]
        free += [] if problems else [device]
    if candidates[0].is_slice and max(request.wanted.values(), default=0) > 1:
        return None, [*reasons, "a role sees one MIG slice at most"]
    if len(free) < sum(request.wanted.values()):
        return None, reasons
    # By whole GiB, so that a few bytes do not reorder equally empty GPUs.
    free.sort(key=lambda device: -((device.room_bytes or 0) >> 30))
    chosen: dict[str, list[Device]] = {}
    too_full = []
    for name in sorted(request.wanted, key=lambda name: -request.need_bytes.get(name, 0)):
        taken, free = free[: request.wanted[name]], free[request.wanted[name] :]
        for device in taken:
            room = check_room(device, request.need_bytes.get(name, 0))
            too_full += [
                f"{name} on {problem.given}" for problem in room if problem.severity is Severity.ERROR
            ]
        chosen[name] = sorted(taken, key=candidates.index)
    if too_full:
        return None, [*reasons, *too_full]
    return {name: _name(chosen[name]) for name in request.wanted}, []


def _name(devices: Sequence[Device]) -> RoleDevices:
    """Name whole GPUs by index, which every program accepts, and slices by UUID, their only name."""
    if not devices:
        return _nothing()
    uuids = tuple(device.uuid for device in devices)
    if devices[0].is_slice:
        return RoleDevices(visible=VisibleDevices(form=DeviceForm.MIG_UUID, ids=uuids), uuids=uuids)
    ids = tuple(device.gpu.index for device in devices)
    return RoleDevices(visible=VisibleDevices(form=DeviceForm.INDEX, ids=ids), uuids=uuids)
