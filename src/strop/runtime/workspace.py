"""strop's own data plane: the workspace routes of OpenHands' agent server, served from outside the sandbox.

Nothing of it runs in the sandbox: commands join it from outside, and files are read and written by a process
that joins it too. So an image needs no agent server, no Python and, for files alone, no shell; the key of the
sandbox never enters it; and it is ready at once.

Covered: commands, files, archives, git, server facts. Not covered, and answered with 404: conversations,
tools, settings, skills and sockets, for which the image's own agent server is needed.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Awaitable, Callable, Mapping
from pathlib import PurePosixPath
from typing import Any
from urllib.parse import quote

from pydantic import BaseModel, Field

from strop.errors import SandboxError, SandboxLost, given_of
from strop.runtime.commands import MAX_PAGE, Command, Commands, join_outputs
from strop.runtime.http_server import Answer, HttpError, Request, has_key, json_answer, one_part, read_form
from strop.runtime.repository import Repository
from strop.sandbox.contract import MIB, ExecKind, Sandbox
from strop.sandbox.wire import SANDBOX_KEY_HEADER

SERVES_VERSION = "1.58.0"
"""The agent server whose routes these are."""
MAX_FILE_BYTES = 256 * MIB
"""Largest file that is taken or given in one request: both sides hold it in memory."""
_MAX_TIMEOUT_S = 24 * 3600
_OPEN_PATHS = ("/", "/health", "/alive", "/ready", "/server_info")
_STATUS = {
    "missing": 404,
    "directory": 400,
    "not_regular": 400,
    "denied": 403,
    "too_large": 413,
    "no_space": 507,
}


class _Order(BaseModel):
    command: str
    cwd: str | None = None
    timeout: int = Field(default=300, le=_MAX_TIMEOUT_S)


class Workspace:
    """Answers the requests of one sandbox's clients."""

    def __init__(self, sandbox: Sandbox, *, key: str, env: Mapping[str, str], working_dir: str) -> None:
        self.commands = Commands(sandbox, env, working_dir)
        self._sandbox = sandbox
        self._repository = Repository(sandbox)
        self._key = key
        self._began_at = time.monotonic()
        self._used_at = self._began_at
        self._routes: dict[tuple[str, str], Callable[[Request], Awaitable[Answer]]] = {
            ("POST", "/api/bash/start_bash_command"): self._start,
            ("POST", "/api/bash/execute_bash_command"): self._execute,
            ("GET", "/api/bash/bash_events/search"): self._search,
            ("DELETE", "/api/bash/bash_events"): self._clear,
            ("POST", "/api/file/upload"): self._upload,
            ("GET", "/api/file/download"): self._download,
            ("POST", "/api/file/create_directory"): self._make_directory,
            ("GET", "/api/file/archive"): self._archive,
            ("GET", "/api/git/changes"): self._changes,
            ("GET", "/api/git/diff"): self._diff,
        }

    def admit(self, path: str, headers: Mapping[str, str]) -> None:
        """Refuse what comes without the key, before anything of its body is read. Raises: HttpError."""
        if path.startswith("/api/") and not has_key(headers, SANDBOX_KEY_HEADER, self._key):
            raise HttpError(401, "Unauthorized")

    async def answer(self, request: Request) -> Answer:
        """Answer one request. Raises: HttpError."""
        if request.path in _OPEN_PATHS:
            if request.method != "GET":
                raise HttpError(405, "Method Not Allowed")
            return json_answer(self._tell(request.path))
        self._used_at = time.monotonic()
        handler = self._routes.get((request.method, request.path))
        try:
            if handler is not None:
                return await handler(request)
            if request.path.startswith("/api/bash/"):
                return await self._answer_about_command(request)
        except SandboxLost as lost:
            raise HttpError(503, given_of(lost)) from lost
        except SandboxError as error:
            raise HttpError(_STATUS.get(error.kind, 500), given_of(error)) from error
        if any(path == request.path for _, path in self._routes):
            raise HttpError(405, "Method Not Allowed")
        raise HttpError(404, "Not Found")

    def _tell(self, path: str) -> dict[str, Any]:
        if path == "/ready":
            return {"status": "ready"}
        if path in ("/health", "/alive"):
            return {"status": "ok"}
        now = time.monotonic()
        return {
            "uptime": int(now - self._began_at),
            "idle_time": int(now - self._used_at),
            "title": "strop workspace",
            **{f"{part}version": SERVES_VERSION for part in ("", "sdk_", "tools_", "workspace_")},
            "build_git_sha": "unknown",
            "build_git_ref": "unknown",
            "python_version": sys.version,
            "usable_tools": [],
            "runtime_idle_timeout_seconds": None,
            "conversation_runtime": "local",
            "available_conversation_runtimes": [],
            "capabilities": [],
            "docs": "/docs",
            "redoc": "/redoc",
        }

    # Commands.

    async def _start(self, request: Request) -> Answer:
        return json_answer(self._begin(request).record)

    async def _execute(self, request: Request) -> Answer:
        command = self._begin(request)
        await command.ended.wait()
        _require_result(command)
        return json_answer(join_outputs(command))

    def _begin(self, request: Request) -> Command:
        order = _Order.model_validate_json(request.body)
        return self.commands.start(order.command, order.timeout, order.cwd)

    async def _search(self, request: Request) -> Answer:
        command_id = request.one("command_id__eq").replace("-", "")
        after_order = request.number("order__gt", -1)
        limit = request.number("limit", MAX_PAGE)
        is_newest_first = request.one("sort_order") == "TIMESTAMP_DESC"
        if not 0 < limit <= MAX_PAGE:
            raise HttpError(422, f"limit={limit}, and a page has 1 to {MAX_PAGE} events")
        command = self.commands.find(command_id)
        if command is not None and not is_newest_first:
            await self.commands.wait_for_news(command, after_order)
            _require_result(command)
        chosen = self.commands.list() if not command_id else [command] if command else []
        kind = request.one("kind__eq")
        events = [event for one in chosen for event in ([] if command_id else [one.record]) + one.outputs]
        events = [
            one
            for one in events
            if (not kind or one["kind"] == kind) and one.get("order", 1 << 62) > after_order
        ]
        events.sort(key=lambda one: one["timestamp"], reverse=is_newest_first)
        names = [one["id"] for one in events]
        page_id = request.one("page_id")
        start = names.index(page_id) if page_id in names else 0
        rest = events[start : start + limit + 1]
        next_page = rest[limit]["id"] if len(rest) > limit else None
        return json_answer({"items": rest[:limit], "next_page_id": next_page})

    async def _clear(self, request: Request) -> Answer:
        return json_answer({"cleared_count": self.commands.clear()})

    async def _answer_about_command(self, request: Request) -> Answer:
        """Answer `bash_commands/{id}/stop` and `bash_events/{id}`."""
        words = request.path.removeprefix("/api/bash/").split("/")
        match request.method, words:
            case "POST", ["bash_commands", command_id, "stop"]:
                if not _is_id(command_id):
                    raise HttpError(422, f"{command_id!r} is no id of a command")
                command = self.commands.find(command_id.replace("-", ""))
                if command is None:
                    raise HttpError(404, "Not Found")
                await self.commands.stop(command)
                return json_answer({"success": True})
            case "GET", ["bash_events", event_id]:
                for one in self.commands.list():
                    for event in (one.record, *one.outputs):
                        if event["id"] == event_id.replace("-", ""):
                            return json_answer(event)
        raise HttpError(404, "Not Found")

    # Files.

    async def _upload(self, request: Request) -> Answer:
        path = _absolute(request)
        data = one_part(read_form(request.headers.get("content-type", ""), request.body), "file")
        try:
            await self._sandbox.write(path, data)
        except SandboxError as error:
            # A parent that is no directory is said to be missing.
            status = 400 if error.kind in ("missing", "io") else _STATUS.get(error.kind, 500)
            raise HttpError(status, given_of(error)) from error
        return json_answer({"success": True, "file_size": len(data)})

    async def _download(self, request: Request) -> Answer:
        path = _absolute(request)
        try:
            data = await self._sandbox.read(path, max_bytes=MAX_FILE_BYTES)
        except SandboxError as error:
            if error.kind != "not_regular":
                raise
            # A link is followed by a program of the sandbox, where there is one.
            told = await self._sandbox.exec(["readlink", "-e", path], wall_limit_s=10.0)
            target = told.stdout.decode(errors="surrogateescape").rstrip("\n")
            if told.kind is not ExecKind.EXITED or told.exit_code or target == path:
                raise
            data = await self._sandbox.read(target, max_bytes=MAX_FILE_BYTES)
        name = quote(PurePosixPath(path).name, safe="")
        return Answer(
            body=data,
            content_type="application/octet-stream",
            headers={"content-disposition": f"attachment; filename*=utf-8''{name}"},
        )

    async def _make_directory(self, request: Request) -> Answer:
        path = _absolute(request)
        made = await self._sandbox.exec(["mkdir", "-p", path], wall_limit_s=30.0)
        if made.exit_code:
            raise HttpError(400, made.stderr.decode(errors="replace").strip())
        return json_answer({"success": True})

    async def _archive(self, request: Request) -> Answer:
        kind = request.one("format", "git-delta")
        if kind not in ("git-delta", "tar.gz"):
            raise HttpError(422, f"format={kind!r}, and it is git-delta or tar.gz")
        use_default = request.one("use_default_excludes", "true").lower() in ("true", "1", "yes", "on")
        data, facts = await self._repository.archive(
            _absolute(request),
            is_delta=kind == "git-delta",
            base_ref=request.one("base_ref"),
            excludes=tuple(request.query.get("exclude", ())),
            use_default_excludes=use_default,
        )
        content_type = "text/x-patch" if kind == "git-delta" else "application/gzip"
        return Answer(body=data, content_type=content_type, headers=facts)

    # Repositories.

    async def _changes(self, request: Request) -> Answer:
        return json_answer(await self._repository.list_changes(_given(request), request.one("ref")))

    async def _diff(self, request: Request) -> Answer:
        ref, commit = request.one("ref"), request.one("commit")
        if ref and commit:
            raise HttpError(400, "'ref' and 'commit' are mutually exclusive")
        return json_answer(await self._repository.diff(_given(request), ref, commit))


def _require_result(command: Command) -> None:
    """Refuse to show an end that is no result of the command. Raises: HttpError."""
    if command.no_result is not None:
        raise HttpError(*command.no_result)


def _given(request: Request) -> str:
    path = request.one("path")
    if not path or "\0" in path:
        raise HttpError(422, f"path={path!r} is no path")
    return path


def _absolute(request: Request) -> str:
    path = _given(request)
    if not path.startswith("/"):
        raise HttpError(400, "Path must be absolute")
    return path


def _is_id(text: str) -> bool:
    digits = text.replace("-", "")
    return len(digits) == 32 and all(one in "0123456789abcdefABCDEF" for one in digits)
