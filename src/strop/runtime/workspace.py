"""strop's own data plane: the workspace routes of OpenHands' agent server, served from outside the sandbox.

No server runs in the sandbox: commands join it from outside, and so does a process that reads and writes
files. The image therefore needs no agent server, no Python and, for files alone, no shell; the sandbox's key
never enters it; and it is ready at once.

Covered: commands, files, archives, git, server facts. Conversations, tools, settings, skills and sockets need
the image's own agent server and are answered with 404.
"""

from __future__ import annotations

import asyncio
import re
import sys
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import PurePosixPath
from typing import Any
from urllib.parse import quote

from pydantic import BaseModel, Field

from strop.errors import SandboxError, SandboxLost, given_of
from strop.runtime.commands import MAX_PAGE, Command, Commands, join_outputs
from strop.runtime.http_server import (
    Answer,
    HttpError,
    Request,
    has_key,
    json_answer,
    one_part,
    read_form,
    serve_connection,
)
from strop.runtime.planes import SandboxFailed, lost_as_failure
from strop.runtime.ports import Serve, Stream
from strop.sandbox.contract import MIB, ExecKind, ExecResult, Sandbox
from strop.sandbox.local import LocalSandbox
from strop.sandbox.wire import SANDBOX_KEY_HEADER

SERVES_VERSION = "1.58.0"
"""The version of the agent server with these routes."""
MAX_FILE_BYTES = 256 * MIB
"""Largest file of an upload or a download: both sides hold it in memory."""
_FORM_BYTES = 1 << 16
"""Overhead of a form beside its file."""
_MAX_TIMEOUT_S = 24 * 3600
_ID = re.compile(r"[0-9a-fA-F]{32}")
_OPEN_PATHS = ("/", "/health", "/alive", "/ready", "/server_info")
_STATUS = {
    "missing": 404,
    "directory": 400,
    "not_regular": 400,
    "denied": 403,
    "too_large": 413,
    "no_space": 507,
}

_GIT_LIMIT_S = 120.0
_MAX_DIFF_BYTES = MIB
_EMPTY_TREE = "4b825dc642cb6eb9a060e54bf8d69288fbee4904"
_CHANGES = {"M": "UPDATED", "A": "ADDED", "D": "DELETED", "U": "UPDATED", "T": "UPDATED"}
_DEFAULT_EXCLUDES = ("node_modules/", ".venv/", "venv/", "__pycache__/", "*.pyc", ".cache/", ".git/")
_DEFAULT_BRANCHES = ("origin/HEAD", "origin/main", "origin/master")


class _Order(BaseModel):
    command: str
    cwd: str | None = None
    timeout: int = Field(default=300, le=_MAX_TIMEOUT_S)


class Workspace:
    """Answers the requests of one sandbox's clients."""

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
        self._commands = Commands(sandbox, env, working_dir)
        self._sandbox = sandbox
        self._note_use = note_use
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

    async def dial(self) -> Stream | Serve:
        """Return the function that serves the next connection here."""
        return self._serve

    async def wait_ended(self) -> SandboxFailed:
        """Return the failure once the sandbox is lost."""
        return lost_as_failure(await self._sandbox.wait_lost(), self._sandbox.client.lost_why)

    def log_tail(self) -> str:
        """Return an empty text: no server runs inside."""
        return ""

    @property
    def num_commands(self) -> int:
        """Number of commands so far."""
        return self._commands.num_started

    @property
    def first_command_at(self) -> float | None:
        """Unix time of the first command."""
        return self._commands.first_at

    async def close(self, why: str) -> None:
        """Stop waiting for commands."""
        await self._commands.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        limit = MAX_FILE_BYTES + _FORM_BYTES
        await serve_connection(reader, writer, self.answer, admit=self._admit, max_body_bytes=limit)

    def _admit(self, path: str, headers: Mapping[str, str]) -> None:
        """Refuse a request without the key before its body is read. Raises: HttpError."""
        if path.startswith("/api/") and not has_key(headers, SANDBOX_KEY_HEADER, self._key):
            raise HttpError(401, "Unauthorized")

    async def answer(self, request: Request) -> Answer:
        """Answer one request. Raises: HttpError."""
        self._note_use()
        if request.path in _OPEN_PATHS:
            if request.method != "GET":
                raise HttpError(405, "Method Not Allowed")
            return json_answer(self._server_facts(request.path))
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

    def _server_facts(self, path: str) -> dict[str, Any]:
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
        return self._commands.start(order.command, order.timeout, order.cwd)

    async def _search(self, request: Request) -> Answer:
        command_id = request.query_field("command_id__eq").replace("-", "")
        after_order = request.number("order__gt", -1)
        limit = request.number("limit", MAX_PAGE)
        is_newest_first = request.query_field("sort_order") == "TIMESTAMP_DESC"
        if not 0 < limit <= MAX_PAGE:
            raise HttpError(422, f"limit={limit}, and a page has 1 to {MAX_PAGE} events")
        command = self._commands.find(command_id)
        if command is not None and not is_newest_first:
            await self._commands.wait_for_news(command, after_order)
            _require_result(command)
        chosen = self._commands.list() if not command_id else [command] if command else []
        kind = request.query_field("kind__eq")
        events = [
            event
            for command in chosen
            for event in ([] if command_id else [command.record]) + command.outputs
            if (not kind or event["kind"] == kind) and event.get("order", 1 << 62) > after_order
        ]
        events.sort(key=lambda event: event["timestamp"], reverse=is_newest_first)
        ids = [event["id"] for event in events]
        page_id = request.query_field("page_id")
        start = ids.index(page_id) if page_id in ids else 0
        rest = events[start : start + limit + 1]
        next_page = rest[limit]["id"] if len(rest) > limit else None
        return json_answer({"items": rest[:limit], "next_page_id": next_page})

    async def _clear(self, request: Request) -> Answer:
        return json_answer({"cleared_count": self._commands.clear()})

    async def _answer_about_command(self, request: Request) -> Answer:
        """Answer `bash_commands/{id}/stop` and `bash_events/{id}`."""
        words = request.path.removeprefix("/api/bash/").split("/")
        match request.method, words:
            case "POST", ["bash_commands", command_id, "stop"]:
                if not _ID.fullmatch(command_id.replace("-", "")):
                    raise HttpError(422, f"{command_id!r} is no id of a command")
                command = self._commands.find(command_id.replace("-", ""))
                if command is None:
                    raise HttpError(404, "Not Found")
                await self._commands.stop(command)
                return json_answer({"success": True})
            case "GET", ["bash_events", event_id]:
                for command in self._commands.list():
                    for event in (command.record, *command.outputs):
                        if event["id"] == event_id.replace("-", ""):
                            return json_answer(event)
        raise HttpError(404, "Not Found")

    # Files.

    async def _upload(self, request: Request) -> Answer:
        path = _absolute_path_of(request)
        data = one_part(read_form(request.headers.get("content-type", ""), request.body), "file")
        try:
            await self._sandbox.write(path, data)
        except SandboxError as error:
            # `missing` means that the parent is no directory.
            status = 400 if error.kind in ("missing", "io") else _STATUS.get(error.kind, 500)
            raise HttpError(status, given_of(error)) from error
        return json_answer({"success": True, "file_size": len(data)})

    async def _download(self, request: Request) -> Answer:
        path = _absolute_path_of(request)
        try:
            data = await self._sandbox.read(path, max_bytes=MAX_FILE_BYTES)
        except SandboxError as error:
            if error.kind != "not_regular":
                raise
            # A link is resolved by the sandbox's own `readlink`, if it has one.
            result = await self._sandbox.exec(["readlink", "-e", path], wall_limit_s=10.0)
            target = result.stdout.decode(errors="surrogateescape").rstrip("\n")
            if result.kind is not ExecKind.EXITED or result.exit_code or target == path:
                raise
            data = await self._sandbox.read(target, max_bytes=MAX_FILE_BYTES)
        name = quote(PurePosixPath(path).name, safe="")
        return Answer(
            body=data,
            content_type="application/octet-stream",
            headers={"content-disposition": f"attachment; filename*=utf-8''{name}"},
        )

    async def _make_directory(self, request: Request) -> Answer:
        path = _absolute_path_of(request)
        result = await self._sandbox.exec(["mkdir", "-p", path], wall_limit_s=30.0)
        _require_exit(result)
        return json_answer({"success": True})

    async def _archive(self, request: Request) -> Answer:
        kind = request.query_field("format", "git-delta")
        if kind not in ("git-delta", "tar.gz"):
            raise HttpError(422, f"format={kind!r}, and it is git-delta or tar.gz")
        flag = request.query_field("use_default_excludes", "true")
        use_default = flag.lower() in ("true", "1", "yes", "on")
        data, facts = await self._repository.archive(
            _absolute_path_of(request),
            is_delta=kind == "git-delta",
            base_ref=request.query_field("base_ref"),
            excludes=tuple(request.query.get("exclude", ())),
            use_default_excludes=use_default,
        )
        content_type = "text/x-patch" if kind == "git-delta" else "application/gzip"
        return Answer(body=data, content_type=content_type, headers=facts)

    # Repositories.

    async def _changes(self, request: Request) -> Answer:
        return json_answer(await self._repository.list_changes(_path_of(request), request.query_field("ref")))

    async def _diff(self, request: Request) -> Answer:
        ref, commit = request.query_field("ref"), request.query_field("commit")
        if ref and commit:
            raise HttpError(400, "'ref' and 'commit' are mutually exclusive")
        return json_answer(await self._repository.diff(_path_of(request), ref, commit))


def _require_result(command: Command) -> None:
    """Refuse the answer for a command that has no result. Raises: HttpError."""
    if command.no_result is not None:
        raise HttpError(*command.no_result)


def _path_of(request: Request) -> str:
    path = request.query_field("path")
    if not path or "\0" in path:
        raise HttpError(422, f"path={path!r} is no path")
    return path


def _absolute_path_of(request: Request) -> str:
    path = _path_of(request)
    if not path.startswith("/"):
        raise HttpError(400, "Path must be absolute")
    return path


class Repository:
    """The changes of a repository in a sandbox, by the sandbox's git.

    They are relative to the commit at which the current branch left the remote's default branch; without a
    remote to the last commit; without any commit to the empty tree, so that all files are added.
    """

    def __init__(self, sandbox: Sandbox) -> None:
        self._sandbox = sandbox

    async def list_changes(self, path: str, ref: str = "") -> list[dict[str, str]]:
        """Return the changes below a directory, with paths relative to it; none without a repository.

        Raises: HttpError 400 for an unknown reference.
        """
        base = await self._find_base(path, ref)
        if base is None:
            return []
        result = await self._git(path, "diff", "--name-status", "--no-renames", "--relative", "-z", base)
        words = result.stdout.decode(errors="surrogateescape").split("\0")[:-1]
        changes = [
            {"status": _CHANGES.get(status[:1], "UPDATED"), "path": name}
            for status, name in zip(words[::2], words[1::2], strict=False)
        ]
        result = await self._git(path, "ls-files", "--others", "--exclude-standard", "-z")
        names = result.stdout.decode(errors="surrogateescape").split("\0")[:-1]
        changes += [{"status": "ADDED", "path": name} for name in names]
        return sorted(changes, key=lambda change: change["path"])

    async def diff(self, path: str, ref: str = "", commit: str = "") -> dict[str, str | None]:
        """Return a file's whole text before and after.

        Raises: HttpError 400 if it is too large, or missing in both.
        """
        folder, name = str(PurePosixPath(path).parent), PurePosixPath(path).name
        base = await self._find_base(folder, f"{commit}^" if commit else ref)
        if base is None:
            return {"modified": None, "original": None}
        original = await self._show(folder, f"{base}:./{name}")
        if commit:
            modified = await self._show(folder, f"{commit}:./{name}")
        else:
            result = _require_end(await self._run(["cat", "--", path]))
            modified = None if result.exit_code else _text_of(result)
        if original is None and modified is None:
            raise HttpError(400, f"File does not exist: {path}")
        return {"modified": modified or "", "original": original or ""}

    async def archive(
        self, path: str, *, is_delta: bool, base_ref: str, excludes: Sequence[str], use_default_excludes: bool
    ) -> tuple[bytes, dict[str, str]]:
        """Return a directory as a patch or a gzip tar, and the headers that describe it.

        Raises: HttpError 400 without a repository or with an unknown base; 413 if it is too large.
        """
        excludes = (*(_DEFAULT_EXCLUDES if use_default_excludes else ()), *excludes)
        base = await self._find_base(path, base_ref) if is_delta or base_ref else None
        if is_delta and base is None:
            raise HttpError(400, f"{path} is in no git repository")
        facts = {}
        for header, words in (
            ("X-Archive-Head-Commit", ("rev-parse", "--verify", "-q", "HEAD")),
            ("X-Archive-Branch", ("rev-parse", "--abbrev-ref", "HEAD")),
            ("X-Archive-Repo-Root", ("rev-parse", "--show-toplevel")),
        ):
            if (fact := await self._ask(path, *words)) is not None:
                facts[header] = fact
        if not is_delta:
            flags = [f"--exclude={pattern.rstrip('/')}" for pattern in excludes]
            result = await self._run(["tar", "-C", path, "-czf", "-", *flags, "."])
        else:
            assert base is not None
            facts["X-Archive-Base-Ref"] = base_ref or "auto"
            if base != _EMPTY_TREE:
                facts["X-Archive-Base-Commit"] = base
            pathspecs = [
                f":(exclude,glob)**/{pattern}" + ("**" if pattern.endswith("/") else "")
                for pattern in excludes
            ]
            script = (
                "export GIT_INDEX_FILE=$(mktemp); trap 'rm -f \"$GIT_INDEX_FILE\"' EXIT; base=$1; shift;"
                ' git read-tree "$base" && git add -A -- . "$@" >&2'
                ' && git diff --binary --cached "$base" -- . "$@"'
            )
            result = await self._run(["/bin/sh", "-c", script, "sh", base, *pathspecs], cwd=path)
        _require_exit(result)
        if result.truncated:
            raise HttpError(413, f"an archive of {result.stdout_total} bytes is more than one answer holds")
        return result.stdout, facts

    async def _find_base(self, folder: str, ref: str) -> str | None:
        if await self._ask(folder, "rev-parse", "--git-dir") is None:
            return None
        commit = await self._ask(folder, "rev-parse", "--verify", "-q", f"{ref or 'HEAD'}^{{commit}}")
        if commit is None and ref not in ("", "HEAD") and not ref.endswith("^"):
            raise HttpError(400, f"{ref!r} is no commit of this repository")
        if ref or commit is None:
            return commit or _EMPTY_TREE
        for name in _DEFAULT_BRANCHES:
            base = await self._ask(folder, "merge-base", commit, name)
            if base not in (None, commit):
                return base
        return commit

    async def _show(self, folder: str, name: str) -> str | None:
        result = _require_end(await self._run(["git", "-C", folder, "show", name]))
        return None if result.exit_code else _text_of(result)

    async def _ask(self, folder: str, *words: str) -> str | None:
        """Return what git says; None if it says no. Raises: HttpError 500 if it was killed."""
        result = _require_end(await self._run(["git", "-C", folder, *words]))
        return None if result.exit_code else result.stdout.decode(errors="replace").strip()

    async def _git(self, folder: str, *words: str) -> ExecResult:
        return _require_exit(await self._run(["git", "-C", folder, "--no-pager", *words]))

    async def _run(self, argv: Sequence[str], cwd: str | None = None) -> ExecResult:
        # git refuses a directory of another user unless it is declared safe; a sandbox has one user only.
        env = {"GIT_CONFIG_COUNT": "1", "GIT_CONFIG_KEY_0": "safe.directory", "GIT_CONFIG_VALUE_0": "*"}
        return await self._sandbox.exec(argv, wall_limit_s=_GIT_LIMIT_S, env=env, cwd=cwd)


def _require_end(result: ExecResult) -> ExecResult:
    """Refuse what a program said that was killed. Raises: HttpError 500."""
    if result.kind not in (ExecKind.EXITED, ExecKind.NOT_STARTED):
        raise HttpError(500, f"it was killed ({result.kind}), so its answer is not known")
    return result


def _require_exit(result: ExecResult) -> ExecResult:
    if _require_end(result).exit_code:
        raise HttpError(400, result.stderr.decode(errors="replace").strip())
    return result


def _text_of(result: ExecResult) -> str:
    if result.stdout_total > _MAX_DIFF_BYTES:
        raise HttpError(400, f"File too large for git diff: more than {_MAX_DIFF_BYTES} bytes")
    return "\n".join(result.stdout.decode(errors="replace").splitlines())
