"""Every role of a run as an actor on Ray: learner ranks, engines, rollout workers, judges.

The loop stays in its process and gets the same `Roles` as from every other placement. Weights go by file, in
shared memory if that has room, and are sent where an engine is on another node. Of several engines all but
the last may be lost; the end of any other role ends the run.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import shutil
import tempfile
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from strop.cluster.contract import LearnerFacts, Roles
from strop.cluster.ray.deaths import DeathWatch
from strop.cluster.ray.engines import ActorEngine, EngineActor
from strop.cluster.ray.node import OBJECT_STORE_BYTES, require_ray, shared_dir_of
from strop.cluster.ray.ranks import LearnerRank, RayLearner
from strop.cluster.ray.roles import RayRole, RoleStart, RunningRole
from strop.cluster.ray.runtime import RayHead, attach, disconnect
from strop.cluster.ray.workers import RolloutWorker, RolloutWorkers
from strop.engine.contract import Engine
from strop.engine.loading import EngineSettings, streams_replies
from strop.engine.pool import EnginePool, ReplicaCause
from strop.engine.vllm.environment import command_of
from strop.errors import CheckRefused
from strop.hardware import describe_machine
from strop.hardware.ports import NAMES_VARIABLE
from strop.io.atomic import explain_write_failure, make_directory
from strop.io.endpoints import hand_over, list_endpoints, withdraw
from strop.io.variables import level_variables, log_level_of
from strop.record.fence import ATTEMPT_VARIABLE
from strop.spec.judge import role_judges
from strop.spec.layout import RoleKind, RoleSlot
from strop.spec.run import RunSpec
from strop.store import ModelHandle
from strop.store.policy import ORDER_VARIABLE, URI_VARIABLE
from strop.tasks import Task, task_builder
from strop.tasks.judge_model import endpoint_name
from strop.tokenizer import DATE_VARIABLE, Tokenizer

STOP_LIMIT_S = 15.0
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
        self._mark_path = self._own_dir / secrets.token_hex(8)
        latest = self._work_dir.parent / "latest"
        self._logs_dir = latest.resolve() / "roles" if latest.is_dir() else self._work_dir
        self._memory_dir: Path | None = None
        self._servers_dir = self._work_dir / "servers"
        self._roles: list[RunningRole] = []
        self._undo = AsyncExitStack()

    @property
    def role_pids(self) -> dict[str, int]:
        """Process ids of the roles that have begun, by name."""
        return {role.start.slot.name: role.facts.pid for role in self._roles if role.facts is not None}

    async def start(self) -> Roles:
        """Start Ray, wait for all nodes, and start and load every role.

        Raises: ConfigError if Ray or a part of it is missing;
        CheckRefused naming nodes that did not join, or a role whose node shows fewer GPUs;
        EngineError with the last log lines of what did not come up.
        """
        layout = self._spec.layout
        # The first learner rank and all judges are on this node.
        host = await self._begin_roles(layout.slots, len(layout.nodes))
        await self._serve_judges(host)
        learner, engines = await asyncio.gather(self._load_learner(host), self._load_engines())
        engine = self._join(engines)
        workers = await self._load_workers(engine)
        # Here, because it imports torch, as roles do when they begin.
        from strop.cluster.publishers import choose_publisher, has_memory_room

        weights_dir = self._own_dir / "weights"
        if self._memory_dir and has_memory_room(self._source.path, reserved_bytes=OBJECT_STORE_BYTES):
            weights_dir = self._memory_dir
        return Roles(
            learner=learner,
            engine=engine,
            publish=choose_publisher(self._spec, learner, weights_dir, host=host),
            tokenizer=Tokenizer.load(self._source.path),
            run_group=None if workers is None else workers.run_group,
            busy={} if workers is None else workers.busy,
        )

    async def start_engine(self, version: int = 0) -> ActorEngine:
        """Start Ray on this machine and one engine, of weights of a version, and nothing else.

        Raises: as `start`.
        """
        await self._begin_roles([RoleSlot(kind=RoleKind.ENGINE, index=0, node=0)], 1)
        return (await self._load_engines(version))[0]

    async def stop(self) -> None:
        """End every role and Ray itself. May be called at any time, and twice."""
        await self._undo.aclose()

    async def _begin_roles(self, slots: Sequence[RoleSlot], num_nodes: int) -> str:
        """Start Ray, wait for all nodes, and make an actor of every slot, which finds its model.

        Returns the address of this machine for the other ones.
        """
        require_ray()
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        # A killed attempt may have left it.
        shutil.rmtree(self._own_dir, ignore_errors=True)
        self._undo.callback(shutil.rmtree, self._own_dir, ignore_errors=True)
        make_directory(self._own_dir)
        self._mark_path.touch()
        self._watch = DeathWatch()
        nodes = await self._find_nodes(num_nodes)
        self._undo.push_async_callback(self._end_roles)
        is_attached = self._spec.ray.address is not None
        if is_attached:
            require_gpus(slots, nodes)
        firsts: dict[tuple[Any, ...], Any] = {}
        """The begin of the first of several roles with the same GPUs: it alone asks Ray for them."""
        calls = []
        for slot in slots:
            key = (slot.node, slot.devices or slot.name)
            asks_ray = is_attached and slot.devices is not None and key not in firsts
            start, settings = self._describe_start(slot), self._settings_of(slot)
            # One call at a time, and in parallel the one that waits for the end.
            make = ray.remote(concurrency_groups={"watch": 1})(_CLASSES[slot.kind])
            actor = make.options(
                num_cpus=0,
                num_gpus=slot.devices.count if asks_ray and slot.devices else 0,
                # It sets the modules that vLLM's interpreter sees.
                runtime_env={"py_executable": command_of(self._spec.engine.python)}
                if settings and settings.kind == "vllm"
                else None,
                # Two nodes may have one address.
                scheduling_strategy=NodeAffinitySchedulingStrategy(nodes[slot.node]["NodeID"], soft=False),
            ).remote(start)
            self._roles.append(role := RunningRole(start=start, actor=actor))
            ending = role.ended(actor.wait_for_end.options(concurrency_group="watch").remote())
            self._watch.follow(slot.name, ending, is_replica=slot.kind is RoleKind.ENGINE)
            # In parallel: each may import torch from a slow disk.
            calls.append(actor.begin.remote(self._model_of(slot), firsts.get(key) if is_attached else None))
            firsts.setdefault(key, calls[-1])
        for role, call in zip(self._roles, calls, strict=True):
            role.facts = await self._watch.guard(call)
        return str(nodes[0]["NodeManagerAddress"])

    async def _find_nodes(self, num_nodes: int) -> list[dict[str, Any]]:
        """Start Ray or attach to it; return the nodes as Ray shows them, this one first."""
        spec = self._spec.ray
        if spec.address is not None:
            self._undo.callback(disconnect)
            return await attach(spec.address, num_nodes)
        temp_dir = Path(spec.temp_dir) if spec.temp_dir else None
        head = RayHead(self._logs_dir, num_nodes, self._own_dir / "ray.token", temp_dir)
        self._undo.push_async_callback(head.stop)
        await head.start()
        self._watch.follow("ray", head.ended())
        self._undo.callback(self._watch.stop)
        self._memory_dir = shared_dir_of(head.temp_dir)
        return await head.await_nodes()

    async def _end_roles(self) -> None:
        import ray
        from ray.exceptions import RayError

        self._watch.stop()
        for role in self._roles:
            if role.start.slot.kind is not RoleKind.LEARNER:
                with suppress(RayError, TimeoutError):
                    await asyncio.wait_for(role.actor.end.remote(), STOP_LIMIT_S)
            ray.kill(role.actor)

    def _describe_start(self, slot: RoleSlot) -> RoleStart:
        is_attached = self._spec.ray.address is not None
        # The run changes these variables in this process, so roles get them.
        names = [URI_VARIABLE, ORDER_VARIABLE, DATE_VARIABLE]
        if is_attached:
            # The processes of an attached cluster have other variables.
            names += os.environ.get(NAMES_VARIABLE, "").split(",")
        logs_as = str(slot.kind) if slot.kind in (RoleKind.ENGINE, RoleKind.JUDGE) else "train"
        levels = level_variables(log_level_of(self._spec.output.log_level, logs_as))
        return RoleStart(
            slot=slot,
            log_path=self._logs_dir / f"{slot.name}.log",
            num_threads=self._spec.placement.threads or describe_machine().num_physical_cores,
            takes_devices=not is_attached,
            variables={**levels, **{name: os.environ[name] for name in names if name in os.environ}},
            mark_path=self._mark_path,
        )

    def _settings_of(self, slot: RoleSlot) -> EngineSettings | None:
        """Return those of an engine or a judge."""
        if slot.kind is not RoleKind.JUDGE:
            return EngineSettings.of(self._spec) if slot.kind is RoleKind.ENGINE else None
        return EngineSettings(
            kind=role_judges(self._spec.task)[slot.index].judge_engine,
            dtype=self._spec.model.dtype,
            max_num_seqs=self._spec.engine.max_num_seqs,
            tensor_parallel=slot.devices.count if slot.devices else 1,
        )

    def _model_of(self, slot: RoleSlot) -> ModelHandle:
        judges = role_judges(self._spec.task) if slot.kind is RoleKind.JUDGE else ()
        model = self._judges[judges[slot.index].judge_model] if judges else self._source
        return replace(model, path=model.path.absolute())

    async def _serve_judges(self, host: str) -> None:
        """Load every judge, and hand over its address and key, before anything could ask it."""
        if not (judges := role_judges(self._spec.task)):
            return
        roles = self._of(RoleKind.JUDGE)
        calls = [one.actor.load.remote(self._settings_of(one.start.slot), chat_host=host) for one in roles]
        endpoints = await self._watch.guard(asyncio.gather(*calls))
        names = [endpoint_name(section.judge_model) for section in judges]
        self._undo.callback(withdraw, self._servers_dir, names)
        try:
            hand_over(self._servers_dir, dict(zip(names, endpoints, strict=True)))
        except OSError as error:
            raise explain_write_failure(error, self._servers_dir) from error

    async def _load_learner(self, host: str) -> RayLearner:
        ranks = [role.actor for role in self._of(RoleKind.LEARNER)]
        rendezvous = (host, 0)
        if len(ranks) > 1:
            from torch.distributed import TCPStore  # type: ignore[attr-defined]

            # As long as the run lives.
            self._store = TCPStore(host, 0, is_master=True, wait_for_workers=False)
            rendezvous = (host, self._store.port)
        calls = [
            rank.load.remote(self._spec, index, len(ranks), rendezvous) for index, rank in enumerate(ranks)
        ]
        facts: list[LearnerFacts] = await self._watch.guard(asyncio.gather(*calls))
        return RayLearner(ranks, self._watch, facts)

    async def _load_engines(self, version: int = 0) -> list[ActorEngine]:
        """Load every engine, and make its client."""
        roles, settings = self._of(RoleKind.ENGINE), EngineSettings.of(self._spec)
        loads = [role.actor.load.remote(settings, version) for role in roles]
        await self._watch.guard(asyncio.gather(*loads))
        engines = [
            ActorEngine(
                role.actor,
                is_streamed=streams_replies(self._spec),
                # Weights are written on the first node, into its memory.
                sees_files=role.start.slot.node == 0,
                guard=partial(self._watch.guard, role=role.start.slot.name),
            )
            for role in roles
        ]
        for engine in engines:
            self._undo.push_async_callback(engine.close)
        return engines

    def _join(self, engines: Sequence[ActorEngine]) -> Engine:
        if len(engines) == 1:
            return engines[0]
        pool = EnginePool({f"engine-{index}": engine for index, engine in enumerate(engines)})
        self._watch.on_lost = lambda name, message: pool.condemn(name, message, ReplicaCause.LOST)
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
                self._own_dir / worker.start.slot.name,
            )
            for worker, served in zip(workers, chosen, strict=True)
        ]
        await self._watch.guard(asyncio.gather(*calls))
        return RolloutWorkers(
            [worker.actor for worker in workers],
            [served.start.slot.name for served in chosen],
            engine.serves if isinstance(engine, EnginePool) else lambda name: True,
            self._watch,
        )

    def _of(self, kind: RoleKind) -> list[RunningRole]:
        return [role for role in self._roles if role.start.slot.kind is kind]


def require_gpus(slots: Sequence[RoleSlot], nodes: Sequence[Mapping[str, Any]]) -> None:
    """Refuse nodes, as Ray shows them, with fewer GPUs than their roles share out. Raises: CheckRefused."""
    wanted: Counter[int] = Counter()
    for node, share in {(slot.node, slot.devices) for slot in slots}:
        wanted[node] += share.count if share else 0
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
