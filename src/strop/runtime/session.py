"""The service's record of one sandbox, from its start request until it is forgotten."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from strop.runtime.contract import FailureKind, SandboxReport, Slot, StartRequest, State
from strop.runtime.gate import Gate

ENDED = frozenset({State.STOPPED, State.FAILED})
BEGINNING = frozenset({State.QUEUED, State.IMAGE, State.STARTING})
"""A client that asks for a sandbox in one of these states waits until it has left them."""

WORDS: Mapping[tuple[State, FailureKind | None], tuple[str, str]] = {
    (State.QUEUED, None): ("starting", "pending"),
    (State.IMAGE, None): ("starting", "pending"),
    (State.STARTING, None): ("starting", "running"),
    (State.READY, None): ("running", "ready"),
    (State.PAUSED, None): ("paused", "not found"),
    (State.STOPPED, None): ("stopped", "not found"),
    (State.FAILED, FailureKind.TASK_OOM): ("error", "crashloopbackoff"),
    (State.FAILED, FailureKind.IMAGE_ERROR): ("error", "failed"),
    (State.FAILED, FailureKind.AGENT_ERROR): ("error", "failed"),
    (State.FAILED, FailureKind.CAPACITY): ("error", "failed"),
    (State.FAILED, FailureKind.INFRA_LOST): ("error", "unknown"),
}
"""`status` and `pod_status` of each state."""


@dataclass(kw_only=True, slots=True, eq=False)
class Session:
    """One sandbox. Ages use the monotonic clock."""

    runtime_id: str
    session_id: str
    owner: str
    key: str = field(repr=False)
    request: StartRequest = field(repr=False)
    slot: Slot
    gate: Gate
    """Its address, which is final."""
    state: State = State.QUEUED
    failure_kind: FailureKind | None = None
    cause: str = ""
    newest: SandboxReport | None = None
    """The newest report of its host."""
    node_id: str = ""
    """The node that has it or was ordered to make it."""
    lease_s: float | None = None
    """How long each renewal lasts. None: it was never leased, and only age and idleness end it."""

    begun_at: float = field(default_factory=time.monotonic)
    asked_at: float = field(default_factory=time.monotonic)
    """When its client last asked for it."""
    renewed_at: float = 0.0
    queued_unix_s: float = field(default_factory=time.time)
    settled: asyncio.Event = field(default_factory=asyncio.Event)
    """Set while its state is not in `BEGINNING`."""
    operating: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while it is paused or resumed."""
    placing: asyncio.Task[None] | None = None
    """Orders it from its node."""
    clearing: asyncio.Task[None] | None = None
    """Stops it at its node, once it has ended here."""

    @property
    def is_alive(self) -> bool:
        """Whether it has not ended."""
        return self.state not in ENDED

    def enter(self, state: State) -> None:
        """Change its state, and wake the clients that wait for that."""
        self.state = state
        if state not in BEGINNING:
            self.settled.set()

    def record(self, *, place: str, expires_in_s: float | None) -> dict[str, Any]:
        """Return its record for clients, as openhands-workspace 1.58.0 reads it.

        `place`: its place in the queue; empty if it does not wait.
        """
        status, pod_status = WORDS[self.state, self.failure_kind if self.state is State.FAILED else None]
        newest = self.newest or SandboxReport(runtime_id=self.runtime_id, state=self.state)
        events = [place, *newest.events] if place else list(newest.events)
        pod_logs = newest.log_tail
        if not self.is_alive:
            kind = f"[{self.failure_kind.value}] " if self.failure_kind else ""
            pod_logs = "\n".join(filter(None, (f"{kind}{self.cause}", pod_logs)))
        waiting = {"name": "sandbox", "state": self.state.value, "message": events[-1] if events else ""}
        return {
            "runtime_id": self.runtime_id,
            "session_id": self.session_id,
            "url": self.gate.url,
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
            "isolation": newest.isolation,
            "node": self.node_id,
            "lease_expires_in_s": expires_in_s,
            "timeline": {"queued": self.queued_unix_s, **newest.timeline},
            "last_termination_reason": self.cause,
            "last_termination_exit_code": newest.exit_code,
        }
