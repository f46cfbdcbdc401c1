"""The operations of every sandbox, its commands and its shells.

`local` and `hosts` make them.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import socket
import stat
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, Self

from strop.errors import SandboxError, SandboxRefused
from strop.sandbox.agent import EXIT_KINDS, unread
from strop.sandbox.client import Answer, Requests
from strop.sandbox.contract import (
    MIB,
    ExecKind,
    ExecResult,
    Guard,
    Isolation,
    IsolationLevel,
    JobOutput,
    SandboxStats,
    ShellResult,
)
from strop.sandbox.ground import python_candidates

MIN_PYTHON = (3, 11)
_STOP_LIMIT_S = 30.0
_FILE_LIMIT_S = 60.0
_SHELL_LIMIT_S = 20.0
_SHELLS = (
    (("/bin/bash", "--norc", "--noprofile", "--noediting", "-i"), "set +H"),
    (("/bin/sh", "-i"), ":"),
)
"""Each with a command that turns history expansion off, as in a script."""
_QUIET = "PS1= PS2=; unset HISTFILE MAILCHECK"
"""Turns the prompts off, which would appear in the output."""


class ServedSandbox(ABC):
    """A place where untrusted programs run, usable from one event loop. Leaving its block stops it."""

    def __init__(
        self,
        client: Requests,
        isolation: Isolation,
        *,
        scratch: str,
        env: Mapping[str, str],
        python_argv: tuple[str, ...],
        supervisor_pid: int,
    ) -> None:
        self.client = client
        """Takes its requests; a host passes on those of other processes."""
        self._env = dict(env)
        self._isolation = isolation
        self._scratch = scratch
        self.found_python = python_argv
        """As `python_argv`, empty if none was found."""
        self._supervisor_pid = supervisor_pid
        self._stopping: asyncio.Future[None] | None = None

    @property
    def isolation(self) -> Isolation:
        """The isolation that was reached."""
        return self._isolation

    @property
    def scratch(self) -> str:
        """The private directory as a program sees it."""
        return self._scratch

    @property
    def supervisor_pid(self) -> int:
        """The ancestor of all its processes, on the sandbox's machine; it ends last."""
        return self._supervisor_pid

    @property
    def is_lost(self) -> bool:
        """Whether the connection is lost."""
        return bool(self.client.lost_kind)

    async def wait_lost(self) -> str:
        """Wait until the sandbox is lost and return the kind of its `SandboxLost`."""
        return await self.client.wait_lost()

    @property
    def refused_calls(self) -> tuple[str, ...]:
        """Connections to hosts outside the list of allowed ones: host, port and reason.

        The newest 1,000; `stats` has the total number.
        """
        return tuple(self.client.refused_calls)

    @property
    def python_argv(self) -> tuple[str, ...]:
        """A Python inside, with its flags.

        Raises: SandboxRefused with kind interpreter if none was found that a program may run.
        """
        if not self.found_python:
            raise SandboxRefused(
                f"no Python can be started in a {self._isolation.backend} sandbox; tried: "
                + ", ".join(python_candidates()),
                allowed=f"Python {MIN_PYTHON[0]}.{MIN_PYTHON[1]} or newer that other users can reach",
                next_step="install the system's python3, or move Python out of a private directory",
                kind="interpreter",
            )
        return self.found_python

    async def exec(
        self,
        argv: Sequence[str],
        *,
        wall_limit_s: float,
        stdin: bytes = b"",
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
    ) -> ExecResult:
        """Run a program until it exits, at most `wall_limit_s`; then kill all that it started.

        Several may run at once. `env` is added to that of the sandbox. `cwd` None is the private directory.
        Behind `stdin` the program reads the end of the file.

        Raises: SandboxLost if the sandbox does not answer. Never because of the program's behaviour.
        """
        request = {"argv": list(argv), "cwd": cwd, "wall_limit_s": wall_limit_s}
        return as_result(*await self._run({**request, "env": {**self._env, **(env or {})}}, stdin))

    async def start(
        self,
        argv: Sequence[str],
        *,
        wall_limit_s: float = math.inf,
        has_stdin: bool = False,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
    ) -> ServedJob:
        """Start a program and return. If it cannot be started, its result says so, as with `exec`.

        Without `has_stdin` its standard input is empty. `Limits.flood_bytes` bounds its whole output.
        Raises: SandboxLost.
        """
        request = {"argv": list(argv), "cwd": cwd, "wall_limit_s": wall_limit_s, "has_stdin": has_stdin}
        full = {"op": "start", **request, "env": {**self._env, **(env or {})}}
        return ServedJob(self.client, *self.client.begin(full))

    async def open_shell(
        self, *, env: Mapping[str, str] | None = None, cwd: str | None = None
    ) -> ServedShell:
        """Return a shell that stays open: bash where the sandbox has one, else /bin/sh.

        Raises: SandboxError with kind shell if there is none that answers; SandboxLost.
        """
        why = ""
        for argv, prepare in _SHELLS:
            request = {
                "op": "open_shell",
                "argv": list(argv),
                "cwd": cwd,
                "env": {**self._env, **(env or {})},
            }
            shell = ServedShell(self.client, *self.client.begin(request))
            try:
                first = await shell.run(f"{_QUIET}; {prepare}", wall_limit_s=_SHELL_LIMIT_S)
                if first.kind is ExecKind.EXITED and first.has_shell:
                    return shell
                why = first.stderr.decode(errors="replace") or first.kind
            except SandboxError as error:
                if error.kind != "ended":
                    raise
                why = "it ended before it was asked anything"
            await shell.close()
        raise SandboxError(
            f"no shell answers in the sandbox: {why}",
            allowed="a root that has /bin/bash or /bin/sh, and limits that one fits into",
            next_step="use an image with a shell, or exec, which needs none",
            kind="shell",
        )

    @abstractmethod
    async def connect(self, address: int | str) -> socket.socket:
        """Return a blocking connection to a port of the sandbox's own loopback, or a Unix socket's path.

        It is opened inside as the programs' user, so it needs no network. With the host's network it leads
        to the host's loopback.

        Raises: SandboxError with kind refused, missing, denied, timed_out, or busy where the server's queue
        is full or 64 connections are being opened; SandboxLost.
        """

    async def run_main(self, *, wall_limit_s: float, stdin: bytes = b"") -> ExecResult:
        """Run `main` of the sandbox's source, as `exec` runs a program.

        As the first command of a sandbox it runs in a fork of an interpreter that has loaded the source, if
        that interpreter is the one of `python_argv`; otherwise in a newly started one.

        Raises: SandboxLost, as `exec`; SandboxRefused with kind interpreter if no Python was found.
        """
        request = {"argv": list(self.python_argv), "is_main": True, "wall_limit_s": wall_limit_s}
        return as_result(*await self._run({**request, "env": self._env}, stdin))

    async def read(self, path: str, *, offset: int = 0, max_bytes: int = 16 * MIB) -> bytes:
        """Return a regular file's bytes from `offset`. A relative path starts in the private directory.

        Raises: SandboxError with kind missing, directory, not_regular, denied or too_large.
        """
        details = {"path": path, "offset": offset, "max_bytes": max_bytes}
        return await self._work_inside("read", details, b"")

    async def write(self, path: str, data: bytes, *, mode: int = 0o644) -> None:
        """Write a file atomically, and create its parent directories.

        Raises: SandboxError with kind missing, directory, denied, too_large or no_space.
        """
        await self._work_inside("write", {"path": path, "mode": mode}, data)

    async def upload(self, host_path: Path, path: str) -> None:
        """Copy a file or directory tree of the host into the sandbox, with permission bits.

        Raises: SandboxError like `write`, and with kind not_regular for a link or a device in the tree.
        """
        for place, mode in _walk_host(host_path):
            inside = str(PurePosixPath(path, place.relative_to(host_path)))
            if stat.S_ISDIR(mode):
                await self._work_inside("make_dir", {"path": inside}, b"")
            elif stat.S_ISREG(mode):
                await self.write(inside, place.read_bytes(), mode=stat.S_IMODE(mode) & 0o777)
            else:
                raise SandboxError(
                    f"cannot upload {str(place)!r}: it is a link or a special file",
                    allowed="regular files and directories",
                    next_step="copy its target, or leave it out",
                    kind="not_regular",
                )

    async def download(
        self, path: str, host_path: Path, *, max_bytes: int = 64 * MIB, max_files: int = 10_000
    ) -> tuple[str, ...]:
        """Copy a file or directory tree out of the sandbox, to a `host_path` that does not exist yet.

        Only regular files and directories are copied, with ordinary permission bits. Returns the paths,
        relative to `path`, of links and special files, which are not copied.

        Raises: SandboxError like `read`, with kind too_large beyond `max_bytes` or `max_files` in all, and
        with kind exists if `host_path` exists.
        """
        _require_free(host_path)
        details = {"path": path, "max_files": max_files, "max_bytes": MIB + 5000 * max_files}
        left_out = []
        # Names are directory entries, and only this call writes below the new path, so none leads elsewhere.
        for name, kind, mode in json.loads(await self._work_inside("list", details, b"")):
            inside, target = (str(PurePosixPath(path, name)), host_path / name) if name else (path, host_path)
            if kind == "directory":
                target.mkdir(mode=0o700)
            elif kind == "file":
                data = await self.read(inside, max_bytes=max_bytes)
                max_bytes -= len(data)
                target.write_bytes(data)
                target.chmod((mode & 0o755) | stat.S_IRUSR | stat.S_IWUSR)
            else:
                left_out.append(name)
        return tuple(left_out)

    async def stats(self) -> SandboxStats:
        """Return its resource use. Raises: SandboxLost."""
        header, _ = await self.client.ask({"op": "stats"})
        header["refused_calls"] = self.client.num_refused_calls
        return SandboxStats(**{name: header[name] for name in SandboxStats.__slots__})

    async def pause(self) -> None:
        """Stop all its programs; their time limits go on. No-op if they are.

        Raises: SandboxError with kind busy if a process could not be stopped; then all go on. SandboxLost.
        """
        await self.client.ask({"op": "pause"})

    async def resume(self) -> None:
        """Let its programs go on. Raises: SandboxLost."""
        await self.client.ask({"op": "resume"})

    async def stop(self) -> None:
        """End all its processes and remove its files before returning. May be called twice."""
        if self._stopping is None:
            self._stopping = asyncio.ensure_future(self.client.end(_STOP_LIMIT_S))
            self._stopping.add_done_callback(
                lambda done: self.client.close() if done.cancelled() else done.exception()
            )
        # If this caller is cancelled, the stop goes on, and a later caller waits for it.
        await asyncio.shield(self._stopping)

    async def __aenter__(self) -> Self:
        """Return the sandbox."""
        return self

    async def __aexit__(self, *_: object) -> None:
        """Stop it."""
        await self.stop()

    async def _work_inside(self, builtin: str, details: dict[str, Any], stdin: bytes) -> bytes:
        request = {"builtin": builtin, "details": details, "wall_limit_s": _FILE_LIMIT_S}
        header, output = await self._run(request, stdin)
        num_bytes = header["stdout_bytes"]
        if header["kind"] == ExecKind.EXITED and header["exit_code"] == 0:
            return output[:num_bytes]
        raise SandboxError(
            f"cannot {builtin} {details['path']!r} in the sandbox: "
            + (output[num_bytes:].decode(errors="replace") or header["why"] or header["kind"]),
            allowed="regular files that a program inside can reach, within the limits",
            next_step="look at the path, at Limits and at max_bytes",
            kind=EXIT_KINDS.get(header["exit_code"] or 0, "io"),
        )

    async def _run(self, request: dict[str, Any], stdin: bytes) -> Answer:
        """Run a request to its end; if the caller is cancelled, kill it."""
        number, answer = self.client.begin({"op": "start", **request}, stdin)
        try:
            return await answer
        except asyncio.CancelledError:
            self.client.tell({"op": "cancel", "job": number})
            raise
        finally:
            self.client.forget(number)


class ServedJob:
    """A command that was started. It ends by itself or with its sandbox, referenced or not."""

    def __init__(self, client: Requests, number: int, end: asyncio.Future[Answer]) -> None:
        self._client = client
        self._number = number
        self._end = end
        # Retrieve the exception, since a job need not be awaited when its sandbox ends.
        end.add_done_callback(lambda done: done.cancelled() or done.exception())
        self._positions = (0, 0)

    async def read(self) -> JobOutput | None:
        """Return the output since the last read, as soon as there is some; None after the end.

        A slow reader never blocks the command: unread output is bounded like an `ExecResult`, and dropped
        bytes are counted. A line may be cut anywhere. Raises: SandboxLost.
        """
        if not self._end.done():
            request = {"op": "output", "job": self._number, "positions": self._positions}
            number, answer = self._client.begin(request)
            try:
                await asyncio.wait({answer, self._end}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                self._client.forget(number)
            if answer.done() and not answer.exception() and "has_ended" not in answer.result()[0]:
                header, body = answer.result()
                num_bytes = header["stdout_bytes"]
                return self._advance(header["omitted"], (body[:num_bytes], body[num_bytes:]))
        header, body = await asyncio.shield(self._end)
        num_bytes = header["stdout_bytes"]
        streams = ((body[:num_bytes], header["stdout_total"]), (body[num_bytes:], header["stderr_total"]))
        (out_gone, stdout), (error_gone, stderr) = (
            unread(kept[:head], kept[head:], total, position)
            for (kept, total), head, position in zip(streams, header["heads"], self._positions, strict=True)
        )
        output = self._advance([out_gone, error_gone], (stdout, stderr))
        return output if output.stdout or output.stderr else None

    def _advance(self, omitted: list[int], data: tuple[bytes, bytes]) -> JobOutput:
        stdout, stderr = (
            position + gone + len(part)
            for position, gone, part in zip(self._positions, omitted, data, strict=True)
        )
        self._positions = (stdout, stderr)
        return JobOutput(stdout=data[0], stderr=data[1], stdout_omitted=omitted[0], stderr_omitted=omitted[1])

    async def write(self, data: bytes) -> bool:
        """Write all of `data` to its standard input; return False if the reading end is closed.

        Raises: SandboxLost.
        """
        if self._end.done():
            await self._end
            return False
        header, _ = await self._client.ask({"op": "input", "job": self._number}, data)
        return bool(header["is_open"])

    async def close_stdin(self) -> None:
        """Close its standard input behind the data written so far."""
        self._client.tell({"op": "input_end", "job": self._number})

    async def signal(self, number: int) -> None:
        """Send a signal, 1 to 64, to the program's process group, as a terminal would."""
        self._client.tell({"op": "signal", "job": self._number, "number": int(number)})

    async def stop(self) -> ExecResult:
        """End it and its descendants: SIGTERM, half a second later SIGKILL. May be called twice.

        Raises: SandboxLost.
        """
        self._client.tell({"op": "end", "job": self._number})
        return await self.wait()

    async def wait(self) -> ExecResult:
        """Return its result once it and all its descendants have ended. May be called twice.

        Descendants that outlive the program are killed; output left in the pipes is awaited for 200 ms.
        Raises: SandboxLost.
        """
        return as_result(*await asyncio.shield(self._end))


class ServedShell:
    """A shell that evaluates commands one after the other: directory, variables and functions stay.

    Background processes of a command continue, and write into the output of later commands, until the shell
    ends. Bash announces background jobs on its standard error, as at a terminal. Leaving its block closes it.
    """

    def __init__(self, client: Requests, number: int, end: asyncio.Future[Answer]) -> None:
        self._client = client
        self._number = number
        self._end = end
        # Retrieve the exception, since a shell may still be open when its sandbox ends.
        end.add_done_callback(lambda done: done.cancelled() or done.exception())
        self._turn = asyncio.Lock()

    async def run(self, command: str, *, wall_limit_s: float) -> ShellResult:
        """Evaluate a command, of any number of lines, with an empty standard input.

        At the wall limit the command is interrupted and all that it started is killed; background processes
        of earlier commands continue. Cancelling the call does the same. Calls run one after the other.

        Raises: SandboxError with kind ended if the shell has ended, command for one with a NUL in it;
        SandboxLost.
        """
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
            # The next command waits until this one has ended, even if its caller was cancelled.
            if answer is None or answer.done():
                self._turn.release()
            else:
                answer.add_done_callback(self._on_dropped)
        return ShellResult(**result_fields(header, output), has_shell=header["has_shell"])

    def _on_dropped(self, answer: asyncio.Future[Answer]) -> None:
        self._turn.release()
        if not answer.cancelled():
            answer.exception()

    async def close(self) -> None:
        """End it and its background processes. May be called twice."""
        if not self._end.done():
            self._client.tell({"op": "cancel", "job": self._number})
            await asyncio.wait({self._end})

    async def __aenter__(self) -> Self:
        """Return the shell."""
        return self

    async def __aexit__(self, *_: object) -> None:
        """Close it."""
        await self.close()


def _walk_host(top: Path) -> list[tuple[Path, int]]:
    """Return the paths and modes of a tree, directories before their contents."""
    return [(place, place.lstat().st_mode) for place in (top, *sorted(top.rglob("*")))]


def _require_free(path: Path) -> None:
    if os.path.lexists(path):
        raise SandboxError(
            f"cannot download to {str(path)!r}: something is there",
            allowed="a path where nothing is",
            next_step="remove it, or name another path",
            kind="exists",
        )


def as_result(header: dict[str, Any], output: bytes) -> ExecResult:
    """Make a command's result from the agent's last frame."""
    return ExecResult(**result_fields(header, output))


def result_fields(header: dict[str, Any], output: bytes) -> dict[str, Any]:
    """Return the fields of an `ExecResult` from the agent's last frame."""
    num_bytes = header["stdout_bytes"]
    kind = ExecKind(header["kind"])
    why = header["why"].encode() if kind is ExecKind.NOT_STARTED else b""
    return {
        "kind": kind,
        "exit_code": header["exit_code"],
        "signal": header["signal"],
        "stdout": output[:num_bytes],
        "stderr": output[num_bytes:] + why,
        "stdout_total": header["stdout_total"],
        "stderr_total": header["stderr_total"] + len(why),
        "oom_kills": header["oom_kills"],
        "duration_s": header["duration_s"],
        "cpu_s": header["cpu_s"],
    }


def read_isolation(facts: Mapping[str, Any]) -> Isolation:
    """Make the record from the fields of a frame."""
    guards = {name: Guard(facts[name]) for name in ("memory", "pids", "cpu", "disk", "files")}
    level, lacks = IsolationLevel(facts["level"]), tuple(facts["lacks"])
    return Isolation(**{**facts, **guards, "level": level, "lacks": lacks})
