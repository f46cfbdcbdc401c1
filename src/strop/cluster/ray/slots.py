"""Which role runs on which node, with which of its GPUs: a pure plan, made before anything starts.

Ray's own scheduler only gets the result: it never chooses a GPU, and a run is laid out alike every time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from strop.errors import CheckRefused, ConfigError, explain_refusal
from strop.hardware.allocation import DEVICE_ORDER, PCI_BUS_ID
from strop.hardware.visible_devices import INFER_DEVICES, VISIBLE_DEVICES, parse_visible_devices


class RoleKind(StrEnum):
    """What a role does."""

    LEARNER = "learner"
    ENGINE = "engine"
    WORKER = "worker"


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceShare:
    """GPUs of a node, by their places in what the node was given for a part."""

    part: str
    """'train' or 'infer'."""
    first: int
    count: int


@dataclass(frozen=True, kw_only=True, slots=True)
class RoleSlot:
    """One role and where it lives."""

    kind: RoleKind
    index: int
    node: int
    devices: DeviceShare | None = None
    """None: the run has no GPUs of its own, and the role sees what its node shows."""

    @property
    def name(self) -> str:
        """For people, files and messages."""
        return f"{self.kind}-{self.index}"


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeOffer:
    """A node, and the GPUs that it has for each part."""

    index: int
    num_train: int = 0
    num_infer: int = 0
    is_shared: bool = False
    """Whether training and generation use the same GPUs."""
    is_cpu: bool = False
    """A node beside the main part."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RoleCounts:
    """How many of each."""

    learners: int
    engines: int
    workers: int


def plan_slots(counts: RoleCounts, nodes: Sequence[NodeOffer]) -> tuple[RoleSlot, ...]:
    """Lay out all roles: learners fill the first nodes, engines go round, workers prefer nodes without GPUs.

    Raises: ConfigError if the GPUs do not go into the roles; the sums are in the message.
    """
    main = [node for node in nodes if not node.is_cpu]
    learners = [
        (node.index, DeviceShare(part="train", first=place, count=1))
        for node in main
        for place in range(node.num_train)
    ]
    _require(
        not learners or counts.learners == len(learners),
        f"placement.learners is {counts.learners} and the nodes have {len(learners)} GPUs for learning",
        "one learner rank for each GPU of job.train_gpus",
    )
    slots = []
    for index in range(counts.learners):
        node, share = learners[index] if learners else (main[0].index, None)
        slots.append(RoleSlot(kind=RoleKind.LEARNER, index=index, node=node, devices=share))
    slots += _plan_engines(counts.engines, main)
    hosts = [node for node in nodes if node.is_cpu] or main
    for index in range(counts.workers):
        node = hosts[index % len(hosts)].index
        nothing = DeviceShare(part="train", first=0, count=0) if learners else None
        slots.append(RoleSlot(kind=RoleKind.WORKER, index=index, node=node, devices=nothing))
    return tuple(slots)


def _plan_engines(num_engines: int, main: Sequence[NodeOffer]) -> list[RoleSlot]:
    total = sum(node.num_infer for node in main)
    if not total:
        return [
            RoleSlot(kind=RoleKind.ENGINE, index=index, node=main[index % len(main)].index)
            for index in range(num_engines)
        ]
    per_engine, rest = divmod(total, num_engines)
    fits = per_engine and not rest and all(node.num_infer % per_engine == 0 for node in main)
    _require(
        bool(fits),
        f"placement.engines is {num_engines} and the nodes have"
        f" {', '.join(str(node.num_infer) for node in main)} GPUs for generation",
        "as many GPUs for each engine, all of one node",
    )
    places = [
        (node.index, DeviceShare(part="infer", first=first, count=per_engine))
        for node in main
        for first in range(0, node.num_infer, per_engine)
    ]
    return [
        RoleSlot(kind=RoleKind.ENGINE, index=index, node=node, devices=share)
        for index, (node, share) in enumerate(places)
    ]


def take_devices(role: str, share: DeviceShare, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables by which a role sees its GPUs alone; ids stay words, slices' UUIDs too.

    Raises: CheckRefused naming the role if its node shows fewer.
    """
    # Where training and generation share GPUs, only the first variable is set.
    name = INFER_DEVICES if share.part == "infer" and INFER_DEVICES in environ else VISIBLE_DEVICES
    given = parse_visible_devices(environ.get(name))
    chosen = given.ids[share.first : share.first + share.count]
    if len(chosen) < share.count:
        raise CheckRefused(
            explain_refusal(
                f"role {role} is to have GPU {share.first} to {share.first + share.count - 1} of its node,"
                f" and {name} there names {len(given.ids)}: {given.text or 'none'}",
                allowed="as many GPUs on every node as the run file asks for",
                next_step="ask the scheduler for as many as job.train_gpus and job.infer_gpus say",
            )
        )
    return {VISIBLE_DEVICES: ",".join(chosen), DEVICE_ORDER: PCI_BUS_ID}


def _require(is_met: bool, given: str, allowed: str) -> None:
    if not is_met:
        raise ConfigError(
            explain_refusal(given, allowed=allowed, next_step="change one of the two, or leave it out")
        )
