"""The scheduler: which request gets the next slot, and on which node (fair shares, best fit).

Only processors are overcommitted, by a stated factor. The owner with the smallest dominant share comes next,
with its oldest request; one that fits nowhere now lets other owners pass. A request goes to the node that has
the least room left after it, and to none that ends soon.
"""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field

from strop.runtime.contract import Slot
from strop.runtime.session import Session

DRAIN_BEFORE_END_S = 120.0
"""A node takes no new sandboxes so long before its allocation ends."""
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
    ends_at: float = math.inf
    """When its allocation ends, by the monotonic clock."""
    used: Amounts = field(default_factory=lambda: dict.fromkeys(RESOURCES, 0.0))
    taken: dict[str, Session] = field(default_factory=dict)
    """Sandboxes by runtime id."""

    @property
    def is_open(self) -> bool:
        """Whether it takes new sandboxes now."""
        return time.monotonic() < self.ends_at - DRAIN_BEFORE_END_S

    def fits(self, wanted: Amounts) -> bool:
        """Whether the amounts are free now."""
        return all(wanted[name] <= self.has[name] - self.used[name] + _ROUNDING for name in RESOURCES)

    def share_left(self, wanted: Amounts) -> float:
        """Return the free part of the scarcest resource after `wanted` is taken."""
        return min(
            (self.has[name] - self.used[name] - wanted[name]) / self.has[name]
            for name in RESOURCES
            if self.has[name]
        )


class Admission:
    """The rooms of all nodes, and the sessions that wait for a slot."""

    def __init__(self, *, cpu_factor: float = 1.0) -> None:
        self.rooms: dict[str, Room] = {}
        """Rooms by node id."""
        self._cpu_factor = cpu_factor
        self._waiting: dict[str, Session] = {}
        """By runtime id, in the order of arrival."""
        self._owned: defaultdict[tuple[str, str], float] = defaultdict(float)
        """Amounts that the sandboxes of each owner take, by owner and resource."""

    def __len__(self) -> int:
        """Return the number of waiting sessions."""
        return len(self._waiting)

    def __iter__(self) -> Iterator[Session]:
        """Yield the waiting sessions in the order of arrival."""
        return iter(self._waiting.values())

    def add(self, session: Session) -> None:
        """Queue a session."""
        self._waiting[session.runtime_id] = session

    def remove(self, session: Session) -> None:
        """Take a session from the queue. No-op if it does not wait."""
        self._waiting.pop(session.runtime_id, None)

    def place_of(self, session: Session) -> int:
        """Return the place of a session in the queue, from 1; 0 if it does not wait."""
        if session.runtime_id not in self._waiting:
            return 0
        return list(self._waiting).index(session.runtime_id) + 1

    def add_room(self, node_id: str, capacity: Slot, *, ends_in_s: float | None = None) -> None:
        """Add a node."""
        has = amounts_of(capacity, cpu_factor=self._cpu_factor)
        ends_at = math.inf if ends_in_s is None else time.monotonic() + ends_in_s
        self.rooms[node_id] = Room(node_id=node_id, has=has, ends_at=ends_at)

    def drop_room(self, node_id: str) -> list[Session]:
        """Forget a node; return the sessions that had slots there."""
        taken = list(self.rooms[node_id].taken.values())
        for session in taken:
            self.release(session)
        del self.rooms[node_id]
        return taken

    def release(self, session: Session) -> None:
        """Free the slot of a session. No-op if it has none."""
        for room in self.rooms.values():
            if room.taken.pop(session.runtime_id, None) is not None:
                self._count(room, session, -1)

    def take(self) -> list[tuple[Session, str]]:
        """Give slots to the next sessions and unqueue them; return each with its node's id."""
        placed: list[tuple[Session, str]] = []
        heads: dict[str, Session] = {}
        for session in self:
            heads.setdefault(session.owner, session)
        while heads:
            owner = min(heads, key=self._dominant_share)
            head = heads.pop(owner)
            wanted = needs_of(head.slot)
            rooms = [room for room in self.rooms.values() if room.is_open and room.fits(wanted)]
            if not rooms:
                # Its owner's next request waits behind it; other owners may pass.
                continue
            room = min(rooms, key=lambda one: one.share_left(wanted))
            self.remove(head)
            room.taken[head.runtime_id] = head
            self._count(room, head, 1)
            placed.append((head, room.node_id))
            if (following := next((one for one in self if one.owner == owner), None)) is not None:
                heads[owner] = following
        return placed

    def explain_impossible(self, slot: Slot) -> str:
        """Explain why no node could ever hold a slot; empty if one could, or if there is no node."""
        wanted = needs_of(slot)
        rooms = list(self.rooms.values())
        lacks = [[name for name in RESOURCES if wanted[name] > room.has[name] + _ROUNDING] for room in rooms]
        if not all(lacks):
            return ""
        short = [
            f"node {room.node_id} has {name} {room.has[name]:g} of {wanted[name]:g}"
            for room, names in zip(rooms, lacks, strict=True)
            for name in names
        ]
        return f"no node can ever hold it: {', '.join(short)}" if short else ""

    def _dominant_share(self, owner: str) -> float:
        rooms = self.rooms.values()
        return max(
            self._owned[owner, name] / (sum(room.has[name] for room in rooms) or 1.0) for name in RESOURCES
        )

    def _count(self, room: Room, session: Session, sign: int) -> None:
        for name, amount in needs_of(session.slot).items():
            room.used[name] += sign * amount
            self._owned[session.owner, name] += sign * amount
