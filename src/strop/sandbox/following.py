"""The contract of commands that are followed while they run, and of shells that stay open."""

from __future__ import annotations

from dataclasses import dataclass
from types import TracebackType
from typing import Protocol, Self

from strop.sandbox.contract import ExecResult


@dataclass(frozen=True, kw_only=True, slots=True)
class JobOutput:
    """Output of a running command since the last read."""

    stdout: bytes
    stderr: bytes
    stdout_omitted: int
    """Bytes dropped in front of `stdout`, because they were written faster than read."""
    stderr_omitted: int


class Job(Protocol):
    """A command that runs in a sandbox. It ends by itself or with its sandbox, referenced or not."""

    async def read(self) -> JobOutput | None:
        """Return the output since the last read, as soon as there is some; None after the end.

        A slow reader never blocks the command: unread output is bounded like an `ExecResult`, the first
        `Limits.output_head_bytes` and the newest `Limits.output_tail_bytes` of each stream, and dropped bytes
        are counted. A line may be cut anywhere.

        Raises: SandboxLost.
        """
        ...

    async def write(self, data: bytes) -> bool:
        """Write all of `data` to its standard input; return False if the reading end is closed.

        Raises: SandboxLost.
        """
        ...

    async def close_stdin(self) -> None:
        """Close its standard input behind the data written so far."""
        ...

    async def signal(self, number: int) -> None:
        """Send a signal, 1 to 64, to the program's process group, as a terminal would."""
        ...

    async def stop(self) -> ExecResult:
        """End it and its descendants: SIGTERM, half a second later SIGKILL. May be called twice.

        Raises: SandboxLost.
        """
        ...

    async def wait(self) -> ExecResult:
        """Return its result once it and all its descendants have ended. May be called twice.

        Descendants that outlive the program are killed; output left in the pipes is awaited for 200 ms.

        Raises: SandboxLost.
        """
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class ShellResult(ExecResult):
    """The result of a shell's command.

    `exit_code` is the shell's own report: 128 plus the number for a signal. A command that the shell itself
    evaluates could falsify it, for that command and later ones.
    """

    has_shell: bool
    """Whether the shell still runs. It ends with `exit`, with a command that cannot be interrupted at the
    wall limit, or when it exceeds a limit of the sandbox."""


class Shell(Protocol):
    """A shell that evaluates commands one after the other: directory, variables and functions stay.

    Background processes of a command continue, and write into the output of later commands, until the shell
    ends. Bash announces background jobs on its standard error, as at a terminal.
    Leaving its `async with` block closes it.
    """

    async def run(self, command: str, *, wall_limit_s: float) -> ShellResult:
        """Evaluate a command, of any number of lines, with an empty standard input.

        At the wall limit the command is interrupted and all that it started is killed; background processes
        of earlier commands continue. Cancelling the call does the same. Calls run one after the other.

        Raises: SandboxError with kind ended if the shell has ended, command for one with a NUL in it;
        SandboxLost.
        """
        ...

    async def close(self) -> None:
        """End it and its background processes. May be called twice."""
        ...

    async def __aenter__(self) -> Self: ...

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
        /,
    ) -> None: ...
