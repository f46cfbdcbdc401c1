"""The placement of a run's roles on nodes and GPUs: one function for plan, check, submit and run.

GPUs are shared out by the `job` section; what `placement` and `engine` leave open follows from them. A GPU
that no role would use is refused, and so is a node without a role.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Literal

from strop.errors import ConfigError
from strop.spec.base import SpecConflict
from strop.spec.judge import role_judges
from strop.spec.parts import needs_ray

if TYPE_CHECKING:
    from strop.spec.run import RunSpec

RAY_NODE_MODULE = "strop.cluster.ray.node"
"""Joins a node to the Ray cluster of the run."""
SHARED_GPU_FRAC = 0.45
"""Of a GPU's memory, for vLLM beside a learner: the rest holds masters, moments and activations."""
INFER, TRAIN, JUDGE, ENV, EVAL = "infer", "train", "judge", "env", "eval"
PARTS = (INFER, TRAIN, JUDGE, ENV, EVAL)
"""What GPUs of a node are for, in the order in which a node's GPUs are handed out."""
Kind = Literal["inline", "ray"]


class RoleKind(StrEnum):
    """The kinds of roles."""

    LEARNER = "learner"
    ENGINE = "engine"
    WORKER = "worker"
    JUDGE = "judge"


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceShare:
    """Consecutive GPUs of a node within one part."""

    part: str
    """One of `PARTS`."""
    first: int
    count: int


@dataclass(frozen=True, kw_only=True, slots=True)
class RoleSlot:
    """One role and its placement."""

    kind: RoleKind
    index: int
    node: int
    devices: DeviceShare | None = None
    """None: the run has no GPUs of its own, and the role sees what its node shows."""

    @property
    def name(self) -> str:
        """The role's name in files and messages."""
        return f"{self.kind}-{self.index}"


@dataclass(frozen=True, kw_only=True, slots=True)
class LayoutNode:
    """One node of a job, and its number of GPUs by part."""

    index: int
    gpus: Mapping[str, int] = field(default_factory=dict)
    is_cpu: bool = False
    """A node beside the main part."""

    @property
    def num_gpus(self) -> int:
        """All GPUs that the node must have."""
        return sum(self.gpus.values())


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """The placement of every role of a run."""

    kind: Kind
    nodes: tuple[LayoutNode, ...]
    """The main part, then the nodes without GPUs that join Ray."""
    slots: tuple[RoleSlot, ...]
    tensor_parallel: int
    """GPUs of one engine."""

    def of(self, kind: RoleKind) -> list[RoleSlot]:
        """Return the roles of one kind, in order."""
        return [slot for slot in self.slots if slot.kind is kind]

    @property
    def num_learners(self) -> int:
        """Ranks that share the learner's weights."""
        return len(self.of(RoleKind.LEARNER))

    @property
    def num_engines(self) -> int:
        """Engines, all of the same weights."""
        return len(self.of(RoleKind.ENGINE))

    @property
    def num_workers(self) -> int:
        """Processes that attempt and judge examples; 0 = the run's own process does."""
        return len(self.of(RoleKind.WORKER))

    @property
    def has_gpus(self) -> bool:
        """Whether learner and engines have GPUs assigned by the run file."""
        return any({INFER, TRAIN} & node.gpus.keys() for node in self.nodes)

    @property
    def is_shared(self) -> bool:
        """Whether learner and engines take turns on the same devices, so that they cannot overlap."""
        return self.kind == "inline" or not any(INFER in node.gpus for node in self.nodes)

    def describe(self) -> str:
        """Return kind and roles in one line."""
        counts = {kind.value: len(self.of(kind)) for kind in RoleKind}
        roles = [f"{n} {name}{'s' if n > 1 else ''}" for name, n in counts.items() if n]
        turns = ", learners and engines in turns on the same GPUs" if self.is_shared and self.has_gpus else ""
        width = f", {self.tensor_parallel} GPUs for each engine" if self.tensor_parallel > 1 else ""
        return f"{self.kind}: {', '.join(roles)}{width}{turns}"


def settle_layout(spec: RunSpec, num_nodes: int | None = None) -> RunSpec:
    """Return the spec with placement, learners, engines and tensor_parallel filled in from its GPUs.

    `num_nodes`: those that are there, of both parts, as `job` then says, too; None: as many as it asks for.
    Raises: ConfigError if the roles do not go into these nodes and their GPUs.
    """
    if num_nodes is not None:
        num_main = max(1, num_nodes - spec.job.cpu_nodes)
        there: dict[str, Any] = {"nodes": num_main, "cpu_nodes": max(0, num_nodes - num_main)}
        spec = spec.model_copy(update={"job": spec.job.model_copy(update=there)})
    try:
        layout = lay_out(spec)
    except SpecConflict as error:
        raise ConfigError(str(error)) from error
    placement = {"kind": layout.kind, "learners": layout.num_learners, "engines": layout.num_engines}
    engine: dict[str, Any] = {"tensor_parallel": layout.tensor_parallel}
    is_beside = layout.is_shared and layout.has_gpus and spec.engine.kind == "vllm"
    if is_beside and spec.engine.gpu_memory_frac is None:
        engine["gpu_memory_frac"] = SHARED_GPU_FRAC
    return spec.model_copy(
        update={
            "placement": spec.placement.model_copy(update=placement),
            "engine": spec.engine.model_copy(update=engine),
        }
    )


def lay_out(spec: RunSpec) -> Layout:
    """Return the layout of a run on the nodes that its job requests.

    Raises: SpecConflict if the roles do not go into the nodes and their GPUs, or a GPU or node would be idle.
    """
    nodes = _list_nodes(spec)
    learners = _place_learners(spec, nodes)
    engines, tensor_parallel = _place_engines(spec, nodes)
    workers = _place_workers(spec, nodes, len(engines))
    kind = _choose_kind(spec, nodes, (learners, engines, workers))
    layout = Layout(
        kind=kind,
        nodes=nodes,
        slots=(*learners, *engines, *workers, *_place_judges(spec, nodes)),
        tensor_parallel=tensor_parallel,
    )
    _require_none_idle(spec, layout)
    return layout


def _list_nodes(spec: RunSpec) -> tuple[LayoutNode, ...]:
    """Return the nodes with their GPUs by part."""
    job, num_main = spec.job, spec.job.nodes
    if job.infer_nodes and job.infer_nodes >= num_main:
        raise SpecConflict(
            {"job.nodes": num_main, "job.infer_nodes": job.infer_nodes},
            "no node is left to learn",
            allowed="fewer nodes that only generate than nodes",
            next_step="raise job.nodes or lower job.infer_nodes",
        )
    nodes = []
    for index in range(num_main):
        gpus = dict(job.gpu_roles)
        if index >= num_main - job.infer_nodes and gpus:
            gpus = {INFER: gpus[TRAIN]}
        beside = {ENV: job.env_gpus} | ({} if index else {JUDGE: job.judge_gpus})
        gpus |= {part: number for part, number in beside.items() if number}
        ordered = {part: gpus[part] for part in PARTS if part in gpus}
        nodes.append(LayoutNode(index=index, gpus=ordered))
    if job.cpu_command is None and spec.runtime.serve != "cpu-nodes":
        nodes += [LayoutNode(index=num_main + index, is_cpu=True) for index in range(job.cpu_nodes)]
    return tuple(nodes)


def _places(nodes: Sequence[LayoutNode], part: str) -> list[tuple[int, int]]:
    """Return (node, index) of every GPU of a part."""
    return [(node.index, place) for node in nodes for place in range(node.gpus.get(part, 0))]


def _place_learners(spec: RunSpec, nodes: Sequence[LayoutNode]) -> list[RoleSlot]:
    """Put one rank on each GPU for learning; without GPUs all stay on the first node, near each other."""
    places, asked = _places(nodes, TRAIN), spec.placement.learners
    if places and asked not in (None, len(places)):
        raise SpecConflict(
            {"placement.learners": asked, **_gpus_asked(spec)},
            f"placement.learners is {asked} and the nodes have {len(places)} GPUs for learning",
            allowed="one learner rank for each GPU",
            next_step="leave placement.learners out, or ask for as many GPUs",
        )
    if not places:
        return [RoleSlot(kind=RoleKind.LEARNER, index=index, node=0) for index in range(asked or 1)]
    return [
        RoleSlot(
            kind=RoleKind.LEARNER,
            index=index,
            node=node,
            devices=DeviceShare(part=TRAIN, first=place, count=1),
        )
        for index, (node, place) in enumerate(places)
    ]


def _place_engines(spec: RunSpec, nodes: Sequence[LayoutNode]) -> tuple[list[RoleSlot], int]:
    """Place engines on the GPUs for generation, else in turns on those for learning; return also their GPUs.

    Without GPUs they go round the nodes that generate.
    """
    asked, width = spec.placement.engines, spec.engine.tensor_parallel
    main = [node for node in nodes if not node.is_cpu]
    part = INFER if _places(main, INFER) else TRAIN
    total = len(_places(main, part))
    if part == INFER and not spec.train.has_rl:
        raise SpecConflict(
            {"train.terms": spec.train.terms, **_gpus_asked(spec)},
            "nothing is generated while it learns, and the GPUs for generation would be idle",
            allowed="job.gpus alone, whose GPUs learn; evaluation takes its turn on them",
            next_step="give all GPUs in job.gpus",
        )
    if not total:
        generating = main[-spec.job.infer_nodes :] if spec.job.infer_nodes else main
        num_engines = asked or (len(generating) if len(main) > 1 and spec.train.has_rl else 1)
        slots = [
            RoleSlot(kind=RoleKind.ENGINE, index=index, node=generating[index % len(generating)].index)
            for index in range(num_engines)
        ]
        return slots, width or 1
    if width is None:
        # vLLM's copies may be spread over GPUs; the rest computes on one.
        width = max(1, total // asked) if asked and part == INFER and spec.engine.kind == "vllm" else 1
    num_engines = asked or (total // width if spec.train.has_rl else 1)
    places = [
        (node.index, DeviceShare(part=part, first=first, count=width))
        for node in main
        for first in range(0, node.gpus.get(part, 0) - width + 1, width)
    ]
    if num_engines > len(places) or not num_engines:
        shown = ", ".join(str(node.gpus.get(part, 0)) for node in main)
        raise SpecConflict(
            {"placement.engines": asked, "engine.tensor_parallel": width, **_gpus_asked(spec)},
            f"{num_engines or 'no'} engines of {width} GPUs do not go into nodes with {shown} GPUs for"
            " generation",
            allowed="as many GPUs for each engine, all of one node",
            next_step="leave placement.engines and engine.tensor_parallel out, or ask for other GPUs",
        )
    slots = [
        RoleSlot(kind=RoleKind.ENGINE, index=index, node=node, devices=share)
        for index, (node, share) in enumerate(places[:num_engines])
    ]
    return slots, width


def _place_workers(spec: RunSpec, nodes: Sequence[LayoutNode], num_engines: int) -> list[RoleSlot]:
    """Distribute rollout workers over nodes with GPUs for environments, else those without GPUs, else all."""
    with_gpus = [node for node in nodes if ENV in node.gpus]
    asked = spec.placement.rollout_workers
    # Each engine has as many as another, and each node's GPUs one at least.
    num_workers = num_engines * -(-len(with_gpus) // num_engines) if asked is None else asked
    if num_workers % num_engines:
        raise SpecConflict(
            {"placement.rollout_workers": num_workers, "placement.engines": num_engines},
            "some engines would have fewer workers than others",
            allowed="a multiple of the engines, or 0",
            next_step="change one of the two",
        )
    hosts = with_gpus or [node for node in nodes if node.is_cpu] or list(nodes)
    has_gpus = any(node.gpus for node in nodes)
    slots = []
    for index in range(num_workers):
        node = hosts[index % len(hosts)]
        share = DeviceShare(part=ENV, first=0, count=node.gpus.get(ENV, 0))
        slots.append(
            RoleSlot(kind=RoleKind.WORKER, index=index, node=node.index, devices=share if has_gpus else None)
        )
    return slots


def _place_judges(spec: RunSpec, nodes: Sequence[LayoutNode]) -> list[RoleSlot]:
    """Place the judges that the run starts on the first node, beside the loop that queries them."""
    judges, total = role_judges(spec.task), spec.job.judge_gpus
    width = total // len(judges) if judges else 0
    is_native = any(judge.judge_engine == "native" for judge in judges)
    if total and (not judges or total % len(judges) or (is_native and width > 1)):
        raise SpecConflict(
            {"job.judge_gpus": total, "task.name": spec.task.name},
            f"the run starts {len(judges)} judges"
            + (", and its own engine takes one GPU" if is_native else ""),
            allowed="as many GPUs for each judge with task.judge_url = 'role'; one for each with judge_engine"
            " = 'native'",
            next_step="correct job.judge_gpus, or leave it out",
        )
    return [
        RoleSlot(
            kind=RoleKind.JUDGE,
            index=index,
            node=0,
            devices=DeviceShare(part=JUDGE, first=index * width, count=width) if width else None,
        )
        for index in range(len(judges))
    ]


def _choose_kind(spec: RunSpec, nodes: Sequence[LayoutNode], roles: tuple[Sequence[RoleSlot], ...]) -> Kind:
    """Return the requested placement, else the simplest one that supports these roles."""
    asked, num_main = spec.placement.kind, sum(not node.is_cpu for node in nodes)
    learners, engines, workers = map(len, roles)
    is_several = num_main > 1 or learners > 1 or engines > 1 or workers > 0 or spec.ray.address is not None
    is_apart = bool(_places(nodes, INFER)) or bool(role_judges(spec.task)) or spec.engine.kind == "vllm"
    if asked == "inline" and (is_several or is_apart):
        names = ("learners", "engines", "rollout_workers")
        counts = {f"placement.{name}": getattr(spec.placement, name) for name in names}
        raise SpecConflict(
            {"placement.kind": asked, **{k: v for k, v in counts.items() if v}, **_gpus_asked(spec)},
            f"they make {learners} learners, {engines} engines, {workers} rollout workers and"
            f" {len(role_judges(spec.task))} judges on {num_main} nodes, and only Ray starts other processes",
            allowed="placement.kind = 'ray', or one learner and its own engine, as with job.single_gpu",
            next_step="leave placement.kind out, or ask for less",
        )
    if asked is not None:
        return asked
    is_apart |= needs_ray(spec.task) or spec.train.max_staleness > 0
    return "ray" if is_several or is_apart else "inline"


def _require_none_idle(spec: RunSpec, layout: Layout) -> None:
    """Refuse GPUs and nodes that no role would use."""
    used = {
        (slot.node, slot.devices.part, slot.devices.first + place)
        for slot in layout.slots
        if slot.devices is not None
        for place in range(slot.devices.count)
    }
    idle = [
        f"{num_left} of the {number} for job.{part}_gpus on node {node.index}"
        for node in layout.nodes
        for part, number in node.gpus.items()
        if (num_left := sum((node.index, part, place) not in used for place in range(number)))
    ]
    # A scheduler gives every node of the main part as many.
    most = max(node.num_gpus for node in layout.nodes)
    idle += [
        f"{most - node.num_gpus} of node {node.index}"
        for node in layout.nodes
        if not node.is_cpu and node.num_gpus < most
    ]
    if idle:
        raise SpecConflict(
            _gpus_asked(spec) or {"job.nodes": spec.job.nodes},
            f"GPUs would be idle: {'; '.join(idle)}",
            allowed="GPUs that a role uses: learners, engines and rollout workers, and on the first node"
            " judges",
            next_step="ask for fewer, or for other shares",
        )
    busy = {slot.node for slot in layout.slots}
    unused = [node.index for node in layout.nodes if not node.is_cpu and node.index not in busy]
    if unused:
        raise SpecConflict(
            {"job.nodes": spec.job.nodes, "placement.engines": layout.num_engines},
            f"node {', '.join(map(str, unused))} would have no role",
            allowed="nodes with a learner, an engine or a rollout worker each",
            next_step="lower job.nodes, or leave placement.engines out",
        )


def _gpus_asked(spec: RunSpec) -> dict[str, Any]:
    """Return the settings that ask for GPUs and nodes, for a message."""
    names = (
        *("nodes", "infer_nodes", "gpus", "single_gpu", "train_gpus", "infer_gpus"),
        *("judge_gpus", "env_gpus"),
    )
    given = {f"job.{name}": getattr(spec.job, name) for name in names}
    return {key: value for key, value in given.items() if value and (key, value) != ("job.nodes", 1)}
