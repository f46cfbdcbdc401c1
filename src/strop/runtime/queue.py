"""The scheduler: which request gets the next slot, and on which node (fair shares, best fit).

Only processors are overcommitted, by a stated factor. The owner with the smallest dominant share comes next,
with its oldest request. A request that fits nowhere now lets others pass, but not for longer than
`PATIENCE_S`: then one node is kept free for it. A request goes to the node that has the least room left after
it; nodes that end too soon are used only if no other has room.
"""

from __future__ import annotations

import bisect
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

from strop.runtime.contract import Slot
from strop.runtime.session import Session

PATIENCE_S = 60.0
RESOURCES = ("cpus", "memory_bytes", "disk_bytes", "processes")
_ROUNDING = 1e-6
"""Processors are fractions: the rounding error of their sums is no shortage."""

Amounts = dict[str, float]
"""Amounts by resource."""


def amounts_of(slot: Slot, *, cpu_factor: float = 1.0) -> Amounts:
    """Return the amounts of a node, processors times a factor."""
    return {name: getattr(slot, name) * (cpu_factor if name == "cpus" else 1.0) for name in RESOURCES}


def needs_of(slot: Slot) -> Amounts:
    """Return the amounts that a sandbox takes: its files are in the node's memory too."""
    return amounts_of(slot) | {"memory_bytes": float(slot.memory_bytes + slot.disk_bytes)}


@dataclass(kw_only=True, slots=True)
class Room:
    """The resources of a node, and the sandboxes that take them."""

    node_id: str
    has: Amounts
    is_open: bool = True
    """Whether it takes new sandboxes."""
    ends_at: float = math.inf
    """When its allocation ends, by the monotonic clock."""
    used: Amounts = field(default_factory=lambda: dict.fromkeys(RESOURCES, 0.0))
    taken: dict[str, Session] = field(default_factory=dict)
    """Sandboxes by runtime id."""

    def fits(self, wanted: Amounts) -> bool:
        """Whether the amounts are free."""
        return all(wanted[name] <= self.has[name] - self.used[name] + _ROUNDING for name in RESOURCES)

    def could_fit(self, wanted: Amounts) -> bool:
        """Whether the amounts would be free on the empty node."""
        return all(wanted[name] <= self.has[name] + _ROUNDING for name in RESOURCES)

    def free_share(self, wanted: Amounts | None = None) -> float:
        """Return the free part of the scarcest resource after `wanted` is taken."""
        return min(
            (self.has[name] - self.used[name] - (wanted[name] if wanted else 0.0)) / self.has[name]
            for name in RESOURCES
            if self.has[name]
        )


class Admission:
    """The rooms of all nodes, and the sessions that wait for a slot."""

    def __init__(self, *, cpu_factor: float = 1.0, min_left_s: float = 0.0) -> None:
        """`min_left_s`: nodes that end sooner are used only if no other has room."""
        self.rooms: dict[str, Room] = {}
        """Rooms by node id."""
        self._cpu_factor = cpu_factor
        self._min_left_s = min_left_s
        self._waiting: dict[str, list[Session]] = {}
        """Waiting sessions by owner, in the order of arrival."""
        self._arrivals: list[int] = []
        """Arrival numbers of all waiting sessions, sorted."""
        self._num_arrived = 0
        self._owned: dict[str, Amounts] = {}
        """Amounts that each owner's sandboxes take, over all nodes."""

    def __len__(self) -> int:
        """Return the number of waiting sessions."""
        return len(self._arrivals)

    def __iter__(self) -> Iterator[Session]:
        """Yield the waiting sessions."""
        for sessions in self._waiting.values():
            yield from sessions

    def add(self, session: Session) -> None:
        """Queue a session; one that has waited before gets its old place."""
        if not session.arrival:
            self._num_arrived += 1
            session.arrival = self._num_arrived
        bisect.insort(self._waiting.setdefault(session.owner, []), session, key=_by_arrival)
        bisect.insort(self._arrivals, session.arrival)

    def remove(self, session: Session) -> None:
        """Take a session from the queue. No-op if it does not wait."""
        sessions = self._waiting.get(session.owner, [])
        index = bisect.bisect_left(sessions, session.arrival, key=_by_arrival)
        if index == len(sessions) or sessions[index] is not session:
            return
        del sessions[index]
        if not sessions:
            del self._waiting[session.owner]
        del self._arrivals[bisect.bisect_left(self._arrivals, session.arrival)]

    def place_of(self, session: Session) -> tuple[int, int] | None:
        """Return the place of a session, from 1, and the queue's length; None if it does not wait."""
        index = bisect.bisect_left(self._arrivals, session.arrival)
        is_waiting = index < len(self._arrivals) and self._arrivals[index] == session.arrival
        return (index + 1, len(self._arrivals)) if is_waiting else None

    def set_room(
        self,
        node_id: str,
        capacity: Slot,
        *,
        is_open: bool,
        ends_in_s: float | None = None,
    ) -> None:
        """Set the resources of a node, and whether it takes new sandboxes."""
        has = amounts_of(capacity, cpu_factor=self._cpu_factor)
        room = self.rooms.setdefault(node_id, Room(node_id=node_id, has=has))
        room.has, room.is_open = has, is_open
        room.ends_at = math.inf if ends_in_s is None else time.monotonic() + ends_in_s

    def drop_room(self, node_id: str) -> list[Session]:
        """Forget a node; return the sessions that had slots there."""
        room = self.rooms.get(node_id)
        taken = list(room.taken.values()) if room else []
        for session in taken:
            self.release(session)
        self.rooms.pop(node_id, None)
        return taken

    def assign(self, session: Session, node_id: str) -> None:
        """Give a session a slot of a node, even if none is free: its sandbox may be there already."""
        room = self.rooms.get(node_id)
        if room is None or session.runtime_id in room.taken:
            return
        room.taken[session.runtime_id] = session
        self._count(session, room, 1)

    def release(self, session: Session) -> None:
        """Free the slot of a session. No-op if it has none."""
        for room in self.rooms.values():
            if room.taken.pop(session.runtime_id, None) is not None:
                self._count(session, room, -1)

    def take(self) -> list[tuple[Session, str]]:
        """Give slots to the next sessions and unqueue them; return each with its node's id."""
        placed: list[tuple[Session, str]] = []
        kept: set[str] = set()
        passed: set[str] = set()
        while head := self._next_head(passed):
            wanted = needs_of(head.slot)
            open_rooms = [room for room in self.rooms.values() if room.is_open and room.node_id not in kept]
            room = self._best_room(head, wanted, open_rooms)
            if room is None:
                passed.add(head.owner)
                possible = [room for room in open_rooms if room.could_fit(wanted)]
                if possible and time.monotonic() - head.begun_at > PATIENCE_S:
                    # It has waited long: the node with the most free is kept until it has room.
                    kept.add(max(possible, key=Room.free_share).node_id)
                continue
            self.remove(head)
            self.assign(head, room.node_id)
            placed.append((head, room.node_id))
        return placed

    def explain_impossible(self, slot: Slot) -> str:
        """Explain why no node could ever hold a slot; empty if one could, or if there is no node."""
        wanted = needs_of(slot)
        rooms = list(self.rooms.values())
        if not rooms or any(room.could_fit(wanted) for room in rooms):
            return ""
        most = {name: max(room.has[name] for room in rooms) for name in RESOURCES}
        short = [
            f"{name} {wanted[name]:g} of {most[name]:g}"
            for name in RESOURCES
            if wanted[name] > most[name] + _ROUNDING
        ]
        return "no node can ever hold it: " + (", ".join(short) or "no single node has enough of everything")

    def _next_head(self, passed: set[str]) -> Session | None:
        heads = [sessions[0] for owner, sessions in self._waiting.items() if owner not in passed]
        if len(heads) < 2:
            return heads[0] if heads else None
        total = {name: sum(room.has[name] for room in self.rooms.values()) for name in RESOURCES}
        return min(heads, key=lambda head: (self._dominant_share(head.owner, total), head.arrival))

    def _dominant_share(self, owner: str, total: Amounts) -> float:
        owned = self._owned.get(owner, {})
        return max((amount / total[name] for name, amount in owned.items() if total[name]), default=0.0)

    def _best_room(self, session: Session, wanted: Amounts, open_rooms: list[Room]) -> Room | None:
        rooms = [room for room in open_rooms if room.fits(wanted)]
        needed_until = time.monotonic() + max(session.request.lifetime_s, self._min_left_s)
        lasting = [room for room in rooms if room.ends_at >= needed_until]
        if not lasting:
            return max(rooms, key=lambda room: room.ends_at, default=None)
        return min(lasting, key=lambda room: room.free_share(wanted))

    def _count(self, session: Session, room: Room, sign: int) -> None:
        owned = self._owned.setdefault(session.owner, dict.fromkeys(RESOURCES, 0.0))
        for name, amount in needs_of(session.slot).items():
            room.used[name] += sign * amount
            owned[name] += sign * amount
        if not any(amount > _ROUNDING for amount in owned.values()):
            del self._owned[session.owner]


def _by_arrival(session: Session) -> int:
    return session.arrival
