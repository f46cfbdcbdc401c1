"""What the controller knows of one sandbox, from the request that asked for it to the hour after its end."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from typing import Any

from strop.hardware.identity import read_boot_id
from strop.runtime.contract import FailureKind, SandboxReport, Slot, StartRequest, State

ENDED = frozenset({State.STOPPED, State.FAILED})
BEGINNING = frozenset({State.QUEUED, State.IMAGE, State.STARTING, State.RESUMING})
"""A client that asks in one of these waits for the next."""

_JOURNALED = (
    *("runtime_id", "session_id", "owner", "key", "started_at", "url", "port", "node_id", "node_url"),
    *("cause", "exit_code", "log_tail", "events", "isolation", "timeline", "usage", "lease_s"),
)


@dataclass(kw_only=True, slots=True, eq=False)
class Session:
    """One sandbox. The journal has what must outlive the controller; ages count by the monotonic clock."""

    runtime_id: str
    session_id: str
    owner: str
    key: str = field(repr=False)
    request: StartRequest = field(repr=False)
    slot: Slot
    started_at: float = field(default_factory=time.time)
    """Seconds since the epoch, for people. It decides nothing but how old a sandbox is when its controller is
    started again after a boot, or on another machine."""
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
    """Final from the moment it is not empty. Clients are told nothing before."""
    port: int = 0
    """The controller's own port behind `url`; 0 where the node holds it."""
    node_id: str = ""
    """Where it is, or is about to be."""
    node_url: str = ""
    """Its address at the node, once that has taken it."""
    lease_s: float | None = None
    """How long each renewal lasts; None: it was never leased, and only its age and idleness count."""

    arrival: int = 0
    """Its number in the order of arrival, from 1; 0: it never waited."""
    begun: float = field(default_factory=time.monotonic)
    asked: float = 0.0
    """When its client last asked for it; 0: never since it was started."""
    used: float = 0.0
    """When its address was last used."""
    renewed: float = 0.0
    ended: float = 0.0
    version: int = 0
    """Of the newest report."""
    num_missed: int = 0
    """Successive reports of its node that do not have it."""
    has_failed_to_resume: bool = False
    is_probed: bool = False
    """Whether it answered through `url`."""
    announced: asyncio.Event = field(default_factory=asyncio.Event)
    """Set once `url` is final."""
    settled: asyncio.Event = field(default_factory=asyncio.Event)
    """Set while its state is none of `BEGINNING`."""
    clearing: asyncio.Task[None] | None = None
    """Has its node end it, once it has ended here."""
    operating: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while it is paused or resumed."""

    @property
    def is_alive(self) -> bool:
        """Whether it has not ended."""
        return self.state not in ENDED

    @property
    def only_node_id(self) -> str:
        """The node that alone can make it, since the snapshot that it begins with is there; empty: any."""
        terms = self.request.sandbox
        return terms.snapshot.node_id if terms is not None and terms.snapshot is not None else ""

    @property
    def is_beginning(self) -> bool:
        """Whether its client has to wait."""
        return self.state in BEGINNING

    def enter(self, state: State) -> None:
        """Change its state, and wake those who wait for that."""
        self.state = state
        if state in BEGINNING:
            self.settled.clear()
        else:
            self.settled.set()

    def take(self, report: SandboxReport) -> None:
        """Keep what a node reports, but for the state."""
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
        """Return its line in the journal."""
        return {
            **{name: getattr(self, name) for name in _JOURNALED},
            "state": self.state.value,
            "failure_kind": self.failure_kind and self.failure_kind.value,
            "request": self.request.model_dump(mode="json", exclude_defaults=True),
            "slot": self.slot.model_dump(),
            "begun": self.begun,
            "boot_id": read_boot_id(),
        }

    @classmethod
    def from_json(cls, line: dict[str, Any]) -> Session:
        """Read it back. Its ages begin anew, but for the time since it was started.

        That is counted by the monotonic clock, unless the machine was started again or is another one.

        Raises: ValueError, KeyError, TypeError (no such line).
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
            begun=now - max(0.0, age_s),
            asked=now,
            used=now,
            renewed=now,
        )
        session.enter(State(line["state"]))
        if session.url:
            session.announced.set()
        if not session.is_alive:
            session.ended = now
        return session
