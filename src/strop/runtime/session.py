"""The controller's record of one sandbox, from its start request to the hour after its end."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from typing import Any

from strop.hardware.identity import read_boot_id
from strop.runtime.contract import FailureKind, SandboxReport, Slot, StartRequest, State

ENDED = frozenset({State.STOPPED, State.FAILED})
BEGINNING = frozenset({State.QUEUED, State.IMAGE, State.STARTING, State.RESUMING})
"""A client that asks for a sandbox in one of these states waits until it has left them."""

_JOURNALED = (
    *("runtime_id", "session_id", "owner", "key", "started_at", "url", "port", "node_id", "node_url"),
    *("cause", "exit_code", "log_tail", "events", "isolation", "timeline", "usage", "lease_s"),
)


@dataclass(kw_only=True, slots=True, eq=False)
class Session:
    """One sandbox. The journal keeps the fields that outlive the controller. Ages use the monotonic clock."""

    runtime_id: str
    session_id: str
    owner: str
    key: str = field(repr=False)
    request: StartRequest = field(repr=False)
    slot: Slot
    started_at: float = field(default_factory=time.time)
    """Unix time, for people. Only a controller restarted after a boot or on another machine computes with it:
    the age."""
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
    port: int = 0
    """The controller's own port behind `url`; 0 if the node holds it."""
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
    num_missed: int = 0
    """Successive reports of its node that lack it."""
    has_failed_to_resume: bool = False
    is_probed: bool = False
    """Whether it has answered through `url`."""
    announced: asyncio.Event = field(default_factory=asyncio.Event)
    """Set once `url` is final."""
    settled: asyncio.Event = field(default_factory=asyncio.Event)
    """Set while its state is not in `BEGINNING`."""
    clearing: asyncio.Task[None] | None = None
    """Stops it at its node, once it has ended here."""
    operating: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while it is paused or resumed."""

    @property
    def is_alive(self) -> bool:
        """Whether it has not ended."""
        return self.state not in ENDED

    @property
    def is_beginning(self) -> bool:
        """Whether its client has to wait."""
        return self.state in BEGINNING

    def enter(self, state: State) -> None:
        """Change its state, and wake the clients that wait for that."""
        self.state = state
        if state in BEGINNING:
            self.settled.clear()
        else:
            self.settled.set()

    def take(self, report: SandboxReport) -> None:
        """Copy a node's report, except for the state."""
        self.version = max(self.version, report.version)
        self.num_missed = 0
        self.exit_code = report.exit_code if report.exit_code is not None else self.exit_code
        self.log_tail = report.log_tail or self.log_tail
        self.refusal = report.refusal or self.refusal
        if report.events:
            self.events = list(report.events)
        self.isolation = report.isolation or self.isolation
        self.timeline.update(report.timeline)
        self.usage.update(report.usage)

    def to_json(self) -> dict[str, Any]:
        """Return its entry for the journal."""
        return {
            **{name: getattr(self, name) for name in _JOURNALED},
            "state": self.state.value,
            "failure_kind": self.failure_kind and self.failure_kind.value,
            "request": self.request.model_dump(mode="json", exclude_defaults=True),
            "slot": self.slot.model_dump(),
            "begun": self.begun_at,
            "boot_id": read_boot_id(),
        }

    @classmethod
    def from_json(cls, line: dict[str, Any]) -> Session:
        """Read an entry of the journal. Its age goes on; idleness and lease count from now.

        The age is by the monotonic clock, or by the wall clock after a boot or on another machine.

        Raises: ValueError, KeyError, TypeError for an invalid entry.
        """
        now = time.monotonic()
        kind = line["failure_kind"]
        is_same_boot = line.get("boot_id") and line["boot_id"] == read_boot_id()
        age_s = now - line["begun"] if is_same_boot else time.time() - line["started_at"]
        session = cls(
            **{name: line[name] for name in _JOURNALED},
            failure_kind=FailureKind(kind) if kind else None,
            request=StartRequest(**line["request"]),
            slot=Slot(**line["slot"]),
            begun_at=now - max(0.0, age_s),
            asked_at=now,
            used_at=now,
            renewed_at=now,
        )
        session.enter(State(line["state"]))
        if session.url:
            session.announced.set()
        if not session.is_alive:
            session.ended_at = now
        return session
