"""Which GPUs each role of a run gets: of those that its job was given, or of those that are free here.

The caller names the roles, mostly learner, engine and environments; a role that wants no GPU sees none.
Inside a job the list in CUDA_VISIBLE_DEVICES is cut in its order. On a machine where it is not set, those
GPUs are taken that no living run holds and no process computes on, the emptiest first.
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
    is_one_by_one,
    parse_visible_devices,
    share_out,
)
from strop.spec.layout import DeviceShare

DEVICE_ORDER = "CUDA_DEVICE_ORDER"
PCI_BUS_ID = "PCI_BUS_ID"
"""The order that nvidia-smi counts in. CUDA's own default puts the fastest first."""
_NUM_TRIES = 5


@dataclass(frozen=True, kw_only=True, slots=True)
class RoleDevices:
    """What one role sees."""

    visible: VisibleDevices
    uuids: tuple[str, ...]
    """Of GPUs or slices; empty where nvidia-smi does not tell them."""

    @property
    def variables(self) -> Mapping[str, str]:
        """What its environment needs; of a role without GPUs too, which would see all of them else."""
        return {VISIBLE_DEVICES: self.visible.text or "", DEVICE_ORDER: PCI_BUS_ID}


@dataclass(frozen=True, kw_only=True, slots=True)
class Allocation:
    """Which role has which GPUs."""

    roles: Mapping[str, RoleDevices]
    inherited: str | None = None
    """CUDA_VISIBLE_DEVICES as it was before; None where it was not set."""
    notices: tuple[str, ...] = ()

    @property
    def uuids(self) -> tuple[str, ...]:
        """All of them, as a lease names them."""
        return tuple(uuid for role in self.roles.values() for uuid in role.uuids)

    def record(self) -> dict[str, object]:
        """Return what a start record keeps: UUIDs, since an index means another GPU elsewhere."""
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
    """How many GPUs each role wants, and what it was given to take them from."""

    wanted: Mapping[str, int]
    """Role to number, in the order in which they are served."""
    inherited: str | None = None
    """CUDA_VISIBLE_DEVICES; None where it is not set."""
    is_granted: bool = False
    """Whether a scheduler was asked for these GPUs: then it must name them."""
    need_bytes: Mapping[str, int] = field(default_factory=dict)
    """What a role needs free on each of its GPUs; a role that is not here asks for no amount."""
    own_lease_id: str | None = None
    """Whose processes are not strangers."""


def allocate_gpus(request: GpuRequest, inventory: Inventory) -> Allocation:
    """Divide GPUs among roles.

    Raises: CheckRefused if there are too few, if the variable is missing in a job that asked for GPUs, if a
        role is to have several slices, or slices and whole GPUs are mixed, naming who is in the way where
        they are chosen here; ConfigError if the variable cannot be read, or names no GPU of this machine.
    """
    total = sum(request.wanted.values())
    given = parse_visible_devices(request.inherited)
    if total == 0:
        roles = {name: _nothing() for name in request.wanted}
        return Allocation(roles=roles, inherited=request.inherited)
    if given.form is DeviceForm.UNSET:
        if request.is_granted:
            raise CheckRefused(
                f"{count_gpus(total)} asked for, and {VISIBLE_DEVICES} is not set in this job, so that"
                " CUDA would see every GPU of the node",
                allowed="a job whose scheduler names its GPUs",
                next_step="see that the job asks its scheduler for GPUs, and that nothing unsets it",
            )
        return _take_free(request, inventory)
    shares = share_out(given, request.wanted)
    used = given.ids[:total]
    by_id = {entry: _resolve(entry, given.form, inventory) for entry in used}
    # One GPU may be given by two names: a UUID and its beginning.
    uuids = [uuid for uuid in by_id.values() if uuid is not None]
    if len(set(uuids)) < len(uuids):
        raise ConfigError(
            f"{VISIBLE_DEVICES}={given.text} names one GPU twice",
            allowed="each GPU once",
            next_step="correct the variable",
        )
    notices = []
    if len(given.ids) > total:
        notices.append(
            f"{count_gpus(len(given.ids))} visible and {total} asked for: the first are used, "
            f"{', '.join(used)}, and {', '.join(given.ids[total:])} stay unused"
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
    """Divide GPUs among roles and hold them for a run.

    Where another run takes one in between, it is chosen anew, of what is left.
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
    """Return the variables by which a role sees its GPUs alone; ids stay words, slices' UUIDs too.

    Raises: CheckRefused naming the role if its node shows fewer.
    """
    name = PART_DEVICES.get(share.part, VISIBLE_DEVICES)
    if name not in environ:
        # A node that only generates shows these GPUs and no others.
        name = VISIBLE_DEVICES
    given = parse_visible_devices(environ.get(name))
    chosen = given.ids[share.first : share.first + share.count]
    if len(chosen) < share.count:
        raise CheckRefused(
            f"role {role} is to have GPU {share.first} to {share.first + share.count - 1} of its node,"
            f" and {name} there names {len(given.ids)}: {given.text or 'none'}",
            allowed="as many GPUs on every node as the run file asks for",
            next_step="ask the scheduler for as many as the job section says",
        )
    return {VISIBLE_DEVICES: ",".join(chosen), DEVICE_ORDER: PCI_BUS_ID}


def _nothing() -> RoleDevices:
    return RoleDevices(visible=VisibleDevices(form=DeviceForm.NONE), uuids=())


def _resolve(entry: str, form: DeviceForm, inventory: Inventory) -> str | None:
    """Return the UUID that an entry names; None where nvidia-smi tells of no GPU at all."""
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
    found = [device.uuid for device in inventory.devices if _is_named(device, entry, form)]
    if not found and any(gpu.has_mig and entry.startswith(f"MIG-{gpu.uuid}/") for gpu in gpus):
        # The old spelling of a slice, which newer drivers take and do not list.
        return entry
    if len(found) != 1:
        listed = ", ".join(device.uuid for device in inventory.devices)
        said = "several GPUs" if found else "no GPU of this machine"
        raise ConfigError(
            f"{VISIBLE_DEVICES} names {entry}, which is {said}: CUDA drops it and all that follow",
            allowed=f"indices below {len(gpus)}, or one of {listed}",
            next_step="correct the variable",
        )
    return found[0]


def _is_named(device: Device, entry: str, form: DeviceForm) -> bool:
    if form is DeviceForm.INDEX:
        return not device.is_slice and device.gpu.index == entry
    if form is DeviceForm.GPU_UUID:
        # CUDA takes the beginning of a UUID too, where it is the only such.
        return not device.is_slice and device.uuid.startswith(entry)
    return device.is_slice and device.uuid.startswith(entry)


def _take_free(request: GpuRequest, inventory: Inventory) -> Allocation:
    """Choose among the GPUs of a machine that has no scheduler."""
    total = sum(request.wanted.values())
    whole = [device for device in inventory.devices if not device.is_slice]
    slices = [device for device in inventory.devices if device.is_slice]
    refusals = []
    # Whole ones first. Never both: NCCL connects no slices, and a slice's memory is another.
    for candidates in filter(None, (whole, slices)):
        chosen, reasons = _fill(request, candidates, inventory)
        if chosen is not None:
            return Allocation(roles=chosen)
        refusals += reasons
    kinds = f"{len(whole)} whole GPUs and {len(slices)} MIG slices" if slices else f"{len(whole)} GPUs"
    said = f"{inventory.report.probe}: {inventory.report.complaint}".rstrip(": ")
    found = f"this machine has {kinds}" if inventory.devices else f"nvidia-smi shows none ({said})"
    raise CheckRefused(
        "; ".join([f"{count_gpus(total)} asked for and {found}", *refusals]),
        allowed="as many free GPUs as the roles ask for, all whole or all slices, one slice for a role",
        next_step="wait, end those processes yourself, or ask for fewer GPUs",
    )


def _fill(
    request: GpuRequest, candidates: Sequence[Device], inventory: Inventory
) -> tuple[dict[str, RoleDevices] | None, list[str]]:
    """Give the emptiest devices to the roles that need most; return None and the reasons if some lack."""
    reasons, free = [], []
    for device in candidates:
        found = list(check_device(device, inventory, own_lease_id=request.own_lease_id))
        reasons += [finding.given for finding in found]
        free += [] if found else [device]
    together = [number for name, number in request.wanted.items() if not is_one_by_one(name)]
    if candidates[0].is_slice and max(together, default=0) > 1:
        return None, [*reasons, "a role sees one MIG slice at most"]
    if len(free) < sum(request.wanted.values()):
        return None, reasons
    # By whole GiB: a few bytes more or less shall not shuffle GPUs that are equally empty.
    free.sort(key=lambda device: -((device.room_bytes or 0) >> 30))
    chosen: dict[str, list[Device]] = {}
    too_full = []
    for name in sorted(request.wanted, key=lambda name: -request.need_bytes.get(name, 0)):
        mine, free = free[: request.wanted[name]], free[request.wanted[name] :]
        for device in mine:
            room = check_room(device, request.need_bytes.get(name, 0))
            too_full += [f"{name} on {one.given}" for one in room if one.severity is Severity.ERROR]
        chosen[name] = sorted(mine, key=candidates.index)
    if too_full:
        return None, [*reasons, *too_full]
    return {name: _name(chosen[name]) for name in request.wanted}, []


def _name(devices: Sequence[Device]) -> RoleDevices:
    """Name whole GPUs by index, which every program reads, and slices by UUID, which is all they have."""
    if not devices:
        return _nothing()
    uuids = tuple(device.uuid for device in devices)
    if devices[0].is_slice:
        return RoleDevices(visible=VisibleDevices(form=DeviceForm.MIG_UUID, ids=uuids), uuids=uuids)
    ids = tuple(device.gpu.index for device in devices)
    return RoleDevices(visible=VisibleDevices(form=DeviceForm.INDEX, ids=ids), uuids=uuids)
