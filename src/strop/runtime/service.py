"""The service: its clients' operations on their sandboxes, the nodes that have them, and the time limits.

`/start` is answered before the sandbox exists, with its final address: the service holds the port, and passes
bytes on to the sandbox. All is in memory: what a service that was killed had is lost.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections import Counter, deque
from collections.abc import Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from socket import socket
from typing import Any

from fastapi import HTTPException

from strop.errors import CheckRefused, SandboxError, SandboxLost, describe_error, given_of
from strop.runtime.contract import FailureKind, Slot, StartRequest, State
from strop.runtime.gate import Gate
from strop.runtime.host import Host, HostFacts
from strop.runtime.keys import new_key
from strop.runtime.queue import Node, explain_impossible, place
from strop.runtime.session import Failure, Session
from strop.sandbox.served import ServedSandbox

STOP_WAIT_S = 5.0
MAX_ALIVE = 10_000
"""Further starts are answered with 429."""
HOLD_S = 5.0
"""How long a request for a beginning sandbox is held."""
_MAX_ENDED = 4096
"""Ended sandboxes are kept, since clients read how they ended."""
_GIB = 1 << 30
_PLAIN_SLOT = Slot(cpus=1.0, memory_bytes=2 * _GIB, disk_bytes=2 * _GIB, processes=512)
_log = logging.getLogger("strop.runtime")


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
    """In the order of arrival."""
    counts: Counter[str] = field(default_factory=Counter)
    """Metrics of events: names, with their labels."""

    def __post_init__(self) -> None:
        self._ended: deque[Session] = deque()
        self._tasks: set[asyncio.Task[Any]] = set()

    # Nodes and slots.

    def add_host(self, node_id: str, host: Host, facts: HostFacts) -> None:
        """Use a host that is open."""
        self.nodes[node_id] = Node(node_id=node_id, host=host, facts=facts, cpu_factor=self.policy.cpu_factor)
        _log.info("node %s on %s: joined", node_id, facts.name)
        self._dispatch()

    def drop_host(self, node_id: str, why: str) -> None:
        """Forget a host that is lost, and end its sandboxes."""
        node = self.nodes.pop(node_id)
        self.counts["nodes_lost_total"] += 1
        cause = f"node {node_id} on {node.facts.name} is lost: {why}"
        _log.warning("%s", cause)
        for session in list(node.taken):
            self._fail(session, Failure(FailureKind.INFRA_LOST, cause))

    def waiting(self) -> list[Session]:
        """Return the sandboxes that wait for a slot, in the order of arrival."""
        return [one for one in self.by_runtime.values() if one.state is State.QUEUED]

    def alive(self) -> list[Session]:
        """Return the sandboxes that have not ended."""
        return [one for one in self.by_runtime.values() if one.is_alive]

    def _dispatch(self) -> None:
        """Give free slots to the next waiting sandboxes."""
        for session, node in place(self.waiting(), self.nodes.values()):
            session.node = node
            session.enter(State.IMAGE)
            session.living = self._spawn(self._live(session, node))

    async def _live(self, session: Session, node: Node) -> None:
        try:
            failure = await session.live(node.host)
        except Exception as error:
            _log.exception("sandbox %s", session.runtime_id)
            failure = Failure(FailureKind.INFRA_LOST, describe_error(error))
        self._fail(session, failure)

    async def _clear(self, session: Session) -> None:
        """Release the address of a sandbox that has ended, remove what is left of it, and free its slot."""
        await session.gate.close()
        if session.living is not None and session.node is not None:
            session.living.cancel()
            await asyncio.wait([session.living])
            if session.sandbox is not None:
                try:
                    await session.sandbox.stop()
                except SandboxLost:
                    _log.warning("%s did not end in time", session.runtime_id)
            session.node.taken.discard(session)
            self._dispatch()

    async def _connect(self, runtime_id: str) -> socket:
        """Return a connection to the server in a sandbox, for its gate. Raises: OSError, SandboxError."""
        return await self.by_runtime[runtime_id].connect()

    # Ends.

    def _fail(self, session: Session, failure: Failure) -> None:
        """End a sandbox that cannot go on. No-op if it has ended."""
        if session.is_alive:
            session.failure = failure
            self.counts[f'failures_total{{kind="{failure.kind}"}}'] += 1
            self._end(session, State.FAILED, failure.cause)

    def _end(self, session: Session, state: State, cause: str) -> None:
        """End a sandbox. No-op if it has ended."""
        if not session.is_alive:
            return
        session.cause = cause
        session.enter(state)
        self.counts[f'ends_total{{state="{state}"}}'] += 1
        session.clearing = self._spawn(self._clear(session))
        self._ended.append(session)
        if len(self._ended) > _MAX_ENDED:
            oldest = self._ended.popleft()
            del self.by_runtime[oldest.runtime_id]
            if self.by_name.get((oldest.owner, oldest.session_id)) is oldest:
                del self.by_name[oldest.owner, oldest.session_id]

    def tick(self) -> None:
        """End sandboxes at their limits. Called every second."""
        policy, now = self.policy, time.monotonic()
        for session in self.alive():
            used_at = max(session.asked_at, session.gate.connections.last_used_at)
            if session.state is State.QUEUED and now - session.begun_at > policy.queue_limit_s:
                cause = f"no slot was free for it within {policy.queue_limit_s:g} s"
                self._fail(session, Failure(FailureKind.CAPACITY, cause))
            elif session.lease_s is not None and now - session.renewed_at > session.lease_s:
                self._end(session, State.STOPPED, f"its lease of {session.lease_s:g} s was not renewed")
            elif now - session.begun_at > policy.age_limit_s:
                self._end(session, State.STOPPED, f"it reached the age of {policy.age_limit_s:g} s")
            elif session.state is not State.PAUSED and now - used_at > policy.idle_limit_s:
                self._end(session, State.STOPPED, f"it was idle for {policy.idle_limit_s:g} s")

    async def close(self) -> None:
        """End all sandboxes."""
        for session in self.alive():
            self._end(session, State.STOPPED, "the service ends")
        await asyncio.gather(*self._tasks, return_exceptions=True)

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
        if len(self.alive()) >= MAX_ALIVE:
            raise HTTPException(429, f"{MAX_ALIVE} sandboxes live here, as many as may")
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
        self.by_name[owner, session.session_id] = self.by_runtime[runtime_id] = session
        self.counts["starts_total"] += 1
        if cause := explain_impossible(session.slot, self.nodes.values()):
            self._fail(session, Failure(FailureKind.CAPACITY, cause))
        else:
            await gate.open()
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
        """Wait until a beginning sandbox is ready or has ended, for `HOLD_S` at most."""
        with suppress(TimeoutError):
            async with asyncio.timeout(HOLD_S):
                await session.settled.wait()

    async def stop(self, owner: str, runtime_id: str) -> Session:
        """End a sandbox; nothing is left of it by then, or within seconds. Raises: HTTPException 404."""
        session = self.find_runtime(owner, runtime_id)
        self._end(session, State.STOPPED, "its client stopped it")
        # If it had failed, its client knows now.
        session.enter(State.STOPPED)
        if session.clearing is not None:
            await asyncio.wait([session.clearing], timeout=STOP_WAIT_S)
        return session

    async def pause(self, owner: str, runtime_id: str) -> Session:
        """Freeze a sandbox. Raises: HTTPException 404, 409 unless it is ready, 503."""
        session = self.find_runtime(owner, runtime_id)
        async with session.operating:
            if session.state is not State.PAUSED:
                sandbox = _require(session, State.READY)
                # Before the freeze, so that no request is taken and then hangs.
                session.enter(State.PAUSED)
                try:
                    await sandbox.pause()
                except SandboxError as error:
                    # Its life tells why one is lost.
                    if session.is_alive and not sandbox.is_lost:
                        session.enter(State.READY)
                    raise HTTPException(503, f"it could not be paused: {given_of(error)}") from error
                session.gate.connections.cut_all()
        return session

    async def resume(self, owner: str, runtime_id: str) -> Session:
        """Continue a sandbox, with the same address and key. One that cannot be resumed has failed.

        Raises: HTTPException 404, 503.
        """
        session = self.find_runtime(owner, runtime_id)
        async with session.operating:
            if session.state is not State.READY:
                sandbox = _require(session, State.PAUSED)
                try:
                    await sandbox.resume()
                except SandboxError as error:
                    cause = f"it could not be resumed: {given_of(error)}"
                    self._fail(session, Failure(FailureKind.INFRA_LOST, cause))
                    raise HTTPException(503, cause) from error
                if session.state is State.PAUSED:
                    session.enter(State.READY)
        return session

    async def _resume_quietly(self, session: Session) -> None:
        with suppress(HTTPException):
            await self.resume(session.owner, session.runtime_id)

    def renew(self, owner: str, runtime_ids: Sequence[str] | None, lease_s: float) -> list[Session]:
        """Lease sandboxes for `lease_s` from now, all of the owner for None; return the leased ones.

        A sandbox that has been leased ends with its lease.
        """
        leased = [
            session
            for session in self.alive()
            if session.owner == owner and (runtime_ids is None or session.runtime_id in runtime_ids)
        ]
        for session in leased:
            session.asked_at = session.renewed_at = time.monotonic()
            session.lease_s = lease_s
        return leased

    def expires_in_s(self, session: Session) -> float | None:
        """Return the seconds until its lease or its age ends it; None once it has ended."""
        if not session.is_alive:
            return None
        ends_at = session.begun_at + self.policy.age_limit_s
        if session.lease_s is not None:
            ends_at = min(ends_at, session.renewed_at + session.lease_s)
        return ends_at - time.monotonic()

    def record(self, session: Session) -> dict[str, Any]:
        """Return a sandbox's record for its client."""
        waiting = self.waiting() if session.state is State.QUEUED else []
        words = f"waits for a slot: {waiting.index(session) + 1} of {len(waiting)}" if waiting else ""
        return session.record(place=words, expires_in_s=self.expires_in_s(session))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run a coroutine in the background; its errors are logged."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._finish_task)
        return task

    def _finish_task(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("a task ended: %s", describe_error(error), exc_info=error)


def _require(session: Session, state: State) -> ServedSandbox:
    """Return the sandbox of a session in a state. Raises: HTTPException."""
    if not session.is_alive:
        raise HTTPException(404, f"it has ended: {session.cause or session.state.value}")
    if session.sandbox is None or session.state is not state:
        raise HTTPException(409, f"it is {session.state.value}, not {state.value}")
    return session.sandbox
