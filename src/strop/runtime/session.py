"""One sandbox of the service: its life from its start request to its end, and its record for clients."""

from __future__ import annotations

import asyncio
import logging
import math
import socket
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import Any

import httpx

from strop.errors import SandboxError, SandboxLost, SandboxRefused, describe_error, given_of
from strop.runtime.agent_server import server_environment
from strop.runtime.contract import FailureKind, Slot, StartRequest, State
from strop.runtime.gate import Gate
from strop.runtime.host import Host
from strop.sandbox.contract import ExecKind, ExecResult
from strop.sandbox.served import ServedJob, ServedSandbox

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
_IMAGE_KINDS = frozenset({"image", "architecture", "interpreter"})
"""Of refusals that are no fault of the node."""
_LOG_BYTES = 4000
_PROBE_LIMIT_S = 5.0
_START_LIMIT_S = 300.0
"""For the server inside to answer. OpenHands' needs 10 s of processor time; 120 s were too few beside twenty
other processes on two cores."""
_log = logging.getLogger("strop.runtime.session")


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
    """Why it has ended."""
    node_id: str = ""
    """The node that makes it or has it."""
    sandbox: ServedSandbox | None = None
    lease_ends_at: float = math.inf
    """Never, if it was not leased: then only age and idleness end it."""
    begun_at: float = field(default_factory=time.monotonic)
    asked_at: float = field(default_factory=time.monotonic)
    """When its client last asked for it."""
    timeline: dict[str, float] = field(default_factory=lambda: {State.QUEUED.value: time.time()})
    """Unix times at which it entered its states."""
    settled: asyncio.Event = field(default_factory=asyncio.Event)
    """Set while its state is not in `BEGINNING`."""
    operating: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while it is paused or resumed."""
    living: asyncio.Task[None] | None = None
    """Its life on its node."""
    clearing: asyncio.Task[None] | None = None
    """Removes what is left of it, once it has ended."""
    _port: int = 0
    _output: bytes = b""

    @property
    def is_alive(self) -> bool:
        """Whether it has not ended."""
        return self.state not in (State.STOPPED, State.FAILED)

    def enter(self, state: State) -> None:
        """Change its state, and wake the clients that wait for that."""
        if self.state is not state:
            self.state = state
            self.timeline[state.value] = time.time()
            why = f" ({self.cause})" if self.cause else ""
            _log.info("sandbox %s of %s: %s%s", self.runtime_id, self.owner, state.value, why)
        if state not in BEGINNING:
            self.settled.set()

    async def connect(self) -> socket.socket:
        """Return a connection to the server inside. Raises: OSError, SandboxError."""
        if self.sandbox is None or self.state not in (State.STARTING, State.READY):
            raise ConnectionError(f"the sandbox is {self.state.value}")
        return await self.sandbox.connect(self._port)

    async def live(self, host: Host) -> tuple[FailureKind, str]:
        """Make the sandbox, start its server and follow it to its end; return why it has ended."""
        try:
            self.sandbox, server = await host.make(self.request, self.slot)
            self._port = server.port
            self.enter(State.STARTING)
            env = server_environment(self.request, self.key, self.sandbox.scratch) | server.env
            return await self._follow(await self.sandbox.start(server.argv, env=env, cwd=server.cwd))
        except SandboxLost as error:
            if error.kind != "from_inside":
                return FailureKind.INFRA_LOST, given_of(error)
            return FailureKind.AGENT_ERROR, "from_inside: a program of the sandbox ended it"
        except SandboxError as error:
            is_nodes = isinstance(error, SandboxRefused) and error.kind not in _IMAGE_KINDS
            kind = FailureKind.INFRA_LOST if is_nodes else FailureKind.IMAGE_ERROR
            return kind, f"{error.kind}: {given_of(error)}"

    async def _follow(self, job: ServedJob) -> tuple[FailureKind, str]:
        """Follow the server from its start; return why it has ended. Raises: SandboxLost."""
        probing = asyncio.create_task(self._probe())
        ending = asyncio.create_task(job.wait())
        reading = asyncio.create_task(self._read_log(job))
        try:
            await asyncio.wait({probing, ending}, return_when=asyncio.FIRST_COMPLETED)
            if not ending.done():
                if fault := await probing:
                    cause = f"its server did not answer GET /health in {_START_LIMIT_S:.0f} s; last: {fault}"
                    return FailureKind.AGENT_ERROR, cause
                self.enter(State.READY)
            result = await ending
            await reading
            return end_as_failure(result)
        finally:
            for task in (probing, ending, reading):
                task.cancel()
            await asyncio.gather(probing, ending, reading, return_exceptions=True)

    async def _probe(self) -> str:
        """Ask the server as its clients do until it is ready; return its last fault if it takes too long."""
        deadline = time.monotonic() + _START_LIMIT_S
        wait_s, last = 0.02, ""
        async with httpx.AsyncClient(trust_env=False, verify=False, timeout=_PROBE_LIMIT_S) as client:
            while time.monotonic() < deadline:
                try:
                    answer = await client.get(f"{self.gate.url}/health")
                    if answer.is_success:
                        return ""
                    last = str(answer.status_code)
                except httpx.HTTPError as error:
                    last = describe_error(error)
                await asyncio.sleep(wait_s)
                wait_s = min(2 * wait_s, 0.5)
        return last

    async def _read_log(self, job: ServedJob) -> None:
        with suppress(SandboxLost):
            while (output := await job.read()) is not None:
                self._output = (self._output + output.stdout + output.stderr)[-_LOG_BYTES:]

    def record(self, *, place: str, expires_in_s: float) -> dict[str, Any]:
        """Return its record for clients, as openhands-workspace 1.58.0 reads it.

        `place`: its place in the queue; empty if it does not wait. `expires_in_s`: until a limit ends it.
        """
        kind = self.failure_kind
        status, pod_status = WORDS[self.state, kind]
        pod_logs = self._output.decode(errors="replace")
        if not self.is_alive:
            pod_logs = "\n".join(filter(None, (f"[{kind}] {self.cause}" if kind else self.cause, pod_logs)))
        return {
            "runtime_id": self.runtime_id,
            "session_id": self.session_id,
            "url": self.gate.url,
            "session_api_key": self.key,
            "status": status,
            "pod_status": pod_status,
            "restart_count": 0,
            "events": [place] if place else [],
            "pod_logs": pod_logs,
            "failure_kind": kind,
            "cause": self.cause,
            "isolation": asdict(self.sandbox.isolation) if self.sandbox else {},
            "node": self.node_id,
            "lease_expires_in_s": expires_in_s if self.is_alive else None,
            "timeline": self.timeline,
        }


def end_as_failure(result: ExecResult) -> tuple[FailureKind, str]:
    """Return the failure that the end of a server means."""
    if result.kind is ExecKind.OOM:
        return FailureKind.TASK_OOM, "its server was killed for memory"
    if result.kind is ExecKind.NOT_STARTED:
        why = result.stderr.decode(errors="replace").strip()
        return FailureKind.IMAGE_ERROR, f"its command cannot be started: {why}"
    how = f"exit code {result.exit_code}" if result.signal is None else f"signal {result.signal}"
    return FailureKind.AGENT_ERROR, f"its server ended with {how} ({result.kind.value})"
