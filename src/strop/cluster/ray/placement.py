"""Every role of a run as an actor on Ray: learner ranks, engines, rollout workers, judges.

The loop stays in its process and gets the same `Roles` as from every other placement. Weights go by file, in
shared memory if that has room, and are sent where an engine is on another node. Of several engines all but
the last may be lost; the end of any other role ends the run.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from strop.cluster.contract import LearnerFacts, Publisher, Roles, start_all
from strop.cluster.publishers import has_memory_room, open_publisher
from strop.cluster.ray.attached import AttachedCluster
from strop.cluster.ray.deaths import DeathWatch, FollowedRole
from strop.cluster.ray.engines import ActorEngine, EngineActor, EngineFacts
from strop.cluster.ray.ranks import LearnerRank, RayLearner
from strop.cluster.ray.roles import RayRole, RoleStart
from strop.cluster.ray.runtime import RayHead, read_nodes
from strop.cluster.ray.settings import (
    OBJECT_STORE_BYTES,
    RayNode,
    check_object_store,
    choose_temp_dir,
    require_ray,
)
from strop.cluster.ray.workers import RolloutWorker, RolloutWorkers, assign_engines
from strop.engine.contract import Engine
from strop.engine.loading import EngineSettings, streams_replies
from strop.engine.vllm.environment import command_of
from strop.errors import EngineError
from strop.hardware.ports import NAMES_VARIABLE, find_host_address
from strop.io.atomic import explain_write_failure
from strop.io.endpoints import hand_over, list_endpoints, withdraw
from strop.io.variables import log_level_of
from strop.record.fence import ATTEMPT_VARIABLE
from strop.spec.judge import JudgeSettings, role_judges
from strop.spec.layout import ENV, RoleKind, RoleSlot
from strop.spec.run import RunSpec
from strop.store import ModelHandle
from strop.store.policy import ORDER_VARIABLE, URI_VARIABLE
from strop.tasks import Task, task_builder
from strop.tasks.judge_model import endpoint_name
from strop.tokenizer import DATE_VARIABLE, Tokenizer

JOIN_LIMIT_S = 900.0
"""Longest wait until all nodes of a job have joined: hosts of a cloud start minutes apart."""
START_LIMIT_S = 300.0
"""Limit for the start of a role's process: importing torch from a cold network disk takes a minute."""
LOAD_LIMIT_S = 900.0
FETCH_LIMIT_S = 3600.0
"""Limit for fetching a model to a node's disk."""
STOP_LIMIT_S = 15.0
_CLASSES: Mapping[RoleKind, type[RayRole]] = {
    RoleKind.LEARNER: LearnerRank,
    RoleKind.ENGINE: EngineActor,
    RoleKind.WORKER: RolloutWorker,
    RoleKind.JUDGE: EngineActor,
}


@dataclass(kw_only=True)
class _Started:
    """A running role."""

    slot: RoleSlot
    actor: Any
    log_path: Path
    source: ModelHandle
    """The model on this role's machine."""
    facts: Any = field(default=None)


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
        self._source = replace(source, path=source.path.absolute())
        self._work_dir = work_dir.absolute()
        self._attempt = os.environ.get(ATTEMPT_VARIABLE, "local")
        self._num_nodes = 1
        self._head: RayHead | AttachedCluster | None = None
        self._group: Any = None
        self._watch: DeathWatch | None = None
        self._roles: list[_Started] = []
        self._engines: list[ActorEngine] = []
        self._weights_dir = self._work_dir / "weights"
        self._publisher: Publisher | None = None

    @property
    def role_pids(self) -> dict[str, int]:
        """Process ids of the roles that have begun, by name."""
        return {role.slot.name: role.facts.pid for role in self._roles if role.facts is not None}

    @property
    def _servers_dir(self) -> Path:
        """The folder with addresses and keys of the run's servers."""
        return self._work_dir / "servers"

    async def start(self) -> Roles:
        """Start Ray, wait for all nodes, start every role, and have all hold the same weights.

        Raises: ConfigError if Ray or a part of it is missing;
        CheckRefused naming nodes that did not join, or a role whose node shows fewer GPUs;
        EngineError with the last log lines of what did not come up.
        """
        require_ray()
        return await start_all(self._start, self.stop)

    async def stop(self) -> None:
        """End every role and Ray itself. May be called at any time, and twice."""
        if self._watch is not None:
            self._watch.stop()
            self._watch = None
        for engine in self._engines:
            await engine.close()
        self._engines = []
        withdraw(self._servers_dir, map(endpoint_name, self._judges))
        if self._roles:
            import ray
            from ray.exceptions import RayError

            roles, self._roles = self._roles, []
            for role in roles:
                with suppress(RayError, TimeoutError):
                    # Sequentially is fast enough: all but engines only set a flag.
                    await asyncio.wait_for(role.actor.end.remote(), STOP_LIMIT_S)
                ray.kill(role.actor)
            if self._group is not None:
                from ray.util.placement_group import remove_placement_group

                remove_placement_group(self._group)
                self._group = None
        if self._head is not None:
            await self._head.stop()
            self._head = None
        if self._publisher is not None:
            await self._publisher.close()
            self._publisher = None

    async def _start(self) -> Roles:
        layout = self._spec.layout
        host = await self._connect(len(layout.nodes))
        await self._begin_roles(layout.slots)
        await self._serve_judges(host)
        loads = self._guard(asyncio.gather(*map(self._load_engine, self._of(RoleKind.ENGINE))), LOAD_LIMIT_S)
        facts, loaded = await asyncio.gather(self._load_learners(host), loads)
        return await self._join(facts, loaded, host)

    async def start_engine(self, version: int = 0) -> ActorEngine:
        """Start Ray on this machine and one engine, of weights of a version, and nothing else.

        Raises: as `start`.
        """
        require_ray()
        await self._connect(1)
        await self._begin_roles([RoleSlot(kind=RoleKind.ENGINE, index=0, node=0)])
        (role,) = self._roles
        await self._guard(self._load_engine(role, version), LOAD_LIMIT_S)
        self._engines.append(self._make_client(role))
        return self._engines[0]

    async def _connect(self, num_nodes: int) -> str:
        """Start Ray and wait for all nodes; return the address of this one."""
        self._num_nodes = num_nodes
        host = find_host_address(num_nodes, os.environ.get("GLOO_SOCKET_IFNAME"))
        address = self._spec.ray.address
        self._head = (
            self._make_head()
            if address is None
            else AttachedCluster(address, self._find_own_dir(), num_nodes)
        )
        self._head.launch()
        await self._head.connect()
        await self._head.await_nodes(range(num_nodes), JOIN_LIMIT_S)
        self._watch = DeathWatch(read_nodes, self._head.find_death)
        self._watch.start()
        return host

    async def _load_engine(self, role: _Started, version: int = 0) -> EngineFacts:
        settings = EngineSettings.of(self._spec)
        facts: EngineFacts = await role.actor.load.remote(settings, role.source.path, version)
        return facts

    async def _serve_judges(self, host: str) -> None:
        """Load every judge, and hand over its address and key, before anything could ask it."""

        async def serve(role: _Started, section: JudgeSettings) -> None:
            settings = EngineSettings(
                kind=section.judge_engine,
                dtype=self._spec.model.dtype,
                max_num_seqs=self._spec.engine.max_num_seqs,
                tensor_parallel=role.slot.devices.count if role.slot.devices else 1,
            )
            await role.actor.load.remote(settings, role.source.path)
            endpoint = await role.actor.serve_chat.remote(host)
            try:
                hand_over(self._servers_dir, {endpoint_name(section.judge_model): endpoint})
            except OSError as error:
                raise explain_write_failure(error, self._servers_dir) from error

        pairs = zip(self._of(RoleKind.JUDGE), role_judges(self._spec.task), strict=True)
        await self._guard(asyncio.gather(*(serve(*pair) for pair in pairs)), LOAD_LIMIT_S)

    def _make_head(self) -> RayHead:
        """Return a new cluster for the run, which is not started yet."""
        ray = self._spec.ray
        check_object_store()
        node = RayNode.here(
            os.environ,
            self._num_nodes,
            temp_dir=choose_temp_dir(Path(ray.temp_dir) if ray.temp_dir else None),
            logs_dir=self._find_logs_dir(),
        )
        # Weights in shared memory of this node, if it has room.
        if has_memory_room(self._source.path, reserved_bytes=OBJECT_STORE_BYTES):
            self._weights_dir = node.shared_dir
        return RayHead(node, self._num_nodes, self._find_own_dir() / "ray.token")

    async def _join(self, facts: Sequence[LearnerFacts], loaded: Sequence[EngineFacts], host: str) -> Roles:
        """Make the clients of the loaded roles, and publish the learner's weights to all engines."""
        assert self._watch is not None
        learner = RayLearner([role.actor for role in self._of(RoleKind.LEARNER)], self._watch, facts)
        engines, workers = self._of(RoleKind.ENGINE), self._of(RoleKind.WORKER)
        self._engines = [self._make_client(role) for role in engines]
        chosen = assign_engines(len(workers), len(engines))
        own_dir, endpoints = self._find_own_dir(), list_endpoints()
        calls = [
            worker.actor.load.remote(
                worker.source,
                engines[engine].actor,
                streams_replies(self._spec),
                self._make_task,
                endpoints,
                own_dir / worker.slot.name,
            )
            for worker, engine in zip(workers, chosen, strict=True)
        ]
        await self._guard(asyncio.gather(*calls), START_LIMIT_S)
        self._publisher = publisher = open_publisher(
            self._spec, learner, self._weights_dir, self._find_acknowledged, host=host
        )
        update = await publisher.publish()
        tokenizer = Tokenizer.load(self._source.path)
        self._check_engines(loaded, update.digest, tokenizer.digest)
        engine = self._join_engines()
        await engine.update(update)
        joined = self._join_workers(workers, chosen, engine) if workers else None
        return Roles(
            learner=learner,
            engine=engine,
            publisher=publisher,
            tokenizer=tokenizer,
            run_group=None if joined is None else joined.run_group,
            busy={} if joined is None else joined.busy,
        )

    def _join_workers(
        self, workers: Sequence[_Started], chosen: Sequence[int], engine: Engine
    ) -> RolloutWorkers:
        """Return all workers as one object, which only uses workers whose engine serves."""
        from strop.engine.pool import EnginePool

        def serves(worker: int) -> bool:
            return not isinstance(engine, EnginePool) or engine.serves(f"engine-{chosen[worker]}")

        assert self._watch is not None
        actors = [worker.actor for worker in workers]
        return RolloutWorkers(actors, self._watch, engines=chosen, serves=serves)

    def _make_client(self, role: _Started) -> ActorEngine:
        assert self._watch is not None
        return ActorEngine(
            role.actor,
            is_streamed=streams_replies(self._spec),
            # Weights are written on the first node, into its memory.
            sees_files=role.slot.node == 0,
            guard=partial(self._watch.guard, role=role.slot.name),
        )

    def _join_engines(self) -> Engine:
        if len(self._engines) == 1:
            return self._engines[0]
        from strop.engine.pool import EnginePool, ReplicaCause

        assert self._watch is not None
        pool = EnginePool({f"engine-{index}": engine for index, engine in enumerate(self._engines)})
        self._watch.report_to(lambda name, message: pool.condemn(name, message, ReplicaCause.LOST))
        return pool

    def _find_acknowledged(self) -> int | None:
        """Return the oldest version that a living engine may still read."""
        assert self._watch is not None
        is_lost = [self._watch.find_end(f"engine-{index}") for index in range(len(self._engines))]
        living = zip(self._engines, is_lost, strict=True)
        versions = [engine.version for engine, end in living if end is None] or [None]
        return None if None in versions else min(version for version in versions if version is not None)

    def _check_engines(self, loaded: Sequence[EngineFacts], digest: str, tokenizer: str) -> None:
        """Refuse a model directory that is another one on an engine's node."""
        for role, facts in zip(self._of(RoleKind.ENGINE), loaded, strict=True):
            # With adapters the learner publishes the model with these merged in.
            is_same = facts.model_digest == digest or self._spec.lora.rank is not None
            if not is_same or facts.tokenizer_digest != tokenizer:
                raise EngineError(
                    f"{role.slot.name} on node {role.slot.node} loaded weights with digest"
                    f" {facts.model_digest[:12]} and a tokenizer with {facts.tokenizer_digest[:12]}"
                    f" from {self._source.path}",
                    allowed=f"those of the learner, {digest[:12]} and {tokenizer[:12]}",
                    next_step="see that every node has the same model there, then start the run again",
                )

    async def _begin_roles(self, slots: Sequence[RoleSlot]) -> None:
        """Make an actor of every slot on its node; each finds its model."""
        import ray
        from ray.util.placement_group import placement_group
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        assert self._head is not None
        seats = self._head.reserve(slots)
        self._group = group = placement_group(list(seats.bundles), strategy="PACK")
        await self._guard(group.ready(), START_LIMIT_S)
        # The run changes these variables in this process, so roles get them.
        changed = (URI_VARIABLE, ORDER_VARIABLE, DATE_VARIABLE)
        store = {name: os.environ[name] for name in changed if name in os.environ}
        listed = os.environ.get(NAMES_VARIABLE, "").split(",")
        import torch

        logs_dir, mark_path = self._find_logs_dir(), self._head.mark_path
        # The processes of an attached cluster have other variables.
        own, shown = {}, {}
        if seats.variables:
            own = {name: os.environ[name] for name in listed if name in os.environ}
            shown = {"env_vars": {"PYTHONPATH": seats.variables["PYTHONPATH"]}}
        sections = role_judges(self._spec.task)
        for index, slot in enumerate(slots):
            logs_as, source, kind = str(slot.kind), self._source, "native"
            if slot.kind is RoleKind.JUDGE:
                section = sections[slot.index]
                source, kind = self._judges[section.judge_model], section.judge_engine
            elif slot.kind is RoleKind.ENGINE:
                kind = self._spec.engine.kind
            else:
                logs_as = "train"
            # Its launcher sets the modules that vLLM's interpreter sees.
            interpreter = {"py_executable": command_of(self._spec.engine.python)} if kind == "vllm" else shown
            start = RoleStart(
                name=slot.name,
                node=slot.node,
                log_path=str(logs_dir / f"{slot.name}.log"),
                num_threads=torch.get_num_threads(),
                log_level=log_level_of(self._spec.output.log_level, logs_as),
                devices=None if seats.num_gpus[index] else slot.devices,
                has_env_gpus=slot.devices is not None and slot.devices.part == ENV,
                variables={**seats.variables, **own, **store},
                mark_path=str(mark_path),
            )
            # One call at a time, and in parallel the one that waits for the end.
            make = ray.remote(concurrency_groups={"watch": 1})
            actor = (
                make(_CLASSES[slot.kind])
                .options(
                    num_cpus=0,
                    num_gpus=seats.num_gpus[index],
                    name=slot.name,
                    runtime_env=interpreter,
                    scheduling_strategy=PlacementGroupSchedulingStrategy(
                        placement_group=group, placement_group_bundle_index=seats.indices[index]
                    ),
                )
                .remote(start)
            )
            log_path = Path(start.log_path)
            self._roles.append(_Started(slot=slot, actor=actor, log_path=log_path, source=source))
        # In parallel: each may import torch from a slow disk.
        calls = [role.actor.begin.remote() for role in self._roles]
        for role, call in zip(self._roles, calls, strict=True):
            role.facts = await self._guard(call, START_LIMIT_S)
            self._follow(role)
        # Every role finds the model on its machine, or fetches it there.
        fetches = [role.actor.bring_model.remote(role.source) for role in self._roles]
        sources = await self._guard(asyncio.gather(*fetches), FETCH_LIMIT_S)
        for role, source in zip(self._roles, sources, strict=True):
            role.source = source

    def _follow(self, role: _Started) -> None:
        assert self._watch is not None
        followed = FollowedRole(
            name=role.slot.name,
            node=role.slot.node,
            pid=role.facts.pid,
            host=role.facts.host,
            log_path=role.log_path,
            is_replica=role.slot.kind is RoleKind.ENGINE,
        )
        ending = role.actor.wait_for_end.options(concurrency_group="watch").remote()
        self._watch.follow(followed, ending)

    async def _load_learners(self, host: str) -> list[LearnerFacts]:
        ranks = self._of(RoleKind.LEARNER)
        rendezvous = (host, 0)
        if len(ranks) > 1:
            # The first rank is on the head's node.
            port = await self._guard(ranks[0].actor.open_rendezvous.remote(host, len(ranks)), START_LIMIT_S)
            rendezvous = (host, port)
        calls = [
            role.actor.load.remote(self._spec, role.source, index, len(ranks), rendezvous)
            for index, role in enumerate(ranks)
        ]
        facts: list[LearnerFacts] = await self._guard(asyncio.gather(*calls), LOAD_LIMIT_S)
        return facts

    async def _guard(self, call: Any, limit_s: float) -> Any:
        assert self._watch is not None
        return await self._watch.guard(call, limit_s)

    def _of(self, kind: RoleKind) -> list[_Started]:
        return [role for role in self._roles if role.slot.kind is kind]

    def _find_own_dir(self) -> Path:
        """Return a folder for keys: not the attempt's folder, which is mirrored to a store."""
        return self._work_dir / f"ray-{self._attempt}"

    def _find_logs_dir(self) -> Path:
        """Return the folder of the roles' logs: in the attempt's folder, if there is one."""
        latest = self._work_dir.parent / "latest"
        return latest.resolve() / "roles" if latest.is_dir() else self._work_dir


@asynccontextmanager
async def serve_engine(spec: RunSpec, model_dir: Path, *, version: int = 0) -> AsyncIterator[ActorEngine]:
    """Start one engine with a model directory on this machine, for the block.

    Raises: as `RayPlacement.start`.
    """
    with tempfile.TemporaryDirectory(prefix="strop-engine-") as folder:
        placement = RayPlacement(spec, ModelHandle(path=model_dir, digest=""), Path(folder))
        try:
            yield await start_all(partial(placement.start_engine, version), placement.stop)
        finally:
            await placement.stop()
