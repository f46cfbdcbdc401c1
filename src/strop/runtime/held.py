"""One sandbox of a host, from its order to its end, with its address."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import asdict

from strop.errors import SandboxError, SandboxLost, SandboxRefused, StropError, given_of
from strop.runtime.contract import FailureKind, Order, SandboxReport, State
from strop.runtime.making import Made, Starter
from strop.runtime.planes import SandboxFailed, lost_as_failure
from strop.runtime.ports import Gate
from strop.runtime.server_plane import ServerPlane
from strop.sandbox.local import LocalSandbox

_log = logging.getLogger("strop.runtime.held")
_LOG_CHARACTERS = 4000
_COUNT_LIMIT_S = 2.0
_PROBE_LIMIT_S = 5.0
_START_LIMIT_S = 300.0
"""For the server inside to answer. OpenHands' needs 10 s of processor time; 120 s were too few beside twenty
other processes on two cores."""


class HeldSandbox:
    """A sandbox and its address. `start` it once; `stop` releases both."""

    def __init__(self, order: Order, starter: Starter, changed: Callable[[], None]) -> None:
        self.order = order
        self.state = State.IMAGE
        self._starter = starter
        self._changed = changed
        self._gate: Gate | None = None
        self._made: Made | None = None
        self._running: asyncio.Task[None] | None = None
        self._failure: SandboxFailed | None = None
        self._cause = ""
        self._events: list[str] = []
        self._timeline: dict[str, float] = {}
        self._isolation: dict[str, object] = {}
        """Converted once, since every full report contains it."""
        self._usage: dict[str, float] = {}
        self._version = 0
        self._turn = asyncio.Lock()

    async def start(self, address: str, gate: Gate | None = None) -> None:
        """Hold a port of an address, or take over one that is held, and begin to make the sandbox.

        Raises: CheckRefused if the address cannot be listened on.
        """
        self._gate = gate or await Gate.listen(self._connect, key=self.order.session_api_key, host=address)
        self._gate.connect = self._connect
        self._running = asyncio.create_task(self._run())

    @property
    def url(self) -> str:
        """The address of the sandbox."""
        assert self._gate is not None
        return self._gate.url

    @property
    def last_used_s(self) -> float:
        """Seconds since its address was last used."""
        return time.monotonic() - self._gate.last_used_at if self._gate is not None else 0.0

    @property
    def is_over(self) -> bool:
        """Whether it was stopped or has failed."""
        return self.state in (State.STOPPED, State.FAILED)

    def report(self) -> SandboxReport:
        """Return the report of the sandbox for the service."""
        plane = None if self._made is None else self._made.plane
        failure = self._failure
        log_tail = failure.log_tail if failure is not None else ""
        if not log_tail and plane is not None:
            log_tail = plane.log_tail()
        if failure is not None:
            log_tail = "\n".join(filter(None, (log_tail, f"strop: {failure.kind}: {failure.cause}")))
        return SandboxReport(
            runtime_id=self.order.runtime_id,
            state=self.state,
            failure_kind=None if failure is None else failure.kind,
            cause=self._cause if failure is None else failure.cause,
            refusal="" if failure is None else failure.refusal,
            exit_code=None if failure is None else failure.exit_code,
            log_tail=log_tail[-_LOG_CHARACTERS:],
            events=tuple(self._events),
            isolation=self._isolation,
            timeline=dict(self._timeline),
            version=self._version,
            usage=self._usage,
        )

    async def pause(self) -> None:
        """Freeze the sandbox. Its address stays and answers 503. No-op if it is paused.

        Raises: SandboxError if it is not ready or cannot be frozen.
        """
        async with self._turn:
            if self.state is State.PAUSED:
                return
            if self.state is not State.READY:
                raise self._wrong_state("paused", allowed="one that is ready")
            assert self._made is not None
            assert self._gate is not None
            # Before the freeze, so that no request is taken and then hangs.
            self._set(State.PAUSED)
            self._gate.disconnect()
            try:
                await self._made.sandbox.pause()
            except SandboxLost:
                # `_run` notices the loss and reports its cause.
                raise
            except SandboxError:
                self._set(State.READY)
                raise

    async def resume(self) -> None:
        """Continue the sandbox. No-op if it runs. Raises: SandboxError if it neither runs nor is paused."""
        async with self._turn:
            if self.state in (State.READY, State.RESUMING, State.STARTING):
                return
            if self.state is not State.PAUSED:
                raise self._wrong_state("resumed", allowed="one that is paused")
            assert self._made is not None
            self._set(State.RESUMING)
            await self._made.sandbox.resume()
            try:
                await self._wait_until_ready()
            except SandboxFailed as failure:
                await self._end(State.FAILED, failure=failure)
                raise SandboxError(failure.cause, kind="infra") from failure
            self._note_use()
            self._set(State.READY)

    async def stop(self, cause: str) -> None:
        """End the sandbox and release its address. May be called twice."""
        if self._running is not None and self._running is not asyncio.current_task():
            self._running.cancel()
            await asyncio.gather(self._running, return_exceptions=True)
        await self._end(State.STOPPED, cause=cause)

    async def _run(self) -> None:
        try:
            await self._begin()
            assert self._made is not None
            failure = await self._made.plane.wait_ended()
        except SandboxFailed as error:
            failure = error
        except StropError as error:
            failure = as_failure(error)
        await self._end(State.FAILED, failure=failure)

    async def _begin(self) -> None:
        self._say("image")
        await self._starter.fetch_image(self.order, self._say)
        self._timeline["image"] = time.time()
        self._set(State.STARTING)
        self._made = await self._starter.make(self.order, self._note_use)
        self._isolation = asdict(self._made.sandbox.isolation)
        self._timeline["started"] = time.time()
        self._note_change()
        serving = asyncio.create_task(self._wait_until_ready())
        ending = asyncio.create_task(self._made.plane.wait_ended())
        try:
            await asyncio.wait({serving, ending}, return_when=asyncio.FIRST_COMPLETED)
            if not serving.done():
                raise ending.result()
            await serving
        finally:
            for task in (serving, ending):
                task.cancel()
            await asyncio.gather(serving, ending, return_exceptions=True)
        self._timeline["ready"] = time.time()
        self._note_use()
        self._say("ready")
        self._set(State.READY)

    async def _wait_until_ready(self) -> None:
        """Return once the address answers its clients' probe. Raises: SandboxFailed if it takes too long."""
        import httpx

        if self._made is None or not isinstance(self._made.plane, ServerPlane):
            # This process serves its address.
            return
        deadline = time.monotonic() + _START_LIMIT_S
        wait_s = 0.02
        async with httpx.AsyncClient(trust_env=False, verify=False, timeout=_PROBE_LIMIT_S) as client:
            while True:
                try:
                    # Its body is not read: any program may be the server.
                    async with client.stream("GET", f"{self.url}/health") as answer:
                        if answer.is_success:
                            return
                        last = str(answer.status_code)
                except httpx.HTTPError as error:
                    last = f"{type(error).__name__} {error}"
                if time.monotonic() > deadline:
                    raise SandboxFailed(
                        FailureKind.AGENT_ERROR,
                        f"its server did not answer GET /health in {_START_LIMIT_S:.0f} s; last: {last}",
                    )
                await asyncio.sleep(wait_s)
                wait_s = min(2 * wait_s, 0.5)

    async def _end(self, state: State, *, failure: SandboxFailed | None = None, cause: str = "") -> None:
        if self.is_over:
            return
        made = self._made
        if failure is not None and made is not None and not failure.log_tail:
            failure.log_tail = made.plane.log_tail()
        self._failure, self._cause = failure, cause
        if made is not None:
            self._usage = await _count_usage(made.sandbox)
            await made.plane.close(cause if failure is None else failure.cause)
        if self._gate is not None:
            await self._gate.close()
        if made is not None:
            try:
                await made.sandbox.stop()
            except SandboxLost:
                _log.warning("%s did not end in time", self.order.runtime_id)
        self._timeline["stopped"] = time.time()
        self._set(state)

    async def _connect(self) -> asyncio.Protocol:
        if self._made is None or self.state in (State.PAUSED, State.STOPPED, State.FAILED):
            raise ConnectionError(f"the sandbox is {self.state.value}")
        return await self._made.plane.connect()

    def _wrong_state(self, operation: str, *, allowed: str) -> SandboxError:
        return SandboxError(
            f"sandbox {self.order.runtime_id} is {self.state.value} and cannot be {operation}",
            allowed=allowed,
            next_step="look at its record first",
            kind="state",
        )

    def _note_use(self) -> None:
        if self._gate is not None:
            self._gate.note_use()

    def _say(self, event: str) -> None:
        self._events.append(event)
        del self._events[:-20]
        self._note_change()

    def _set(self, state: State) -> None:
        self.state = state
        self._note_change()

    def _note_change(self) -> None:
        self._version += 1
        self._changed()


async def _count_usage(sandbox: LocalSandbox) -> dict[str, float]:
    """Return the usage of a sandbox before it ends; empty if it is lost or too busy to answer."""
    try:
        async with asyncio.timeout(_COUNT_LIMIT_S):
            stats = await sandbox.stats()
    except (SandboxError, TimeoutError):
        return {}
    usage = {
        "cpu_s": stats.cpu_s,
        "memory_peak_bytes": stats.memory_peak_bytes,
        "disk_bytes": stats.disk_bytes,
        "oom_kills": stats.oom_kills,
        "refused_calls": stats.refused_calls,
    }
    return {name: float(value) for name, value in usage.items() if value is not None}


def as_failure(error: StropError) -> SandboxFailed:
    """Return the failure that an error at a sandbox's start means: whose fault it is."""
    cause = given_of(error)
    if isinstance(error, SandboxLost):
        return lost_as_failure(error.kind)
    if not isinstance(error, SandboxRefused):
        return SandboxFailed(FailureKind.IMAGE_ERROR, cause)
    is_image = error.kind in ("image", "architecture", "interpreter")
    kind = FailureKind.IMAGE_ERROR if is_image else FailureKind.INFRA_LOST
    return SandboxFailed(kind, cause, refusal=error.kind)
