"""The operations of clients on their sandboxes, and the time limits. Of HTTP it uses the error statuses only.

`/start` is answered as soon as an address is held, before the sandbox exists. Where a slot is free and its
node answers at once, the address is the node's own; else the controller holds a port and relays. A record is
in the journal before a client gets it.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Awaitable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass

from strop.runtime.contract import LOST_AFTER_S, FailureKind, SandboxReport, Slot, StartRequest, State
from strop.runtime.http_server import HttpError
from strop.runtime.keys import new_key
from strop.runtime.nodes import NodeFailed
from strop.runtime.placement import Placement
from strop.runtime.registry import Registry
from strop.runtime.session import Session

OPERATION_WAIT_S = 10.0
"""Clients time out after 15 s at the earliest. The operation goes on, and a client may ask again."""
STOP_WAIT_S = 5.0
GIB = 1 << 30
PLAIN_SLOT = Slot(cpus=1.0, memory_bytes=2 * GIB, disk_bytes=2 * GIB, processes=512)

_Ending = tuple[State, FailureKind | None, str]


@dataclass(frozen=True, kw_only=True, slots=True)
class Policy:
    """The resources of a sandbox and its time limits, in seconds."""

    slot: Slot = PLAIN_SLOT
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
    settle_s: float = LOST_AFTER_S
    """How long a request that fits no node is kept after a node registered: larger nodes may follow."""


class Sessions:
    """The clients' operations on their sandboxes."""

    def __init__(self, policy: Policy, registry: Registry, placement: Placement) -> None:
        self.policy = policy
        self.registry = registry
        self.placement = placement
        self._restored_at = time.monotonic()

    async def start(self, owner: str, request: StartRequest) -> Session:
        """Return the live sandbox of a session id, or a new one. Its address is final.

        Raises: HttpError; StoreError and CheckRefused if no sandbox could be begun.
        """
        live = self.registry.by_name.get((owner, request.session_id))
        if live is not None and live.is_alive:
            if live.request.image != request.image:
                raise HttpError(409, f"session {request.session_id} has image {live.request.image}")
            if not (live.state is State.PAUSED and live.has_failed_to_resume):
                live.asked_at = time.monotonic()
                await live.announced.wait()
                if not live.url:
                    raise HttpError(503, live.cause)
                if live.state is State.PAUSED:
                    self.registry.spawn(_ignore_refusal(self._resume(live)))
                return live
            self.registry.end(live, State.STOPPED, cause="it could not be resumed and was started again")
        if len(self.registry.alive) >= self.policy.max_alive:
            raise HttpError(429, f"{len(self.registry.alive)} sandboxes live here, as many as may")
        default, terms = self.policy.slot, request.sandbox
        session = Session(
            runtime_id=uuid.uuid4().hex,
            session_id=request.session_id,
            owner=owner,
            key=new_key(),
            request=request,
            slot=default.times(request.resource_factor) if terms is None else terms.slot(default),
            timeline={"queued": time.time()},
        )
        self.registry.add(session)
        self.registry.counts["starts"] += 1
        self.registry.log_session(session, "asked", image=request.image)
        try:
            impossible = self._find_impossible(session)
            await self.placement.announce(session, has_to_wait=impossible is None)
            if impossible is not None:
                self.registry.end(session, *impossible)
        finally:
            # After a failure no client has an address, and clients that wait for one get the failure.
            if not session.announced.is_set():
                self.registry.end(session, State.FAILED, FailureKind.INFRA_LOST, "no address could be held")
                session.announced.set()
        return session

    def find(self, owner: str, session_id: str) -> Session:
        """Return the newest sandbox of a session id. Raises: HttpError with 404."""
        session = self.registry.by_name.get((owner, session_id))
        if session is None or not session.url:
            raise HttpError(404, f"no session {session_id}")
        session.asked_at = time.monotonic()
        return session

    def find_runtime(self, owner: str, runtime_id: str) -> Session:
        """Return a sandbox by its runtime id. Raises: HttpError 404, also for another owner's sandbox."""
        session = self.registry.by_runtime.get(runtime_id)
        if session is None or session.owner != owner:
            raise HttpError(404, f"no runtime {runtime_id}")
        session.asked_at = time.monotonic()
        return session

    def list_all(self, owner: str) -> list[Session]:
        """Return the owner's sandboxes that were not stopped."""
        return [
            session
            for (name, _), session in self.registry.by_name.items()
            if name == owner and session.url and session.state is not State.STOPPED
        ]

    async def wait(self, session: Session) -> None:
        """Wait until a beginning sandbox is ready or has ended, for `Policy.hold_s` at most."""
        with suppress(TimeoutError):
            async with asyncio.timeout(self.policy.hold_s):
                await session.settled.wait()

    async def stop(self, owner: str, runtime_id: str) -> Session:
        """End a sandbox; its node has removed it by then, or does so within seconds.

        Raises: HttpError 404; StoreError.
        """
        session = self.find_runtime(owner, runtime_id)
        if session.is_alive:
            self.registry.end(session, State.STOPPED, cause="its client stopped it")
        else:
            # It failed, and its client knows now.
            self.registry.enter(session, State.STOPPED)
        await self.registry.write(session)
        if session.clearing is not None:
            await asyncio.wait([session.clearing], timeout=STOP_WAIT_S)
        return session

    async def pause(self, owner: str, runtime_id: str) -> Session:
        """Freeze a sandbox. Raises: HttpError 404, 409 unless it is ready, 503."""
        session = self._find_alive(owner, runtime_id)
        await self._finish(self._pause(session), is_waited_for=True)
        return session

    async def resume(self, owner: str, runtime_id: str) -> Session:
        """Continue a sandbox, with the same address and key. Raises: HttpError 404, 503."""
        session = self._find_alive(owner, runtime_id)
        await self._finish(self._resume(session), is_waited_for=False)
        return session

    def renew(self, owner: str, runtime_ids: Sequence[str] | None, lease_s: float) -> list[Session]:
        """Lease sandboxes for `lease_s` from now, all of the owner for None; return the leased ones.

        A sandbox that has been leased ends with its lease.
        """
        alive = self.registry.alive
        wanted = list(alive) if runtime_ids is None else runtime_ids
        leased = [alive[name] for name in wanted if name in alive and alive[name].owner == owner]
        for session in leased:
            session.asked_at = session.renewed_at = time.monotonic()
            if session.lease_s != lease_s:
                session.lease_s = lease_s
                self.registry.keep(session)
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

    def tick(self) -> None:
        """End sandboxes at their limits, drop silent nodes, forget old sandboxes. Called every second."""
        self.placement.lose_silent()
        now = time.monotonic()
        for session in list(self.registry.alive.values()):
            session.used_at = max(session.used_at, self.placement.used_at(session))
            ending = self._find_ending(session, now)
            if ending is not None:
                self.registry.end(session, *ending)
                self.registry.counts["expired"] += ending[0] is State.STOPPED
        self.registry.forget(older_than_s=self.policy.keep_ended_s, max_kept=self.policy.max_ended)
        self.placement.dispatch()

    async def restore(self) -> None:
        """Restore the sandboxes of the journal, with their addresses and keys."""
        for line in self.registry.journal.read():
            self.registry.add(Session.from_json(line))
        for session in list(self.registry.alive.values()):
            await self.placement.take_back(session)
        self._restored_at = time.monotonic()

    def _find_impossible(self, session: Session) -> _Ending | None:
        """Return the ending of a sandbox that can never be made, None if a node may yet make it."""
        if time.monotonic() - self.placement.newest_node_at < self.policy.settle_s:
            return None
        cause = self.placement.admission.explain_impossible(session.slot)
        return (State.FAILED, FailureKind.CAPACITY, cause) if cause else None

    def _find_alive(self, owner: str, runtime_id: str) -> Session:
        session = self.find_runtime(owner, runtime_id)
        if not session.is_alive:
            raise HttpError(404, f"runtime {runtime_id} has ended: {session.cause or session.state.value}")
        return session

    async def _finish(self, work: Coroutine[None, None, None], *, is_waited_for: bool) -> None:
        """Wait for an operation for `OPERATION_WAIT_S`; it goes on in the background after that."""
        task = asyncio.create_task(work)
        done, _ = await asyncio.wait([task], timeout=OPERATION_WAIT_S)
        if done:
            task.result()
            return
        self.registry.spawn(_ignore_refusal(task))
        if is_waited_for:
            raise HttpError(503, f"it takes longer than {OPERATION_WAIT_S:g} s; ask again")

    async def _pause(self, session: Session) -> None:
        async with session.operating:
            if session.state is State.PAUSED:
                return
            if session.state is not State.READY:
                raise HttpError(409, f"it is {session.state.value}; only a ready sandbox can be paused")
            report = await self._operate(session, "pause")
            self._take(session, report, State.PAUSED)
            session.has_failed_to_resume = False
            self.placement.disconnect(session)
            self.registry.counts["pauses"] += 1

    async def _resume(self, session: Session) -> None:
        async with session.operating:
            if session.state is not State.PAUSED:
                return
            self.registry.enter(session, State.RESUMING)
            try:
                report = await self._operate(session, "resume")
            except HttpError:
                session.has_failed_to_resume = True
                if session.is_alive:
                    self.registry.enter(session, State.PAUSED)
                raise
            session.has_failed_to_resume = False
            self._take(session, report, report.state)
            self.registry.counts["resumes"] += 1

    async def _operate(self, session: Session, verb: str) -> SandboxReport:
        try:
            node = await self.placement.node_of(session)
            return await self.placement.client.operate(node.report.url, session.runtime_id, verb)
        except NodeFailed as error:
            raise HttpError(503, f"its node could not {verb} it: {error}") from error

    def _take(self, session: Session, report: SandboxReport, state: State) -> None:
        if not session.is_alive:
            raise HttpError(404, f"it ended meanwhile: {session.cause}")
        session.take(report)
        if report.state is State.FAILED:
            kind = report.failure_kind or FailureKind.AGENT_ERROR
            self.registry.end(session, State.FAILED, kind, report.cause, is_gone=True)
            raise HttpError(404, f"it failed: {report.cause}")
        self.registry.enter(session, state)

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
        elif session.node_id not in self.placement.nodes and now - self._restored_at > LOST_AFTER_S:
            return State.FAILED, FailureKind.INFRA_LOST, f"node {session.node_id} did not come back"
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
    with suppress(HttpError):
        await work
