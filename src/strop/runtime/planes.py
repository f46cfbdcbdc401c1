"""What serves a sandbox's address: the server inside it, or strop's own workspace outside of it.

A node decides for each sandbox by its policy:

* `image`: the client's command is started in the sandbox, and bytes are relayed to the port that it names;
* `inject`: the same with a real agent server that the image lacks, mounted read-only;
* `own`: nothing is started; the node agent serves the workspace routes itself;
* `auto`: `image` where the command's program is in the image, else `own`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from enum import StrEnum
from typing import Protocol

from strop.errors import SandboxError
from strop.runtime.contract import FailureKind, NodeOrder, StartRequest
from strop.runtime.http_server import Answer, Request, serve_connection
from strop.runtime.ports import Serve, Stream
from strop.runtime.workspace import MAX_FILE_BYTES, Workspace
from strop.sandbox.local import LocalSandbox

_FORM_BYTES = 1 << 16
"""What a form adds to the file in it."""
_AGENT_WORDS = ("openhands-agent-server", "openhands.agent_server", "agent-server")


class DataPlane(StrEnum):
    """Which of them; see the module."""

    AUTO = "auto"
    IMAGE = "image"
    INJECT = "inject"
    OWN = "own"


class SandboxFailed(Exception):
    """A sandbox will not serve, or serves no more, and whose fault that is."""

    def __init__(
        self,
        kind: FailureKind,
        cause: str,
        *,
        refusal: str = "",
        exit_code: int | None = None,
        log_tail: str = "",
    ) -> None:
        super().__init__(cause)
        self.kind = kind
        self.cause = cause
        self.refusal = refusal
        self.exit_code = exit_code
        self.log_tail = log_tail


class Plane(Protocol):
    """Serves the address of one sandbox."""

    async def dial(self) -> Stream | Serve:
        """Say who serves the next connection. Raises: OSError if nobody does now."""
        ...

    async def wait_ended(self) -> SandboxFailed:
        """Return when it serves no more, with the reason."""
        ...

    def log_tail(self) -> str:
        """Return the last lines that a server inside has written."""
        ...

    @property
    def num_commands(self) -> int:
        """Commands that it started, where it knows of them."""
        ...

    @property
    def first_command_at(self) -> float | None:
        """Unix time of the first one."""
        ...

    async def close(self, why: str) -> None:
        """Stop serving; whoever is connected may be told why."""
        ...


class OwnPlane:
    """strop's own workspace."""

    def __init__(
        self, sandbox: LocalSandbox, order: NodeOrder, working_dir: str, note_use: Callable[[], None]
    ) -> None:
        self._sandbox = sandbox
        self._note_use = note_use
        self._workspace = Workspace(
            sandbox,
            key=order.session_api_key,
            env=order.request.environment,
            working_dir=working_dir,
        )

    async def dial(self) -> Stream | Serve:
        """Serve it here."""
        return self._serve

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        admit, limit = self._workspace.admit, MAX_FILE_BYTES + _FORM_BYTES
        await serve_connection(reader, writer, self._answer, admit=admit, max_body_bytes=limit)

    async def _answer(self, request: Request) -> Answer:
        self._note_use()
        return await self._workspace.answer(request)

    async def wait_ended(self) -> SandboxFailed:
        """Return when the sandbox is lost."""
        return lost_as_failure(await self._sandbox.wait_lost())

    def log_tail(self) -> str:
        """Return nothing: no server runs inside."""
        return ""

    @property
    def num_commands(self) -> int:
        """Commands so far."""
        return self._workspace.commands.num_started

    @property
    def first_command_at(self) -> float | None:
        """Unix time of the first one."""
        return self._workspace.commands.first_at

    async def close(self, why: str) -> None:
        """Stop waiting for commands."""
        await self._workspace.commands.close()


def is_agent_server(request: StartRequest) -> bool:
    """Whether a command starts OpenHands' agent server, whose routes strop can serve too."""
    return any(word.rpartition("/")[2] in _AGENT_WORDS for word in request.command)


async def has_program(sandbox: LocalSandbox, request: StartRequest) -> bool:
    """Whether the program of a command is in a sandbox, as far as a path tells."""
    path = request.command[0]
    if not path.startswith("/"):
        return True
    try:
        await sandbox.read(path, max_bytes=0)
    except SandboxError as error:
        # Whatever else is wrong with it: it is there.
        return error.kind != "missing"
    return True


def lost_as_failure(kind: str) -> SandboxFailed:
    """Say whose fault it is that a sandbox is lost."""
    if kind == "from_inside":
        return SandboxFailed(FailureKind.AGENT_ERROR, "from_inside: a program of the sandbox ended it")
    return SandboxFailed(FailureKind.INFRA_LOST, f"the sandbox is lost ({kind})")


async def probe_address(host: str, port: int, path: str, *, limit_s: float = 5.0) -> int:
    """Return the status that a sandbox's address answers a GET with. Raises: OSError."""
    try:
        async with asyncio.timeout(limit_s):
            reader, writer = await asyncio.open_connection(host, port)
            try:
                head = f"GET {path} HTTP/1.1\r\nhost: {host}:{port}\r\nconnection: close\r\n\r\n"
                writer.write(head.encode())
                line = await reader.readline()
            finally:
                writer.close()
            return int(line.split()[1])
    except (IndexError, ValueError) as error:
        raise ConnectionError(f"no HTTP answer to GET {path}") from error


async def wait_answering(
    ask: Callable[[str], Awaitable[int]], paths: tuple[str, ...], *, limit_s: float
) -> None:
    """Return when all paths have answered with success, one time each.

    Raises: SandboxFailed if they have not in time.
    """
    deadline = time.monotonic() + limit_s
    wait_s = 0.02
    told = "nothing"
    for path in paths:
        while True:
            try:
                status = await ask(path)
                if 200 <= status < 300:
                    break
                told = f"{status}"
            except OSError as error:
                told = str(error) or type(error).__name__
            if time.monotonic() > deadline:
                raise SandboxFailed(
                    FailureKind.AGENT_ERROR,
                    f"its server did not answer GET {path} in {limit_s:.0f} s; last: {told}",
                )
            await asyncio.sleep(wait_s)
            wait_s = min(2 * wait_s, 0.5)
