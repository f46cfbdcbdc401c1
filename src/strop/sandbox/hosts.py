"""Sandboxes on any node of the run's Ray cluster that has room.

A sandbox takes a placement group of one bundle, its processors and memory: Ray lets it wait, chooses its
node, and frees it when the process that asked for it has ended. The node's `SandboxHost` makes the sandbox by
a backend of that node, and passes requests on to its agent, which enforces time limits and bounds as for
a local sandbox. The cluster is the run's own, so a host trusts its callers.

Covered: kill -9 of the caller, of the host, loss of the node.
Not covered: a caller that is an actor and dies before its run: its sandboxes end with the run.
"""

from __future__ import annotations

import asyncio
import itertools
import platform
import sys
import time
import uuid
from collections import defaultdict, deque
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn, TypeVar, cast

from strop.errors import ConfigError, SandboxError, SandboxLost, SandboxRefused
from strop.sandbox.choose import BACKENDS, RAY, choose_among
from strop.sandbox.client import Answer, Requests
from strop.sandbox.container import ENGINES
from strop.sandbox.contract import SandboxSpec
from strop.sandbox.served import ServedSandbox

_MAX_AGE_S = 10.0
_PATIENCE_S = 15.0
"""Since it had its place, for a sandbox whose host has died."""
_LOOK_EVERY_S = 2.0
_MIN_PAUSE_S, _MAX_PAUSE_S = 0.005, 0.25
_LOOKS_PER_CHECK = 8
"""While a sandbox waits, the cluster's size is checked once in so many looks."""
_hosts: dict[Any, Any] = {}
"""The first handle of each host, by its id: an actor ends without that of its maker."""
T = TypeVar("T")


@dataclass(kw_only=True)
class _Held:
    sandbox: ServedSandbox
    group: Any
    next_turn: int = 0
    """Place of the message that goes to the agent next: Ray does not keep a caller's order."""
    moved: asyncio.Condition = field(default_factory=asyncio.Condition)


class SandboxHost:
    """The sandboxes of one node, by their names; an actor."""

    def __init__(self) -> None:
        self._held: dict[str, _Held] = {}
        self._looking: asyncio.Task[None] | None = None

    async def create(self, name: str, group: Any, spec: SandboxSpec, main_source: str) -> dict[str, Any]:
        """Make a sandbox, which ends with its placement group; return its properties.

        Raises: as `LocalBackend.create`.
        """
        backend = await choose_among([*ENGINES] if spec.image is not None else BACKENDS, spec.min_level)
        sandbox = await backend.create(spec, main_source=main_source)
        made = self.hold(name, sandbox, group)
        if self._looking is None or self._looking.done():
            self._looking = asyncio.create_task(self._end_abandoned())
        lacks = ("mounts", "servers", *sandbox.isolation.lacks)
        return made | {"isolation": replace(sandbox.isolation, node=platform.node(), lacks=lacks)}

    def hold(self, name: str, sandbox: ServedSandbox, group: Any = None) -> dict[str, Any]:
        """Take a sandbox, which ends with its placement group if it has one; return its properties."""
        self._held[name] = _Held(sandbox=sandbox, group=group)
        return {
            "isolation": sandbox.isolation,
            "scratch": sandbox.scratch,
            "python_argv": sandbox.found_python,
            "supervisor_pid": sandbox.supervisor_pid,
        }

    async def pass_on(self, name: str, turn: int, header: dict[str, Any], body: bytes) -> Answer:
        """Pass a message on to the agent, after those of earlier turns; return the answer, if any.

        Raises: SandboxLost, SandboxError.
        """
        held = self._find(name)
        async with held.moved:
            await held.moved.wait_for(lambda: held.next_turn == turn or held.sandbox.is_lost)
            held.next_turn = turn + 1
            held.moved.notify_all()
            if "id" not in header:
                held.sandbox.client.tell(header, body)
                return {}, b""
            answer = held.sandbox.client.pass_on(header, body)
        return await answer

    async def watch(self, name: str) -> str:
        """Wait until a sandbox is lost; return the kind."""
        held = self._find(name)
        kind = await held.sandbox.wait_lost()
        async with held.moved:
            held.moved.notify_all()
        return kind

    async def end(self, name: str) -> bool:
        """End a sandbox, if it is still here; return whether nothing is left of it."""
        try:
            if (held := self._held.pop(name, None)) is not None:
                await held.sandbox.stop()
        except SandboxLost:
            return False
        return True

    def _find(self, name: str) -> _Held:
        if name not in self._held:
            raise SandboxLost("this sandbox has ended: its placement group is gone", kind="infra")
        return self._held[name]

    async def _end_abandoned(self) -> None:
        """End sandboxes whose placement groups have gone with the processes that asked for them."""
        while self._held:
            await asyncio.sleep(_LOOK_EVERY_S)
            for name, held in list(self._held.items()):
                if await asyncio.to_thread(_read_group, held.group) is None:
                    await self.end(name)


class RayBackend:
    """Make sandboxes on the nodes of the cluster that this process is connected to."""

    name = RAY

    async def create(
        self, spec: SandboxSpec, *, main_source: str = "", beside: ServedSandbox | None = None
    ) -> RaySandbox:
        """Return a fresh sandbox; see `LocalBackend.create`. Waits until a node has room.

        `main_source`: see `LocalBackend.create`. `beside`: a sandbox that rests meanwhile, whose place this
        one shares: if attempts that have one waited for another one, none would end.

        Raises: SandboxRefused with kind mounts, gpus, capacity if no node is large enough, or a kind of the
            node's backend (`LocalBackend.create`); SandboxLost with kind infra if its node was lost.
        """
        for kind, own in (("gpus", spec.gpus), ("mounts", [mount.host_path for mount in spec.mounts])):
            if own:
                raise SandboxRefused(
                    f"{kind} of this machine ({', '.join(own)}) for a sandbox on any node",
                    allowed="files that are written or uploaded into it",
                    next_step="leave them out, or choose another backend than 'ray'",
                    kind=kind,
                )
        cpus = spec.limits.cpus or 1.0
        limits = replace(spec.limits, cpus=cpus)
        if beside is not None and isinstance(beside.client, RayRequests):
            place = replace(beside.client.place, is_shared=True)
        else:
            place = await _take_place(cpus, limits.memory_bytes + limits.scratch_bytes)
        requests = RayRequests(place)
        async with AsyncExitStack() as stack:
            stack.callback(requests.close)
            made = await requests.create(replace(spec, limits=limits), main_source)
            # It is the caller's.
            stack.pop_all()
        return RaySandbox(requests, env=spec.env, **made)


class RaySandbox(ServedSandbox):
    """A sandbox on a node of the cluster. Usable from one event loop."""

    async def connect(self, address: int | str) -> NoReturn:
        """Refuse: a connection does not pass between nodes. Raises: SandboxError with kind servers."""
        raise SandboxError(
            f"a connection to {address} in a sandbox of another node",
            allowed="commands, shells and files; connections in sandboxes of this machine",
            next_step="use the server by a command inside, or choose another backend than 'ray'",
            kind="servers",
        )


class HostRequests(Requests):
    """Sends the requests of one sandbox to its host, an actor."""

    def __init__(self, host: Any = None) -> None:
        # The host itself numbers its own from 0.
        super().__init__(RAY, 1 << 32)
        self.lost_why = ""
        """What Ray says of the host's death."""
        self._name = uuid.uuid4().hex
        self._host = host
        self._turns = itertools.count()
        self._tasks: set[asyncio.Task[Any]] = set()

    async def make(self, method: Any, *details: object) -> Any:
        """Make the sandbox by a method of its host; return the answer. Raises: as that; SandboxLost."""
        made = await answer_of(method.remote(self._name, *details), self._note_lost)
        self._watching = self.keep(self._watch())
        return made

    def pass_on(self, header: dict[str, Any], body: bytes) -> asyncio.Future[Answer]:
        """Send a request whose header has a number; see `Requests.pass_on`."""
        if self.lost_kind:
            raise self.lost(self.lost_kind, self.lost_why)
        # Called here and now: the order of calls is that of the messages.
        call = self._host.pass_on.remote(self._name, next(self._turns), header, body)
        return self.keep(answer_of(call, self._note_lost))

    def tell(self, header: dict[str, Any], body: bytes = b"") -> None:
        """Send a message that has no answer; see `Requests.tell`."""
        if not self.lost_kind:
            self.pass_on(header, body)

    async def wait_lost(self) -> str:
        """Wait until the sandbox is lost and return why."""
        await asyncio.shield(self._watching)
        return self.lost_kind

    async def end(self, limit_s: float) -> None:
        """End the sandbox; see `Requests.end`."""
        self.lost_kind = self.lost_kind or "stopped"
        is_over = False
        try:
            # It may have ended with its host.
            with suppress(SandboxLost):
                async with asyncio.timeout(limit_s):
                    is_over = await answer_of(self._host.end.remote(self._name), self._note_lost)
                    if not is_over:
                        raise TimeoutError
        except TimeoutError:
            raise self.lost("infra") from None
        finally:
            self.leave(is_over=is_over)

    def close(self) -> None:
        """Leave the sandbox to its host, which ends it."""
        self.leave(is_over=False)

    def leave(self, *, is_over: bool) -> None:
        """Have the host end what is left of the sandbox."""
        if not is_over and self._host is not None:
            self._host.end.remote(self._name)

    async def _watch(self) -> None:
        kind = "infra"
        with suppress(SandboxLost):
            kind = await answer_of(self._host.watch.remote(self._name), self._note_lost)
        self._note_lost("", kind)

    def _note_lost(self, why: str, kind: str = "infra") -> SandboxLost:
        """Note why the sandbox is lost, unless that is known; return the error of a call that failed so."""
        if not self.lost_kind:
            self.lost_kind, self.lost_why = kind, why
        return self.lost(self.lost_kind, self.lost_why)

    def keep(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Do work beside, whose error may go unread."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        # Retrieve the exception of an answer that nobody awaits.
        task.add_done_callback(lambda done: done.cancelled() or done.exception())
        return task


class RayRequests(HostRequests):
    """Sends the requests of one sandbox to the host of its place."""

    def __init__(self, place: _Place) -> None:
        super().__init__()
        self.place = place

    async def create(self, spec: SandboxSpec, main_source: str) -> dict[str, Any]:
        """Make the sandbox. Raises: as `RayBackend.create`."""
        while True:
            self._host = await asyncio.to_thread(_host_of, self.place.node)
            try:
                made = await self.make(self._host.create, self.place.group, spec, main_source)
                return cast(dict[str, Any], made)
            except SandboxLost:
                # A host that died is started again; those of a node that died are not.
                if not self.lost_kind or time.monotonic() - self.place.since > _PATIENCE_S:
                    raise
                await asyncio.sleep(_MAX_PAUSE_S)
                self.lost_kind = ""

    def leave(self, *, is_over: bool) -> None:
        """Have the host end what is left of the sandbox, and free its place."""
        super().leave(is_over=is_over)
        (self.place.give_back if is_over else self.place.remove)()


async def answer_of(call: Awaitable[T], note_death: Callable[[str], Exception]) -> T:
    """Return the answer of an actor. Raises: its own errors; what `note_death` makes of its end."""
    from ray.exceptions import RayError, RayTaskError

    try:
        return await call
    except RayTaskError as error:
        raise cast(RayTaskError, error).cause from error
    except RayError as error:
        raise note_death(f"{type(error).__name__}: {str(error).splitlines()[0]}") from error


def find_cluster() -> RayBackend:
    """Return the backend of the cluster that this process is connected to. Raises: ConfigError if none is."""
    ray = sys.modules.get("ray")
    if ray is None or not ray.is_initialized():
        raise ConfigError(
            f"task.sandbox={RAY} in a process that belongs to no Ray cluster",
            allowed=f"training runs with placement.kind=ray; elsewhere {', '.join(('auto', *BACKENDS))}",
            next_step="set task.sandbox=auto here",
        )
    return RayBackend()


@dataclass(frozen=True, kw_only=True)
class _Place:
    """A placement group that has its node.

    It is given to the next sandbox of this process with the same needs: Ray looks only once a second whether
    a waiting group fits, and that would be idle time. After `_MAX_AGE_S` other processes get their turn.
    """

    needs: tuple[float, int]
    group: Any
    node: str
    since: float = field(default_factory=time.monotonic)
    is_shared: bool = False
    """Whether another sandbox of this process has it."""

    def give_back(self) -> None:
        """Hand it over to the one who has waited longest, or free it."""
        waiting = _waiting[self.needs]
        if waiting and not self.is_shared and time.monotonic() - self.since < _MAX_AGE_S:
            waiting.popleft().set_result(self)
        else:
            self.remove()

    def remove(self) -> None:
        """Free it, unless it is another sandbox's."""
        from ray.exceptions import RayError
        from ray.util.placement_group import remove_placement_group

        # With its cluster it is gone.
        with suppress(RayError):
            if not self.is_shared:
                remove_placement_group(self.group)


_waiting: defaultdict[tuple[float, int], deque[asyncio.Future[_Place]]] = defaultdict(deque)


async def _take_place(cpus: float, memory_bytes: int) -> _Place:
    """Return a place, once there is one.

    Raises: SandboxRefused with kind capacity while no node is large enough; SandboxLost.
    """
    from ray.util.placement_group import placement_group

    needs, pause_s = (cpus, memory_bytes), _MIN_PAUSE_S
    own = _Place(needs=needs, group=placement_group([{"CPU": cpus, "memory": memory_bytes}]), node="")
    offer: asyncio.Future[_Place] = asyncio.get_running_loop().create_future()
    _waiting[needs].append(offer)
    taken: _Place | None = None
    try:
        for number in itertools.count(1):
            table = await asyncio.to_thread(_read_group, own.group)
            if table is None:
                raise SandboxLost("the placement group of this sandbox was removed", kind="infra")
            if table["state"] == "CREATED":
                taken = replace(own, node=table["bundles_to_node_id"][0], since=time.monotonic())
                return taken
            if number % _LOOKS_PER_CHECK == 0:
                await asyncio.to_thread(_require_room, cpus, memory_bytes)
            await asyncio.wait({offer}, timeout=pause_s)
            if offer.done():
                taken = offer.result()
                return taken
            pause_s = min(2.0 * pause_s, _MAX_PAUSE_S)
        raise AssertionError("unreachable")
    finally:
        if not offer.done():
            _waiting[needs].remove(offer)
        elif offer.result() is not taken:
            offer.result().give_back()
        if taken is None or taken.group is not own.group:
            own.remove()


def _read_group(group: Any) -> dict[str, Any] | None:
    """Return what Ray knows of a placement group; None once it is gone."""
    from ray.util.placement_group import placement_group_table

    table: dict[str, Any] = placement_group_table(group)
    return None if table.get("state", "REMOVED") == "REMOVED" else table


def _require_room(cpus: float, memory_bytes: int) -> None:
    import ray

    sizes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    if not any(cpus <= size.get("CPU", 0) and memory_bytes <= size.get("memory", 0) for size in sizes):
        shown = ", ".join(f"{size.get('CPU', 0):g} CPUs and {size.get('memory', 0):g} B" for size in sizes)
        raise SandboxRefused(
            f"a sandbox of {cpus:g} CPUs and {memory_bytes} B, and the nodes have {shown}",
            allowed="a sandbox that fits into a node of the Ray cluster",
            next_step="ask for less, or give the job larger nodes",
            kind="capacity",
        )


def _host_of(node: str) -> Any:
    """Return the host of a node, made if there is none."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    make = ray.remote(SandboxHost).options(
        name=f"sandboxes-{node}",
        get_if_exists=True,
        num_cpus=0,
        max_restarts=-1,
        max_concurrency=100_000,  # Each command, job and sandbox is a call.
        scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False),
    )
    host = make.remote()
    return _hosts.setdefault(host._ray_actor_id, host)
