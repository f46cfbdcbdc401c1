"""Every role of a run as an actor on Ray: learner ranks, engines, rollout workers, judges.

The loop stays in its process and gets the same `Roles` as from every other placement. Weights go by file, in
shared memory if that has room, and are sent where an engine is on another node. Of several engines all but
the last may be lost; the end of any other role ends the run.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import tempfile
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from strop.cluster.contract import LearnerFacts, Publisher, Roles
from strop.cluster.ray.deaths import DeathWatch, RunningRole
from strop.cluster.ray.engines import ActorEngine, EngineActor
from strop.cluster.ray.node import OBJECT_STORE_BYTES, require_ray
from strop.cluster.ray.ranks import LearnerRank, RayLearner
from strop.cluster.ray.roles import RayRole, RoleStart
from strop.cluster.ray.runtime import AttachedCluster, RayHead
from strop.cluster.ray.workers import RolloutWorker, RolloutWorkers
from strop.engine.contract import Engine
from strop.engine.loading import EngineSettings, streams_replies
from strop.engine.pool import EnginePool, ReplicaCause
from strop.engine.vllm.environment import command_of
from strop.errors import CheckRefused
from strop.hardware import describe_machine
from strop.hardware.ports import NAMES_VARIABLE, find_host_address
from strop.io.atomic import explain_write_failure
from strop.io.endpoints import hand_over, list_endpoints, withdraw
from strop.io.variables import log_level_of
from strop.record.fence import ATTEMPT_VARIABLE
from strop.spec.judge import role_judges
from strop.spec.layout import RoleKind, RoleSlot
from strop.spec.run import RunSpec
from strop.store import ModelHandle
from strop.store.policy import ORDER_VARIABLE, URI_VARIABLE
from strop.tasks import Task, task_builder
from strop.tasks.judge_model import endpoint_name
from strop.tokenizer import DATE_VARIABLE, Tokenizer

START_LIMIT_S = 300.0
"""Limit for the start of a role's process: importing torch from a cold network disk takes a minute."""
LOAD_LIMIT_S = 900.0
FETCH_LIMIT_S = 3600.0
"""Limit for the start of a role and for fetching its model to a node's disk."""
STOP_LIMIT_S = 15.0
_NODE_SHARE = 0.001
"""Share of the resource that Ray gives every node by its address: a bundle must ask for something."""
_CLASSES: Mapping[RoleKind, type[RayRole]] = {
    RoleKind.LEARNER: LearnerRank,
    RoleKind.ENGINE: EngineActor,
    RoleKind.WORKER: RolloutWorker,
    RoleKind.JUDGE: EngineActor,
}


class RayPlacement:
    """Roles on a Ray cluster that the run starts, or one that is already running (`ray.address`)."""

    def __init__(
        self,
        spec: RunSpec,
        source: ModelHandle,
        work_dir: Path,
        *,
        make_task: Callable[[], Task] | None = None,
        judges: Mapping[str, ModelHandle] | None = None,
    ) -> None:
        """Nothing is started yet. `make_task` builds the task of rollout workers, by default the spec's.

        `judges` are the models of `role_judges`, by name.
        """
        self._spec = spec
        self._judges = dict(judges or {})
        self._make_task = make_task or task_builder(spec.task)
        self._source = source
        self._work_dir = work_dir.absolute()
        # For keys: not the attempt's folder, which is mirrored to a store.
        self._own_dir = self._work_dir / f"ray-{os.environ.get(ATTEMPT_VARIABLE, 'local')}"
        latest = self._work_dir.parent / "latest"
        self._logs_dir = latest.resolve() / "roles" if latest.is_dir() else self._work_dir
        self._servers_dir = self._work_dir / "servers"
        self._cluster: RayHead | AttachedCluster | None = None
        self._group: Any = None
        self._roles: list[RunningRole] = []
        self._engines: list[ActorEngine] = []
        self._publisher: Publisher | None = None

    @property
    def role_pids(self) -> dict[str, int]:
        """Process ids of the roles that have begun, by name."""
        return {role.slot.name: role.facts.pid for role in self._roles if role.facts is not None}

    async def start(self) -> Roles:
        """Start Ray, wait for all nodes, and start and load every role.

        Raises: ConfigError if Ray or a part of it is missing;
        CheckRefused naming nodes that did not join, or a role whose node shows fewer GPUs;
        EngineError with the last log lines of what did not come up.
        """
        layout = self._spec.layout
        await self._begin_roles(layout.slots, len(layout.nodes))
        # The first learner rank and all judges are on this node.
        host = find_host_address(len(layout.nodes), os.environ.get("GLOO_SOCKET_IFNAME"))
        await self._serve_judges(host)
        learner, _ = await asyncio.gather(self._load_learner(host), self._load_engines())
        engine = self._join_engines()
        workers = await self._load_workers(engine)
        self._publisher = self._open_publisher(learner, host)
        return Roles(
            learner=learner,
            engine=engine,
            publisher=self._publisher,
            tokenizer=Tokenizer.load(self._source.path),
            run_group=None if workers is None else workers.run_group,
            busy={} if workers is None else workers.busy,
        )

    async def start_engine(self, version: int = 0) -> ActorEngine:
        """Start Ray on this machine and one engine, of weights of a version, and nothing else.

        Raises: as `start`.
        """
        await self._begin_roles([RoleSlot(kind=RoleKind.ENGINE, index=0, node=0)], 1)
        await self._load_engines(version)
        return self._engines[0]

    async def stop(self) -> None:
        """End every role and Ray itself. May be called at any time, and twice."""
        if hasattr(self, "_watch"):
            self._watch.stop()
        for engine in self._engines:
            await engine.close()
        self._engines = []
        withdraw(self._servers_dir, map(endpoint_name, self._judges))
        roles, self._roles = self._roles, []
        if roles:
            import ray
            from ray.exceptions import RayError

            for role in roles:
                if role.slot.kind is not RoleKind.LEARNER:
                    with suppress(RayError, TimeoutError):
                        await asyncio.wait_for(role.actor.end.remote(), STOP_LIMIT_S)
                ray.kill(role.actor)
        if self._group is not None:
            from ray.util.placement_group import remove_placement_group

            remove_placement_group(self._group)
            self._group = None
        if self._cluster is not None:
            await self._cluster.stop()
            self._cluster = None
        if self._publisher is not None:
            await self._publisher.close()
            self._publisher = None

    async def _begin_roles(self, slots: Sequence[RoleSlot], num_nodes: int) -> None:
        """Start Ray, wait for all nodes, and make an actor of every slot, which finds its model."""
        require_ray()
        ray_spec = self._spec.ray
        temp_dir = Path(ray_spec.temp_dir) if ray_spec.temp_dir else None
        self._cluster = (
            RayHead(self._logs_dir, num_nodes, self._own_dir / "ray.token", temp_dir)
            if ray_spec.address is None
            else AttachedCluster(ray_spec.address, self._own_dir, num_nodes)
        )
        await self._cluster.start()
        nodes = await self._cluster.await_nodes()
        self._watch = DeathWatch(self._cluster.find_death)
        import ray
        from ray.util.placement_group import placement_group
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        bundles, indices, num_gpus = seat(slots, nodes, has_gpus=ray_spec.address is not None)
        self._group = group = placement_group(
            [resources for _, resources in bundles],
            # Two nodes may have one address.
            bundle_label_selector=[{"ray.io/node-id": nodes[node]["NodeID"]} for node, _ in bundles],
        )
        await self._watch.guard(group.ready(), START_LIMIT_S)
        for slot, index, gpus in zip(slots, indices, num_gpus, strict=True):
            start = self._describe_start(slot, takes_devices=not gpus)
            # One call at a time, and in parallel the one that waits for the end.
            make = ray.remote(concurrency_groups={"watch": 1})
            actor = (
                make(_CLASSES[slot.kind])
                .options(
                    num_cpus=0,
                    num_gpus=gpus,
                    name=slot.name,
                    # It sets the modules that vLLM's interpreter sees.
                    runtime_env={"py_executable": command_of(self._spec.engine.python)}
                    if self._engine_kind(slot) == "vllm"
                    else None,
                    scheduling_strategy=PlacementGroupSchedulingStrategy(
                        placement_group=group, placement_group_bundle_index=index
                    ),
                )
                .remote(start)
            )
            role = RunningRole(slot=slot, log_path=start.log_path, actor=actor)
            self._roles.append(role)
            self._watch.follow(role, actor.wait_for_end.options(concurrency_group="watch").remote())
        # In parallel: each may import torch from a slow disk.
        calls = [role.actor.begin.remote(self._model_of(role.slot)) for role in self._roles]
        for role, call in zip(self._roles, calls, strict=True):
            role.facts = await self._watch.guard(call, FETCH_LIMIT_S)

    def _describe_start(self, slot: RoleSlot, *, takes_devices: bool) -> RoleStart:
        assert self._cluster is not None
        # The run changes these variables in this process, so roles get them.
        names = [URI_VARIABLE, ORDER_VARIABLE, DATE_VARIABLE]
        if self._spec.ray.address is not None:
            # The processes of an attached cluster have other variables.
            names += os.environ.get(NAMES_VARIABLE, "").split(",")
        logs_as = str(slot.kind) if slot.kind in (RoleKind.ENGINE, RoleKind.JUDGE) else "train"
        return RoleStart(
            slot=slot,
            log_path=self._logs_dir / f"{slot.name}.log",
            num_threads=self._spec.placement.threads or describe_machine().num_physical_cores,
            log_level=log_level_of(self._spec.output.log_level, logs_as),
            takes_devices=takes_devices,
            variables={name: os.environ[name] for name in names if name in os.environ},
            mark_path=self._cluster.mark_path,
        )

    def _engine_kind(self, slot: RoleSlot) -> str | None:
        if slot.kind is RoleKind.JUDGE:
            return role_judges(self._spec.task)[slot.index].judge_engine
        return self._spec.engine.kind if slot.kind is RoleKind.ENGINE else None

    def _model_of(self, slot: RoleSlot) -> ModelHandle:
        judges = role_judges(self._spec.task) if slot.kind is RoleKind.JUDGE else ()
        model = self._judges[judges[slot.index].judge_model] if judges else self._source
        return replace(model, path=model.path.absolute())

    async def _serve_judges(self, host: str) -> None:
        """Load every judge, and hand over its address and key, before anything could ask it."""
        sections, calls = role_judges(self._spec.task), []
        if not sections:
            return
        for role, section in zip(self._of(RoleKind.JUDGE), sections, strict=True):
            settings = EngineSettings(
                kind=section.judge_engine,
                dtype=self._spec.model.dtype,
                max_num_seqs=self._spec.engine.max_num_seqs,
                tensor_parallel=role.slot.devices.count if role.slot.devices else 1,
            )
            calls.append(role.actor.serve_chat.remote(settings, host))
        endpoints = await self._watch.guard(asyncio.gather(*calls), LOAD_LIMIT_S)
        names = [endpoint_name(section.judge_model) for section in sections]
        try:
            hand_over(self._servers_dir, dict(zip(names, endpoints, strict=True)))
        except OSError as error:
            raise explain_write_failure(error, self._servers_dir) from error

    async def _load_learner(self, host: str) -> RayLearner:
        ranks = [role.actor for role in self._of(RoleKind.LEARNER)]
        rendezvous = (host, 0)
        if len(ranks) > 1:
            port = await self._watch.guard(ranks[0].open_rendezvous.remote(host, len(ranks)), START_LIMIT_S)
            rendezvous = (host, port)
        calls = [
            rank.load.remote(self._spec, index, len(ranks), rendezvous) for index, rank in enumerate(ranks)
        ]
        facts: list[LearnerFacts] = await self._watch.guard(asyncio.gather(*calls), LOAD_LIMIT_S)
        return RayLearner(ranks, self._watch, facts)

    async def _load_engines(self, version: int = 0) -> None:
        """Load every engine, and make its client."""
        roles, settings = self._of(RoleKind.ENGINE), EngineSettings.of(self._spec)
        loads = [role.actor.load.remote(settings, version) for role in roles]
        await self._watch.guard(asyncio.gather(*loads), LOAD_LIMIT_S)
        self._engines = [
            ActorEngine(
                role.actor,
                is_streamed=streams_replies(self._spec),
                # Weights are written on the first node, into its memory.
                sees_files=role.slot.node == 0,
                guard=partial(self._watch.guard, role=role.slot.name),
            )
            for role in roles
        ]

    def _join_engines(self) -> Engine:
        if len(self._engines) == 1:
            return self._engines[0]
        pool = EnginePool({f"engine-{index}": engine for index, engine in enumerate(self._engines)})
        self._watch.report_to(lambda name, message: pool.condemn(name, message, ReplicaCause.LOST))
        return pool

    async def _load_workers(self, engine: Engine) -> RolloutWorkers | None:
        """Load the rollout workers, which share the engines evenly; None if there are none."""
        workers, engines = self._of(RoleKind.WORKER), self._of(RoleKind.ENGINE)
        if not workers:
            return None
        chosen = [engines[index % len(engines)] for index in range(len(workers))]
        calls = [
            worker.actor.load.remote(
                served.actor,
                streams_replies(self._spec),
                self._make_task,
                list_endpoints(),
                self._own_dir / worker.slot.name,
            )
            for worker, served in zip(workers, chosen, strict=True)
        ]
        await self._watch.guard(asyncio.gather(*calls), START_LIMIT_S)
        return RolloutWorkers(
            [worker.actor for worker in workers],
            self._watch,
            engines=[served.slot.name for served in chosen],
            serves=engine.serves if isinstance(engine, EnginePool) else lambda name: True,
        )

    def _open_publisher(self, learner: RayLearner, host: str) -> Publisher:
        """Return the publisher of weights, in shared memory of this node if that has room."""
        # Here, because it imports torch, as roles do when they begin.
        from strop.cluster.publishers import has_memory_room, open_publisher

        path = self._work_dir / "weights"
        has_room = has_memory_room(self._source.path, reserved_bytes=OBJECT_STORE_BYTES)
        if isinstance(self._cluster, RayHead) and has_room:
            path = self._cluster.weights_dir
        else:
            # A killed attempt leaves some.
            shutil.rmtree(path, ignore_errors=True)
        return open_publisher(self._spec, learner, path, host=host)

    def _of(self, kind: RoleKind) -> list[RunningRole]:
        return [role for role in self._roles if role.slot.kind is kind]


def seat(
    slots: Sequence[RoleSlot], nodes: Sequence[Mapping[str, Any]], *, has_gpus: bool
) -> tuple[list[tuple[int, dict[str, float]]], list[int], list[float]]:
    """Return bundles of a placement group with their nodes, and for each slot its bundle and its GPUs.

    One bundle for each share of GPUs, which its roles divide, and one for each other role. `nodes` are as Ray
    shows them; `has_gpus`: whether Ray shares out their GPUs.
    Raises: CheckRefused if they have fewer GPUs.
    """
    counts = [slot.devices.count if slot.devices and has_gpus else 0 for slot in slots]
    keys = [
        (slot.node, count, slot.devices if count else slot.name)
        for slot, count in zip(slots, counts, strict=True)
    ]
    sharing = Counter(keys)
    order = list(sharing)
    bundles: list[tuple[int, dict[str, float]]] = []
    wanted: Counter[int] = Counter()
    for node, count, _ in order:
        gpus = {"GPU": float(count)} if count else {}
        bundles.append((node, {f"node:{nodes[node]['NodeManagerAddress']}": _NODE_SHARE, **gpus}))
        wanted[node] += count
    lacking = [
        f"{nodes[node]['NodeManagerAddress']} has {there:g} of {count}"
        for node, count in wanted.items()
        if (there := nodes[node]["Resources"].get("GPU", 0.0)) < count
    ]
    if lacking:
        raise CheckRefused(
            f"GPUs of the Ray cluster: {', '.join(lacking)}",
            allowed="as many GPUs as Ray knows on a node",
            next_step="ask for fewer in the job section",
        )
    shares = [key[1] / sharing[key] for key in keys]
    # Ray accepts fractions of one GPU, and only whole numbers above.
    return (
        bundles,
        [order.index(key) for key in keys],
        [share if share < 1 else float(int(share)) for share in shares],
    )


@asynccontextmanager
async def serve_engine(spec: RunSpec, model_dir: Path, *, version: int = 0) -> AsyncIterator[ActorEngine]:
    """Start one engine with a model directory on this machine, for the block.

    Raises: as `RayPlacement.start`.
    """
    with tempfile.TemporaryDirectory(prefix="strop-engine-") as folder:
        placement = RayPlacement(spec, ModelHandle(path=model_dir, digest=""), Path(folder))
        try:
            yield await placement.start_engine(version)
        finally:
            await placement.stop()
