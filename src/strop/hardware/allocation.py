"""The allocation of GPUs to the roles of a run: from those of its job, or from the free ones of this machine.

The caller names the roles, mostly learner, engine and environments; a role without GPUs sees none. Inside a
job the list in CUDA_VISIBLE_DEVICES is divided in its order. If it is not set, the GPUs are chosen that no
living run holds and no process uses, the emptiest first.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from strop.errors import CheckRefused, ConfigError
from strop.hardware.findings import Finding, Severity
from strop.hardware.gpus import Gpu, GpuReport, match_devices, report_gpus
from strop.hardware.leases import Lease, find_holder, take_lease
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
"""NVML's order. CUDA's default puts the fastest GPU first."""
_IDLE_BYTES = 2 << 30
"""Memory that a driver may use on an idle GPU; a measured H100 uses about 0.6 GiB."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RoleDevices:
    """The devices of one role."""

    visible: VisibleDevices
    uuids: tuple[str, ...] = ()
    """UUIDs of GPUs or slices; empty if the driver does not list them."""

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
        """All UUIDs, as a lease takes them."""
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


def allocate_gpus(request: GpuRequest, report: GpuReport | None = None) -> Allocation:
    """Divide the GPUs of this machine among roles. `report`: what the driver says; None asks it.

    Raises: CheckRefused if there are too few, naming their users where they are chosen here, if the variable
        is missing in a job that asked for GPUs, if a role would get several slices, or slices and whole GPUs
        are mixed; ConfigError if the variable is malformed, or names no GPU of this machine.
    """
    total = sum(request.wanted.values())
    visible = parse_visible_devices(request.inherited)
    if total == 0:
        return Allocation(roles={name: _name([]) for name in request.wanted}, inherited=request.inherited)
    report = report or report_gpus()
    if visible.form is DeviceForm.UNSET:
        if request.is_granted:
            raise CheckRefused(
                f"{count_gpus(total)} asked for, and {VISIBLE_DEVICES} is not set in this job, so that"
                " CUDA would see every GPU of the node",
                allowed="a job whose scheduler names its GPUs",
                next_step="see that the job asks its scheduler for GPUs, and that nothing unsets it",
            )
        return _take_free(request, report)
    shares = share_out(visible, request.wanted)
    by_id = {entry: _resolve(entry, report) for entry in visible.ids[:total]} if report.gpus else {}
    # A GPU may be listed under two names: a UUID and its beginning.
    if len(set(by_id.values())) < len(by_id):
        raise ConfigError(
            f"{VISIBLE_DEVICES}={visible.text} names one GPU twice",
            allowed="each GPU once",
            next_step="correct the variable",
        )
    unused = visible.ids[total:]
    notice = (
        f"{count_gpus(len(visible.ids))} visible and {total} asked for: the first are used, "
        f"{', '.join(visible.ids[:total])}, and {', '.join(unused)} stay unused"
    )
    roles = {
        name: RoleDevices(visible=share, uuids=tuple(by_id[entry] for entry in share.ids if by_id))
        for name, share in shares.items()
    }
    return Allocation(roles=roles, inherited=request.inherited, notices=(notice,) if unused else ())


@contextmanager
def lease_gpus(request: GpuRequest) -> Iterator[tuple[Lease, Allocation]]:
    """Divide GPUs among roles, and hold them inside the block.

    Raises: as `allocate_gpus` and `take_lease` do.
    """
    allocation = allocate_gpus(request)
    with take_lease(allocation.uuids) as lease:
        yield lease, allocation


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


def check_device(device: Gpu, need_bytes: int | None) -> Iterator[Finding]:
    """Yield why a GPU or slice is not available: used by others, or too full. None: any memory will do.

    No process is ended to make room: memory without a visible process (of another container, or of one that
    hangs in the driver) is reported and never freed by force.
    """
    users = [user for user in device.users if user.pid != os.getpid()]
    free_bytes = device.free_memory_bytes
    total = "an unknown total" if device.memory_bytes is None else _gib(device.memory_bytes)
    room = f"{'unknown' if free_bytes is None else _gib(free_bytes)} free of {total}"
    need = "" if need_bytes is None else f", {_gib(need_bytes)} needed"
    if users:
        yield Finding(
            code="foreign_process",
            given=f"{device} is used by {'; '.join(map(str, users))}; {room}{need}",
            allowed="a GPU without other users; strop ends no process that it did not start",
            next_step="end that process yourself, or choose other GPUs with CUDA_VISIBLE_DEVICES",
            where=device.uuid,
        )
    elif need_bytes is not None and free_bytes is None:
        yield Finding(
            code="free_memory",
            given=f"{device} does not tell its memory, and {_gib(need_bytes)} are needed",
            allowed="a GPU whose memory the driver shows",
            next_step="look at the first steps: a run that does not fit ends there",
            where=device.uuid,
            severity=Severity.UNKNOWN,
        )
    elif need_bytes is not None and free_bytes is not None and free_bytes < need_bytes:
        used_bytes = (device.memory_bytes or 0) - free_bytes
        hidden = f"; {_gib(used_bytes)} are used by no process that can be seen, which strop never frees"
        yield Finding(
            code="free_memory",
            given=f"{device}: {room}{need}{hidden if used_bytes > _IDLE_BYTES else ''}",
            allowed="a GPU with that much memory free now",
            next_step="wait, choose another GPU, or ask for less: a smaller model or a smaller engine share",
            where=device.uuid,
        )


def _resolve(entry: str, report: GpuReport) -> str:
    """Return the UUID that an entry names."""
    matches = match_devices(entry, report.gpus)
    listed = ", ".join(device.uuid for device in report.devices) or "none yet"
    if len(matches) != 1:
        what = "several GPUs" if matches else "no GPU of this machine"
        raise ConfigError(
            f"{VISIBLE_DEVICES} names {entry}, which is {what}: CUDA drops it and all that follow",
            allowed=f"indices below {len(report.gpus)}, or one of {listed}",
            next_step="correct the variable",
        )
    if matches[0].has_mig:
        raise CheckRefused(
            f"{VISIBLE_DEVICES} names GPU {entry}, which is divided into MIG slices",
            allowed=f"the UUID of a slice or of a whole GPU: {listed}",
            next_step="put a slice's UUID into the variable, or ask for a whole GPU",
        )
    return matches[0].uuid


def _take_free(request: GpuRequest, report: GpuReport) -> Allocation:
    """Choose among the GPUs of a machine without a scheduler."""
    whole = [device for device in report.devices if not device.is_slice]
    slices = [device for device in report.devices if device.is_slice]
    refusals: list[str] = []
    # Whole GPUs first, and never both: NCCL connects no slices, and their memory differs.
    for candidates in filter(None, (whole, slices)):
        chosen, reasons = _fill(request, candidates)
        if chosen is not None:
            return Allocation(roles=chosen)
        refusals += reasons
    kinds = f"{len(whole)} whole GPUs and {len(slices)} MIG slices" if slices else f"{len(whole)} GPUs"
    present = f"this machine has {kinds}" if report.devices else f"NVML shows none ({report.complaint})"
    raise CheckRefused(
        "; ".join([f"{count_gpus(sum(request.wanted.values()))} asked for and {present}", *refusals]),
        allowed="as many free GPUs as the roles ask for, all whole or all slices, one slice for a role",
        next_step="wait, end those processes yourself, or ask for fewer GPUs",
    )


def _fill(request: GpuRequest, candidates: Sequence[Gpu]) -> tuple[dict[str, RoleDevices] | None, list[str]]:
    """Give the emptiest devices to the roles that need most; if some lack devices, return None and why."""
    reasons, free = [], []
    for device in candidates:
        holder = find_holder(device.uuid)
        held = [] if holder is None else [f"{device} is held by {holder}"]
        problems = held or [finding.given for finding in check_device(device, None)]
        reasons += problems
        free += [] if problems else [device]
    if candidates[0].is_slice and max(request.wanted.values(), default=0) > 1:
        return None, [*reasons, "a role sees one MIG slice at most"]
    if len(free) < sum(request.wanted.values()):
        return None, reasons
    # By whole GiB, so that a few bytes do not reorder equally empty GPUs.
    free.sort(key=lambda device: -((device.free_memory_bytes or 0) >> 30))
    chosen: dict[str, list[Gpu]] = {}
    too_full = []
    for name in sorted(request.wanted, key=lambda name: -request.need_bytes.get(name, 0)):
        taken, free = free[: request.wanted[name]], free[request.wanted[name] :]
        for device in taken:
            room = check_device(device, request.need_bytes.get(name, 0))
            too_full += [f"{name} on {found.given}" for found in room if found.severity is Severity.ERROR]
        chosen[name] = sorted(taken, key=candidates.index)
    if too_full:
        return None, [*reasons, *too_full]
    return {name: _name(chosen[name]) for name in request.wanted}, []


def _name(devices: Sequence[Gpu]) -> RoleDevices:
    """Name whole GPUs by index, which every program accepts, and slices by UUID, their only name."""
    if not devices:
        return RoleDevices(visible=VisibleDevices(form=DeviceForm.NONE))
    uuids = tuple(device.uuid for device in devices)
    if devices[0].is_slice:
        return RoleDevices(visible=VisibleDevices(form=DeviceForm.MIG_UUID, ids=uuids), uuids=uuids)
    ids = tuple(device.index for device in devices)
    return RoleDevices(visible=VisibleDevices(form=DeviceForm.INDEX, ids=ids), uuids=uuids)


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / (1 << 30):.2f} GiB"
