"""The service: its clients' operations on their sandboxes, the hosts that have them, and the time limits.

`/start` is answered before the sandbox exists, with its final address: the service holds the port, and passes
bytes on to the sandbox's host. All is in memory: what a service that was killed had is lost.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections import defaultdict, deque
from collections.abc import Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from socket import socket
from typing import Any

from fastapi import HTTPException

from strop.errors import CheckRefused, SandboxError, describe_error, given_of
from strop.runtime.contract import FailureKind, HostFacts, Order, SandboxReport, Slot, StartRequest, State
from strop.runtime.gate import Gate
from strop.runtime.host import Host, HostFailed
from strop.runtime.keys import new_key
from strop.runtime.queue import Admission
from strop.runtime.session import ENDED, Session

STOP_WAIT_S = 5.0
_STATES_LIMIT_S = 10.0
_MAX_ENDED = 4096
"""Ended sandboxes are kept, since clients read how they ended."""
_GIB = 1 << 30
_PLAIN_SLOT = Slot(cpus=1.0, memory_bytes=2 * _GIB, disk_bytes=2 * _GIB, processes=512)
_log = logging.getLogger("strop.runtime")

_Ending = tuple[State, FailureKind | None, str]


@dataclass(frozen=True, kw_only=True, slots=True)
class Policy:
    """The resources of a sandbox and its time limits, in seconds."""

    slot: Slot = _PLAIN_SLOT
    """The slot of a sandbox with a resource factor of 1."""
    cpu_factor: float = 4.0
    """How often a processor may be promised."""
    queue_limit_s: float = 1800.0
    idle_limit_s: float = 3600.0
    """Since its address was used or its client asked for it. A paused sandbox is not idle."""
    age_limit_s: float = 24 * 3600.0
    max_alive: int = 10_000
    """Further starts are answered with 429."""
    hold_s: float = 5.0
    """How long a request for a beginning sandbox is held."""


@dataclass(kw_only=True, slots=True)
class Node:
    """A host of the service."""

    node_id: str
    host: Host
    facts: HostFacts


@dataclass(kw_only=True)
class Service:
    """All sandboxes by name and by id. Ended ones are kept for a while: clients read how they ended."""

    policy: Policy
    address: str
    """The address of this machine on which ports are held."""
    nodes: dict[str, Node] = field(default_factory=dict)
    by_name: dict[tuple[str, str], Session] = field(default_factory=dict)
    """The newest sandbox of each owner and session id."""
    by_runtime: dict[str, Session] = field(default_factory=dict)
    alive: dict[str, Session] = field(default_factory=dict)
    """The sandboxes that have not ended, by runtime id."""
    counts: defaultdict[str, int] = field(default_factory=lambda: defaultdict(int))
    """Counters of events; `routes` has their names."""

    def __post_init__(self) -> None:
        self.admission = Admission(cpu_factor=self.policy.cpu_factor)
        self._ended: deque[Session] = deque()
        self._tasks: set[asyncio.Task[Any]] = set()

    # Hosts.

    def add_host(self, node_id: str, host: Host, facts: HostFacts) -> None:
        """Use a host that is open, until it fails or is closed."""
        node = self.nodes[node_id] = Node(node_id=node_id, host=host, facts=facts)
        self.admission.add_room(node_id, facts.capacity, ends_in_s=facts.ends_in_s)
        _log.info("node %s on %s: joined", node_id, facts.name)
        self._spawn(self._follow(node)).add_done_callback(partial(self._end_following, node))
        self._dispatch()

    async def _follow(self, node: Node) -> None:
        """Take a host's reports until it is lost. Raises: HostFailed."""
        while True:
            for report in await node.host.states(_STATES_LIMIT_S):
                self._take(report)

    def _end_following(self, node: Node, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self._lose_host(node, describe_error(error))

    def _lose_host(self, node: Node, why: str) -> None:
        """Drop a host, and end its sandboxes. No-op if it was dropped."""
        if self.nodes.pop(node.node_id, None) is None:
            return
        self.counts["nodes_lost"] += 1
        cause = f"node {node.node_id} on {node.facts.name} is lost: {why}"
        _log.warning("%s", cause)
        for session in self.admission.drop_room(node.node_id):
            self._end(session, State.FAILED, FailureKind.INFRA_LOST, cause)

    def _take(self, report: SandboxReport) -> None:
        """Take a host's report of one sandbox, unless a newer one was taken."""
        session = self.by_runtime.get(report.runtime_id)
        if session is None or (session.newest is not None and report.version < session.newest.version):
            return
        session.newest = report
        if not session.is_alive:
            return
        if report.state in ENDED:
            # The service did not stop it, and a host stops sandboxes unasked only when it ends itself.
            kind = report.failure_kind or FailureKind.INFRA_LOST
            self._end(session, State.FAILED, kind, report.cause)
        else:
            self._enter(session, report.state)

    # Places.

    def _dispatch(self) -> None:
        """Give free slots to the next waiting sandboxes."""
        for session, node_id in self.admission.take():
            session.node_id = node_id
            self._enter(session, State.IMAGE)
            session.placing = self._spawn(self._place(session, self.nodes[node_id]))

    async def _place(self, session: Session, node: Node) -> None:
        order = Order(
            runtime_id=session.runtime_id,
            session_api_key=session.key,
            slot=session.slot,
            request=session.request,
        )
        try:
            await node.host.start(order)
        except (HostFailed, CheckRefused) as error:
            self._end(session, State.FAILED, FailureKind.INFRA_LOST, f"its node did not take it: {error}")

    async def _connect(self, runtime_id: str) -> socket:
        """Return a connection to the server in a sandbox, for its gate. Raises: ConnectionError."""
        session = self.by_runtime[runtime_id]
        node = self.nodes.get(session.node_id)
        if node is None:
            raise ConnectionError(f"the sandbox is {session.state.value}")
        try:
            return await node.host.connect(runtime_id)
        except HostFailed as error:
            raise ConnectionError(str(error)) from error

    async def _clear(self, session: Session) -> None:
        """Release the address of a sandbox that has ended, stop it at its host, and free its slot."""
        await session.gate.close()
        if session.placing is not None:
            await asyncio.wait([session.placing])
        if (node := self.nodes.get(session.node_id)) is not None:
            with suppress(HostFailed):
                await node.host.stop(session.runtime_id, session.cause)
        self.admission.release(session)
        self._dispatch()

    # States.

    def _enter(self, session: Session, state: State) -> None:
        """Change the state of a sandbox."""
        if session.state is not state:
            session.enter(state)
            self.counts[f"entered_{state.value}"] += 1
            why = f" ({session.cause})" if session.cause else ""
            _log.info("sandbox %s of %s: %s%s", session.runtime_id, session.owner, state.value, why)

    def _end(self, session: Session, state: State, kind: FailureKind | None = None, cause: str = "") -> None:
        """End a sandbox. No-op if it has ended."""
        if self.alive.pop(session.runtime_id, None) is None:
            return
        session.failure_kind, session.cause = kind, cause
        if kind is not None:
            self.counts[f"failed_{kind.value}"] += 1
        self._enter(session, state)
        self.admission.remove(session)
        session.clearing = self._spawn(self._clear(session))
        self._ended.append(session)
        if len(self._ended) > _MAX_ENDED:
            oldest = self._ended.popleft()
            del self.by_runtime[oldest.runtime_id]
            if self.by_name.get((oldest.owner, oldest.session_id)) is oldest:
                del self.by_name[oldest.owner, oldest.session_id]

    # What clients ask.

    async def start(self, owner: str, request: StartRequest) -> Session:
        """Return the live sandbox of a session id, or a new one. Its address is final.

        Raises: HTTPException; 503 if no port could be held.
        """
        live = self.by_name.get((owner, request.session_id))
        if live is not None and live.is_alive:
            if live.request.image != request.image:
                raise HTTPException(409, f"session {request.session_id} has image {live.request.image}")
            live.asked_at = time.monotonic()
            if live.state is State.PAUSED:
                self._spawn(self._resume_quietly(live))
            return live
        if len(self.alive) >= self.policy.max_alive:
            raise HTTPException(429, f"{len(self.alive)} sandboxes live here, as many as may")
        runtime_id = uuid.uuid4().hex
        try:
            gate = Gate(partial(self._connect, runtime_id), self.address)
        except CheckRefused as error:
            raise HTTPException(503, given_of(error)) from error
        session = Session(
            runtime_id=runtime_id,
            session_id=request.session_id,
            owner=owner,
            key=new_key(),
            request=request,
            slot=self.policy.slot.times(request.resource_factor),
            gate=gate,
        )
        self.by_name[owner, session.session_id] = session
        self.by_runtime[runtime_id] = self.alive[runtime_id] = session
        self.counts["starts"] += 1
        if cause := self.admission.explain_impossible(session.slot):
            self._end(session, State.FAILED, FailureKind.CAPACITY, cause)
            return session
        await gate.open()
        if session.is_alive:
            self.admission.add(session)
            self._dispatch()
        return session

    def find(self, owner: str, session_id: str) -> Session:
        """Return the newest sandbox of a session id. Raises: HTTPException with 404."""
        session = self.by_name.get((owner, session_id))
        if session is None:
            raise HTTPException(404, f"no session {session_id}; any of an earlier service is infra_lost")
        session.asked_at = time.monotonic()
        return session

    def find_runtime(self, owner: str, runtime_id: str) -> Session:
        """Return a sandbox by its runtime id. Raises: HTTPException with 404, also for another owner's."""
        session = self.by_runtime.get(runtime_id)
        if session is None or session.owner != owner:
            raise HTTPException(404, f"no runtime {runtime_id}; any of an earlier service is infra_lost")
        session.asked_at = time.monotonic()
        return session

    def list_all(self, owner: str) -> list[Session]:
        """Return the owner's sandboxes that were not stopped."""
        return [
            session
            for (name, _), session in self.by_name.items()
            if name == owner and session.state is not State.STOPPED
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
        self._end(session, State.STOPPED, cause="its client stopped it")
        # If it had failed, its client knows now.
        self._enter(session, State.STOPPED)
        if session.clearing is not None:
            await asyncio.wait([session.clearing], timeout=STOP_WAIT_S)
        return session

    async def pause(self, owner: str, runtime_id: str) -> Session:
        """Freeze a sandbox. Raises: HTTPException 404, 409 unless it is ready, 503."""
        session = self.find_runtime(owner, runtime_id)
        async with session.operating:
            if session.state is not State.PAUSED:
                self._require(session, State.READY)
                self._take(await self._operate(session, "pause"))
                session.gate.connections.cut_all()
        return session

    async def resume(self, owner: str, runtime_id: str) -> Session:
        """Continue a sandbox, with the same address and key. One that cannot be resumed has failed.

        Raises: HTTPException 404, 503.
        """
        session = self.find_runtime(owner, runtime_id)
        async with session.operating:
            if session.state is not State.READY:
                self._require(session, State.PAUSED)
                try:
                    self._take(await self._operate(session, "resume"))
                except HTTPException as error:
                    self._end(session, State.FAILED, FailureKind.INFRA_LOST, str(error.detail))
                    raise
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
        age_left_s = session.begun_at + self.policy.age_limit_s - now
        if session.lease_s is None:
            return age_left_s
        return min(age_left_s, session.renewed_at + session.lease_s - now)

    def record(self, session: Session) -> dict[str, Any]:
        """Return a sandbox's record for its client."""
        place = self.admission.place_of(session)
        words = f"waits for a slot: {place} of {len(self.admission)}" if place else ""
        return session.record(place=words, expires_in_s=self.expires_in_s(session))

    def tick(self) -> None:
        """End sandboxes at their limits. Called every second."""
        for session in list(self.alive.values()):
            ending = self._find_ending(session, time.monotonic())
            if ending is not None:
                self.counts["expired"] += ending[0] is State.STOPPED
                self._end(session, *ending)

    async def close(self) -> None:
        """End all sandboxes and hosts."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for node in self.nodes.values():
            with suppress(HostFailed):
                await node.host.close()
        await asyncio.gather(*(session.gate.close() for session in self.by_runtime.values()))

    def _spawn(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Run a coroutine in the background, until `close` at the latest; its errors are logged."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._finish_task)
        return task

    def _finish_task(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("a task ended: %s", describe_error(error), exc_info=error)

    def _require(self, session: Session, state: State) -> None:
        if not session.is_alive:
            raise HTTPException(404, f"it has ended: {session.cause or session.state.value}")
        if session.state is not state:
            raise HTTPException(409, f"it is {session.state.value}, not {state.value}")

    async def _operate(self, session: Session, verb: str) -> SandboxReport:
        node = self.nodes[session.node_id]
        try:
            operation = node.host.pause if verb == "pause" else node.host.resume
            return await operation(session.runtime_id)
        except HostFailed as error:
            raise HTTPException(503, f"its node could not {verb} it: {error}") from error
        except SandboxError as error:
            raise HTTPException(503, f"its node could not {verb} it: {given_of(error)}") from error

    async def _resume_quietly(self, session: Session) -> None:
        with suppress(HTTPException):
            await self.resume(session.owner, session.runtime_id)

    def _find_ending(self, session: Session, now: float) -> _Ending | None:
        """Return how a sandbox has to end now, None if it goes on."""
        policy = self.policy
        used_at = max(session.asked_at, session.gate.connections.last_used_at)
        if session.state is State.QUEUED and now - session.begun_at > policy.queue_limit_s:
            cause = f"no slot was free for it within {policy.queue_limit_s:g} s"
            return State.FAILED, FailureKind.CAPACITY, cause
        if session.lease_s is not None and now - session.renewed_at > session.lease_s:
            cause = f"its lease of {session.lease_s:g} s was not renewed"
        elif now - session.begun_at > policy.age_limit_s:
            cause = f"it reached the age of {policy.age_limit_s:g} s"
        elif session.state is not State.PAUSED and now - used_at > policy.idle_limit_s:
            cause = f"it was idle for {policy.idle_limit_s:g} s"
        else:
            return None
        return State.STOPPED, None, cause
