"""One sandbox of a host, from its order to its end, with the server that runs in it."""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict

from strop.errors import SandboxError, SandboxLost, SandboxRefused, StropError, given_of
from strop.runtime.agent_server import OPENHANDS, injected_argv, is_agent_server, server_environment
from strop.runtime.contract import INSIDE_PORT, FailureKind, Order, SandboxFailed, SandboxReport, State
from strop.runtime.making import Maker
from strop.sandbox.contract import ExecKind, ExecResult
from strop.sandbox.following import Job
from strop.sandbox.local import LocalSandbox

_log = logging.getLogger("strop.runtime.held")
_LOG_BYTES = 16 << 10
_LOG_CHARACTERS = 4000
_NUM_EVENTS = 20
_PROBE_LIMIT_S = 5.0
_START_LIMIT_S = 300.0
"""For the server inside to answer. OpenHands' needs 10 s of processor time; 120 s were too few beside twenty
other processes on two cores."""
_MAKE_FOLDER_LIMIT_S = 30.0


class HeldSandbox:
    """A sandbox that is made and served from the start; `stop` ends it."""

    def __init__(self, order: Order, maker: Maker, changed: Callable[[], None]) -> None:
        self.order = order
        self.state = State.IMAGE
        self._maker = maker
        self._changed = changed
        self._sandbox: LocalSandbox | None = None
        self._port = INSIDE_PORT
        self._log = b""
        self._failure: SandboxFailed | None = None
        self._cause = ""
        self._events: list[str] = []
        self._timeline: dict[str, float] = {}
        self._isolation: dict[str, object] = {}
        self._version = 0
        self._turn = asyncio.Lock()
        self._running = asyncio.create_task(self._run())

    @property
    def is_over(self) -> bool:
        """Whether it was stopped or has failed."""
        return self.state in (State.STOPPED, State.FAILED)

    def report(self) -> SandboxReport:
        """Return the report of the sandbox for the service."""
        failure = self._failure
        return SandboxReport(
            runtime_id=self.order.runtime_id,
            state=self.state,
            version=self._version,
            failure_kind=None if failure is None else failure.kind,
            cause=self._cause if failure is None else failure.cause,
            exit_code=None if failure is None else failure.exit_code,
            log_tail=self._log.decode(errors="replace")[-_LOG_CHARACTERS:],
            events=tuple(self._events),
            isolation=self._isolation,
            timeline=dict(self._timeline),
        )

    async def connect(self) -> socket.socket:
        """Return a connection to the server inside. Raises: ConnectionError."""
        if self._sandbox is None or self.state not in (State.STARTING, State.READY):
            raise ConnectionError(f"the sandbox is {self.state.value}")
        try:
            return await self._sandbox.connect(self._port)
        except SandboxError as error:
            raise ConnectionError(given_of(error)) from error

    async def pause(self) -> None:
        """Freeze the sandbox. No-op if it is paused.

        Raises: SandboxError if it is not ready or cannot be frozen.
        """
        async with self._turn:
            if self.state is State.PAUSED:
                return
            sandbox = self._require(State.READY)
            # Before the freeze, so that no request is taken and then hangs.
            self._enter(State.PAUSED)
            try:
                await sandbox.pause()
            except SandboxError:
                # Of a lost one `_run` reports the cause.
                if not sandbox.is_lost:
                    self._enter(State.READY)
                raise

    async def resume(self) -> None:
        """Continue the sandbox. No-op if it runs. Raises: SandboxError if it is not paused."""
        async with self._turn:
            if self.state is not State.READY:
                await self._require(State.PAUSED).resume()
                self._enter(State.READY)

    async def stop(self, cause: str) -> None:
        """End the sandbox. May be called twice."""
        self._running.cancel()
        await asyncio.gather(self._running, return_exceptions=True)
        self._cause = self._cause or cause
        await self._end(State.STOPPED)

    def _require(self, state: State) -> LocalSandbox:
        if self._sandbox is None or self.state is not state:
            raise SandboxError(
                f"sandbox {self.order.runtime_id} is {self.state.value}",
                allowed=f"one that is {state.value}",
                next_step="look at its record first",
                kind="state",
            )
        return self._sandbox

    async def _run(self) -> None:
        try:
            image = await self._maker.find_image(self.order, self._say)
            self._enter(State.STARTING)
            self._sandbox = await self._maker.make(self.order, image)
            self._isolation = asdict(self._sandbox.isolation)
            self._failure = await self._serve(await self._start_server(self._sandbox))
        except SandboxFailed as failure:
            self._failure = failure
        except StropError as error:
            self._failure = as_failure(error, self._sandbox)
        await self._end(State.FAILED)

    async def _start_server(self, sandbox: LocalSandbox) -> Job:
        """Start the client's command, or the injected agent server where the image lacks the one it names."""
        request = self.order.request
        argv, env = list(request.command), server_environment(self.order, sandbox.scratch)
        if is_agent_server(request) and not await _has_program(sandbox, argv[0]):
            if not OPENHANDS.is_ready():
                raise SandboxFailed(
                    FailureKind.IMAGE_ERROR,
                    f"the image has no {argv[0]}, and no agent server can be injected: run `make"
                    " openhands-deps` on the node",
                )
            argv, more = injected_argv(request, sandbox.find_mount)
            env |= more
        if sandbox.isolation.network == "host":
            # All such sandboxes share the node's ports.
            with socket.create_server(("127.0.0.1", 0)) as probe:
                self._port = int(probe.getsockname()[1])
            argv = [str(self._port) if word == str(INSIDE_PORT) else word for word in argv]
        cwd = request.working_dir
        if (
            cwd != "/"
            and (await sandbox.exec(["mkdir", "-p", cwd], wall_limit_s=_MAKE_FOLDER_LIMIT_S)).exit_code
        ):
            cwd = "/"
        return await sandbox.start(argv, env=env, cwd=cwd)

    async def _serve(self, job: Job) -> SandboxFailed:
        """Follow the server from its start; return why it has ended. Raises: SandboxFailed, SandboxLost."""
        probing = asyncio.create_task(self._wait_until_ready())
        ending = asyncio.create_task(job.wait())
        reading = asyncio.create_task(self._read_log(job))
        try:
            await asyncio.wait({probing, ending}, return_when=asyncio.FIRST_COMPLETED)
            if not ending.done():
                await probing
                self._enter(State.READY)
            result = await ending
            await reading
            return end_as_failure(result)
        finally:
            for task in (probing, ending, reading):
                task.cancel()
            await asyncio.gather(probing, ending, reading, return_exceptions=True)

    async def _wait_until_ready(self) -> None:
        """Return once the server answers its clients' probe. Raises: SandboxFailed if it takes too long."""
        deadline = time.monotonic() + _START_LIMIT_S
        wait_s, last = 0.02, ""
        while time.monotonic() < deadline:
            try:
                async with asyncio.timeout(_PROBE_LIMIT_S):
                    last = await _ask_health(await self.connect())
                if last.startswith("2"):
                    return
            except (OSError, TimeoutError) as error:
                last = f"{type(error).__name__} {error}"
            await asyncio.sleep(wait_s)
            wait_s = min(2 * wait_s, 0.5)
        raise SandboxFailed(
            FailureKind.AGENT_ERROR,
            f"its server did not answer GET /health in {_START_LIMIT_S:.0f} s; last: {last}",
        )

    async def _read_log(self, job: Job) -> None:
        with suppress(SandboxLost):
            while (output := await job.read()) is not None:
                self._log = (self._log + output.stdout + output.stderr)[-_LOG_BYTES:]

    async def _end(self, state: State) -> None:
        if self.is_over:
            return
        if self._sandbox is not None:
            try:
                await self._sandbox.stop()
            except SandboxLost:
                _log.warning("%s did not end in time", self.order.runtime_id)
        self._enter(state)

    def _say(self, event: str) -> None:
        self._events = [*self._events, event][-_NUM_EVENTS:]
        self._note_change()

    def _enter(self, state: State) -> None:
        self.state = state
        self._timeline[state.value] = time.time()
        self._note_change()

    def _note_change(self) -> None:
        self._version += 1
        self._changed()


async def _has_program(sandbox: LocalSandbox, path: str) -> bool:
    """Whether a program is in a sandbox; True for a bare name, which the sandbox's PATH resolves."""
    if path.startswith("/"):
        try:
            await sandbox.read(path, max_bytes=0)
        except SandboxError as error:
            # With any other error the file exists.
            return error.kind != "missing"
    return True


async def _ask_health(connection: socket.socket) -> str:
    """Return the status of a server's answer to its clients' probe. Raises: OSError."""
    reader, writer = await asyncio.open_connection(sock=connection)
    try:
        writer.write(b"GET /health HTTP/1.1\r\nhost: sandbox\r\nconnection: close\r\n\r\n")
        return (await reader.readline()).decode(errors="replace").partition(" ")[2][:3]
    finally:
        writer.transport.abort()


def end_as_failure(result: ExecResult) -> SandboxFailed:
    """Return the failure that the end of a server means."""
    if result.kind is ExecKind.OOM:
        return SandboxFailed(FailureKind.TASK_OOM, "its server was killed for memory")
    if result.kind is ExecKind.NOT_STARTED:
        why = result.stderr.decode(errors="replace").strip()
        return SandboxFailed(FailureKind.IMAGE_ERROR, f"its command cannot be started: {why}")
    how = f"exit code {result.exit_code}" if result.signal is None else f"signal {result.signal}"
    cause = f"its server ended with {how} ({result.kind.value})"
    return SandboxFailed(FailureKind.AGENT_ERROR, cause, exit_code=result.exit_code)


def as_failure(error: StropError, sandbox: LocalSandbox | None = None) -> SandboxFailed:
    """Return the failure that an error means: whose fault it is."""
    if isinstance(error, SandboxRefused):
        is_image = error.kind in ("image", "architecture", "interpreter")
        return SandboxFailed(
            FailureKind.IMAGE_ERROR if is_image else FailureKind.INFRA_LOST,
            f"{error.kind}: {given_of(error)}",
        )
    if not isinstance(error, SandboxLost):
        return SandboxFailed(FailureKind.IMAGE_ERROR, given_of(error))
    if error.kind != "from_inside":
        return SandboxFailed(FailureKind.INFRA_LOST, f"the sandbox is lost ({error.kind})")
    # The supervisor gives a cause only where no memory was left.
    why = "" if sandbox is None else sandbox.client.lost_why
    kind = FailureKind.TASK_OOM if why else FailureKind.AGENT_ERROR
    return SandboxFailed(kind, f"from_inside: {why or 'a program of the sandbox ended it'}")
