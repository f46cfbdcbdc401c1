"""The service: its clients' operations on their sandboxes, the hosts that have them, and the time limits.

`/start` is answered as soon as an address is held, before the sandbox exists. The service holds the port; a
host in this process takes it over. On another node the address is the host's own if a slot is free at once;
else the service's, which passes bytes on. All is in memory: what a service that was killed had is lost.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections import defaultdict, deque
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from fastapi import HTTPException

from strop.errors import SandboxError, StropError, describe_error, given_of
from strop.runtime.contract import (
    FACTS_EVERY_S,
    FailureKind,
    HostFacts,
    Order,
    SandboxReport,
    Slot,
    StartRequest,
    State,
)
from strop.runtime.host import Host
from strop.runtime.keys import new_key
from strop.runtime.ports import Gate, splice_to
from strop.runtime.queue import Admission
from strop.runtime.session import ENDED, Session

OPERATION_WAIT_S = 10.0
"""Clients time out after 15 s at the earliest. The operation goes on, and a client may ask again."""
STOP_WAIT_S = 5.0
_DIRECT_WAIT_S = 0.3
"""How long a start waits for another node's own address before it is answered with the service's."""
_GIB = 1 << 30
_PLAIN_SLOT = Slot(cpus=1.0, memory_bytes=2 * _GIB, disk_bytes=2 * _GIB, processes=512)
_log = logging.getLogger("strop.runtime")

_Ending = tuple[State, FailureKind | None, str]


class HostFailed(Exception):
    """A host did not answer; it, or its machine, is gone."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Policy:
    """The resources of a sandbox and its time limits, in seconds."""

    slot: Slot = _PLAIN_SLOT
    """The slot of a sandbox with a resource factor of 1."""
    cpu_factor: float = 4.0
    """How often a processor may be promised."""
    min_left_s: float = 300.0
    """How long a node should last for a new sandbox; a start may name more with `lifetime_s`."""
    queue_limit_s: float = 1800.0
    idle_limit_s: float = 3600.0
    """Since its address was used or its client asked for it. A paused sandbox is not idle."""
    age_limit_s: float = 24 * 3600.0
    orphan_limit_s: float = 900.0
    """After a start whose client never asked again."""
    keep_ended_s: float = 3600.0
    max_ended: int = 10_000
    max_alive: int = 10_000
    """Further starts are answered with 429."""
    hold_s: float = 5.0
    """How long a request for a beginning sandbox is held."""
    settle_s: float = 10.0
    """How long a request that fits no node is kept after a node came: larger nodes may follow."""


@dataclass(kw_only=True, slots=True)
class Node:
    """A host of the service, and its newest facts."""

    node_id: str
    host: Host
    facts: HostFacts
    is_here: bool
    """Whether it is in this process."""
    is_suspect: bool = False
    """Whether an order has failed since the last facts: it gets none until the next ones."""

    @property
    def is_open(self) -> bool:
        """Whether it takes new sandboxes now."""
        return not (self.facts.is_draining or self.is_suspect)


@dataclass(kw_only=True)
class Service:
    """All sandboxes by name and by id. Ended ones are kept for a while: clients read how they ended."""

    policy: Policy
    address: str
    """The address of this machine on which ports are held."""
    write_event: Callable[[dict[str, Any]], None]
    """Writes a line of the event log."""
    nodes: dict[str, Node] = field(default_factory=dict)
    by_name: dict[tuple[str, str], Session] = field(default_factory=dict)
    """The newest sandbox of each owner and session id."""
    by_runtime: dict[str, Session] = field(default_factory=dict)
    alive: dict[str, Session] = field(default_factory=dict)
    """The sandboxes that have not ended, by runtime id."""
    counts: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    """Counters of events; `routes` has their names."""

    def __post_init__(self) -> None:
        self.admission = Admission(cpu_factor=self.policy.cpu_factor, min_left_s=self.policy.min_left_s)
        self._newest_node_at = time.monotonic()
        self._mark = uuid.uuid4().hex[:8]
        """Begins the runtime ids of this start of the service."""
        self._ended: deque[Session] = deque()
        self._tasks: set[asyncio.Task[Any]] = set()

    # Hosts.

    def add_host(self, node_id: str, host: Host, facts: HostFacts, *, is_here: bool) -> None:
        """Use a host that is open, until it fails or is closed."""
        self.nodes[node_id] = Node(node_id=node_id, host=host, facts=facts, is_here=is_here)
        self._newest_node_at = time.monotonic()
        self.write_event({"at": time.time(), "event": "node_joined", "node": node_id, "host": facts.name})
        self._take_facts(self.nodes[node_id], facts)
        self.spawn(self._follow(self.nodes[node_id]))

    async def _follow(self, node: Node) -> None:
        """Take a host's facts and reports, until it is lost."""
        cause = "a mistake in the service; its log says more"
        try:
            while True:
                for report in await node.host.states(FACTS_EVERY_S):
                    self._take(report)
                self._take_facts(node, await node.host.facts())
        except HostFailed as error:
            cause = str(error)
        except asyncio.CancelledError:
            # The service ends, and with it the host.
            cause = ""
            raise
        finally:
            if cause:
                self.lose_host(node, f"node {node.node_id} on {node.facts.name} is lost: {cause}")

    def lose_host(self, node: Node, cause: str) -> None:
        """Drop a host, and end its sandboxes. No-op if it was dropped."""
        if self.nodes.pop(node.node_id, None) is None:
            return
        self.counts["nodes_lost"] += 1
        self.write_event({"at": time.time(), "event": "node_lost", "node": node.node_id, "cause": cause})
        for session in self.admission.drop_room(node.node_id):
            self.end(session, State.FAILED, FailureKind.INFRA_LOST, cause, is_gone=True)

    def _take_facts(self, node: Node, facts: HostFacts) -> None:
        node.facts, node.is_suspect = facts, False
        now = time.monotonic()
        for runtime_id, unused_s in facts.last_used_s.items():
            if (session := self.alive.get(runtime_id)) is not None:
                session.used_at = max(session.used_at, now - unused_s)
        self.admission.set_room(node.node_id, facts.capacity, is_open=node.is_open, ends_in_s=facts.ends_in_s)
        self._dispatch()

    def _take(self, report: SandboxReport) -> None:
        """Take a host's report of one sandbox."""
        session = self.by_runtime.get(report.runtime_id)
        if session is None or (session.is_alive and report.version < session.version):
            return
        session.take(report)
        if not session.is_alive:
            return
        if report.state in ENDED:
            # The service did not stop it, and a host stops sandboxes unasked only when it ends itself.
            kind = FailureKind.AGENT_ERROR if report.state is State.FAILED else FailureKind.INFRA_LOST
            kind = report.failure_kind or kind
            self.end(session, State.FAILED, kind, report.cause, is_gone=True)
        elif not session.operating.locked():
            # During a pause or a resume, the answer to that operation sets the state.
            self.enter(session, report.state)

    # Places.

    async def _announce(self, session: Session, *, has_to_wait: bool) -> None:
        """Make a sandbox's address final. Raises: CheckRefused if no port can be held."""
        if has_to_wait:
            self.admission.add(session)
            self._dispatch()
            node = self.nodes.get(session.node_id)
            if session.placing is not None and node is not None and not node.is_here:
                await asyncio.wait([session.placing], timeout=_DIRECT_WAIT_S)
        session.url = session.node_url or await self._hold_port(session)
        session.announced.set()

    async def _hold_port(self, session: Session) -> str:
        async def connect() -> asyncio.Protocol:
            if session.state is State.PAUSED:
                raise ConnectionError("the sandbox is paused")
            if not session.node_url:
                raise ConnectionError("the sandbox is not placed yet")
            where = urlsplit(session.node_url)
            return await splice_to(gate.note_use, where.hostname or "", where.port or 0)

        gate = await Gate.listen(connect, key=session.key, host=self.address)
        if not session.is_alive:
            await gate.close()
        else:
            session.gate = gate
        return gate.url

    def _dispatch(self) -> None:
        """Give free slots to the next waiting sandboxes."""
        for session, node_id in self.admission.take():
            session.node_id = node_id
            session.timeline["placed"] = time.time()
            self.enter(session, State.IMAGE)
            session.placing = self.spawn(self._place(session, self.nodes[node_id]))

    async def _place(self, session: Session, node: Node) -> None:
        """Order a sandbox from a host. If that fails, the sandbox goes back to its place in the queue."""
        order = Order(
            runtime_id=session.runtime_id,
            session_api_key=session.key,
            slot=session.slot,
            request=session.request,
        )
        try:
            if node.is_here:
                # The port is held first, so that its host can take it over.
                await session.announced.wait()
                if not session.is_alive:
                    return
                url = await node.host.start(order, session.gate)
            else:
                url = await node.host.start(order)
        except (HostFailed, StropError) as error:
            self._log_session(session, "order_failed", why=str(error))
            self.counts["orders_failed"] += 1
            if session.is_alive and session.node_id == node.node_id:
                node.is_suspect = True
                if (room := self.admission.rooms.get(node.node_id)) is not None:
                    room.is_open = False
                self.admission.release(session)
                session.node_id = ""
                self.enter(session, State.QUEUED)
                self.admission.add(session)
                self._dispatch()
            return
        session.node_url = url

    async def _clear(self, session: Session) -> None:
        """Stop a sandbox that has ended at its host, and free its slot."""
        if session.placing is not None:
            await asyncio.wait([session.placing])
        node = self.nodes.get(session.node_id)
        if node is not None:
            try:
                await node.host.stop(session.runtime_id, session.cause)
            except HostFailed as error:
                self._log_session(session, "stop_failed", why=str(error))
        if session.gate is not None:
            await session.gate.close()
        self.admission.release(session)
        self._dispatch()

    # States.

    def enter(self, session: Session, state: State) -> None:
        """Change the state of a sandbox."""
        if session.state is state:
            return
        before = session.state
        session.enter(state)
        self.counts[f"entered_{state.value}"] += 1
        if state is State.READY and before is not State.RESUMING:
            self.counts["ready_after_s"] += time.time() - session.timeline["queued"]
        self._log_session(session, "state", before=before.value, state=state.value)

    def end(
        self,
        session: Session,
        state: State,
        kind: FailureKind | None = None,
        cause: str = "",
        *,
        is_gone: bool = False,
    ) -> None:
        """End a sandbox; `is_gone`: its host has ended it. No-op if it has ended."""
        if not session.is_alive:
            return
        del self.alive[session.runtime_id]
        self._ended.append(session)
        session.failure_kind, session.cause = kind, cause
        session.ended_at = time.monotonic()
        session.timeline["stopped"] = time.time()
        if kind is not None:
            self.counts[f"failed_{kind.value}"] += 1
        self.enter(session, state)
        self.admission.remove(session)
        if is_gone:
            self.admission.release(session)
        session.clearing = self.spawn(self._clear(session))

    def _log_session(self, session: Session, event: str, **facts: Any) -> None:
        kind = session.failure_kind.value if session.failure_kind else None
        self.write_event(
            {
                "at": time.time(),
                "event": event,
                "runtime_id": session.runtime_id,
                "session_id": session.session_id,
                "owner": session.owner,
                "node": session.node_id,
                "failure_kind": kind,
                "cause": session.cause,
                **facts,
            }
        )

    # What clients ask.

    async def start(self, owner: str, request: StartRequest) -> Session:
        """Return the live sandbox of a session id, or a new one. Its address is final.

        Raises: HTTPException; CheckRefused if no sandbox could be begun.
        """
        live = self.by_name.get((owner, request.session_id))
        if live is not None and live.is_alive:
            if live.request.image != request.image:
                raise HTTPException(409, f"session {request.session_id} has image {live.request.image}")
            if not (live.state is State.PAUSED and live.has_failed_to_resume):
                live.asked_at = time.monotonic()
                await live.announced.wait()
                if not live.url:
                    raise HTTPException(503, live.cause)
                if live.state is State.PAUSED:
                    self.spawn(_ignore_refusal(self._resume(live)))
                return live
            self.end(live, State.STOPPED, cause="it could not be resumed and was started again")
        if len(self.alive) >= self.policy.max_alive:
            raise HTTPException(429, f"{len(self.alive)} sandboxes live here, as many as may")
        session = Session(
            runtime_id=f"{self._mark}{uuid.uuid4().hex[8:]}",
            session_id=request.session_id,
            owner=owner,
            key=new_key(),
            request=request,
            slot=self.policy.slot.times(request.resource_factor),
            timeline={"queued": time.time()},
        )
        self.by_name[owner, session.session_id] = session
        self.by_runtime[session.runtime_id] = self.alive[session.runtime_id] = session
        self.counts["starts"] += 1
        self._log_session(session, "asked", image=request.image)
        try:
            impossible = self._find_impossible(session)
            await self._announce(session, has_to_wait=impossible is None)
            if impossible is not None:
                self.end(session, *impossible)
        finally:
            # After a failure no client has an address, and clients that wait for one get the failure.
            if not session.announced.is_set():
                self.end(session, State.FAILED, FailureKind.INFRA_LOST, "no address could be held")
                session.announced.set()
        return session

    def find(self, owner: str, session_id: str) -> Session:
        """Return the newest sandbox of a session id. Raises: HTTPException with 404."""
        session = self.by_name.get((owner, session_id))
        if session is None or not session.url:
            raise HTTPException(404, f"no session {session_id}; any of an earlier service is infra_lost")
        session.asked_at = time.monotonic()
        return session

    def find_runtime(self, owner: str, runtime_id: str) -> Session:
        """Return a sandbox by its runtime id.

        Raises: HTTPException 404, also for another owner's; it names a sandbox of an earlier start of the
            service as lost.
        """
        session = self.by_runtime.get(runtime_id)
        if session is None or session.owner != owner:
            is_earlier = len(runtime_id) == 32 and not runtime_id.startswith(self._mark)
            why = "infra_lost: it was lost with an earlier service" if is_earlier else "it is unknown"
            raise HTTPException(404, f"no runtime {runtime_id}: {why}")
        session.asked_at = time.monotonic()
        return session

    def list_all(self, owner: str) -> list[Session]:
        """Return the owner's sandboxes that were not stopped."""
        return [
            session
            for (name, _), session in self.by_name.items()
            if name == owner and session.url and session.state is not State.STOPPED
        ]

    async def wait(self, session: Session) -> None:
        """Wait until a beginning sandbox is ready or has ended, for `Policy.hold_s` at most."""
        with suppress(TimeoutError):
            async with asyncio.timeout(self.policy.hold_s):
                await session.settled.wait()

    async def stop(self, owner: str, runtime_id: str) -> Session:
        """End a sandbox; its host has removed it by then, or does so within seconds.

        Raises: HTTPException 404.
        """
        session = self.find_runtime(owner, runtime_id)
        if session.is_alive:
            self.end(session, State.STOPPED, cause="its client stopped it")
        else:
            # It failed, and its client knows now.
            self.enter(session, State.STOPPED)
        if session.clearing is not None:
            await asyncio.wait([session.clearing], timeout=STOP_WAIT_S)
        return session

    async def pause(self, owner: str, runtime_id: str) -> Session:
        """Freeze a sandbox. Raises: HTTPException 404, 409 unless it is ready, 503."""
        session = self._find_alive(owner, runtime_id)
        await self._finish(self._pause(session), is_waited_for=True)
        return session

    async def resume(self, owner: str, runtime_id: str) -> Session:
        """Continue a sandbox, with the same address and key. Raises: HTTPException 404, 503."""
        session = self._find_alive(owner, runtime_id)
        await self._finish(self._resume(session), is_waited_for=False)
        return session

    def renew(self, owner: str, runtime_ids: Sequence[str] | None, lease_s: float) -> list[Session]:
        """Lease sandboxes for `lease_s` from now, all of the owner for None; return the leased ones.

        A sandbox that has been leased ends with its lease.
        """
        wanted = list(self.alive) if runtime_ids is None else runtime_ids
        alive = self.alive
        leased = [alive[name] for name in wanted if name in alive and alive[name].owner == owner]
        for session in leased:
            session.asked_at = session.renewed_at = time.monotonic()
            session.lease_s = lease_s
        return leased

    def expires_in_s(self, session: Session) -> float | None:
        """Return the seconds until its lease or its age ends it; None once it has ended."""
        if not session.is_alive:
            return None
        now = time.monotonic()
        age_left = session.begun_at + self.policy.age_limit_s - now
        if session.lease_s is None:
            return age_left
        return min(age_left, session.renewed_at + session.lease_s - now)

    def record(self, session: Session) -> dict[str, Any]:
        """Return a sandbox's record for its client."""
        place = self.admission.place_of(session)
        return session.record(place=place, expires_in_s=self.expires_in_s(session))

    def tick(self) -> None:
        """End sandboxes at their limits, and forget old ones. Called every second."""
        now = time.monotonic()
        for session in list(self.alive.values()):
            if session.gate is not None:
                session.used_at = max(session.used_at, session.gate.last_used_at)
            ending = self._find_ending(session, now)
            if ending is not None:
                self.end(session, *ending)
                self.counts["expired"] += ending[0] is State.STOPPED
        policy, ended = self.policy, self._ended
        while ended and (now - ended[0].ended_at > policy.keep_ended_s or len(ended) > policy.max_ended):
            session = ended.popleft()
            del self.by_runtime[session.runtime_id]
            if self.by_name.get((session.owner, session.session_id)) is session:
                del self.by_name[session.owner, session.session_id]
        self._dispatch()

    async def close(self) -> None:
        """End all sandboxes and hosts."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for node in self.nodes.values():
            with suppress(HostFailed):
                await node.host.close()
        gates = [session.gate for session in self.by_runtime.values() if session.gate is not None]
        await asyncio.gather(*(gate.close() for gate in gates))

    def spawn(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Run a coroutine in the background, until `close` at the latest; its errors are logged."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._finish_task)
        return task

    def _finish_task(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self.counts["bugs"] += 1
            _log.error("a task failed: %s", describe_error(error), exc_info=error)

    def _find_impossible(self, session: Session) -> _Ending | None:
        """Return the ending of a sandbox that can never be made, None if a node may yet make it."""
        if time.monotonic() - self._newest_node_at < self.policy.settle_s:
            return None
        cause = self.admission.explain_impossible(session.slot)
        return (State.FAILED, FailureKind.CAPACITY, cause) if cause else None

    def _find_alive(self, owner: str, runtime_id: str) -> Session:
        session = self.find_runtime(owner, runtime_id)
        if not session.is_alive:
            raise HTTPException(
                404, f"runtime {runtime_id} has ended: {session.cause or session.state.value}"
            )
        return session

    async def _finish(self, work: Coroutine[None, None, None], *, is_waited_for: bool) -> None:
        """Wait for an operation for `OPERATION_WAIT_S`; it goes on in the background after that."""
        task = asyncio.create_task(work)
        done, _ = await asyncio.wait([task], timeout=OPERATION_WAIT_S)
        if done:
            task.result()
            return
        self.spawn(_ignore_refusal(task))
        if is_waited_for:
            raise HTTPException(503, f"it takes longer than {OPERATION_WAIT_S:g} s; ask again")

    async def _pause(self, session: Session) -> None:
        async with session.operating:
            if session.state is State.PAUSED:
                return
            if session.state is not State.READY:
                raise HTTPException(409, f"it is {session.state.value}; only a ready sandbox can be paused")
            report = await self._operate(session, "pause")
            self._take_operated(session, report)
            session.has_failed_to_resume = False
            if session.gate is not None:
                session.gate.disconnect()
            self.counts["pauses"] += 1

    async def _resume(self, session: Session) -> None:
        async with session.operating:
            if session.state is not State.PAUSED:
                return
            self.enter(session, State.RESUMING)
            try:
                report = await self._operate(session, "resume")
            except HTTPException:
                session.has_failed_to_resume = True
                if session.is_alive:
                    self.enter(session, State.PAUSED)
                raise
            session.has_failed_to_resume = False
            self._take_operated(session, report)
            self.counts["resumes"] += 1

    async def _operate(self, session: Session, verb: str) -> SandboxReport:
        node = self.nodes.get(session.node_id)
        if node is None:
            raise HTTPException(503, f"node {session.node_id} is lost")
        try:
            operation = node.host.pause if verb == "pause" else node.host.resume
            return await operation(session.runtime_id)
        except HostFailed as error:
            raise HTTPException(503, f"its node could not {verb} it: {error}") from error
        except SandboxError as error:
            raise HTTPException(503, f"its node could not {verb} it: {given_of(error)}") from error

    def _take_operated(self, session: Session, report: SandboxReport) -> None:
        if not session.is_alive:
            raise HTTPException(404, f"it ended meanwhile: {session.cause}")
        session.take(report)
        if report.state in ENDED:
            self.end(
                session,
                State.FAILED,
                report.failure_kind or FailureKind.AGENT_ERROR,
                report.cause,
                is_gone=True,
            )
            raise HTTPException(404, f"it failed: {report.cause}")
        self.enter(session, report.state)

    def _find_ending(self, session: Session, now: float) -> _Ending | None:
        """Return how a sandbox has to end now, None if it goes on."""
        policy = self.policy
        if session.state is State.QUEUED and not session.node_id:
            impossible = self._find_impossible(session)
            if impossible is not None:
                return impossible
            if now - session.begun_at > policy.queue_limit_s:
                cause = f"no slot was free for it within {policy.queue_limit_s:g} s"
                return State.FAILED, FailureKind.CAPACITY, cause
        last_used_at = max(session.used_at, session.asked_at, session.begun_at)
        if session.lease_s is not None and now - session.renewed_at > session.lease_s:
            cause = f"its lease of {session.lease_s:g} s was not renewed"
        elif now - session.begun_at > policy.age_limit_s:
            cause = f"it reached the age of {policy.age_limit_s:g} s"
        elif not session.asked_at and now - session.begun_at > policy.orphan_limit_s:
            cause = f"nobody asked for it within {policy.orphan_limit_s:g} s after its start"
        elif session.state is State.READY and now - last_used_at > policy.idle_limit_s:
            cause = f"it was idle for {policy.idle_limit_s:g} s"
        else:
            return None
        return State.STOPPED, None, cause


async def _ignore_refusal(work: Awaitable[None]) -> None:
    """Await an operation that no client waits for, and ignore its refusal."""
    with suppress(HTTPException):
        await work
