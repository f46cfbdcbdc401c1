"""A shell of a sandbox that stays open, from the side that asks."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any, Self

from strop.errors import SandboxError
from strop.sandbox.client import Answer, Client
from strop.sandbox.contract import ExecKind
from strop.sandbox.following import ShellResult
from strop.sandbox.served_job import result_fields

_SHELLS = (
    (("/bin/bash", "--norc", "--noprofile", "--noediting", "-i"), "set +H"),
    (("/bin/sh", "-i"), ":"),
)
"""Each with what makes it read a command as a script would."""
_QUIET = "PS1= PS2=; unset HISTFILE MAILCHECK"
"""Its prompts would stand in the output. What it says before this is not a command's."""
_START_LIMIT_S = 20.0


class ServedShell:
    """A shell; see `Shell`."""

    def __init__(self, client: Client, number: int, end: asyncio.Future[Answer]) -> None:
        self._client = client
        self._number = number
        self._end = end
        # A shell that is still open is no error when its sandbox ends.
        end.add_done_callback(lambda done: done.cancelled() or done.exception())
        self._turn = asyncio.Lock()

    async def run(self, command: str, *, wall_limit_s: float) -> ShellResult:
        """Evaluate a command; see `Shell.run`."""
        if "\0" in command:
            raise SandboxError(
                f"command {command!r} for a shell",
                allowed="text without NUL",
                next_step="write the bytes into a file",
                kind="command",
            )
        await self._turn.acquire()
        answer: asyncio.Future[Answer] | None = None
        try:
            request = {"op": "run", "shell": self._number, "wall_limit_s": wall_limit_s}
            _, answer = self._client.begin(request, command.encode(errors="surrogateescape"))
            header, output = await asyncio.shield(answer)
        except asyncio.CancelledError:
            self._client.tell({"op": "drop", "job": self._number})
            raise
        finally:
            # The next one's turn comes when this one is over, whoever waits for it.
            if answer is None or answer.done():
                self._turn.release()
            else:
                answer.add_done_callback(self._on_dropped)
        return ShellResult(**result_fields(header, output), has_shell=header["has_shell"])

    def _on_dropped(self, answer: asyncio.Future[Answer]) -> None:
        self._turn.release()
        if not answer.cancelled():
            answer.exception()

    async def interrupt(self) -> None:
        """Interrupt what it evaluates; see `Shell.interrupt`."""
        self._client.tell({"op": "signal", "job": self._number, "number": 2})

    async def close(self) -> None:
        """End it and all that it left running; see `Shell.close`."""
        if not self._end.done():
            self._client.tell({"op": "cancel", "job": self._number})
            await asyncio.wait({self._end})

    async def __aenter__(self) -> Self:
        """Return the shell."""
        return self

    async def __aexit__(self, *_: object) -> None:
        """Close it."""
        await self.close()


async def open_shell(client: Client, env: Mapping[str, str], cwd: str | None) -> ServedShell:
    """Return the best shell that answers. Raises: SandboxError with kind shell; SandboxLost."""
    why = ""
    for argv, prepare in _SHELLS:
        request: dict[str, Any] = {"op": "open_shell", "argv": list(argv), "cwd": cwd}
        shell = ServedShell(client, *client.begin({**request, "env": dict(env)}))
        first = await shell.run(f"{_QUIET}; {prepare}", wall_limit_s=_START_LIMIT_S)
        if first.kind is ExecKind.EXITED and first.has_shell:
            return shell
        why = first.stderr.decode(errors="replace") or first.kind
        await shell.close()
    raise SandboxError(
        f"no shell answers in the sandbox: {why}",
        allowed="a root that has /bin/bash or /bin/sh, and limits that one fits into",
        next_step="use an image with a shell, or exec, which needs none",
        kind="shell",
    )
