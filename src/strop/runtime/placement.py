"""Places sandboxes on nodes, holds ports for waiting ones, and follows the nodes' reports.

The journal has an order before the node gets it. If a node does not answer, its order goes to another node;
should the first have made the sandbox all the same, the answer to its next report orders it to stop that.
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
"""How long a start waits for the node's own address before it is answered with the controller's."""
_MAX_MISSED = 2


class Placement:
    """The slots, nodes and held ports of the sandboxes of a registry."""

    def __init__(self, registry: Registry, client: NodeClient, *, host: str, admission: Admission) -> None:
        """`host` is the address of this machine whose ports are held."""
        self.nodes: dict[str, Node] = {}
        self.admission = admission
        self.client = client
        self.newest_node_at = time.monotonic()
        """When the newest node registered, by the monotonic clock."""
        self._checked_at = time.monotonic()
        self._arrival = asyncio.Event()
        """Set when the next node registers."""
        self._registry = registry
        self._host = host
        self._relays: dict[str, PortRelay] = {}
        self._placing: dict[str, asyncio.Task[None]] = {}
        registry.on_end = self._follow_end

    async def announce(self, session: Session, *, has_to_wait: bool = True) -> None:
        """Make a sandbox's address final, and write it to disk.

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
        """Give free slots to the next waiting sandboxes."""
        for session, node_id in self.admission.take():
            session.node_id = node_id
            session.timeline["placed"] = time.time()
            self._registry.enter(session, State.IMAGE)
            self._placing[session.runtime_id] = self._registry.spawn(self._place(session, node_id))

    async def node_of(self, session: Session) -> Node:
        """Return the node of a sandbox. After a restart, wait for the node's first report.

        Raises: NodeFailed if none comes.
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
        """End the connections through a sandbox's held port."""
        relay = self._relays.get(session.runtime_id)
        if relay is not None:
            relay.disconnect()

    def used_at(self, session: Session) -> float:
        """Return when a sandbox's held port was last used, by the monotonic clock; 0 without such a port."""
        relay = self._relays.get(session.runtime_id)
        return relay.last_used_at if relay is not None else 0.0

    async def take_back(self, session: Session) -> None:
        """Restore a sandbox that was alive when the previous controller ended: hold its port again."""
        if not session.url:
            cause = "the controller ended before its client got an address"
            self._registry.end(session, State.FAILED, FailureKind.INFRA_LOST, cause)
            return
        if session.port:
            try:
                await self._hold_port(session, session.port)
            except CheckRefused as error:
                self._registry.end(session, State.FAILED, FailureKind.INFRA_LOST, str(error))
                return
        if not session.node_url:
            # Its order may or may not have arrived. A node that took it reports it; else it is placed again.
            session.node_id = ""
            self._registry.enter(session, State.QUEUED)
            self.admission.add(session)

    def report(self, report: NodeReport) -> NodeReply:
        """Take a node's report; return the answer to it."""
        node_id = report.node_id
        previous = self.nodes.get(node_id)
        if previous is None and not report.has_all:
            # Sandboxes that the journal has at this node would be missing from a partial report.
            return NodeReply(wants_all=True)
        node = Node(report=report)
        self.nodes[node_id] = node
        if previous is None:
            self.newest_node_at = time.monotonic()
            self._registry.log("node_joined", node=node_id, host=report.host, url=report.url)
            self._arrival.set()
            self._arrival = asyncio.Event()
        self.admission.set_room(node_id, report.capacity, is_open=node.is_open, ends_in_s=report.ends_in_s)
        if previous is None:
            # The journal may have sandboxes at this node that the report lacks.
            for session in self._registry.alive.values():
                if session.node_id == node_id:
                    self.admission.assign(session, node_id)
        to_stop = [sandbox.runtime_id for sandbox in report.sandboxes if not self._take(sandbox, node_id)]
        if report.has_all:
            present = {sandbox.runtime_id for sandbox in report.sandboxes if sandbox.state not in ENDED}
            for session in list(self.admission.rooms[node_id].taken.values()):
                if session.runtime_id not in present:
                    self._note_missing(session)
        self.dispatch()
        return NodeReply(to_stop=tuple(to_stop))

    def lose_silent(self) -> None:
        """Drop nodes that have been silent for too long, and end their sandboxes."""
        now = time.monotonic()
        was_stalled, self._checked_at = now - self._checked_at > 2 * HEARTBEAT_S, now
        if was_stalled:
            # This process stood still, and has not read the reports that came meanwhile.
            for node in self.nodes.values():
                node.seen_at = now
        for node_id in [name for name, node in self.nodes.items() if now - node.seen_at > LOST_AFTER_S]:
            node = self.nodes.pop(node_id)
            self._registry.counts["nodes_lost"] += 1
            self._registry.log("node_lost", node=node_id, host=node.report.host)
            cause = f"node {node_id} on {node.report.host} was silent for {LOST_AFTER_S:g} s"
            for session in self.admission.drop_room(node_id):
                self._registry.end(session, State.FAILED, FailureKind.INFRA_LOST, cause, is_gone=True)

    async def close(self) -> None:
        """Close all held ports."""
        await asyncio.gather(*(relay.close() for relay in self._relays.values()))

    async def _hold_port(self, session: Session, port: int) -> None:
        relay = await PortRelay.listen(partial(_dial, session), key=session.key, host=self._host, port=port)
        session.port, session.url = relay.port, relay.url
        if session.is_alive:
            self._relays[session.runtime_id] = relay
        else:
            await relay.close()

    async def _place(self, session: Session, node_id: str) -> None:
        """Order a sandbox from a node. If that fails, the sandbox goes back to its place in the queue."""
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
            self._registry.log_session(session, "order_failed", why=str(error))
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

    def _follow_end(self, session: Session, is_gone: bool) -> None:
        """Release the port, the place in the queue and the slot of a sandbox that has ended."""
        self.admission.remove(session)
        if session.runtime_id in self._relays:
            self._registry.spawn(self._release_port(session.runtime_id))
        if not is_gone and session.node_id:
            session.clearing = self._registry.spawn(self._stop_at_node(session))
        elif is_gone:
            self.admission.release(session)

    async def _release_port(self, runtime_id: str) -> None:
        await self._relays[runtime_id].close()
        del self._relays[runtime_id]

    async def _stop_at_node(self, session: Session) -> None:
        """Stop a sandbox at its node, and free its slot."""
        placing = self._placing.get(session.runtime_id)
        if placing is not None:
            await asyncio.wait([placing])
        node = self.nodes.get(session.node_id)
        if node is None:
            return
        try:
            await self.client.stop(node.report.url, session.runtime_id, session.cause)
        except NodeFailed as error:
            # The answer to the node's next report orders it to stop the sandbox.
            self._registry.log_session(session, "stop_failed", why=str(error))
            return
        self.admission.release(session)
        self.dispatch()

    def _take(self, report: SandboxReport, node_id: str) -> bool:
        """Take a node's report of one sandbox; return whether the node may keep it."""
        session = self._registry.by_runtime.get(report.runtime_id)
        has_ended = report.state in ENDED
        if session is None or session.node_id not in ("", node_id):
            return has_ended
        if not session.is_alive:
            session.take(report)
            return has_ended
        if report.version < session.version:
            return True
        if not session.node_id:
            self.admission.remove(session)
            session.node_id = node_id
        self.admission.assign(session, node_id)
        session.take(report)
        session.used_at = max(session.used_at, time.monotonic() - report.last_used_s)
        if has_ended:
            # The controller did not stop it, and a node stops sandboxes unasked only when it ends itself.
            kind = FailureKind.AGENT_ERROR if report.state is State.FAILED else FailureKind.INFRA_LOST
            kind = report.failure_kind or kind
            self._registry.end(session, State.FAILED, kind, report.cause, is_gone=True)
            return True
        if report.url and report.url != session.node_url:
            # The answer to its order was lost.
            session.node_url = report.url
            self._registry.keep(session)
        # During a pause or a resume, the answer to that operation sets the state.
        if not session.operating.locked():
            if report.state is State.READY and session.port and not session.is_probed:
                self._registry.spawn(self._probe(session))
            else:
                self._registry.enter(session, report.state)
        return True

    async def _probe(self, session: Session) -> None:
        """Call a sandbox ready once it has answered through the address that clients have."""
        if await self.client.answers(session.url) and session.is_alive and session.state is not State.PAUSED:
            session.is_probed = True
            self._registry.enter(session, State.READY)

    def _note_missing(self, session: Session) -> None:
        """Note that a node's full report lacks a sandbox that has a slot there."""
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
    address = urlsplit(session.node_url)
    return await asyncio.open_connection(address.hostname, address.port, limit=CHUNK_BYTES)
