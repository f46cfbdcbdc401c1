"""Commands that are followed while they run, and shells that stay open: what a sandbox promises of them."""

from __future__ import annotations

from dataclasses import dataclass
from types import TracebackType
from typing import Protocol, Self

from strop.sandbox.contract import ExecResult


@dataclass(frozen=True, kw_only=True, slots=True)
class JobOutput:
    """Output of a running command, behind what was read before."""

    stdout: bytes
    stderr: bytes
    stdout_omitted: int
    """Bytes left out in front of `stdout`: they came faster than they were read."""
    stderr_omitted: int


class Job(Protocol):
    """A command that runs in a sandbox. Nobody needs to hold it: it ends by itself, or with its sandbox."""

    async def read(self) -> JobOutput | None:
        """Return what was written since the last read, as soon as there is something; None after the end.

        A command is never held up: what is kept unread is bounded like an `ExecResult`, the first
        `Limits.output_head_bytes` and the newest `Limits.output_tail_bytes` of each stream, and what a
        slow reader misses is counted. A line may be cut anywhere.

        Raises: SandboxLost.
        """
        ...

    async def write(self, data: bytes) -> bool:
        """Write to its standard input, and return when it is written; False if nobody reads it any more.

        Raises: SandboxLost.
        """
        ...

    async def close_stdin(self) -> None:
        """Let its standard input end, behind what was written."""
        ...

    async def signal(self, number: int) -> None:
        """Send a signal, 1 to 64, to the program and those of its process group, as a terminal would."""
        ...

    async def stop(self) -> ExecResult:
        """End it and every process below it: SIGTERM, half a second later SIGKILL. May be called twice.

        Raises: SandboxLost.
        """
        ...

    async def wait(self) -> ExecResult:
        """Return its result once it and every process below it have ended. May be called twice.

        A process that goes on behind the program is killed; what comes out of its pipes is awaited 200 ms.

        Raises: SandboxLost.
        """
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class ShellResult(ExecResult):
    """How a command of a shell ended.

    `exit_code` is what the shell says: 128 and the number for a signal. A command that the shell evaluates
    itself, no program, could make it say otherwise, of that command and of later ones.
    """

    has_shell: bool
    """Whether the shell goes on. It ends with `exit`, with a command that it cannot be got out of at the
    wall limit, and where a limit of the sandbox ends it."""


class Shell(Protocol):
    """A shell that evaluates commands one after the other: directory, variables and functions stay.

    What a command leaves running goes on, and writes into the output of later commands, until the shell ends.
    Bash tells on its standard error of what it puts in the background, as it does at a terminal.
    Leaving its `async with` block closes it.
    """

    async def run(self, command: str, *, wall_limit_s: float) -> ShellResult:
        """Evaluate a command, of any number of lines, with an empty standard input.

        At the wall limit the command is interrupted and all that it started is killed; what earlier commands
        left running goes on. A call that is cancelled does the same. Calls wait for each other.

        Raises: SandboxError with kind ended if the shell has ended, command for one with a NUL in it;
        SandboxLost.
        """
        ...

    async def interrupt(self) -> None:
        """Send SIGINT to what it evaluates, as a terminal would; `run` then returns, mostly with 130."""
        ...

    async def close(self) -> None:
        """End it and all that it left running. May be called twice."""
        ...

    async def __aenter__(self) -> Self: ...

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
        /,
    ) -> None: ...
