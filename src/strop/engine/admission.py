"""Admission of requests: bounded places at several replicas, and one queue in front of them.

A replica has a bounded number of places. A request takes one at the least loaded replica, in tokens, or
at the one that holds the other requests of its prompt while that one is not far ahead. The others wait in
order of arrival; each free place wakes one waiter, and those of the same prompt right behind it join it.

This module knows no engines, health or weights; a replica is an index that is open or closed.
"""

from __future__ import annotations

import asyncio
import heapq
from dataclasses import dataclass

import numpy as np

from strop.errors import EngineError

_CLOSED = np.iinfo(np.int64).max


@dataclass(slots=True, eq=False)
class Ticket:
    """A request in the queue or at its place."""

    arrival: int
    """Order among all requests; kept when a request goes to a second replica."""
    key: int
    """Equal for requests with equal prompts. Two prompts with one key only share a replica."""
    cost_tokens: int
    arrived_at: float
    """On the event loop's clock (seconds)."""
    avoid: int | None = None
    """The replica that failed to answer it."""
    place: asyncio.Future[int] | None = None

    def __lt__(self, other: Ticket) -> bool:
        return self.arrival < other.arrival


class Admission:
    """The places of several replicas. All are open at first."""

    def __init__(self, num_replicas: int, *, max_running: int, max_group_lead: int) -> None:
        self._max_running = max_running
        self._max_group_lead = max_group_lead
        self._num_running = [0] * num_replicas
        self._load_tokens = [0] * num_replicas
        self._is_open = [True] * num_replicas
        self._offers = np.zeros(num_replicas, np.int64)
        """Load of each replica that has a place; else `_CLOSED`."""
        self._homes: dict[int, list[int]] = {}
        """For each prompt with requests: index of their replica, and their number."""
        self._queue: list[Ticket] = []
        self.longest_wait_s = 0.0

    @property
    def num_running(self) -> int:
        """Requests that have a place."""
        return sum(self._num_running)

    @property
    def num_waiting(self) -> int:
        """Requests that wait for a place."""
        return sum(1 for ticket in self._queue if ticket.place and not ticket.place.done())

    def add(self) -> int:
        """Add a replica, closed; return its index."""
        self._num_running.append(0)
        self._load_tokens.append(0)
        self._is_open.append(False)
        self._offers = np.append(self._offers, np.int64(_CLOSED))
        return len(self._is_open) - 1

    def set_open(self, index: int, is_open: bool) -> None:
        """Open or close a replica. Requests that have a place keep it."""
        self._is_open[index] = is_open
        self._offer(index)
        if is_open:
            self._let_in()

    def refuse(self, error: EngineError) -> None:
        """Fail every queued request: no place will become free."""
        queue, self._queue = self._queue, []
        for ticket in queue:
            if ticket.place is not None and not ticket.place.done():
                ticket.place.set_exception(error)

    async def enter(self, ticket: Ticket) -> int:
        """Return the index of a replica with a place for the request, waiting for one in order."""
        if not self._has_waiting():
            index = self._find(ticket)
            if index is not None:
                self._occupy(index, ticket)
                return index
        loop = asyncio.get_running_loop()
        place: asyncio.Future[int] = loop.create_future()
        ticket.place = place
        heapq.heappush(self._queue, ticket)
        try:
            index = await place
        except asyncio.CancelledError:
            if place.done() and not place.cancelled() and place.exception() is None:
                self.leave(place.result(), ticket)  # Woken and cancelled in the same turn of the loop.
            raise
        self.longest_wait_s = max(self.longest_wait_s, loop.time() - ticket.arrived_at)
        return index

    def leave(self, index: int, ticket: Ticket) -> None:
        """Free a place, and wake the request that has waited longest."""
        self._num_running[index] -= 1
        self._load_tokens[index] -= ticket.cost_tokens
        home = self._homes.get(ticket.key)
        if home is not None and home[0] == index:
            home[1] -= 1
            if not home[1]:
                del self._homes[ticket.key]
        self._offer(index)
        self._let_in()

    def _find(self, ticket: Ticket) -> int | None:
        """Return the home of the prompt's other requests, else the least loaded; None if all are full."""
        least = int(self._offers.argmin())
        if least == ticket.avoid:
            others = self._offers.copy()
            others[least] = _CLOSED
            # A place at the replica that failed is better than none.
            least = least if others.min() == _CLOSED else int(others.argmin())
        if self._offers[least] == _CLOSED:
            return None
        home = self._homes.get(ticket.key)
        if home is not None and home[0] != ticket.avoid:
            lead_tokens = self._offers[home[0]] - self._offers[least]
            if lead_tokens <= self._max_group_lead * ticket.cost_tokens:
                return home[0]
        return least

    def _occupy(self, index: int, ticket: Ticket) -> None:
        self._num_running[index] += 1
        self._load_tokens[index] += ticket.cost_tokens
        home = self._homes.get(ticket.key)
        if home is None or home[0] != index:
            # The rest of the group follows to the latest replica.
            home = self._homes[ticket.key] = [index, 0]
        home[1] += 1
        self._offer(index)

    def _offer(self, index: int) -> None:
        has_place = self._is_open[index] and self._num_running[index] < self._max_running
        self._offers[index] = self._load_tokens[index] if has_place else _CLOSED

    def _let_in(self) -> None:
        """While there are places, wake the longest waiting requests, each with the rest of its group."""
        while self._has_waiting():
            key = self._queue[0].key
            index = self._find(self._queue[0])
            if index is None:
                return
            most = self._max_running + self._max_group_lead
            while self._has_waiting() and self._queue[0].key == key and self._num_running[index] < most:
                ticket = heapq.heappop(self._queue)
                assert ticket.place is not None
                self._occupy(index, ticket)
                ticket.place.set_result(index)

    def _has_waiting(self) -> bool:
        """Whether a request waits. Cancelled ones are dropped from the queue."""
        while self._queue and (self._queue[0].place is None or self._queue[0].place.done()):
            heapq.heappop(self._queue)
        return bool(self._queue)
