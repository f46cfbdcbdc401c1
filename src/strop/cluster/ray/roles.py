"""The roles of a run on Ray: which node and GPUs each gets, and what all of them have in common.

The plan is made before anything starts: Ray's own scheduler never chooses a GPU, and a run is laid out alike
every time. A role is a plain class; `placement` makes actors of it. It logs from its first line, and `begin`
proves its environment and takes its GPUs before anything is loaded.
"""

from __future__ import annotations

import hmac
import os
import socket
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING

from strop.errors import CheckRefused, ConfigError
from strop.hardware.allocation import DEVICE_ORDER, PCI_BUS_ID
from strop.hardware.visible_devices import INFER_DEVICES, VISIBLE_DEVICES, parse_visible_devices

if TYPE_CHECKING:
    from strop.cluster.contract import ModelSource


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
            f"role {role} is to have GPU {share.first} to {share.first + share.count - 1} of its node,"
            f" and {name} there names {len(given.ids)}: {given.text or 'none'}",
            allowed="as many GPUs on every node as the run file asks for",
            next_step="ask the scheduler for as many as job.train_gpus and job.infer_gpus say",
        )
    return {VISIBLE_DEVICES: ",".join(chosen), DEVICE_ORDER: PCI_BUS_ID}


def _require(is_met: bool, given: str, allowed: str) -> None:
    if not is_met:
        raise ConfigError(given, allowed=allowed, next_step="change one of the two, or leave it out")


@dataclass(frozen=True, kw_only=True, slots=True)
class RoleStart:
    """The parameters of a role, sent before anything else."""

    name: str
    node: int
    log_path: str
    num_threads: int = 1
    devices: DeviceShare | None = None
    proofs: Mapping[str, str] = field(default_factory=dict)
    """Of the environment: see `prove_environment`."""
    salt: str = ""
    store: Mapping[str, str] = field(default_factory=dict)
    """The variables of `store.policy`, which the run's own process may have from its run file."""
    mark_path: str = ""
    """A file on the disk of the run's own process: who sees it sees that disk."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RoleFacts:
    """Who a role is."""

    pid: int
    host: str
    sees_run: bool = True
    """Whether it sees the disk of the run's own process."""


class RayRole:
    """Base of all roles."""

    computes = True
    """Whether it uses torch."""

    def __init__(self, start: RoleStart) -> None:
        self._start = start
        self._ended = threading.Event()
        path = Path(start.log_path)
        path.parent.mkdir(parents=True, exist_ok=True)
        # Everything that this process and its children say, native code too.
        with path.open("ab") as log:
            for stream in (sys.stdout, sys.stderr):
                stream.flush()
                os.dup2(log.fileno(), stream.fileno())

    def begin(self) -> RoleFacts:
        """Check the environment and take the GPUs.

        Raises: CheckRefused naming the role and what it lacks.
        """
        start = self._start
        require_environment(start.name, start.proofs, start.salt, os.environ)
        os.environ.update(start.store)
        if start.devices is not None:
            os.environ.update(take_devices(start.name, start.devices, os.environ))
            os.environ.pop(INFER_DEVICES, None)
        if self.computes:
            # After the GPUs are chosen: importing torch may already look at them.
            import torch

            torch.set_num_threads(start.num_threads)
        sys.stdout.write(f"role {start.name} on node {start.node}, process {os.getpid()}\n")
        sys.stdout.flush()
        sees_run = not start.mark_path or Path(start.mark_path).exists()
        return RoleFacts(pid=os.getpid(), host=socket.gethostname(), sees_run=sees_run)

    def bring_model(self, source: ModelSource) -> ModelSource:
        """Return where a model is on this machine, fetched first if it is not here.

        Raises: StoreError if it cannot be had; CheckRefused if it is another one than the run's.
        """
        if not source.uri or source.path.is_dir():
            return source
        from strop.store import get_model

        sys.stdout.write(f"{source.path} is not on {socket.gethostname()}: fetching {source.uri}\n")
        sys.stdout.flush()
        model = get_model(source.uri)
        if model.digest != source.digest:
            raise CheckRefused(
                f"{source.uri} has digest {model.digest[:12]} on {socket.gethostname()}, where role"
                f" {self._start.name} is",
                allowed=f"the model of the run, {source.digest[:12]}, on every machine",
                next_step="name a revision of it, or keep it in the store of the run",
            )
        return replace(source, path=model.path)

    def wait_for_end(self) -> str:
        """Return why this role ended, once it has; a killed one never returns, which says it too."""
        self._ended.wait()
        return "it was told to end"

    def end(self) -> None:
        """Release everything."""
        self._ended.set()


def prove_environment(names: Sequence[str], salt: str, environ: Mapping[str, str]) -> dict[str, str]:
    """Return for each name a salted digest of its value, which does not reveal the value.

    Raises: CheckRefused if one is missing here already.
    """
    missing = [name for name in names if name not in environ]
    if missing:
        raise _lacking("the run itself", missing)
    return {name: _digest(environ[name], salt) for name in names}


def require_environment(role: str, proofs: Mapping[str, str], salt: str, environ: Mapping[str, str]) -> None:
    """Raise CheckRefused if a role lacks a variable, or has it with a single byte changed."""
    missing = [name for name in proofs if name not in environ]
    if missing:
        raise _lacking(f"role {role}", missing)
    other = [name for name, proof in proofs.items() if _digest(environ[name], salt) != proof]
    if other:
        raise CheckRefused(
            f"role {role} has another value of {', '.join(other)} than the run itself",
            allowed="the same bytes in every role of a run",
            next_step="see what sets it on that node, a profile or a wrapper, and remove that",
        )


def _lacking(role: str, names: Sequence[str]) -> CheckRefused:
    return CheckRefused(
        f"{role} would start without {', '.join(names)}",
        allowed="every variable and secret that the job names, in every role",
        next_step="submit again: the file with their values has gone, or is not on that node",
    )


def _digest(value: str, salt: str) -> str:
    return hmac.digest(salt.encode(), os.fsencode(value), "sha256").hex()
