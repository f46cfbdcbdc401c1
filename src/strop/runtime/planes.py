"""What serves a sandbox's address: the server inside it, or strop's own workspace outside of it.

A node decides for each sandbox by its policy:

* `image`: the client's command is started in the sandbox, and bytes are relayed to the port that it names;
* `inject`: the same with a real agent server that the image lacks, mounted read-only;
* `own`: nothing is started; the node agent serves the workspace routes itself;
* `auto`: `image` where the command's program is in the image, else `own`.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Protocol

from strop.runtime.contract import FailureKind, StartRequest
from strop.runtime.ports import Serve, Stream

_AGENT_WORDS = ("openhands-agent-server", "openhands.agent_server", "agent-server")


class DataPlane(StrEnum):
    """Which of them; see the module."""

    AUTO = "auto"
    IMAGE = "image"
    INJECT = "inject"
    OWN = "own"


class SandboxFailed(Exception):
    """A sandbox does not start, or has ended by itself; `kind` says whose fault that is."""

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
        """Return what serves the next connection. Raises: OSError if nothing does now."""
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
        """Stop serving; connected clients may be told why."""
        ...


def is_agent_server(request: StartRequest) -> bool:
    """Whether a command starts OpenHands' agent server, whose routes strop can serve too."""
    return any(word.rpartition("/")[2] in _AGENT_WORDS for word in request.command)


def lost_as_failure(kind: str) -> SandboxFailed:
    """Say whose fault it is that a sandbox is lost."""
    if kind == "from_inside":
        return SandboxFailed(FailureKind.AGENT_ERROR, "from_inside: a program of the sandbox ended it")
    return SandboxFailed(FailureKind.INFRA_LOST, f"the sandbox is lost ({kind})")
