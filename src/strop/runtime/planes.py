"""Data planes: a sandbox's address is served by a server inside it, or by strop's own workspace outside it.

A host chooses for each sandbox by its policy:

* `image`: the client's command is started in the sandbox, and bytes are passed on to the port that it names;
* `inject`: the same with a real agent server that the image lacks, mounted read-only;
* `own`: nothing is started; the host serves the workspace routes itself;
* `auto`: `image` where the command's program is in the image, else `own`.
"""

from __future__ import annotations

import asyncio
from enum import StrEnum
from typing import Protocol

from strop.runtime.contract import FailureKind, StartRequest

_AGENT_WORDS = ("openhands-agent-server", "openhands.agent_server", "agent-server")


class DataPlane(StrEnum):
    """The policies of the module's docstring."""

    AUTO = "auto"
    IMAGE = "image"
    INJECT = "inject"
    OWN = "own"


class SandboxFailed(Exception):
    """A sandbox did not start, or has ended by itself; `kind` says whose fault that is."""

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

    @property
    def num_commands(self) -> int:
        """Commands so far; 0 if a server inside starts them."""
        ...

    @property
    def first_command_at(self) -> float | None:
        """Unix time of the first command."""
        ...

    async def connect(self) -> asyncio.Protocol:
        """Return the protocol that serves the next connection. Raises: OSError if none can."""
        ...

    async def wait_ended(self) -> SandboxFailed:
        """Return the reason once the sandbox or its server has ended."""
        ...

    def log_tail(self) -> str:
        """Return the last lines of the server inside."""
        ...

    async def close(self, why: str) -> None:
        """Stop serving. `why` is the reason for connected clients."""
        ...


def is_agent_server(request: StartRequest) -> bool:
    """Whether a command starts OpenHands' agent server, whose routes strop can serve too."""
    return any(word.rpartition("/")[2] in _AGENT_WORDS for word in request.command)


def lost_as_failure(kind: str, why: str = "") -> SandboxFailed:
    """Return the failure that the loss of a sandbox means: whose fault it is.

    `why`: the supervisor's cause, which only a sandbox without free memory has.
    """
    if kind == "from_inside" and why:
        return SandboxFailed(FailureKind.TASK_OOM, f"from_inside: {why}")
    if kind == "from_inside":
        return SandboxFailed(FailureKind.AGENT_ERROR, "from_inside: a program of the sandbox ended it")
    return SandboxFailed(FailureKind.INFRA_LOST, f"the sandbox is lost ({kind})")
