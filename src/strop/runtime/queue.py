"""The scheduler: which request gets the next slot, and on which node (fair shares, best fit).

A node has room for so much of each resource; only processors are overcommitted, by a stated factor. The owner
with the smallest dominant share comes next, with its oldest request. A request that fits nowhere now lets
others pass, but not for longer than `PATIENCE_S`: then one node is kept free for it. Of the nodes with room,
the one that is left with the least takes a request; nodes that end too soon are left out while there is
another. A request that begins with a snapshot fits only on the node that has the snapshot, and lets its
owner's other requests pass.
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
"""Processors are fractions: what sums and differences of them leave is not a shortage."""

Amounts = dict[str, float]
"""By `RESOURCES`."""


def amounts_of(slot: Slot, *, cpu_factor: float = 1.0) -> Amounts:
    """Return a slot as numbers by name, processors times a factor."""
    return {name: getattr(slot, name) * (cpu_factor if name == "cpus" else 1.0) for name in RESOURCES}


@dataclass(kw_only=True, slots=True)
class Room:
    """What a node has, and who takes how much of it."""

    node_id: str
    has: Amounts
    is_open: bool = True
    """Whether it takes new ones."""
    ends_at: float = math.inf
    """When its allocation ends, by the monotonic clock."""
    used: Amounts = field(default_factory=lambda: dict.fromkeys(RESOURCES, 0.0))
    taken: dict[str, Session] = field(default_factory=dict)
    """By runtime id."""
    snapshot_bytes: int = 0
    """In `used`, of its disk."""

    def fits(self, wanted: Amounts) -> bool:
        """Whether that much is free."""
        return all(wanted[name] <= self.has[name] - self.used[name] + _ROUNDING for name in RESOURCES)

    def could_fit(self, wanted: Amounts) -> bool:
        """Whether that much would be free on the empty node."""
        return all(wanted[name] <= self.has[name] + _ROUNDING for name in RESOURCES)

    def free_share(self, wanted: Amounts | None = None) -> float:
        """Return the free part of what is scarcest, once `wanted` was taken."""
        return min(
            (self.has[name] - self.used[name] - (wanted[name] if wanted else 0.0)) / self.has[name]
            for name in RESOURCES
            if self.has[name]
        )


class Admission:
    """The rooms of all nodes, and the sessions that wait for a slot in one."""

    def __init__(self, *, cpu_factor: float = 1.0, min_left_s: float = 0.0) -> None:
        """`min_left_s`: how long a node has to last at least for a sandbox, if another one does."""
        self.rooms: dict[str, Room] = {}
        """By node id."""
        self._cpu_factor = cpu_factor
        self._min_left_s = min_left_s
        self._waiting: dict[tuple[str, str], list[Session]] = {}
        """By owner and the only node that will do, in the order of arrival."""
        self._arrivals: list[int] = []
        """Of all who wait, sorted."""
        self._num_arrived = 0
        self._owned: dict[str, Amounts] = {}
        """What each owner has of all nodes together."""

    def __len__(self) -> int:
        """Return how many wait."""
        return len(self._arrivals)

    def __iter__(self) -> Iterator[Session]:
        """Yield those who wait."""
        for sessions in self._waiting.values():
            yield from sessions

    def add(self, session: Session) -> None:
        """Let a session wait; one that waited before gets its old place."""
        if not session.arrival:
            self._num_arrived += 1
            session.arrival = self._num_arrived
        bisect.insort(self._waiting.setdefault(_queue_of(session), []), session, key=_by_arrival)
        bisect.insort(self._arrivals, session.arrival)

    def remove(self, session: Session) -> None:
        """Let it wait no more. Nothing happens where it does not."""
        queue = _queue_of(session)
        mine = self._waiting.get(queue, [])
        index = bisect.bisect_left(mine, session.arrival, key=_by_arrival)
        if index == len(mine) or mine[index] is not session:
            return
        del mine[index]
        if not mine:
            del self._waiting[queue]
        del self._arrivals[bisect.bisect_left(self._arrivals, session.arrival)]

    def place_of(self, session: Session) -> tuple[int, int] | None:
        """Return the place of a session by arrival, from 1, and how many wait; None if it does not."""
        index = bisect.bisect_left(self._arrivals, session.arrival)
        is_there = index < len(self._arrivals) and self._arrivals[index] == session.arrival
        return (index + 1, len(self._arrivals)) if is_there else None

    def set_room(
        self,
        node_id: str,
        capacity: Slot,
        *,
        is_open: bool,
        ends_in_s: float | None = None,
        snapshot_bytes: int = 0,
    ) -> None:
        """Say what a node has now, and whether it takes new ones."""
        has = amounts_of(capacity, cpu_factor=self._cpu_factor)
        room = self.rooms.setdefault(node_id, Room(node_id=node_id, has=has))
        room.has, room.is_open = has, is_open
        room.used["disk_bytes"] += snapshot_bytes - room.snapshot_bytes
        room.snapshot_bytes = snapshot_bytes
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
        """Give a session a slot, whether or not it is free: it may be there already."""
        room = self.rooms.get(node_id)
        if room is None or session.runtime_id in room.taken:
            return
        room.taken[session.runtime_id] = session
        self._count(session, room, 1)

    def release(self, session: Session) -> None:
        """Take its slot back, wherever that is. Nothing happens where it has none."""
        for room in self.rooms.values():
            if room.taken.pop(session.runtime_id, None) is not None:
                self._count(session, room, -1)

    def take(self) -> list[tuple[Session, str]]:
        """Give slots to those who come next; return each with its node's id. They wait no more."""
        found: list[tuple[Session, str]] = []
        kept: set[str] = set()
        passed: set[tuple[str, str]] = set()
        while head := self._next_head(passed):
            wanted = amounts_of(head.slot)
            room = self._best_room(head, wanted, kept)
            if room is None:
                passed.add(_queue_of(head))
                if time.monotonic() - head.begun > PATIENCE_S:
                    kept |= self._keep_room(head, wanted, kept)
                continue
            self.remove(head)
            self.assign(head, room.node_id)
            found.append((head, room.node_id))
        return found

    def why_never(self, slot: Slot, only_node_id: str = "") -> str:
        """Say in numbers why no node could ever hold a slot; nothing if one could, or if there is no node.

        `only_node_id`: the only one that will do, where there is one.
        """
        wanted = amounts_of(slot)
        rooms = [room for room in self.rooms.values() if only_node_id in ("", room.node_id)]
        if not rooms or any(room.could_fit(wanted) for room in rooms):
            return ""
        most = {name: max(room.has[name] for room in rooms) for name in RESOURCES}
        short = [
            f"{name} {wanted[name]:g} of {most[name]:g}"
            for name in RESOURCES
            if wanted[name] > most[name] + _ROUNDING
        ]
        return "no node can ever hold it: " + (", ".join(short) or "no single node has enough of everything")

    def _next_head(self, passed: set[tuple[str, str]]) -> Session | None:
        heads = [sessions[0] for queue, sessions in self._waiting.items() if queue not in passed]
        if len(heads) < 2:
            return heads[0] if heads else None
        total = {name: sum(room.has[name] for room in self.rooms.values()) for name in RESOURCES}
        return min(heads, key=lambda one: (self._dominant_share(one.owner, total), one.arrival))

    def _dominant_share(self, owner: str, total: Amounts) -> float:
        mine = self._owned.get(owner, {})
        return max((amount / total[name] for name, amount in mine.items() if total[name]), default=0.0)

    def _open_rooms(self, session: Session, kept: set[str]) -> list[Room]:
        return [
            room
            for room in self.rooms.values()
            if room.is_open and room.node_id not in kept and session.only_node_id in ("", room.node_id)
        ]

    def _best_room(self, session: Session, wanted: Amounts, kept: set[str]) -> Room | None:
        rooms = [room for room in self._open_rooms(session, kept) if room.fits(wanted)]
        needed_at = time.monotonic() + max(session.request.lifetime_s, self._min_left_s)
        lasting = [room for room in rooms if room.ends_at >= needed_at]
        if not lasting:
            return max(rooms, key=lambda room: room.ends_at, default=None)
        return min(lasting, key=lambda room: room.free_share(wanted))

    def _keep_room(self, session: Session, wanted: Amounts, kept: set[str]) -> set[str]:
        """Return the node that is to get free for one who has waited long: the one with the most free."""
        rooms = [room for room in self._open_rooms(session, kept) if room.could_fit(wanted)]
        best = max(rooms, key=Room.free_share, default=None)
        return {best.node_id} if best else set()

    def _count(self, session: Session, room: Room, sign: int) -> None:
        mine = self._owned.setdefault(session.owner, dict.fromkeys(RESOURCES, 0.0))
        for name, amount in amounts_of(session.slot).items():
            room.used[name] += sign * amount
            mine[name] += sign * amount
        if not any(amount > _ROUNDING for amount in mine.values()):
            del self._owned[session.owner]


def _queue_of(session: Session) -> tuple[str, str]:
    return session.owner, session.only_node_id


def _by_arrival(session: Session) -> int:
    return session.arrival
