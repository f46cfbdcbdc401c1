"""What serves the address of a sandbox, and how it fails."""

from __future__ import annotations

import asyncio
from typing import Protocol

from strop.runtime.contract import FailureKind


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


def lost_as_failure(kind: str, why: str = "") -> SandboxFailed:
    """Return the failure that the loss of a sandbox means: whose fault it is.

    `why`: the supervisor's cause, which only a sandbox without free memory has.
    """
    if kind == "from_inside" and why:
        return SandboxFailed(FailureKind.TASK_OOM, f"from_inside: {why}")
    if kind == "from_inside":
        return SandboxFailed(FailureKind.AGENT_ERROR, "from_inside: a program of the sandbox ended it")
    return SandboxFailed(FailureKind.INFRA_LOST, f"the sandbox is lost ({kind})")
