"""The commands of one sandbox, as events that a client polls: what OpenHands' agent server calls bash events.

Each command is a fresh shell. It ends when the shell does, not when the last child has closed its output, and
takes all that it started with it. A poll is held until there is something new, so that a command costs its
client one round trip and not a tenth of a second.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from strop.errors import SandboxLost
from strop.sandbox.contract import MIB, ExecKind, ExecResult, Sandbox

EVENT_CHARACTERS = MIB
"""Most text of one event, as the agent server splits it."""
MAX_PAGE = 100
_MAX_HOLD_S = 1.0
_ANSWER_EARLY_S = 0.1
"""The client gives up at the same moment by its own clock, and would then say less."""
_MAX_KEPT = 200
_MAX_KEPT_CHARACTERS = 64 * MIB


@dataclass(kw_only=True, slots=True)
class Command:
    """A command and what it has written."""

    record: dict[str, Any]
    """As its start was answered."""
    outputs: list[dict[str, Any]] = field(default_factory=list)
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    task: asyncio.Task[None] | None = None
    is_stopped: bool = False

    @property
    def num_characters(self) -> int:
        """Of all its events."""
        return sum(len(one["stdout"] or "") + len(one["stderr"] or "") for one in self.outputs)


class Commands:
    """Runs commands in a sandbox and keeps what they wrote, the newest `_MAX_KEPT` of them."""

    def __init__(self, sandbox: Sandbox, env: Mapping[str, str], working_dir: str) -> None:
        self._sandbox = sandbox
        self._env = env
        self._working_dir = working_dir
        self._commands: dict[str, Command] = {}
        self.num_started = 0
        self.first_at: float | None = None
        """Unix time of the first command."""

    def start(self, text: str, timeout_s: int, cwd: str | None) -> Command:
        """Start a shell command."""
        command = Command(
            record={
                "id": uuid.uuid4().hex,
                "timestamp": _now(),
                "command": text,
                "cwd": cwd,
                "timeout": timeout_s,
                "kind": "BashCommand",
            }
        )
        self._commands[command.record["id"]] = command
        self.num_started += 1
        self.first_at = self.first_at or time.time()
        command.task = asyncio.create_task(self._run(command))
        self._forget_old()
        return command

    def find(self, command_id: str) -> Command | None:
        """Return a command that is kept."""
        return self._commands.get(command_id)

    def list(self) -> list[Command]:
        """Return all that are kept, oldest first."""
        return list(self._commands.values())

    async def stop(self, command: Command) -> None:
        """End a command and all that it started."""
        if command.task is not None and not command.ended.is_set():
            command.is_stopped = True
            command.task.cancel()
            await command.ended.wait()

    async def wait_for_news(self, command: Command, after_order: int) -> None:
        """Return when a command has an event beyond one, or has ended, or the client should hear of us."""
        # 0 and less are taken for 1, as the command's own limit is.
        limit_s = min(_MAX_HOLD_S, max(1, command.record["timeout"]) / 2)
        if any(one["order"] > after_order for one in command.outputs):
            return
        try:
            async with asyncio.timeout(limit_s):
                await command.ended.wait()
        except TimeoutError:
            return

    def clear(self) -> int:
        """Forget what ended commands wrote; return how many events that were."""
        ended = {key: one for key, one in self._commands.items() if one.ended.is_set()}
        for key in ended:
            del self._commands[key]
        return sum(1 + len(one.outputs) for one in ended.values())

    async def close(self) -> None:
        """Stop waiting for commands; the sandbox ends them."""
        tasks = [one.task for one in self._commands.values() if one.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _run(self, command: Command) -> None:
        record = command.record
        limit_s = max(1, record["timeout"]) - _ANSWER_EARLY_S
        cwd = record["cwd"] or self._working_dir
        try:
            result = await self._sandbox.exec(
                ["/bin/sh", "-c", record["command"]], wall_limit_s=limit_s, env=self._env, cwd=cwd
            )
            _add_result(command, result)
        except SandboxLost as lost:
            _add_output(command, None, f"the sandbox is lost ({lost.kind})", exit_code=-1)
        except asyncio.CancelledError:
            _add_output(command, None, "stopped" if command.is_stopped else "the sandbox ends", exit_code=-15)
        finally:
            command.ended.set()

    def _forget_old(self) -> None:
        kept = sum(one.num_characters for one in self._commands.values())
        for key, one in list(self._commands.items()):
            if len(self._commands) <= _MAX_KEPT and kept <= _MAX_KEPT_CHARACTERS:
                return
            if one.ended.is_set():
                kept -= one.num_characters
                del self._commands[key]


def join_outputs(command: Command) -> dict[str, Any]:
    """Return all events of an ended command as one."""
    stdout = "".join(one["stdout"] or "" for one in command.outputs)
    stderr = "".join(one["stderr"] or "" for one in command.outputs)
    return {**command.outputs[-1], "stdout": stdout or None, "stderr": stderr or None}


def _add_result(command: Command, result: ExecResult) -> None:
    out = _text_of(result.stdout, result.stdout_omitted)
    err = _text_of(result.stderr, result.stderr_omitted)
    why = {
        ExecKind.TIMED_OUT: f"Command timed out after {max(1, command.record['timeout'])} seconds",
        ExecKind.OOM: "killed: the sandbox has no memory left",
        ExecKind.OUTPUT_FLOOD: "killed: it wrote more than a command may",
        ExecKind.OVER_LIMIT: "killed: it went beyond a limit of the sandbox",
        ExecKind.FROM_INSIDE: "a program of the sandbox ended the sandbox",
    }.get(result.kind)
    # What was killed for memory may have ended well all the same.
    if why is not None and not (result.kind is ExecKind.OOM and result.exit_code == 0):
        err += ("\n" if err and not err.endswith("\n") else "") + why
    pieces = max(1, _count_pieces(out), _count_pieces(err))
    for number in range(pieces):
        part = slice(number * EVENT_CHARACTERS, (number + 1) * EVENT_CHARACTERS)
        is_last = number == pieces - 1
        _add_output(
            command, out[part] or None, err[part] or None, exit_code=_code_of(result) if is_last else None
        )


def _code_of(result: ExecResult) -> int:
    if result.kind in (ExecKind.TIMED_OUT, ExecKind.NOT_STARTED, ExecKind.FROM_INSIDE):
        return -1
    if result.signal is not None:
        return -result.signal
    return -1 if result.exit_code is None else result.exit_code


def _text_of(data: bytes, omitted: int) -> str:
    if not omitted:
        return data.decode(errors="replace")
    # Head and tail are equally long.
    half = len(data) // 2
    mark = f"\n[... {omitted} bytes left out ...]\n"
    return data[:half].decode(errors="replace") + mark + data[half:].decode(errors="replace")


def _count_pieces(text: str) -> int:
    return -(-len(text) // EVENT_CHARACTERS)


def _add_output(command: Command, stdout: str | None, stderr: str | None, *, exit_code: int | None) -> None:
    command.outputs.append(
        {
            "id": uuid.uuid4().hex,
            "timestamp": _now(),
            "command_id": command.record["id"],
            "order": len(command.outputs),
            "exit_code": exit_code,
            "stdout": stdout,
            "stderr": stderr,
            "kind": "BashOutput",
        }
    )


def _now() -> str:
    return datetime.now(UTC).isoformat()
