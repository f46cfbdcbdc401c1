"""strop's own data plane: the workspace routes of OpenHands' agent server, served from outside the sandbox.

No server runs in the sandbox: commands join it from outside, and so does a process that reads and writes
files. The image therefore needs no agent server, no Python and, for files alone, no shell; the sandbox's key
never enters it; and it is ready at once.

Covered: what the client's workspace class calls. Conversations, tools, settings, skills and sockets need the
image's own agent server and are answered with 404.
"""

from __future__ import annotations

import asyncio
import hmac
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import PurePosixPath
from typing import Annotated, Any
from urllib.parse import quote

from fastapi import Depends, File, HTTPException, Query, Request, Response, UploadFile
from pydantic import BaseModel, Field

from strop.errors import SandboxError, given_of
from strop.runtime.commands import Command, Commands, join_outputs
from strop.runtime.planes import SandboxFailed, lost_as_failure
from strop.runtime.web import Guard, HttpFace, Scope, header_of, make_app
from strop.sandbox.contract import MIB, ExecKind, ExecResult
from strop.sandbox.local import LocalSandbox
from strop.sandbox.wire import SANDBOX_KEY_HEADER

SERVES_VERSION = "1.58.0"
"""The version of the agent server with these routes."""
MAX_FILE_BYTES = 256 * MIB
"""Largest file of an upload or a download: a download is held in memory on both sides."""
_FORM_BYTES = 1 << 16
"""Overhead of a form beside its file."""
_BODY_LIMIT_S = 300.0
_MAX_PAGE = 100
_MAX_TIMEOUT_S = 24 * 3600
_ID = re.compile(r"[0-9a-fA-F]{32}")

_GIT_LIMIT_S = 120.0
_MAX_DIFF_BYTES = MIB
_EMPTY_TREE = "4b825dc642cb6eb9a060e54bf8d69288fbee4904"
_CHANGES = {"M": "UPDATED", "A": "ADDED", "D": "DELETED", "U": "UPDATED", "T": "UPDATED"}
_DEFAULT_BRANCHES = ("origin/HEAD", "origin/main", "origin/master")


class Workspace:
    """What serves one sandbox's clients. Its routes are those of `APP`."""

    def __init__(
        self,
        sandbox: LocalSandbox,
        *,
        key: str,
        env: Mapping[str, str],
        working_dir: str,
        note_use: Callable[[], None],
    ) -> None:
        """Commands get `env` and `working_dir`; each request calls `note_use`."""
        self.sandbox = sandbox
        self.key = key
        self.commands = Commands(sandbox, env, working_dir)
        self.note_use = note_use

    async def connect(self) -> asyncio.Protocol:
        """Return the protocol that serves the next connection."""
        return FACE.protocol({"workspace": self})

    async def wait_ended(self) -> SandboxFailed:
        """Return the failure once the sandbox is lost."""
        return lost_as_failure(await self.sandbox.wait_lost(), self.sandbox.client.lost_why)

    def log_tail(self) -> str:
        """Return an empty text: no server runs inside."""
        return ""

    @property
    def num_commands(self) -> int:
        """Number of commands so far."""
        return self.commands.num_started

    @property
    def first_command_at(self) -> float | None:
        """Unix time of the first command."""
        return self.commands.first_at

    async def close(self, why: str) -> None:
        """Stop waiting for commands."""
        await self.commands.close()

    def facts(self) -> dict[str, Any]:
        """Return the answer to `/server_info`."""
        return {
            "title": "strop workspace",
            **{f"{part}version": SERVES_VERSION for part in ("", "sdk_", "tools_", "workspace_")},
            "python_version": sys.version,
            "usable_tools": [],
            "capabilities": [],
            "conversation_runtime": "local",
        }


APP = make_app()
"""The routes of all workspaces; a connection knows its own."""


def _admit(scope: Scope) -> None:
    workspace: Workspace = scope["state"]["workspace"]
    if scope["path"].startswith("/api/"):
        given = header_of(scope, SANDBOX_KEY_HEADER)
        if not hmac.compare_digest(given.encode(), workspace.key.encode()):
            raise HTTPException(401, "Unauthorized")
    workspace.note_use()


FACE = HttpFace(
    Guard(APP, admit=_admit, max_body_bytes=MAX_FILE_BYTES + _FORM_BYTES, body_limit_s=_BODY_LIMIT_S)
)


def _workspace_of(request: Request) -> Workspace:
    workspace: Workspace = request.state.workspace
    return workspace


def _read_path(path: Annotated[str, Query(pattern=r"^[^\x00]+$")]) -> str:
    return path


def _read_absolute_path(path: Annotated[str, Depends(_read_path)]) -> str:
    if not path.startswith("/"):
        raise HTTPException(400, f"path {path!r} is not absolute")
    return path


Here = Annotated[Workspace, Depends(_workspace_of)]
AnyPath = Annotated[str, Depends(_read_path)]
AbsolutePath = Annotated[str, Depends(_read_absolute_path)]


class BashOrder(BaseModel):
    """The body of a command's start."""

    command: str
    cwd: str | None = None
    timeout: int = Field(default=300, le=_MAX_TIMEOUT_S)


@APP.get("/health")
async def tell_health() -> dict[str, str]:
    """Answer a probe."""
    return {"status": "ok"}


@APP.get("/server_info")
async def tell_facts(workspace: Here) -> dict[str, Any]:
    """Return the facts of the server."""
    return workspace.facts()


# Commands.


@APP.post("/api/bash/start_bash_command")
async def start_command(order: BashOrder, workspace: Here) -> dict[str, Any]:
    """Start a command; its events are polled."""
    return workspace.commands.start(order.command, order.timeout, order.cwd).record


@APP.post("/api/bash/execute_bash_command")
async def execute_command(order: BashOrder, workspace: Here) -> dict[str, Any]:
    """Run a command to its end."""
    command = workspace.commands.start(order.command, order.timeout, order.cwd)
    await command.ended.wait()
    _require_result(command)
    return join_outputs(command)


@APP.get("/api/bash/bash_events/search")
async def search_events(
    workspace: Here,
    command_id__eq: str = "",
    order__gt: int = -1,
    limit: Annotated[int, Query(ge=1, le=_MAX_PAGE)] = _MAX_PAGE,
    sort_order: str = "TIMESTAMP",
) -> dict[str, Any]:
    """Return output events of a command: its next ones once there are some, or its newest one."""
    commands = workspace.commands
    command = commands.find(command_id__eq.replace("-", ""))
    if sort_order == "TIMESTAMP_DESC":
        newest_first = command.outputs[::-1] if command else []
        events = newest_first if command_id__eq else commands.newest_output()
    else:
        if command is not None:
            await commands.wait_for_news(command, order__gt)
            _require_result(command)
        events = [event for event in command.outputs if event["order"] > order__gt] if command else []
    return {"items": events[:limit], "next_page_id": None}


@APP.post("/api/bash/bash_commands/{command_id}/stop")
async def stop_command(command_id: str, workspace: Here) -> dict[str, bool]:
    """End a command."""
    plain = command_id.replace("-", "")
    if not _ID.fullmatch(plain):
        raise HTTPException(422, f"{command_id!r} is no id of a command")
    command = workspace.commands.find(plain)
    if command is None:
        raise HTTPException(404, f"no command {command_id}")
    await workspace.commands.stop(command)
    return {"success": True}


def _require_result(command: Command) -> None:
    """Refuse the answer for a command that has no result. Raises: HTTPException."""
    if command.no_result is not None:
        raise HTTPException(*command.no_result)


# Files.


@APP.post("/api/file/upload")
async def upload(path: AbsolutePath, file: Annotated[UploadFile, File()], workspace: Here) -> dict[str, Any]:
    """Write a file."""
    data = await file.read()
    try:
        await workspace.sandbox.write(path, data)
    except SandboxError as error:
        # `missing` means that the parent is no directory.
        if error.kind in ("missing", "io"):
            raise HTTPException(400, given_of(error)) from error
        raise
    return {"success": True, "file_size": len(data)}


@APP.get("/api/file/download")
async def download(path: AbsolutePath, workspace: Here) -> Response:
    """Return a file's bytes."""
    sandbox = workspace.sandbox
    try:
        data = await sandbox.read(path, max_bytes=MAX_FILE_BYTES)
    except SandboxError as error:
        if error.kind != "not_regular":
            raise
        # A link is resolved by the sandbox's own `readlink`, if it has one.
        result = await sandbox.exec(["readlink", "-e", path], wall_limit_s=10.0)
        target = result.stdout.decode(errors="surrogateescape").rstrip("\n")
        if result.kind is not ExecKind.EXITED or result.exit_code or target == path:
            raise
        data = await sandbox.read(target, max_bytes=MAX_FILE_BYTES)
    name = quote(PurePosixPath(path).name, safe="", errors="surrogatepass")
    headers = {"content-disposition": f"attachment; filename*=utf-8''{name}"}
    return Response(data, media_type="application/octet-stream", headers=headers)


# Repositories.


@APP.get("/api/git/changes")
async def list_changes(path: AnyPath, workspace: Here) -> list[dict[str, str]]:
    """Return the changes below a directory, with paths relative to it; none without a repository.

    They are relative to the commit at which the current branch left the remote's default branch; without a
    remote to the last commit; without any commit to the empty tree, so that all files are added.
    """
    sandbox = workspace.sandbox
    base = await _find_base(sandbox, path)
    if base is None:
        return []
    changed = await _git(sandbox, path, "diff", "--name-status", "--no-renames", "--relative", "-z", base)
    words = changed.stdout.decode(errors="replace").split("\0")[:-1]
    changes = [
        {"status": _CHANGES.get(status[:1], "UPDATED"), "path": name}
        for status, name in zip(words[::2], words[1::2], strict=False)
    ]
    others = await _git(sandbox, path, "ls-files", "--others", "--exclude-standard", "-z")
    names = others.stdout.decode(errors="replace").split("\0")[:-1]
    changes += [{"status": "ADDED", "path": name} for name in names]
    return sorted(changes, key=lambda change: change["path"])


@APP.get("/api/git/diff")
async def diff(path: AnyPath, workspace: Here) -> dict[str, str | None]:
    """Return a file's whole text before and after, relative to the commit of `list_changes`."""
    sandbox, folder, name = workspace.sandbox, str(PurePosixPath(path).parent), PurePosixPath(path).name
    base = await _find_base(sandbox, folder)
    if base is None:
        return {"modified": None, "original": None}
    original = _text_of(await _run(sandbox, ["git", "-C", folder, "show", f"{base}:./{name}"]))
    modified = _text_of(await _run(sandbox, ["cat", "--", path]))
    if original is None and modified is None:
        raise HTTPException(400, f"File does not exist: {path}")
    return {"modified": modified or "", "original": original or ""}


async def _find_base(sandbox: LocalSandbox, folder: str) -> str | None:
    if await _ask(sandbox, folder, "rev-parse", "--git-dir") is None:
        return None
    commit = await _ask(sandbox, folder, "rev-parse", "--verify", "-q", "HEAD^{commit}")
    if commit is None:
        return _EMPTY_TREE
    for name in _DEFAULT_BRANCHES:
        base = await _ask(sandbox, folder, "merge-base", commit, name)
        if base not in (None, commit):
            return base
    return commit


async def _ask(sandbox: LocalSandbox, folder: str, *words: str) -> str | None:
    """Return what git says; None if it says no. Raises: HTTPException 500 if it was killed."""
    result = await _run(sandbox, ["git", "-C", folder, *words])
    return None if result.exit_code else result.stdout.decode(errors="replace").strip()


async def _git(sandbox: LocalSandbox, folder: str, *words: str) -> ExecResult:
    result = await _run(sandbox, ["git", "-C", folder, "--no-pager", *words])
    if result.exit_code:
        raise HTTPException(400, result.stderr.decode(errors="replace").strip())
    return result


async def _run(sandbox: LocalSandbox, argv: Sequence[str]) -> ExecResult:
    """Run a helper; refuse what one said that was killed. Raises: HTTPException 500."""
    # git refuses a directory of another user unless it is declared safe; a sandbox has one user only.
    env = {"GIT_CONFIG_COUNT": "1", "GIT_CONFIG_KEY_0": "safe.directory", "GIT_CONFIG_VALUE_0": "*"}
    result = await sandbox.exec(argv, wall_limit_s=_GIT_LIMIT_S, env=env)
    if result.kind not in (ExecKind.EXITED, ExecKind.NOT_STARTED):
        raise HTTPException(500, f"it was killed ({result.kind}), so its answer is not known")
    return result


def _text_of(result: ExecResult) -> str | None:
    if result.exit_code or result.kind is ExecKind.NOT_STARTED:
        return None
    if result.stdout_total > _MAX_DIFF_BYTES:
        raise HTTPException(400, f"File too large for git diff: more than {_MAX_DIFF_BYTES} bytes")
    return "\n".join(result.stdout.decode(errors="replace").splitlines())
