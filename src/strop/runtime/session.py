"""The service's record of one sandbox, from its start request to the hour after its end."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from strop.runtime.contract import FailureKind, SandboxReport, Slot, StartRequest, State
from strop.runtime.ports import Gate

ENDED = frozenset({State.STOPPED, State.FAILED})
BEGINNING = frozenset({State.QUEUED, State.IMAGE, State.STARTING, State.RESUMING})
"""A client that asks for a sandbox in one of these states waits until it has left them."""
_POD_LOG_CHARS = 16_000

WORDS: Mapping[tuple[State, FailureKind | None], tuple[str, str]] = {
    (State.QUEUED, None): ("starting", "pending"),
    (State.IMAGE, None): ("starting", "pending"),
    (State.STARTING, None): ("starting", "running"),
    (State.READY, None): ("running", "ready"),
    (State.PAUSED, None): ("paused", "not found"),
    (State.RESUMING, None): ("starting", "running"),
    (State.FAILED, FailureKind.TASK_OOM): ("error", "crashloopbackoff"),
    (State.FAILED, FailureKind.IMAGE_ERROR): ("error", "failed"),
    (State.FAILED, FailureKind.AGENT_ERROR): ("error", "failed"),
    (State.FAILED, FailureKind.CAPACITY): ("error", "failed"),
    (State.FAILED, FailureKind.INFRA_LOST): ("error", "unknown"),
}
"""`status` and `pod_status` of each state."""


def words_of(state: State, failure_kind: FailureKind | None) -> tuple[str, str]:
    """Return `status` and `pod_status`."""
    if state is State.STOPPED:
        return "stopped", "not found"
    return WORDS[state, failure_kind if state is State.FAILED else None]


@dataclass(kw_only=True, slots=True, eq=False)
class Session:
    """One sandbox. Ages use the monotonic clock."""

    runtime_id: str
    session_id: str
    owner: str
    key: str = field(repr=False)
    request: StartRequest = field(repr=False)
    slot: Slot
    state: State = State.QUEUED
    failure_kind: FailureKind | None = None
    cause: str = ""
    refusal: str = ""
    exit_code: int | None = None
    log_tail: str = ""
    events: list[str] = field(default_factory=list)
    isolation: dict[str, Any] = field(default_factory=dict)
    timeline: dict[str, float] = field(default_factory=dict)
    usage: dict[str, float] = field(default_factory=dict)
    url: str = ""
    """Final once it is not empty. No client gets a record before."""
    node_id: str = ""
    """The node that has it or was ordered to make it."""
    node_url: str = ""
    """Its address at the node, once the node has taken the order."""
    lease_s: float | None = None
    """How long each renewal lasts. None: it was never leased, and only age and idleness end it."""

    arrival: int = 0
    """Its number in the order of arrival, from 1; 0: it never waited."""
    begun_at: float = field(default_factory=time.monotonic)
    asked_at: float = 0.0
    """When its client last asked for it; 0: not since its start."""
    used_at: float = 0.0
    """When its address was last used."""
    renewed_at: float = 0.0
    ended_at: float = 0.0
    version: int = 0
    """The version of the newest report."""
    has_failed_to_resume: bool = False
    gate: Gate | None = None
    """The port that the service holds for it, unless its node does."""
    announced: asyncio.Event = field(default_factory=asyncio.Event)
    """Set once `url` is final."""
    settled: asyncio.Event = field(default_factory=asyncio.Event)
    """Set while its state is not in `BEGINNING`."""
    placing: asyncio.Task[None] | None = None
    """Orders it from its node."""
    clearing: asyncio.Task[None] | None = None
    """Stops it at its node, once it has ended here."""
    operating: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while it is paused or resumed."""

    @property
    def is_alive(self) -> bool:
        """Whether it has not ended."""
        return self.state not in ENDED

    def enter(self, state: State) -> None:
        """Change its state, and wake the clients that wait for that."""
        self.state = state
        if state in BEGINNING:
            self.settled.clear()
        else:
            self.settled.set()

    def take(self, report: SandboxReport) -> None:
        """Copy a host's report, except for the state."""
        self.version = max(self.version, report.version)
        self.exit_code = report.exit_code if report.exit_code is not None else self.exit_code
        self.log_tail = report.log_tail or self.log_tail
        self.refusal = report.refusal or self.refusal
        if report.events:
            self.events = list(report.events)
        self.isolation = report.isolation or self.isolation
        self.timeline.update(report.timeline)
        self.usage.update(report.usage)

    def record(self, *, place: tuple[int, int] | None, expires_in_s: float | None) -> dict[str, Any]:
        """Return its record for clients, as openhands-workspace 1.58.0 reads it.

        `place`: its place in the queue and the queue's length. `expires_in_s`: time until lease or age ends
        it.
        """
        status, pod_status = words_of(self.state, self.failure_kind)
        events = list(self.events)
        if place is not None:
            events.insert(0, f"waits for a slot: {place[0]} of {place[1]}")
        pod_logs = self.log_tail[-_POD_LOG_CHARS:]
        if not self.is_alive:
            kind = f"[{self.failure_kind.value}] " if self.failure_kind else ""
            pod_logs = "\n".join(filter(None, (f"{kind}{self.cause}", pod_logs)))
        waiting = {"name": "sandbox", "state": self.state.value, "message": events[0] if events else ""}
        return {
            "runtime_id": self.runtime_id,
            "session_id": self.session_id,
            "url": self.url,
            "node_url": self.node_url,
            "session_api_key": self.key,
            "status": status,
            "pod_status": pod_status,
            "restart_count": 0,
            "restart_reasons": [],
            "container_statuses": [waiting] if self.state in BEGINNING else [],
            "events": events,
            "pod_logs": pod_logs,
            "failure_kind": self.failure_kind.value if self.failure_kind else None,
            "cause": self.cause,
            "refusal": self.refusal,
            "isolation": self.isolation,
            "node": self.node_id,
            "lease_expires_in_s": expires_in_s,
            "timeline": self.timeline,
            "usage": self.usage,
            "last_termination_reason": self.cause,
            "last_termination_exit_code": self.exit_code,
        }
