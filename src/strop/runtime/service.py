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
from collections.abc import Coroutine
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Annotated, Any

from fastapi import Depends, HTTPException, Request
from pydantic import BaseModel, Field

from strop.errors import CheckRefused, SandboxError, SandboxLost, describe_error, given_of
from strop.runtime.contract import FailureKind, Policy, StartRequest, State
from strop.runtime.gate import Gate
from strop.runtime.host import Host, HostFacts
from strop.runtime.keys import new_key
from strop.runtime.queue import Node, explain_impossible, place
from strop.runtime.session import Session
from strop.sandbox.served import ServedSandbox

STOP_WAIT_S = 5.0
MAX_LEASE_S = 7 * 24 * 3600.0
HOLD_S = 5.0
"""How long a request for a beginning sandbox is held."""
_MAX_ENDED = 4096
"""Ended sandboxes are kept, since clients read how they ended."""
_log = logging.getLogger("strop.runtime")


class LeaseCall(BaseModel):
    """`POST /leases`."""

    lease_s: float = Field(gt=0, le=MAX_LEASE_S, allow_inf_nan=False)
    runtime_ids: list[str] | None = None
    """None: all sandboxes of the owner."""


class RuntimeCall(BaseModel):
    """`POST /stop`, `/pause` and `/resume`."""

    runtime_id: str = Field(min_length=1)


def _owner_of(request: Request) -> str:
    return str(request.state.owner)


Owner = Annotated[str, Depends(_owner_of)]
"""Whose key a request has."""
Record = dict[str, Any]


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
    _ended: deque[Session] = field(default_factory=deque)
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)

    # Nodes and slots.

    def add_host(self, node_id: str, host: Host, facts: HostFacts) -> None:
        """Use a host that is open."""
        promised = replace(facts, cpus=self.policy.cpu_factor * facts.cpus)
        self.nodes[node_id] = Node(node_id=node_id, host=host, facts=promised)
        _log.info("node %s on %s: joined", node_id, facts.name)
        self._dispatch()

    def drop_host(self, node_id: str, why: str) -> None:
        """Forget a host that is lost, and end its sandboxes."""
        node = self.nodes.pop(node_id)
        self.counts["nodes_lost_total"] += 1
        cause = f"node {node_id} on {node.facts.name} is lost: {why}"
        _log.warning("%s", cause)
        for session in list(node.taken):
            self._end(session, cause, FailureKind.INFRA_LOST)

    def waiting(self) -> list[Session]:
        """Return the sandboxes that wait for a slot, in the order of arrival."""
        return [one for one in self.by_runtime.values() if one.state is State.QUEUED]

    def alive(self) -> list[Session]:
        """Return the sandboxes that have not ended."""
        return [one for one in self.by_runtime.values() if one.is_alive]

    def _dispatch(self) -> None:
        """Give free slots to the next waiting sandboxes."""
        for session, node in place(self.waiting(), self.nodes.values()):
            session.node_id = node.node_id
            session.enter(State.IMAGE)
            session.living = self._spawn(self._live(session, node))

    async def _live(self, session: Session, node: Node) -> None:
        try:
            kind, cause = await session.live(node.host)
        except Exception as error:
            _log.exception("sandbox %s", session.runtime_id)
            kind, cause = FailureKind.INFRA_LOST, describe_error(error)
        self._end(session, cause, kind)

    def _end(self, session: Session, cause: str, kind: FailureKind | None = None) -> None:
        """End a sandbox, with a failure or as it was asked for. No-op if it has ended."""
        if not session.is_alive:
            return
        session.cause, session.failure_kind = cause, kind
        session.enter(State.FAILED if kind else State.STOPPED)
        self.counts[f'ends_total{{failure="{kind or ""}"}}'] += 1
        session.clearing = self._spawn(self._clear(session))
        self._ended.append(session)
        if len(self._ended) > _MAX_ENDED:
            oldest = self._ended.popleft()
            del self.by_runtime[oldest.runtime_id]
            if self.by_name.get((oldest.owner, oldest.session_id)) is oldest:
                del self.by_name[oldest.owner, oldest.session_id]

    async def _clear(self, session: Session) -> None:
        """Release the address of a sandbox that has ended, remove what is left of it, and free its slot."""
        await session.gate.close()
        if session.living is not None:
            session.living.cancel()
            await asyncio.wait([session.living])
            if session.sandbox is not None:
                try:
                    await session.sandbox.stop()
                except SandboxLost:
                    _log.warning("%s did not end in time", session.runtime_id)
            if (node := self.nodes.get(session.node_id)) is not None:
                node.taken.discard(session)
            self._dispatch()

    def tick(self) -> None:
        """End sandboxes at their limits. Called every second."""
        policy, now = self.policy, time.monotonic()
        for session in self.alive():
            used_at = max(session.asked_at, session.gate.connections.last_used_at)
            if now > session.lease_ends_at:
                self._end(session, "its lease was not renewed")
            elif now - session.begun_at > policy.age_limit_s:
                self._end(session, f"it reached the age of {policy.age_limit_s:g} s")
            elif session.state is not State.PAUSED and now - used_at > policy.idle_limit_s:
                self._end(session, f"it was idle for {policy.idle_limit_s:g} s")

    async def close(self) -> None:
        """End all sandboxes."""
        for session in self.alive():
            self._end(session, "the service ends")
        await asyncio.gather(*self._tasks, return_exceptions=True)

    # What clients ask; `routes` has the paths. Refusals are HTTPExceptions.

    async def start(self, request: StartRequest, owner: Owner) -> Record:
        """Return the live sandbox of a session id, or a new one. Its address is final.

        Refused with 409 for another image, 503 if no port could be held.
        """
        live = self.by_name.get((owner, request.session_id))
        if live is not None and live.is_alive:
            if live.request.image != request.image:
                raise HTTPException(409, f"session {request.session_id} has image {live.request.image}")
            live.asked_at = time.monotonic()
            if live.state is State.PAUSED:
                # A client whose resume has failed starts it again.
                self._spawn(self._resume_quietly(live))
            return self.record(live)
        try:
            gate = Gate(self.address)
        except CheckRefused as error:
            raise HTTPException(503, given_of(error)) from error
        session = Session(
            runtime_id=uuid.uuid4().hex,
            session_id=request.session_id,
            owner=owner,
            key=new_key(),
            request=request,
            slot=self.policy.slot.times(request.resource_factor),
            gate=gate,
        )
        self.by_name[owner, session.session_id] = self.by_runtime[session.runtime_id] = session
        self.counts["starts_total"] += 1
        if cause := explain_impossible(session.slot, self.nodes.values()):
            self._end(session, cause, FailureKind.CAPACITY)
        else:
            await gate.open(session.connect)
            self._dispatch()
        return self.record(session)

    async def read(self, session_id: str, owner: Owner) -> Record:
        """Return the newest sandbox of a session id, once it is ready or has ended, after `HOLD_S` at most.

        Refused with 404 for an unknown one.
        """
        session = self._find(self.by_name.get((owner, session_id)), owner)
        with suppress(TimeoutError):
            async with asyncio.timeout(HOLD_S):
                await session.settled.wait()
        return self.record(session)

    async def list_all(self, owner: Owner) -> Record:
        """Return the owner's living sandboxes."""
        return {"runtimes": [self.record(one) for one in self.alive() if one.owner == owner]}

    async def stop(self, call: RuntimeCall, owner: Owner) -> Record:
        """End a sandbox; nothing is left of it by then, or within seconds. Refused with 404."""
        session = self._find(self.by_runtime.get(call.runtime_id), owner)
        self._end(session, "its client stopped it")
        if session.clearing is not None:
            await asyncio.wait([session.clearing], timeout=STOP_WAIT_S)
        return self.record(session)

    async def pause(self, call: RuntimeCall, owner: Owner) -> Record:
        """Freeze a sandbox. Refused with 404, 409 unless it is ready, 503."""
        session = self._find(self.by_runtime.get(call.runtime_id), owner)
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
        return self.record(session)

    async def resume(self, call: RuntimeCall, owner: Owner) -> Record:
        """Continue a sandbox, with the same address and key. One that cannot be resumed has failed.

        Refused with 404, 409 unless it is paused, 503.
        """
        session = self._find(self.by_runtime.get(call.runtime_id), owner)
        async with session.operating:
            if session.state is not State.READY:
                sandbox = _require(session, State.PAUSED)
                try:
                    await sandbox.resume()
                except SandboxError as error:
                    cause = f"it could not be resumed: {given_of(error)}"
                    self._end(session, cause, FailureKind.INFRA_LOST)
                    raise HTTPException(503, cause) from error
                if session.is_alive:
                    session.enter(State.READY)
        return self.record(session)

    async def _resume_quietly(self, session: Session) -> None:
        with suppress(HTTPException):
            await self.resume(RuntimeCall(runtime_id=session.runtime_id), session.owner)

    async def lease(self, call: LeaseCall, owner: Owner) -> Record:
        """Lease sandboxes from now. One that has been leased ends with its lease."""
        wanted = call.runtime_ids
        own = [one for one in self.alive() if one.owner == owner]
        leased = [one for one in own if wanted is None or one.runtime_id in wanted]
        for session in leased:
            session.asked_at = time.monotonic()
            session.lease_ends_at = session.asked_at + call.lease_s
        renewed = [session.runtime_id for session in leased]
        return {"renewed": renewed, "unknown": sorted(set(wanted or ()) - set(renewed))}

    def record(self, session: Session) -> Record:
        """Return a sandbox's record for its client."""
        waiting = self.waiting() if session.state is State.QUEUED else []
        words = f"waits for a slot: {waiting.index(session) + 1} of {len(waiting)}" if waiting else ""
        ends_at = min(session.begun_at + self.policy.age_limit_s, session.lease_ends_at)
        return session.record(place=words, expires_in_s=ends_at - time.monotonic())

    def _find(self, session: Session | None, owner: str) -> Session:
        """Note that a client asks for its sandbox. Another owner's does not exist."""
        if session is None or session.owner != owner:
            raise HTTPException(404, "there is no such sandbox; any of an earlier service is infra_lost")
        session.asked_at = time.monotonic()
        return session

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


def _require(session: Session, state: State) -> ServedSandbox:
    if not session.is_alive:
        raise HTTPException(404, f"it has ended: {session.cause or session.state.value}")
    if session.sandbox is None or session.state is not state:
        raise HTTPException(409, f"it is {session.state.value}, not {state.value}")
    return session.sandbox
