"""The commands of one sandbox, as events that a client polls (the bash events of OpenHands' agent server).

Each command runs in a fresh shell. It ends when the shell does, not when the last child has closed its
output, and its remaining processes are killed. A poll is held until there is a new event, so that a command
costs its client one round trip and not a tenth of a second.
"""

from __future__ import annotations

import asyncio
import codecs
import time
import uuid
from collections.abc import Mapping
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any

from strop.errors import SandboxLost
from strop.sandbox.contract import MIB, ExecKind, ExecResult
from strop.sandbox.following import Job
from strop.sandbox.local import LocalSandbox

EVENT_CHARACTERS = MIB
"""Longest text of one event; the agent server splits at the same length."""
_MAX_HOLD_S = 1.0
_ANSWER_EARLY_S = 0.1
"""The client times out at the same moment by its own clock, and its message would say less."""
_QUICK_S = 0.05
"""Most commands have ended by then; their output is read whole."""
_SETTLE_S = 0.05
_SHELL = "/bin/sh"
_SHELL_LIMIT_S = 10.0
_MAX_TAKEN_BYTES = 16 * MIB
_MAX_KEPT = 200
_MAX_KEPT_CHARACTERS = 64 * MIB


class _Text:
    """One output stream of a command, decoded as it comes; an excess is left out of its middle."""

    def __init__(self) -> None:
        self.uncut = ""
        """Text that is not in an event yet."""
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._num_taken = 0

    def add(self, data: bytes, omitted: int) -> None:
        """Take bytes that follow `omitted` bytes which were left out."""
        if omitted and len(data) > omitted and self._num_taken == 0:
            # The output of a whole command: its head and tail are equally long.
            half = len(data) // 2
            self._take(data[:half])
            self._mark(omitted)
            self._take(data[half:])
            return
        if omitted:
            self._mark(omitted)
        self._take(data)

    def _take(self, data: bytes) -> None:
        left = _MAX_TAKEN_BYTES - self._num_taken
        self._num_taken += len(data)
        if left > 0:
            self.uncut += self._decoder.decode(data[:left])
            if len(data) > left:
                self.uncut += f"\n[... more than {_MAX_TAKEN_BYTES} bytes are not kept ...]\n"

    def _mark(self, omitted: int) -> None:
        self.uncut += f"\n[... {omitted} bytes left out ...]\n"

    def end(self) -> None:
        """Take the end of the stream."""
        self.uncut += self._decoder.decode(b"", final=True)

    def cut(self) -> str | None:
        """Return the text of the next event, None if there is no text."""
        piece, self.uncut = self.uncut[:EVENT_CHARACTERS], self.uncut[EVENT_CHARACTERS:]
        return piece or None


class Command:
    """A command and its output."""

    def __init__(self, record: dict[str, Any]) -> None:
        self.record = record
        """The reply to its start."""
        self.outputs: list[dict[str, Any]] = []
        self.ended = asyncio.Event()
        self.has_news = asyncio.Event()
        self.task: asyncio.Task[None] | None = None
        self.job: Job | None = None
        self.is_stopped = False
        self.no_result: tuple[int, str] | None = None
        """HTTP status and cause, where the infrastructure or the image is to blame for its end."""
        self._stdout, self._stderr = _Text(), _Text()

    @property
    def num_characters(self) -> int:
        """Characters in all its events."""
        return sum(len(event["stdout"] or "") + len(event["stderr"] or "") for event in self.outputs)

    def add(self, stdout: bytes, stderr: bytes, omitted: tuple[int, int]) -> None:
        """Take output; `omitted` counts the bytes of each stream that were left out before it."""
        self._stdout.add(stdout, omitted[0])
        self._stderr.add(stderr, omitted[1])

    def cut(self, *, exit_code: int | None) -> None:
        """Make events of the text so far; an exit code goes into the last one."""
        while self._stdout.uncut or self._stderr.uncut or exit_code is not None:
            out, err = self._stdout.cut(), self._stderr.cut()
            is_last = not self._stdout.uncut and not self._stderr.uncut
            event = {
                "id": uuid.uuid4().hex,
                "timestamp": _now(),
                "command_id": self.record["id"],
                "order": len(self.outputs),
                "exit_code": exit_code if is_last else None,
                "stdout": out,
                "stderr": err,
                "kind": "BashOutput",
            }
            self.outputs.append(event)
            if is_last:
                break
        if not self.ended.is_set():
            self.has_news.clear()

    def finish(self, exit_code: int, why: str) -> None:
        """Note the command's end."""
        self._stdout.end()
        self._stderr.end()
        if why:
            has_line = self._stderr.uncut and not self._stderr.uncut.endswith("\n")
            self._stderr.uncut += ("\n" if has_line else "") + why
        self.ended.set()
        self.has_news.set()
        self.cut(exit_code=exit_code)


class Commands:
    """Runs commands in a sandbox and keeps the output of the newest `_MAX_KEPT`."""

    def __init__(self, sandbox: LocalSandbox, env: Mapping[str, str], working_dir: str) -> None:
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
            {
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
        num_characters = sum(kept.num_characters for kept in self._commands.values())
        for key, kept in list(self._commands.items()):
            if len(self._commands) <= _MAX_KEPT and num_characters <= _MAX_KEPT_CHARACTERS:
                break
            if kept.ended.is_set():
                num_characters -= kept.num_characters
                del self._commands[key]
        return command

    def find(self, command_id: str) -> Command | None:
        """Return a kept command."""
        return self._commands.get(command_id)

    def newest_output(self) -> list[dict[str, Any]]:
        """Return the newest event of all commands, if there is one."""
        events = [event for command in self._commands.values() for event in command.outputs]
        return sorted(events, key=lambda event: str(event["timestamp"]))[-1:]

    async def stop(self, command: Command) -> None:
        """End a command and all processes that it started."""
        if command.ended.is_set():
            return
        command.is_stopped = True
        if command.job is not None:
            await command.job.stop()
        await command.ended.wait()

    async def wait_for_news(self, command: Command, after_order: int) -> None:
        """Return when a command has an event after `after_order` or has ended, or when the poll is over."""
        # A time limit below 1 counts as 1, as in `_run`.
        limit_s = min(_MAX_HOLD_S, max(1, command.record["timeout"]) / 2)
        if not any(event["order"] > after_order for event in command.outputs):
            with suppress(TimeoutError):
                async with asyncio.timeout(limit_s):
                    await command.has_news.wait()
            with suppress(TimeoutError):
                # Most commands end right after their output. An answer without the end would cost the client
                # a sleep before its next poll.
                async with asyncio.timeout(_SETTLE_S):
                    await command.ended.wait()
        # The text so far becomes one event, however many pieces it came in.
        command.cut(exit_code=None)

    async def close(self) -> None:
        """Stop waiting for commands; the sandbox ends them."""
        tasks = [command.task for command in self._commands.values() if command.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _run(self, command: Command) -> None:
        record = command.record
        limit_s = max(1, record["timeout"]) - _ANSWER_EARLY_S
        exit_code, why = -1, ""
        try:
            job = await self._sandbox.start(
                [_SHELL, "-c", record["command"]],
                wall_limit_s=limit_s,
                env=self._env,
                cwd=record["cwd"] or self._working_dir,
            )
            command.job = job
            if command.is_stopped:
                await job.stop()
            end = asyncio.ensure_future(job.wait())
            # Nobody awaits it if the sandbox ends first; asyncio would log its exception.
            end.add_done_callback(lambda done: done.cancelled() or done.exception())
            await asyncio.wait({end}, timeout=_QUICK_S)
            if end.done():
                result = end.result()
                command.add(result.stdout, result.stderr, (result.stdout_omitted, result.stderr_omitted))
            else:
                while (output := await job.read()) is not None:
                    command.add(output.stdout, output.stderr, (output.stdout_omitted, output.stderr_omitted))
                    command.has_news.set()
                result = await end
                if result.kind is ExecKind.NOT_STARTED:
                    # The reason did not come through a stream.
                    command.add(b"", result.stderr, (0, 0))
            exit_code, why = _describe_end(result, record["timeout"])
            if result.kind is ExecKind.NOT_STARTED:
                # The image is to blame if no shell starts; else only the command's directory was missing.
                probe = await self._sandbox.exec([_SHELL, "-c", ":"], wall_limit_s=_SHELL_LIMIT_S)
                if probe.kind is ExecKind.NOT_STARTED:
                    error = probe.stderr.decode(errors="replace").strip()
                    command.no_result = (501, f"no shell of the image starts: {error}")
        except SandboxLost as lost:
            why = f"the sandbox is lost ({lost.kind})"
            command.no_result = (503, why)
        except asyncio.CancelledError:
            why = "the sandbox ends"
        finally:
            command.finish(exit_code, why)


def join_outputs(command: Command) -> dict[str, Any]:
    """Return all events of an ended command as one."""
    stdout = "".join(event["stdout"] or "" for event in command.outputs)
    stderr = "".join(event["stderr"] or "" for event in command.outputs)
    return {**command.outputs[-1], "stdout": stdout or None, "stderr": stderr or None}


def _describe_end(result: ExecResult, timeout_s: int) -> tuple[int, str]:
    """Return the exit code that a client sees, and why the command was ended if it was."""
    why = {
        ExecKind.TIMED_OUT: f"Command timed out after {max(1, timeout_s)} seconds",
        ExecKind.OOM: "killed: the sandbox has no memory left",
        ExecKind.OUTPUT_FLOOD: "killed: it wrote more than a command may",
        ExecKind.OVER_LIMIT: "killed: it went beyond a limit of the sandbox",
        ExecKind.FROM_INSIDE: "a program of the sandbox ended the sandbox",
    }.get(result.kind, "")
    if result.kind is ExecKind.OOM and result.exit_code == 0:
        # A child was killed for memory, and the command succeeded all the same.
        why = ""
    if result.kind in (ExecKind.TIMED_OUT, ExecKind.NOT_STARTED, ExecKind.FROM_INSIDE):
        return -1, why
    if result.signal is not None:
        return -result.signal, why
    return -1 if result.exit_code is None else result.exit_code, why


def _now() -> str:
    return datetime.now(UTC).isoformat()
