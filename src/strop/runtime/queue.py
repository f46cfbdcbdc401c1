"""The scheduler: which request gets the next slot, and on which node (fair shares, best fit).

Only processors are overcommitted, by a stated factor. The owner with the smallest dominant share comes next,
with its oldest request; one that fits nowhere now lets other owners pass. A request goes to the node that has
the least room left after it, and to none that ends soon.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field

from strop.runtime.contract import Slot
from strop.runtime.host import Host, HostFacts
from strop.runtime.session import Session

DRAIN_BEFORE_END_S = 120.0
"""A node takes no new sandboxes so long before its allocation ends."""
RESOURCES = ("cpus", "memory_bytes")
_ROUNDING = 1e-6
"""Processors are fractions: the rounding error of their sums is no shortage."""


def needs_of(slot: Slot) -> tuple[float, float]:
    """Return the resources that a sandbox takes: its files are in the node's memory too."""
    return slot.cpus, float(slot.memory_bytes + slot.disk_bytes)


@dataclass(kw_only=True, slots=True, eq=False)
class Node:
    """A node with its host, and the sandboxes that have slots there."""

    node_id: str
    host: Host
    facts: HostFacts
    """With as many processors as may be promised."""
    opened_at: float = field(default_factory=time.monotonic)
    taken: set[Session] = field(default_factory=set)

    @property
    def is_open(self) -> bool:
        """Whether it takes new sandboxes now."""
        ends_in_s = self.facts.ends_in_s
        return ends_in_s is None or time.monotonic() < self.opened_at + ends_in_s - DRAIN_BEFORE_END_S

    @property
    def has(self) -> tuple[float, float]:
        """What it may promise of each resource."""
        return self.facts.cpus, float(self.facts.memory_bytes)

    @property
    def used(self) -> tuple[float, float]:
        """What its sandboxes take of each resource."""
        return _sum_of(self.taken)

    def shares_left(self, slot: Slot) -> list[float]:
        """Return the part of each resource that is free once a slot is taken; below 0 it does not fit."""
        return [
            (has - used - wanted + _ROUNDING) / has
            for has, used, wanted in zip(self.has, self.used, needs_of(slot), strict=True)
        ]


def place(waiting: Iterable[Session], nodes: Collection[Node]) -> Iterator[tuple[Session, Node]]:
    """Give slots to the next sessions, and yield each with its node. `waiting` is in the order of arrival."""
    queues: dict[str, list[Session]] = {}
    for session in waiting:
        queues.setdefault(session.owner, []).append(session)
    total = [sum(amounts) or 1.0 for amounts in zip(*(node.has for node in nodes), strict=True)]

    def share_of(owner: str) -> float:
        """Return the part that an owner has of the resource of which it has most."""
        taken = _sum_of(one for node in nodes for one in node.taken if one.owner == owner)
        return max(used / has for used, has in zip(taken, total, strict=True))

    while queues and nodes:
        owner = min(queues, key=share_of)
        slot = queues[owner][0].slot
        fitting = [node for node in nodes if node.is_open and min(node.shares_left(slot)) >= 0.0]
        if not fitting:
            # Its owner's next request waits behind it; other owners may pass.
            del queues[owner]
            continue
        node = min(fitting, key=lambda one: min(one.shares_left(slot)))
        session = queues[owner].pop(0)
        if not queues[owner]:
            del queues[owner]
        node.taken.add(session)
        yield session, node


def explain_impossible(slot: Slot, nodes: Collection[Node]) -> str:
    """Explain why no node could ever hold a slot; empty if one could, or if there is no node."""
    needs = needs_of(slot)
    for node in nodes:
        if all(wanted <= has + _ROUNDING for wanted, has in zip(needs, node.has, strict=True)):
            return ""
    told = [f"node {node.node_id} has {_describe(node.has)}" for node in nodes]
    return f"it takes {_describe(needs)}, more than any can hold: {'; '.join(told)}" if told else ""


def _describe(amounts: tuple[float, float]) -> str:
    return " and ".join(f"{amount:g} {name}" for name, amount in zip(RESOURCES, amounts, strict=True))


def _sum_of(sessions: Iterable[Session]) -> tuple[float, float]:
    needs = [needs_of(session.slot) for session in sessions]
    return sum(cpus for cpus, _ in needs), sum(memory_bytes for _, memory_bytes in needs)
