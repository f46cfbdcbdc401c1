"""Where sandboxes are: slots and nodes, the ports held for those that wait, and what nodes report.

An order goes to a node after the journal has it. A node that does not answer keeps nothing: its order goes to
another one, and should it have made the sandbox all the same, it is told to stop it with its next report.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from functools import partial
from urllib.parse import urlsplit

from strop.errors import CheckRefused, StoreError
from strop.runtime.contract import (
    HEARTBEAT_S,
    LOST_AFTER_S,
    FailureKind,
    NodeOrder,
    NodeReply,
    NodeReport,
    SandboxReport,
    State,
)
from strop.runtime.nodes import Node, NodeClient, NodeFailed
from strop.runtime.ports import CHUNK_BYTES, PortRelay, Stream
from strop.runtime.queue import Admission
from strop.runtime.registry import Registry
from strop.runtime.session import ENDED, Session

_DIRECT_WAIT_S = 0.3
"""How long an answer waits for a node's own address before the controller's is told."""
_MAX_MISSED = 2


class Placement:
    """Slots, nodes and held ports of the sandboxes of a registry."""

    def __init__(self, registry: Registry, client: NodeClient, *, host: str, admission: Admission) -> None:
        """`host` is the address of this machine whose ports are held."""
        self.nodes: dict[str, Node] = {}
        self.admission = admission
        self.client = client
        self.node_came = time.monotonic()
        """When the newest node registered."""
        self._looked = time.monotonic()
        self._arrival = asyncio.Event()
        """Set when the next node registers."""
        self._registry = registry
        self._host = host
        self._relays: dict[str, PortRelay] = {}
        self._placing: dict[str, asyncio.Task[None]] = {}
        registry.on_end = self._leave

    async def announce(self, session: Session, *, has_to_wait: bool = True) -> None:
        """Make a sandbox's address final, and have it on disk.

        Raises: CheckRefused if no port can be held; StoreError.
        """
        if has_to_wait:
            self.admission.add(session)
            self.dispatch()
            placing = self._placing.get(session.runtime_id)
            if placing is not None:
                await asyncio.wait([placing], timeout=_DIRECT_WAIT_S)
        if session.node_url:
            session.url = session.node_url
        else:
            await self._hold_port(session, 0)
        await self._registry.write(session)
        session.announced.set()

    def dispatch(self) -> None:
        """Give free slots to those who come next."""
        for session, node_id in self.admission.take():
            session.node_id = node_id
            session.timeline["placed"] = time.time()
            self._registry.enter(session, State.IMAGE)
            self._placing[session.runtime_id] = self._registry.spawn(self._place(session, node_id))

    async def node_of(self, session: Session) -> Node:
        """Return where a sandbox is. After a restart, its node has to report first.

        Raises: NodeFailed if it does not.
        """
        with suppress(TimeoutError):
            async with asyncio.timeout(LOST_AFTER_S):
                while session.is_alive and session.node_id not in self.nodes:
                    await self._arrival.wait()
        node = self.nodes.get(session.node_id)
        if node is None or not session.node_url:
            raise NodeFailed(f"the node of {session.runtime_id} has not reported")
        return node

    def disconnect(self, session: Session) -> None:
        """End the connections through a held port."""
        relay = self._relays.get(session.runtime_id)
        if relay is not None:
            relay.disconnect()

    def used_at(self, session: Session) -> float:
        """Return when a held port was last used, by the monotonic clock; 0 where there is none."""
        relay = self._relays.get(session.runtime_id)
        return relay.last_used_at if relay is not None else 0.0

    async def take_back(self, session: Session) -> None:
        """Hold again the port of a sandbox that lived when this controller's predecessor ended."""
        if not session.url:
            cause = "the controller ended before its address was told"
            self._registry.end(session, State.FAILED, FailureKind.INFRA_LOST, cause)
            return
        if session.port:
            try:
                await self._hold_port(session, session.port)
            except CheckRefused as error:
                self._registry.end(session, State.FAILED, FailureKind.INFRA_LOST, str(error))
                return
        if not session.node_url:
            # Whether an order arrived is not known: a node that has it says so, or it is placed anew.
            session.node_id = ""
            self._registry.enter(session, State.QUEUED)
            self.admission.add(session)

    def report(self, report: NodeReport) -> NodeReply:
        """Take what a node says of itself and its sandboxes; return what it is to do."""
        node_id = report.node_id
        known = self.nodes.get(node_id)
        if known is None and not report.has_all:
            # What the journal has of it would be judged by a part.
            return NodeReply(wants_all=True)
        if known is None:
            self.node_came = time.monotonic()
            self._registry.tell("node_joined", node=node_id, host=report.host, url=report.url)
        node = Node(report=report, should_drain=known is not None and known.should_drain)
        self.nodes[node_id] = node
        if known is None:
            self._arrival.set()
            self._arrival = asyncio.Event()
        self.admission.set_room(
            node_id,
            report.capacity,
            is_open=node.is_open,
            ends_in_s=report.ends_in_s,
            snapshot_bytes=report.snapshot_bytes,
        )
        if known is None:
            # Of what the journal knows to be there, the report may lack some.
            for session in self._registry.alive.values():
                if session.node_id == node_id:
                    self.admission.assign(session, node_id)
        to_stop = [one.runtime_id for one in report.sandboxes if not self._take(one, node_id)]
        if report.has_all:
            there = {one.runtime_id for one in report.sandboxes if one.state not in ENDED}
            for session in list(self.admission.rooms[node_id].taken.values()):
                if session.runtime_id not in there:
                    self._miss(session)
        self.dispatch()
        return NodeReply(to_stop=tuple(to_stop), should_drain=node.should_drain)

    def drain(self, node_id: str) -> bool:
        """Let a node take nothing new; return whether there is such a node."""
        node = self.nodes.get(node_id)
        if node is not None:
            node.should_drain = True
            self.admission.rooms[node_id].is_open = False
        return node is not None

    def lose_silent(self) -> None:
        """Give up nodes that have not reported for too long, and what was on them."""
        now = time.monotonic()
        was_away, self._looked = now - self._looked > 2 * HEARTBEAT_S, now
        if was_away:
            # This process stood still: what nodes sent meanwhile has not been read yet.
            for node in self.nodes.values():
                node.seen = now
        for node_id in [one for one, node in self.nodes.items() if now - node.seen > LOST_AFTER_S]:
            node = self.nodes.pop(node_id)
            self._registry.counts["nodes_lost"] += 1
            self._registry.tell("node_lost", node=node_id, host=node.report.host)
            cause = f"node {node_id} on {node.report.host} was silent for {LOST_AFTER_S:g} s"
            for session in self.admission.drop_room(node_id):
                self._registry.end(session, State.FAILED, FailureKind.INFRA_LOST, cause, is_gone=True)

    async def close(self) -> None:
        """Give all held ports back."""
        await asyncio.gather(*(relay.close() for relay in self._relays.values()))

    async def _hold_port(self, session: Session, port: int) -> None:
        relay = await PortRelay.listen(partial(_dial, session), host=self._host, port=port)
        session.port, session.url = relay.port, relay.url
        if session.is_alive:
            self._relays[session.runtime_id] = relay
        else:
            await relay.close()

    async def _place(self, session: Session, node_id: str) -> None:
        """Order a sandbox of a node. Where that fails, it waits again, in its old place."""
        try:
            await self._registry.write(session)
            order = NodeOrder(
                runtime_id=session.runtime_id,
                session_api_key=session.key,
                slot=session.slot,
                request=session.request,
            )
            answer = await self.client.order(self.nodes[node_id].report.url, order)
        except (NodeFailed, StoreError, KeyError) as error:
            self._registry.tell_of(session, "order_failed", why=str(error))
            self._registry.counts["orders_failed"] += 1
            if session.is_alive and session.node_id == node_id and not session.node_url:
                if (node := self.nodes.get(node_id)) is not None:
                    node.is_suspect = True
                    self.admission.rooms[node_id].is_open = False
                self.admission.release(session)
                session.node_id = ""
                self._registry.enter(session, State.QUEUED)
                self.admission.add(session)
                self.dispatch()
            return
        finally:
            self._placing.pop(session.runtime_id, None)
        session.node_url = answer.url
        if session.url:
            self._registry.keep(session)

    def _leave(self, session: Session, is_gone: bool) -> None:
        """Follow the end of a sandbox: its port, its place in the queue, its slot."""
        self.admission.remove(session)
        if session.runtime_id in self._relays:
            self._registry.spawn(self._give_back(session.runtime_id))
        if not is_gone and session.node_id:
            session.clearing = self._registry.spawn(self._clear(session))
        elif is_gone:
            self.admission.release(session)

    async def _give_back(self, runtime_id: str) -> None:
        await self._relays[runtime_id].close()
        del self._relays[runtime_id]

    async def _clear(self, session: Session) -> None:
        """Have a node end what it has of a sandbox, and free its slot."""
        placing = self._placing.get(session.runtime_id)
        if placing is not None:
            await asyncio.wait([placing])
        node = self.nodes.get(session.node_id)
        if node is None:
            return
        try:
            await self.client.stop(node.report.url, session.runtime_id, session.cause)
        except NodeFailed as error:
            # Its next report names the sandbox, and is answered with the order to stop it.
            self._registry.tell_of(session, "stop_failed", why=str(error))
            return
        self.admission.release(session)
        self.dispatch()

    def _take(self, one: SandboxReport, node_id: str) -> bool:
        """Take what a node says of one sandbox; return whether it may keep that."""
        session = self._registry.by_runtime.get(one.runtime_id)
        has_ended = one.state in ENDED
        if session is None or session.node_id not in ("", node_id):
            return has_ended
        if not session.is_alive:
            session.take(one)
            return has_ended
        if one.version < session.version:
            return True
        if not session.node_id:
            self.admission.remove(session)
            session.node_id = node_id
        self.admission.assign(session, node_id)
        session.take(one)
        session.used = max(session.used, time.monotonic() - one.last_used_s)
        if has_ended:
            # The controller did not ask for its end, so a stop was the node's own: its time was over.
            own = FailureKind.AGENT_ERROR if one.state is State.FAILED else FailureKind.INFRA_LOST
            self._registry.end(session, State.FAILED, one.failure_kind or own, one.cause, is_gone=True)
            return True
        if one.url and one.url != session.node_url:
            # The answer to its order was lost.
            session.node_url = one.url
            self._registry.keep(session)
        # While it is paused or resumed, the answer to that has its state.
        if not session.operating.locked():
            if one.state is State.READY and session.port and not session.is_probed:
                self._registry.spawn(self._probe(session))
            else:
                self._registry.enter(session, one.state)
        return True

    async def _probe(self, session: Session) -> None:
        """Believe that a sandbox is ready once it answered through the address that clients have."""
        if await self.client.answers(session.url) and session.is_alive and session.state is not State.PAUSED:
            session.is_probed = True
            self._registry.enter(session, State.READY)

    def _miss(self, session: Session) -> None:
        """Note that a node's report lacks a sandbox that has a slot there."""
        if not session.is_alive:
            self.admission.release(session)
        elif session.node_url:
            session.num_missed += 1
            if session.num_missed >= _MAX_MISSED:
                cause = f"node {session.node_id} does not have it any more"
                self._registry.end(session, State.FAILED, FailureKind.INFRA_LOST, cause, is_gone=True)


async def _dial(session: Session) -> Stream:
    if session.state is State.PAUSED:
        raise ConnectionError("the sandbox is paused")
    if not session.node_url:
        raise ConnectionError("the sandbox is not placed yet")
    where = urlsplit(session.node_url)
    return await asyncio.open_connection(where.hostname, where.port, limit=CHUNK_BYTES)
